"""What several subcommands share: the model's options, loading it, putting one question."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Delta, Done, Visual
from qwen_vl_ros.measure.report import Exchange, Shown
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.pipeline import AskOptions, age_ns, build_request
from qwen_vl_ros.saliency.weights import HEAD_DTYPES
from qwen_vl_ros.share import share

if TYPE_CHECKING:
    from qwen_vl_ros.engine.engine import Engine
    from qwen_vl_ros.saliency.answering import Fewer


class CliError(Exception):
    """Input that a command cannot work with; the message is for the person who typed it."""


def check_writable(path: str | Path | None, folder: bool = False) -> None:
    """
    Refuse a place that cannot be written to, before the work whose result is to go there.

    Nothing that is there is changed, and nothing stays behind.

    :param path: ``None``, ``''`` and ``'-'`` (standard output) are good.
    :param folder: the place is a folder, which is made with its parents where it is missing.
    :raises CliError: when no file can be written there.
    """
    if path is None or str(path) in ('', '-'):
        return
    try:
        place = Path(os.path.realpath(path))
        if folder:
            place = next(p for p in (place, *place.parents) if os.path.lexists(p))
            with tempfile.TemporaryFile(dir=place):
                return
        if place.is_file() or place.is_dir():
            # Appending nothing: permission bits alone say little to root and of mounts.
            with place.open('ab'):
                return
        if not place.exists():
            os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            place.unlink()
    except (OSError, ValueError) as error:
        why = getattr(error, 'strerror', None) or error
        raise CliError(f'cannot write {"into " * folder}{path}: {why}') from None


def default_model() -> Path | None:
    """Return the folder of the checkpoint that comes with the package, if it is there."""
    try:
        return share('models', 'tiny', 'config.json').parent
    except FileNotFoundError:
        return None


def add_model_arguments(parser: argparse.ArgumentParser, extra_selector: str = '',
                        free: bool = True) -> None:
    """
    Add the options that say which model answers, where, and how.

    :param extra_selector: a value of ``--select`` that only this command knows, with its help.
    :param free: whether the person chooses system prompt, length and sampling of answers.
    """
    group = parser.add_argument_group('model')
    group.add_argument(
        '--model', metavar='PATH', default=os.environ.get('QWEN_VL_MODEL'),
        help='Hugging Face Qwen2-VL folder (default: $QWEN_VL_MODEL, else the tiny checkpoint '
             'that comes with the package)')
    group.add_argument('--allow-download', action='store_true',
                       help='let --model be OWNER/NAME of a model hub and fetch it')
    group.add_argument('--device', default='auto', help='auto, cpu, cuda or cuda:N (%(default)s)')
    group.add_argument('--dtype', default='auto',
                       choices=('auto', 'float32', 'bfloat16', 'float16'),
                       help='of weights and activations (%(default)s)')
    group.add_argument('--quantization', default='none', metavar='KIND',
                       help='of the decoder: none, int8 or int4; approximate (%(default)s)')
    group.add_argument('--threads', type=int, metavar='N',
                       help='CPU threads of the forward pass (default: torch decides)')
    group.add_argument('--min-pixels', type=int, default=56 * 56, metavar='N',
                       help='smaller pictures are enlarged to it (%(default)s)')
    group.add_argument('--max-pixels', type=int, default=512 * 28 * 28, metavar='N',
                       help='larger pictures are reduced to it; 784 pixels are one token '
                            '(%(default)s)')
    group.add_argument('--max-context', type=int, default=4096, metavar='N',
                       help='tokens of prompt and answer together (%(default)s)')
    group = parser.add_argument_group('answer')
    if free:
        group.add_argument('--system', metavar='TEXT',
                           help="system prompt (default: the template's)")
        group.add_argument('--max-new-tokens', type=int, default=64, metavar='N',
                           help='longest answer (%(default)s)')
        group.add_argument('--temperature', type=float, default=0.0, metavar='T',
                           help='0 is greedy, the same answer every time (%(default)s)')
    group.add_argument('--seed', type=int, default=0,
                       help=f'of {"sampling and of " * free}--select random (%(default)s)')
    group.add_argument('--keep-ratio', type=float, default=1.0, metavar='R',
                       help='share of the vision tokens kept, over 0 to 1; less than 1 may change '
                            'answers (%(default)s)')
    group.add_argument('--select', default='auto', metavar='NAME',
                       help='what chooses the tokens that are kept. Of the frame: head, saliency, '
                            'gradient, colour, contrast, threshold; of the frames before it: '
                            'next_frame, motion, entropy, grad_cam; of neither: uniform, random; '
                            'after the encoder: divprune, dart, fastv; auto: head where the '
                            f'checkpoint has one, else saliency{extra_selector} (%(default)s)')
    group.add_argument('--weights', metavar='TEXT', default='',
                       help='signals that saliency or next_frame combine, such as '
                            'gradient=1,contrast=0.3; next_frame also takes motion, entropy and '
                            'grad_cam, both take colour and head (default: those fitted)')
    group.add_argument('--gradient-layers', type=int, default=0, metavar='K',
                       help='decoder layers that the gradient of grad_cam passes: all (0) or the '
                            'first K, which is faster (%(default)s)')
    group.add_argument('--generic-every', type=int, default=0, metavar='N',
                       help="divide grad_cam's map by that of a generic prompt, which is taken "
                            'anew for every N maps (0: never)')
    group.add_argument('--head', metavar='FILE', default='',
                       help="saliency head (default: saliency_head.safetensors beside the model's "
                            'weights)')
    group.add_argument('--head-dtype', default='auto', choices=HEAD_DTYPES,
                       help='the saliency head computes in; int8 is for a CPU, auto is float16 on '
                            'CUDA and float32 on a CPU (%(default)s)')
    group.add_argument('--keep-region', metavar='REGION', default='',
                       help="always keep 'corridor' or a polygon 'x,y x,y x,y' in shares of width "
                            'and height')
    group.add_argument('--least-margin', type=float, default=0.0, metavar='M',
                       help='ask again with all tokens where the first token stands less than '
                            'this many logits above the next best (0: never)')
    group.add_argument('--roi', type=float, default=0.0, metavar='SHARE',
                       help='show this share of a picture at full resolution beside a small '
                            'overview; approximate (0: off)')


def fewer_tokens(args: argparse.Namespace) -> Fewer:
    """
    Return the arguments of :func:`add_model_arguments` that save tokens beside the selector.

    :raises CliError: values out of range.
    """
    from qwen_vl_ros.saliency.answering import Fewer
    from qwen_vl_ros.saliency.selectors import AFTER

    if not args.least_margin >= 0:
        raise CliError(f'--least-margin is {args.least_margin}; expected at least 0')
    if not 0 <= args.roi < 1:
        raise CliError(f'--roi is {args.roi}; expected 0 (off) to below 1')
    dropper = args.select if args.select in AFTER else ''
    return Fewer(dropper, args.least_margin, args.roi)


def ask_options(args: argparse.Namespace) -> AskOptions:
    """Return the arguments of :func:`add_model_arguments` that belong to a request."""
    return AskOptions(
        system_prompt=args.system, max_new_tokens=args.max_new_tokens,
        temperature=args.temperature, seed=args.seed, keep_ratio=args.keep_ratio)


def check_ranges(args: argparse.Namespace) -> None:
    """
    Refuse what no model could answer with, before one is loaded.

    :raises CliError: names the option as it is typed, and what it may be.
    """
    from qwen_vl_ros.engine.quantize import KINDS

    good = {
        'seed': (lambda x: 0 <= x < 1 << 63, '0 to 2^63 - 1'),
        'keep_ratio': (lambda x: 0 < x <= 1, 'a share over 0, up to 1'),
        'max_new_tokens': (lambda x: x >= 1, 'at least 1'),
        'temperature': (lambda x: 0 <= x < float('inf'), 'a number from 0'),
        'min_pixels': (lambda x: 0 < x <= args.max_pixels, f'1 to --max-pixels {args.max_pixels}'),
        'max_context': (lambda x: x >= 16, 'at least 16'),
        'gradient_layers': (lambda x: x >= 0, '0 (all) or more'),
        'generic_every': (lambda x: x >= 0, '0 (never) or more'),
        'quantization': (lambda x: x in KINDS, ', '.join(KINDS))}
    for name, (fits, expected) in good.items():
        value = getattr(args, name, None)
        if value is not None and not fits(value):
            raise CliError(f'--{name.replace("_", "-")} is {value}; expected {expected}')


def load_engine(args: argparse.Namespace) -> Engine:
    """
    Load the model that the arguments name.

    :raises CliError: when none is named and none comes with the package.
    :raises EngineError: when it cannot be loaded.
    """
    check_ranges(args)
    path = args.model or default_model()
    if path is None:
        raise CliError('no model: name a Hugging Face Qwen2-VL folder with --model PATH')
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise CliError(f'--threads is {args.threads}; expected 1 to 1024')
        import torch

        torch.set_num_threads(args.threads)
    selector = make_chosen(args, path)
    from qwen_vl_ros.engine.engine import Engine

    try:
        return Engine.load(
            str(path), device=args.device, dtype=args.dtype, quantization=args.quantization,
            max_context=args.max_context, min_pixels=args.min_pixels, max_pixels=args.max_pixels,
            allow_download=args.allow_download, selector=selector)
    except ValueError as error:
        # A head of another checkpoint is seen when it is bound to this one.
        raise CliError(f'{_head_option(args)}: {error}') from error


def make_chosen(args: argparse.Namespace, model: str | Path) -> Any:
    """
    Return the selector that ``--select`` and the options beside it name.

    :raises CliError: names the option that cannot be used.
    """
    from qwen_vl_ros.saliency.region import parse_region
    from qwen_vl_ros.saliency.selectors import NAMES, make_selector
    from qwen_vl_ros.saliency.weights import parse_weights

    # eval makes its own masks for 'oracle'.
    known = args.command == 'eval' and args.select == 'oracle'
    if not known and args.select not in NAMES:
        raise CliError(f"--select: selector '{args.select}' is not one of {', '.join(NAMES)}")
    if known and args.keep_region:
        raise CliError('--keep-region: the masks of --select oracle know no region')
    try:
        always = parse_region(args.keep_region)
    except ValueError as error:
        raise CliError(f'--keep-region: {error}') from error
    try:
        weights = parse_weights(args.weights, args.select)
    except ValueError as error:
        raise CliError(f'--weights: {error}') from error
    if args.head and not Path(args.head).is_file():
        raise CliError(f'--head: {args.head} is no file')
    try:
        return make_selector('uniform' if known else args.select, args.seed, model=model,
                             head=args.head, always=always, weights=weights,
                             gradient_layers=args.gradient_layers,
                             generic_every=args.generic_every, head_dtype=args.head_dtype)
    except ValueError as error:
        raise CliError(f'{_head_option(args)}: {error}') from error


def _head_option(args: argparse.Namespace) -> str:
    """Return the option that a head which cannot be used came from."""
    if args.head:
        return '--head'
    return '--weights' if 'head' in args.weights else f'--select {args.select}'


def model_dict(engine: Engine) -> dict[str, Any]:
    """Return the engine's ModelInfo as JSON-ready data."""
    return asdict(engine.info)


def ask_engine(
    engine: Engine, question: str, options: AskOptions,
    choose: Callable[[], Sequence[Visual]], *, time_ns: int = 0, expected: str | None = None,
    on_text: Callable[[str], None] = lambda text: None, fewer: Fewer | None = None,
) -> Exchange:
    """
    Put one question; failures of this question are part of the result.

    :param choose: returns what to look at; decodes the pictures, so its time counts.
    :param time_ns: when it is asked, on the clock of the pictures' stamps and of their reception;
        0 when that means nothing.
    :param expected: the right answer, if known.
    :param on_text: gets each piece of the answer as it becomes final.
    :param fewer: see :func:`fewer_tokens`.
    """
    from qwen_vl_ros.saliency.answering import AS_IT_IS, answer

    timeline = Timeline()
    exchange = Exchange(question, time_ns, expected=expected)
    visuals: tuple[Visual, ...] = ()
    try:
        with timeline.stage('decode_message'):
            visuals = tuple(choose())
        if time_ns and visuals:
            age = min(age_ns(v.frames[-1], time_ns, time_ns) for v in visuals)
            timeline.add('image_age', timeline.start_ns - age, timeline.start_ns)
        request = build_request(question, visuals, options)
        for event in answer(engine, request, timeline, fewer=fewer or AS_IT_IS):
            if isinstance(event, Delta):
                on_text(event.text)
            elif isinstance(event, Done):
                exchange.answer = event.answer
        if exchange.answer is None:
            raise EngineError(ErrorCode.UNKNOWN, 'the engine ended without an answer')
    except EngineError as error:
        exchange.error_code = ErrorCode(error.code).name
        exchange.error = error.message
    exchange.frames = tuple(Shown.of(v.frames[-1]) for v in visuals)
    exchange.timeline = timeline.to_dict()
    return exchange


def cost_line(exchange: Exchange) -> str:
    """Return what an answer cost, in one line for a terminal."""
    answer = exchange.answer
    if answer is None:
        return f'{exchange.error_code}: {exchange.error}'
    count = len(answer.token_ids)
    return (f'{answer.finish_reason}, {count} token{"s"[count == 1:]} in '
            f'{answer.timeline.total_ms():.0f} ms, first after '
            f'{answer.timeline.time_to_first_token_ms():.0f} ms, '
            f'{answer.vision_tokens_kept}/{answer.vision_tokens_in} vision tokens')
