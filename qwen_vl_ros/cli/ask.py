"""``qwen_vl ask``: one question about picture files or one moment of a bag."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_vl_ros.cli.bag import Bag
from qwen_vl_ros.cli.common import (
    CliError,
    add_model_arguments,
    ask_engine,
    ask_options,
    check_writable,
    cost_line,
    fewer_tokens,
    load_engine,
)
from qwen_vl_ros.decode import FrameError, decode_compressed
from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.types import Answer, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.report import format_stages, stage_table
from qwen_vl_ros.pipeline import FrameStore

if TYPE_CHECKING:
    from qwen_vl_ros.saliency.explaining import Chosen

MANUAL = '''\
Ask one question about pictures. The answer appears word by word on standard output, what it cost
on standard error.

  qwen_vl ask "What is in front of the robot?" photo.jpg
  qwen_vl ask "What changed?" before.png after.png
  qwen_vl ask "What happens?" --clip frame1.jpg frame2.jpg frame3.jpg frame4.jpg
  qwen_vl ask "How many boxes are there?" --bag drive.mcap --at 12.5 --topic /camera/image_raw
  qwen_vl ask "Where is the ball?" photo.jpg --keep-ratio 0.33 --explain kept.png
  qwen_vl ask "What is this?" photo.jpg --model ~/models/Qwen2-VL-2B-Instruct

Pictures are JPEG, PNG or WebP files. A picture's orientation tag is ignored.'''

#: Pictures of a bag before the wanted moment that are looked at for a newest one, seconds.
WINDOW_S = 2.0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        'ask', help='one question about pictures or a moment of a bag', description=MANUAL,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(rest='pictures')
    parser.add_argument('question', help='what to ask')
    parser.add_argument('pictures', nargs='*', metavar='PICTURE', type=Path,
                        help='JPEG, PNG or WebP files, shown to the model in this order')
    parser.add_argument('--clip', action='store_true',
                        help='the pictures are moments of one clip, oldest first')
    parser.add_argument('--bag', type=Path, help='look into this rosbag2 folder or file instead')
    parser.add_argument('--at', type=float, metavar='S',
                        help="seconds after the bag's start (0)")
    parser.add_argument('--topic', action='append', default=[], metavar='NAME',
                        help='image topic of the bag; again for more cameras')
    parser.add_argument('--explain', type=Path, metavar='PNG',
                        help='write what the answer was given about: each picture, and the newer '
                             'frame of each pair of a clip, with its dropped parts dimmed, beside '
                             'the map that they were chosen by, if any. Several stand below each '
                             'other in the one file, under their names')
    parser.add_argument('--stages', action='store_true', help='also print the table of stages')
    parser.add_argument('--json', action='store_true',
                        help='print one JSON object instead: text, costs, timeline')
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer; 1 when the question failed."""
    if bool(args.pictures) == bool(args.bag):
        raise CliError('name either picture files or --bag BAG')
    if not args.bag and (args.at is not None or args.topic):
        raise CliError('--at and --topic are of a bag; name it with --bag, instead of pictures')
    if args.explain and args.explain.suffix.lower() != '.png':
        raise CliError(f'--explain {args.explain}: expected a file name that ends in .png')
    check_writable(args.explain)
    if args.roi > 0 and (args.clip or len(args.pictures) > 1 or len(set(args.topic)) > 1):
        raise CliError('--roi is for a question about one still; expected one picture, or one '
                       '--topic of a bag, without --clip')
    if args.bag:
        visuals = from_bag(args.bag, args.topic, args.at or 0.0)
    else:
        frames = [read_picture(p) for p in args.pictures]
        visuals = [Visual(tuple(frames))] if args.clip else [Visual((f,)) for f in frames]
    fewer = fewer_tokens(args)
    engine = load_engine(args)
    maps: list[Chosen] = []
    if args.explain:
        from qwen_vl_ros.saliency.explaining import keep_maps

        maps = keep_maps(engine.options.selector)
    exchange = ask_engine(
        engine, args.question, ask_options(args), lambda: visuals, fewer=fewer,
        on_text=(lambda text: None) if args.json else _show)
    if exchange.error_code == ErrorCode.BAD_REQUEST.name:
        raise CliError(exchange.error)
    if args.explain and exchange.answer:
        if all(kept.all() for kept in exchange.answer.kept_slices):
            print('[--explain: nothing was dropped, so nothing is dimmed]', file=sys.stderr)
        write_explanation(args.explain, visuals, exchange.answer, maps)
    if args.json:
        print(json.dumps(exchange.to_dict(), ensure_ascii=False, indent=1))
        return 0 if exchange.answer else 1
    print(flush=True)
    print(f'[{cost_line(exchange)}]', file=sys.stderr)
    if exchange.answer and (more := more_kept(exchange.answer, args.keep_ratio)):
        print(f'[{more}]', file=sys.stderr)
    if args.stages:
        print(format_stages(stage_table([exchange])), file=sys.stderr)
    return 0 if exchange.answer else 1


def more_kept(answer: Answer, ratio: float) -> str:
    """
    Return why more was kept than asked for, '' where it was not.

    :param ratio: share that was asked for.
    """
    kept, total = answer.vision_tokens_kept, answer.vision_tokens_in
    if kept <= math.ceil(ratio * total) or not total:
        return ''
    return (f'{kept / total:.0%} were kept where {ratio:.0%} were asked for: the share is rounded '
            'up to a size that the encoder is set up for, regions and at least a few units of '
            'each picture always stay, and a doubtful answer is asked again with all')


def _show(text: str) -> None:
    print(text, end='', flush=True)


def write_explanation(path: Path, visuals: Sequence[Visual], answer: Answer,
                      maps: Sequence[Chosen]) -> None:
    """
    Write what an answer was given about: every slice of every picture.

    :param maps: those that the answer's units were chosen by.
    :raises CliError: when it cannot be written.
    """
    from qwen_vl_ros.saliency.explaining import explain_answer
    from qwen_vl_ros.saliency.picture import write_png

    try:
        write_png(path, explain_answer(visuals, answer, maps))
    except OSError as error:
        raise CliError(f'cannot write {path}: {error.strerror or error}') from None


def read_picture(path: Path) -> Frame:
    """
    Read a picture file.

    :raises CliError: when it is none.
    """
    try:
        return decode_compressed('', path.read_bytes(), camera=path.name)
    except OSError as error:
        raise CliError(f'{path} cannot be read: {error.strerror}') from None
    except FrameError as error:
        raise CliError(f'{path}: {error.reason}') from None


def from_bag(path: Path, topics: Sequence[str], at_s: float) -> Sequence[Visual]:
    """
    Return the newest good picture of each topic at a moment of a bag.

    :param topics: names; none chooses as :meth:`Bag.choose` does.
    :param at_s: seconds after the bag's first message.
    :raises CliError: when a topic has no good picture in the seconds before.
    """
    with Bag(path) as bag:
        chosen = bag.choose(topics)
        if not 0 <= at_s <= bag.duration_s + 1:
            raise CliError(f'--at {at_s:g} lies outside the bag; it lasts {bag.duration_s:.3f} s')
        # Half a frame on, so that the frame recorded at that very moment counts.
        now = bag.start_ns + round(at_s * 1e9) + 15_000_000
        store = FrameStore([t.name for t in chosen])
        window = (now - round(WINDOW_S * 1e9), now)
        for topic, time_ns, message in bag.messages(chosen, *window):
            if message is not None:
                store.offer(topic, message, now_ns=time_ns, received_ns=time_ns, lazy=True)
        return store.select(store.cameras, now_ns=now, now_received_ns=now)
