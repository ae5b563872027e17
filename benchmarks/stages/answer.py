"""
Whole answers and their parts (encoder, prefill, first token, decode) beside transformers.

Both get the same picture and question, greedy, and give the same number of tokens, taken in turns.
The picture is new each time: nothing is reused. On a CPU the shipped tiny model is timed, on a GPU
the official 2B shape with random weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.records import CannotRun, Record, alternate, median, record
from benchmarks.stages._reference import Reference, random_checkpoint
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.share import share

EAGER = 'transformers eager'
QUESTION = 'what colour is the largest thing ?'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--seconds', type=float, default=6.0, help='for each thing that is timed')
    parser.add_argument('--threads', type=int, help='of torch (its own choice)')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--model', type=Path, help='a checkpoint (models/tiny)')
    parser.add_argument('--shape', choices=('2b', '7b'),
                        help='random weights of this shape (on a GPU 2b)')
    parser.add_argument('--size', nargs='+', default=['320x240', '640x480'])
    parser.add_argument('--keep', type=float, nargs='+', default=[1.0, 0.5],
                        help='shares of the vision tokens; the baseline always sees all')
    parser.add_argument('--tokens', type=int, default=33, help='of an answer')


def run(args: argparse.Namespace) -> list[Record]:
    """Time all sizes."""
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or share('models', 'tiny')
        where = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        shape = args.shape or ('2b' if where.type == 'cuda' and not args.model else None)
        if shape:
            folder = random_checkpoint(Path(scratch) / shape, shape, folder, where)
        try:
            # Nothing may end an answer early: each has the same number of tokens.
            engine = Engine.load(str(folder), device=args.device, dtype=args.dtype,
                                 repetition_window=0)
        except EngineError as error:
            raise CannotRun(error.message) from error
        engine.end_tokens = frozenset()
        info = engine.info
        reference = Reference(folder, engine.model.device, engine.model.dtype,
                              (info.min_pixels, info.max_pixels))
        found: list[Record] = []
        for size in args.size:
            width, height = map(int, size.split('x'))
            found += one_size(engine, reference, args, (width, height),
                              shape or folder.name)
        engine.close()
    return found


def picture(size: tuple[int, int], seed: int) -> np.ndarray:
    """Return a picture with large and small structure, another for each seed."""
    rng = np.random.default_rng(seed)
    width, height = size
    coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), np.uint8)
    return np.ascontiguousarray(np.repeat(np.repeat(coarse, 16, 0), 16, 1)[:height, :width])


def ask(engine: Engine, rgb: np.ndarray, tokens: int, keep: float = 1.0) -> Timeline:
    """Answer about a picture as if nothing had been asked before."""
    engine.forget()
    request = Request(QUESTION, (Visual((Frame.from_rgb(rgb),)),), max_new_tokens=tokens,
                      keep_ratio=keep)
    for event in engine.answer(request):
        if isinstance(event, Done):
            if len(event.answer.token_ids) != tokens:
                raise CannotRun(f'{len(event.answer.token_ids)} tokens came, {tokens} were asked')
            return event.answer.timeline
    raise CannotRun('the engine ended without an answer')


def one_size(engine: Engine, reference: Reference, args: argparse.Namespace,
             size: tuple[int, int], model: str) -> list[Record]:
    """Time one picture size."""
    pictures = [picture(size, seed) for seed in range(8)]
    inputs = [reference.inputs(rgb, QUESTION) for rgb in pictures]
    spans: dict[tuple[str, float], list[float]] = {}

    def ours(tokens: int, keep: float) -> Callable[[int], None]:
        def work(number: int) -> None:
            line = ask(engine, pictures[number % 8], tokens, keep)
            for name in ('encode', 'prefill', 'first_token'):
                spans.setdefault((name, keep), []).append(line.ms(name))
            spans.setdefault(('token', keep), []).extend(
                span.ms for span in line.spans if span.name == 'token')
        return work

    n = args.tokens
    work: dict[str, Callable[[int], object]] = {
        'answer theirs': lambda i: reference.answer(pictures[i % 8], QUESTION, n),
        'first theirs': lambda i: reference.answer(pictures[i % 8], QUESTION, 1),
        'encode theirs': lambda i: reference.encode(inputs[i % 8]),
        'forward theirs': lambda i: reference.forward(inputs[i % 8])}
    for keep in args.keep:
        work[f'answer {keep}'] = ours(n, keep)
        work[f'first {keep}'] = ours(1, keep)
    times = alternate(work, args.seconds)
    theirs = {name: median(times[f'{name} theirs'])
              for name in ('answer', 'first', 'encode', 'forward')}
    step = (theirs['answer'] - theirs['first']) / max(1, n - 1)
    found = []
    for keep in args.keep:
        base = {'model': model, 'dtype': engine.info.dtype, 'size': f'{size[0]}x{size[1]}',
                'keep': keep, 'path': engine.model.device.type,
                'threads': torch.get_num_threads()}
        note = 'the baseline sees all tokens' if keep < 1 else ''

        def add(stage: str, metric: str, own: list[float], other: float,
                case: dict[str, object] = base, note: str = note) -> None:
            found.append(record(stage, case, metric, median(own), 'ms', times=own,
                                baseline=(EAGER, other), note=note))

        whole = times[f'answer {keep}']
        add('answer', 'ms', whole, theirs['answer'], {**base, 'answer_tokens': n})
        found.append(record(
            'answer', {**base, 'answer_tokens': n}, 'answers_per_s', 1e3 / median(whole), '1/s',
            baseline=(EAGER, 1e3 / theirs['answer']), higher_is_better=True, note=note))
        add('first_token', 'ms', times[f'first {keep}'], theirs['first'])
        add('encoder', 'ms', spans['encode', keep], theirs['encode'])
        add('prefill', 'ms', spans['prefill', keep], theirs['forward'] - theirs['encode'])
        add('decode', 'ms_per_token', spans['token', keep], step)
    return found
