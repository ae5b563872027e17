"""``qwen_vl replay``: put questions to a recording, the same way every time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_vl_ros.cli.bag import Bag, ImageTopic
from qwen_vl_ros.cli.common import (
    CliError,
    add_model_arguments,
    ask_engine,
    ask_options,
    check_writable,
    cost_line,
    fewer_tokens,
    load_engine,
    model_dict,
)
from qwen_vl_ros.cli.compare import compare, format_comparison
from qwen_vl_ros.measure.report import (
    Exchange,
    build_report,
    format_stages,
    load_report,
    write_report,
)
from qwen_vl_ros.measure.watch import Watch, format_report
from qwen_vl_ros.pipeline import AskOptions, FrameStore

if TYPE_CHECKING:
    from qwen_vl_ros.engine.engine import Engine
    from qwen_vl_ros.saliency.answering import Fewer

MANUAL = '''\
Read a rosbag2 recording and ask about what its cameras saw. Frames take the node's own way:
decoding, newest frame of each camera, one request at a time. Nothing depends on the clock of this
machine: the same bag, model and options give the same answers, however fast it runs.

  qwen_vl replay drive --question "What is in front of the robot?"
  qwen_vl replay drive.mcap -q "How many people?" -q "Is the path free?" --rate 2
  qwen_vl replay drive.db3 --topic /front/image_raw --topic /rear/image_raw -q "What do they show?"
  qwen_vl replay drive -q "What happens?" --frames 4 --report build/drive
  qwen_vl replay drive --questions asked.json --rate 30

BAG is a folder, or a single .mcap or .db3 file (metadata.yaml is not needed). At each key frame
the newest frame of every --topic is shown to the model. --report writes report.json (read it with
'qwen_vl compare') and report.html (pictures, answers, latency waterfall).

A file of questions is a JSON list. An entry is a text, asked at every key frame, or an object:
  {"question": "Is the path free?", "at": 12.5, "frames": 1, "expected": "yes"}
'at' (seconds after the start) asks once, at the first key frame from then on; 'frames' shows a
clip; 'expected' lets the report say how many answers are right.'''

#: Longest clip that can be asked for.
MOST_FRAMES = 64

#: Stamps jitter; a frame may come so much before its key time, nanoseconds.
TOLERANCE_NS = 1_000_000


@dataclass(frozen=True)
class Ask:
    """
    One question of a plan.

    :param text: the words.
    :param expected: the right answer, if known.
    :param at_s: seconds after the bag's start: asked once, at the first key frame from then on;
        ``None`` asks at every key frame.
    :param num_frames: frames of each camera shown to the model: 1 a still, more a clip.
    """

    text: str
    expected: str | None = None
    at_s: float | None = None
    num_frames: int = 1


@dataclass(frozen=True)
class Plan:
    """
    What to ask of a recording.

    :param asks: the questions, in the order in which they are put at one key frame.
    :param rate: key frames a second of bag time.
    :param start_s: seconds of the bag to pass over.
    :param limit: most key frames at which something is asked; 0 is all.
    :param max_age_s: refuse frames that are older at their key frame; ``None`` takes any.
    """

    asks: tuple[Ask, ...]
    rate: float = 1.0
    start_s: float = 0.0
    limit: int = 0
    max_age_s: float | None = None


@dataclass
class Counts:
    """What was in the bag, filled while it is read."""

    messages: int = 0
    damaged: int = 0
    key_frames: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    last_reason: str = ''


def replay(
    bag: Bag, engine: Engine, topics: Sequence[ImageTopic], plan: Plan, options: AskOptions,
    counts: Counts, on_question: Callable[[int, str], None] = lambda time_ns, question: None,
    on_text: Callable[[str], None] = lambda text: None, fewer: Fewer | None = None,
) -> Iterator[Exchange]:
    """
    Put the plan's questions to a bag, in the bag's order.

    Key frames are counted on the first topic, from the first moment at which every topic has sent.

    :param counts: filled as the bag is read.
    :param on_question: called with the bag's time before each question.
    :param on_text: see :func:`ask_engine`.
    :raises BagError: where the bag turns out to be damaged.
    """
    store = FrameStore(
        [t.name for t in topics], history=max((a.num_frames for a in plan.asks), default=1))
    open_asks = list(plan.asks)
    missing = set(store.cameras)
    first: int | None = None
    last_key = -1
    begin = bag.start_ns + round(plan.start_s * 1e9)
    age = None if plan.max_age_s is None else round(plan.max_age_s * 1e9)
    for topic, time_ns, message in bag.messages(topics, begin):
        counts.messages += 1
        if message is None:
            counts.damaged += 1
            continue
        store.offer(topic, message, now_ns=time_ns, received_ns=time_ns, lazy=True)
        missing.discard(topic)
        if missing or topic != topics[0].name:
            continue
        first = time_ns if first is None else first
        key = int((time_ns - first + TOLERANCE_NS) * plan.rate // 1e9)
        if key <= last_key:
            continue
        last_key = key
        moment = (time_ns - bag.start_ns + TOLERANCE_NS) / 1e9
        due = [a for a in open_asks if a.at_s is None or a.at_s <= moment]
        if not due:
            continue
        open_asks = [a for a in open_asks if a.at_s is None or a not in due]
        counts.key_frames += 1
        for ask in due:
            on_question(time_ns, ask.text)
            choose = partial(
                store.select, store.cameras, num_frames=ask.num_frames, now_ns=time_ns,
                now_received_ns=time_ns, max_age_ns=age)
            yield ask_engine(engine, ask.text, options, choose, time_ns=time_ns,
                             expected=ask.expected, on_text=on_text, fewer=fewer)
        for camera in store.cameras:
            seen = store.counts(camera)
            if seen.rejected:
                counts.rejected[camera] = seen.rejected
                counts.last_reason = seen.last_reason
        if counts.key_frames == plan.limit or not open_asks:
            return


def source_dict(bag: Bag, topics: Sequence[ImageTopic], counts: Counts) -> dict[str, Any]:
    """Return what the report says of the recording."""
    return {
        'bag': bag.path.name,
        'duration_s': round(bag.duration_s, 3),
        'topics': [t.name for t in topics],
        'messages': counts.messages,
        'key_frames': counts.key_frames,
        'damaged_messages': counts.damaged,
        'rejected_frames': sum(counts.rejected.values()),
        'last_reason': counts.last_reason,
    }


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        'replay', help='ask about a recording, the same way every time', description=MANUAL,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, help='rosbag2 folder, .mcap or .db3 file')
    parser.add_argument('-q', '--question', action='append', default=[], metavar='TEXT',
                        help='what to ask at every key frame; again for more questions')
    parser.add_argument('--questions', type=Path, metavar='FILE',
                        help='JSON list of questions, see above')
    parser.add_argument('--topic', '--camera', action='append', default=[], metavar='NAME',
                        help='image topic, raw or compressed; again for more cameras '
                             '(default: the first image topic of the bag)')
    parser.add_argument('--rate', type=float, default=1.0, metavar='HZ',
                        help='key frames a second of bag time (%(default)s)')
    parser.add_argument('--start', type=float, default=0.0, metavar='S',
                        help='pass over so many seconds of the bag (%(default)s)')
    parser.add_argument('--limit', type=int, default=0, metavar='N',
                        help='stop after so many key frames (default: the whole bag)')
    parser.add_argument('--frames', type=int, default=1, metavar='N',
                        help='frames of each camera shown to the model; more than one is a clip '
                             '(%(default)s)')
    parser.add_argument('--max-age', type=float, metavar='S',
                        help='refuse frames older than this at their key frame')
    parser.add_argument('--report', type=Path, metavar='DIR',
                        help='write report.json and report.html there')
    parser.add_argument('--trace', type=Path, metavar='FILE',
                        help='write the stages of all answers as a trace for ui.perfetto.dev')
    parser.add_argument('--sensors', action='store_true',
                        help="sample the board meanwhile: memory bandwidth by who used it, power, "
                             'heat')
    parser.add_argument('--title', metavar='TEXT', help='heading of the report')
    parser.add_argument('--compare', type=Path, metavar='REPORT',
                        help='also compare with this report.json of an earlier run')
    parser.add_argument('--json', action='store_true',
                        help='print the report as JSON instead of text')
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Replay; 1 when a question failed."""
    plan = make_plan(args)
    before = _earlier(args.compare)
    check_writable(args.report, folder=True)
    check_writable(args.trace)
    say: Callable[..., None] = (lambda *a, **k: None) if args.json else print
    with Bag(args.bag) as bag:
        topics = bag.choose(args.topic)
        if args.start > bag.duration_s:
            raise CliError(f'--start {args.start:g} lies behind the end of {bag.path}, '
                           f'which lasts {bag.duration_s:.3f} s')
        say(f'bag    {bag.path} · {bag.duration_s:.1f} s · '
            + ', '.join(f'{t.name} ({t.count})' for t in topics))
        fewer = fewer_tokens(args)
        engine = load_engine(args)
        info = engine.info
        say(f'model  {info.name} · {info.dtype} on {info.device} · {info.weight_bytes / 1e6:.0f} '
            f'MB read a token', flush=True)
        counts = Counts()
        exchanges = []
        watch = Watch() if args.sensors else None
        for exchange in replay(
                bag, engine, topics, plan, ask_options(args), counts,
                on_question=lambda t, q: say(f'\n[{(t - bag.start_ns) / 1e9:8.3f} s] {q}\n  ',
                                             end='', flush=True),
                on_text=lambda text: say(text, end='', flush=True), fewer=fewer):
            exchanges.append(exchange)
            verdict = {None: '', True: 'right · ', False: f'WRONG, expected '
                       f'{exchange.expected} · '}[exchange.correct]
            say(f'\n             {verdict}{cost_line(exchange)}', flush=True)
        if watch:
            watch.stop()
        report = build_report(
            args.title or f'Replay of {bag.path.name}', exchanges, model=model_dict(engine),
            source=source_dict(bag, topics, counts), options=_options(args))
    if watch:
        report['sensors'] = watch.report(
            span for e in exchanges if e.answer for span in e.answer.timeline.spans)
    engine.close()
    if not exchanges:
        raise CliError(
            f'{args.bag} has no moment with a picture on each of '
            + ', '.join(t.name for t in topics))
    if args.report:
        paths = write_report(args.report, report, exchanges)
    if args.trace:
        _write_trace(args.trace, exchanges, watch)
    comparison = compare(before, report) if before else None
    if args.json:
        print(json.dumps(report if comparison is None else report | {'comparison': comparison},
                         ensure_ascii=False, indent=1))
    else:
        print('\n' + format_stages(report['stages']))
        print(closing(report))
        if watch:
            print(format_report(report['sensors']))
        if comparison:
            print('\n' + format_comparison(comparison))
        if args.report:
            print(f'report {paths[0]} and {paths[1].name}')
        if args.trace:
            print(f'trace  {args.trace} (open in ui.perfetto.dev)')
    return 0 if all(e.answer for e in exchanges) else 1


def _write_trace(path: Path, exchanges: Sequence[Exchange], watch: Watch | None) -> None:
    from qwen_vl_ros.measure.trace import write_trace

    try:
        if watch:
            write_trace(path, [e.answer.timeline for e in exchanges if e.answer], watch.samples)
        else:
            write_trace(path, [e.timeline | {'title': f'{number} {e.question}'}
                               for number, e in enumerate(exchanges, 1)])
    except OSError as error:
        raise CliError(f'cannot write {path}: {error.strerror}') from None


def closing(report: dict[str, Any]) -> str:
    """Return the sum of a run in one or two lines."""
    total, source = report['summary'], report['source']
    lines = [f'{total["answered"]} of {total["questions"]} questions answered']
    if 'correct' in total:
        lines[0] += f', {total["correct"]} of {total["with_known_answer"]} right'
    for key, what in (('new_picture', 'about a new picture'), ('same_picture', 'about it again')):
        if total[f'total_ms_{key}_p50'] is not None:
            lines[0] += f', {total[f"total_ms_{key}_p50"]:.0f} ms {what} (median)'
    if source['rejected_frames'] or source['damaged_messages']:
        lines.append(
            f'{source["rejected_frames"]} frames and {source["damaged_messages"]} messages were '
            f'not usable: {source["last_reason"] or "no valid image message"}')
    return '\n'.join(lines)


def make_plan(args: argparse.Namespace) -> Plan:
    """:raises CliError: for numbers out of range and for missing or empty questions."""
    for name, good, expected in (
            ('rate', 0 < args.rate <= 1000, 'over 0 and at most 1000'),
            ('start', 0 <= args.start < 1e9, 'not negative'),
            ('limit', args.limit >= 0, 'not negative'),
            ('frames', 1 <= args.frames <= MOST_FRAMES, f'1 to {MOST_FRAMES}'),
            ('max_age', args.max_age is None or args.max_age > 0, 'over 0')):
        if not good:
            raise CliError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; expected {expected}")
    asks = [Ask(q, num_frames=args.frames) for q in args.question]
    if args.questions:
        asks += read_questions(args.questions, args.frames)
    if not asks:
        raise CliError('nothing to ask: give at least one --question TEXT or --questions FILE')
    if any(not a.text.strip() for a in asks):
        raise CliError('a question is empty')
    return Plan(tuple(asks), args.rate, args.start, args.limit, args.max_age)


def read_questions(path: Path, num_frames: int) -> list[Ask]:
    """
    Read a file of questions: a JSON list of texts or of objects as the manual shows them.

    :param num_frames: for questions that do not say.
    :raises CliError: with the place of what is wrong.
    """
    try:
        rows = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise CliError(f'{path} cannot be read: {error.strerror}') from None
    except ValueError as error:
        raise CliError(f'{path} does not hold JSON: {error}') from None
    if not isinstance(rows, list):
        raise CliError(f'{path} does not hold a JSON list')
    asks = []
    for number, row in enumerate(rows, 1):
        row = {'question': row} if isinstance(row, str) else row
        if not isinstance(row, dict) or not isinstance(row.get('question'), str):
            raise CliError(f"{path}, entry {number}: expected a text or an object with 'question'")
        unknown = sorted(set(row) - {'question', 'expected', 'at', 'frames', 'note'})
        if unknown:
            raise CliError(f"{path}, entry {number}: unknown key '{unknown[0]}'")
        at, frames, expected = row.get('at'), row.get('frames', num_frames), row.get('expected')
        if at is not None and not (isinstance(at, (int, float)) and 0 <= at < 1e9):
            raise CliError(f"{path}, entry {number}: 'at' is {at!r}; expected seconds")
        if not isinstance(frames, int) or not 1 <= frames <= MOST_FRAMES:
            raise CliError(
                f"{path}, entry {number}: 'frames' is {frames!r}; expected 1 to {MOST_FRAMES}")
        if expected is not None and not isinstance(expected, str):
            raise CliError(f"{path}, entry {number}: 'expected' is {expected!r}; expected a text")
        asks.append(Ask(row['question'], expected, at, frames))
    return asks


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ('question', 'questions', 'rate', 'start', 'limit', 'frames', 'max_age',
             'max_new_tokens', 'temperature', 'seed', 'keep_ratio', 'select', 'weights',
             'gradient_layers', 'generic_every', 'head_dtype', 'least_margin', 'roi', 'system',
             'threads')
    values = {name: getattr(args, name) for name in names}
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def _earlier(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        return load_report(path)
    except ValueError as error:
        raise CliError(str(error)) from None


if __name__ == '__main__':
    from qwen_vl_ros.cli.main import main

    sys.exit(main(['replay', *sys.argv[1:]]))
