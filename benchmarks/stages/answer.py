"""
Whole answers and their parts (encoder, prefill, first token, decode) beside transformers.

Both get the same picture and question, greedy, and give the same number of tokens, taken in turns.
The picture is new each time: nothing is reused. Ours go through the scheduler, timed by the
client that reads the words: from the frame in host memory to the first and the last of them. On a
CPU the shipped tiny model is timed, on a GPU the official 2B shape with random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.records import CannotRun, Record, alternate, median, record
from benchmarks.stages._engines import Camera, picture, timed_pair
from benchmarks.stages._reference import Reference
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler
from qwen_vl_ros.engine.types import Delta, Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.share import share

EAGER, COMPILED = 'transformers eager', 'transformers static cache, compiled'
QUESTION = 'what colour is the largest thing ?'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--seconds', type=float, default=6.0, help='for each thing that is timed')
    parser.add_argument('--threads', type=int, help='of torch (its own choice)')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--shape', choices=('2b', '7b'),
                        help='random weights of this shape (on a GPU 2b)')
    parser.add_argument('--size', nargs='+', default=['320x240', '640x480'])
    parser.add_argument('--keep', type=float, nargs='+', default=[1.0, 0.5],
                        help='shares of the vision tokens; the baseline always sees all')
    parser.add_argument('--clip', type=int, default=0, metavar='FRAMES',
                        help='time a clip of so many frames as well (ours alone)')
    parser.add_argument('--compiled', nargs='*', metavar='SIZE',
                        help='also against transformers with a static cache, compiled (half a '
                             'minute a size; without one, of all)')
    parser.add_argument('--alone', action='store_true', help='without any baseline')
    parser.add_argument('--tokens', type=int, default=33, help='of an answer')


def run(args: argparse.Namespace) -> list[Record]:
    """Time all sizes."""
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = torch.cuda.is_available() and args.device != 'cpu'
    shape = args.shape or ('2b' if on_gpu else None)
    # A clip of eight frames of 1280x720 has 4784 tokens.
    engine, theirs = timed_pair(shape, args.device, args.dtype,
                                max_context=8192 if args.clip and shape else 4096)
    info = engine.info
    reference = None if args.alone else Reference(
        share('models', 'tiny'), engine.model.device, engine.model.dtype,
        (info.min_pixels, info.max_pixels), theirs)
    plan = Scheduler(engine, ScheduleOptions(1))
    plan.start()
    found: list[Record] = []
    for size in args.size:
        width, height = map(int, size.split('x'))
        found += one_size(plan, reference, args, (width, height), shape or 'tiny')
    plan.stop()
    engine.close()
    return found


def ask(engine: Engine, rgb: np.ndarray, tokens: int, keep: float = 1.0) -> Timeline:
    """Answer about a picture as if nothing had been asked before, without the scheduler."""
    engine.forget()
    request = Request(QUESTION, (Visual((Frame.from_rgb(rgb),)),), max_new_tokens=tokens,
                      keep_ratio=keep)
    for event in engine.answer(request):
        if isinstance(event, Done):
            if len(event.answer.token_ids) != tokens:
                raise CannotRun(f'{len(event.answer.token_ids)} tokens came, {tokens} were asked')
            return event.answer.timeline
    raise CannotRun('the engine ended without an answer')


def client(plan: Scheduler, visual: Visual, tokens: int,
           keep: float = 1.0) -> tuple[float, float, Timeline]:
    """
    Answer about pictures that nobody has asked about before.

    :return: milliseconds to the first words and to the last, and the timeline.
    """
    request = Request(QUESTION, (visual,), max_new_tokens=tokens, keep_ratio=keep)
    first, started = 0.0, time.perf_counter()
    for event in plan.answer(request):
        if isinstance(event, Delta) and not first:
            first = time.perf_counter() - started
        elif isinstance(event, Done):
            whole = time.perf_counter() - started
            if len(event.answer.token_ids) != tokens:
                raise CannotRun(
                    f'{len(event.answer.token_ids)} tokens came, {tokens} were asked')
            return first * 1e3, whole * 1e3, event.answer.timeline
    raise CannotRun('the engine ended without an answer')


def ours(plan: Scheduler, camera: Camera, frames: int, tokens: int, keep: float,
         spans: dict[str, list[float]]) -> Callable[[int], None]:
    """Return what times one of our answers; its parts go into ``spans``."""
    def work(number: int) -> None:
        visual = Visual(tuple(camera.frame() for _ in range(frames)))
        first, whole, line = client(plan, visual, tokens, keep)
        if number < 2:
            return  # graphs are captured and products chosen
        spans.setdefault('first', []).append(first)
        spans.setdefault('whole', []).append(whole)
        for name in ('encode', 'prefill'):
            spans.setdefault(name, []).append(line.ms(name))
        steps = [span.ms for span in line.spans if span.name == 'token']
        spans.setdefault('token', []).append(sum(steps) / max(1, len(steps)))
    return work


def one_size(plan: Scheduler, reference: Reference | None, args: argparse.Namespace,
             size: tuple[int, int], model: str) -> list[Record]:
    """Time one picture size."""
    n = args.tokens
    spans: dict[tuple[int, float], dict[str, list[float]]] = {}
    work: dict[str, Callable[[int], object]] = {}
    for frames in (1, args.clip) if args.clip else (1,):
        for keep in args.keep:
            own = spans[frames, keep] = {}
            work[f'ours {frames} {keep}'] = ours(
                plan, Camera(size, frames), frames, n, keep, own)
    if reference is not None:
        pictures = [picture(size, seed) for seed in range(8)]
        inputs = [reference.inputs(rgb, QUESTION) for rgb in pictures]
        work |= {
            'answer theirs': lambda i: reference.answer(pictures[i % 8], QUESTION, n),
            'first theirs': lambda i: reference.answer(pictures[i % 8], QUESTION, 1),
            'encode theirs': lambda i: reference.encode(inputs[i % 8]),
            'forward theirs': lambda i: reference.forward(inputs[i % 8])}
        if args.compiled is not None and f'{size[0]}x{size[1]}' in (args.compiled or args.size):
            work |= {f'{name} compiled': lambda i, count=count: reference.answer(  # type: ignore
                pictures[i % 8], QUESTION, count, static=True)
                for name, count in (('answer', n), ('first', 1))}
            for _ in range(2):
                work['answer compiled'](0)
    for name in [name for name in work if name.startswith('ours')]:
        for number in range(2):
            work[name](number)
    times = alternate(work, args.seconds, rounds=6)
    theirs: dict[str, float] = {}
    compiled: dict[str, float] = {}
    for kind, into in (('theirs', theirs), ('compiled', compiled)):
        if f'answer {kind}' in times:
            into.update({name: median(times[f'{name} {kind}'])
                         for name in ('answer', 'first', 'encode', 'forward')
                         if f'{name} {kind}' in times})
            into['step'] = (into['answer'] - into['first']) / max(1, n - 1)
    if theirs:
        theirs['prefill'] = theirs['forward'] - theirs['encode']
    found = []
    for (frames, keep), own in spans.items():
        base: dict[str, object] = {
            'model': model, 'dtype': plan.engine.info.dtype, 'size': f'{size[0]}x{size[1]}',
            'frames': frames, 'keep': keep, 'path': plan.engine.model.device.type,
            'threads': torch.get_num_threads()}
        found += records(own, base, EAGER, theirs if frames == 1 else {}, n)
        if compiled and frames == 1:
            found += records(own, base, COMPILED, compiled, n)
    return found


def records(own: dict[str, list[float]], base: dict[str, object], name: str,
            theirs: dict[str, float], tokens: int) -> list[Record]:
    """
    Return the records of one kind of answer.

    :param name: of the baseline; stages that ``theirs`` lacks have none, and beside one that is
        not the first no record.
    """
    keep = base['keep']
    less = bool(theirs) and isinstance(keep, float) and keep < 1
    note = 'the baseline sees all tokens' if less else ''
    found = []
    for stage, metric, part, other in (
            ('answer', 'ms', 'whole', 'answer'), ('first_token', 'ms', 'first', 'first'),
            ('encoder', 'ms', 'encode', 'encode'), ('prefill', 'ms', 'prefill', 'prefill'),
            ('decode', 'ms_per_token', 'token', 'step')):
        if name != EAGER and other not in theirs:
            continue
        case = {**base, 'answer_tokens': tokens} if stage == 'answer' else base
        found.append(record(
            stage, case, metric, median(own[part]), 'ms', times=own[part], note=note,
            baseline=(name, theirs[other]) if theirs else None))
    whole = median(own['whole'])
    found.append(record(
        'answer', {**base, 'answer_tokens': tokens}, 'answers_per_s', 1e3 / whole, '1/s',
        baseline=(name, 1e3 / theirs['answer']) if theirs else None, higher_is_better=True,
        runs=len(own['whole']), note=note))
    return found
