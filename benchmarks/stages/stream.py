"""
A long answer as its client reads it, and the device memory that it takes.

One question through the scheduler, thousands of words long, by the official shape with random
weights on a GPU: time from word to word, time from a token's choice in the host's hands to its
text in the client's, and the memory beside weights and cache, from early in the answer to its end.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import CannotRun, Record, median, percentile, record
from benchmarks.stages._engines import picture, random_checkpoint
from benchmarks.stages.answer import QUESTION
from benchmarks.stages.decode import weights_of
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.options import Options
from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler
from qwen_vl_ros.engine.types import Delta, Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.share import share

#: Tokens of which times from one to the next are taken.
TIMED = 1000

#: Tokens after which memory is looked at first: graphs are captured, streams have their pools.
EARLY = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--shape', choices=('2b', '7b'), default='2b')
    parser.add_argument('--dtype', nargs='+', default=['bf16'], choices=('bf16', 'int8', 'int4'),
                        help='the others are made from bf16 (%(default)s)')
    parser.add_argument('--tokens', type=int, default=10_000, help='of the answer (%(default)s)')
    parser.add_argument('--size', default='640x480', help='of the picture (%(default)s)')


def run(args: argparse.Namespace) -> list[Record]:
    """Answer once for each form of the weights."""
    if not torch.cuda.is_available():
        raise CannotRun('torch finds no CUDA device')
    found = []
    for dtype in args.dtype:
        found += one_form(args, dtype)
    return found


class Noted:
    """
    A decoder whose choices are noted with the time at which they are in the host's hands.

    :param decoder: does the work.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.at: list[float] = []

    def step(self, allowed: Mapping[int, Tensor] | None = None) -> dict[int, Choice]:
        """See :meth:`Decoder.step`."""
        found = self._decoder.step(allowed)
        self.at.append(time.perf_counter())
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def one_form(args: argparse.Namespace, dtype: str) -> list[Record]:
    """Load, warm up, ask."""
    device = torch.device('cuda', torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    torch.zeros(1, device=device)  # the context, which is not ours
    before = in_use(device)
    checkpoint = random_checkpoint(args.shape, share('models', 'tiny'))[0]
    gc.collect()  # transformers' module refers to itself; a user's checkpoint has no such owner
    options = Options(max_context=args.tokens + 2048, repetition_window=0)
    engine = Engine(checkpoint, options, 'none' if dtype == 'bf16' else dtype)
    del checkpoint
    gc.collect()
    torch.cuda.empty_cache()  # what making random weights took
    engine.end_tokens = frozenset()
    width, height = map(int, args.size.split('x'))
    engine.warm_up([(width, height)])
    noted = engine.model.decoder = Noted(engine.model.decoder)
    weights = weights_of(engine.model.language) + engine.info.vision_weight_bytes
    plan = Scheduler(engine, ScheduleOptions(1))
    plan.start()
    # Once short, so that all is warm.
    ask(plan, (width, height), 8, 0, device)
    noted.at.clear()
    got, rows = ask(plan, (width, height), args.tokens, 1, device)
    plan.stop()
    caches = engine.pool.used_bytes
    case = {'model': args.shape, 'dtype': dtype, 'path': 'cuda', 'size': args.size,
            'answer_tokens': args.tokens, 'variant': 'through the scheduler'}
    times = [(b - a) * 1e3 for (_, a), (_, b) in pairwise(got)][:TIMED]
    # The first token comes from prefill; that of step n is the answer's number n + 1.
    late = [(at - noted.at[number - 2]) * 1e3 for number, at in got
            if 2 <= number <= len(noted.at) + 1]
    first, last = rows[0], rows[-1]
    rest = last[1] - before - weights - caches
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    ours = torch.cuda.memory_allocated(device) - weights - caches
    engine.close()
    return [
        record('decode', case, 'ms_per_token_client', median(times), 'ms', times=times,
               p50=median(times), p99=percentile(times, 99), note=f'the first {len(times)}, from '
               'text to text with the client'),
        record('decode', case, 'ms_to_text', median(late), 'ms', times=late,
               p99=percentile(late, 99),
               note='from a choice in the host\'s hands to its text in the client\'s; add '
               'ms_to_host, from the end of the step on the device'),
        record('decode', case, 'mb', rest / 1e6, 'MB', note=f'device memory of the whole engine '
               f'beside {weights / 1e6:.0f} MB of weights and {caches / 1e6:.0f} MB of cache at '
               f'token {last[0]}: {ours / 1e6:.0f} MB of buffers, {held / 1e6:.0f} MB that torch '
               'keeps for later, the rest code and libraries; the context of '
               f'{before / 1e6:.0f} MB aside'),
        record('decode', case, 'mb_grown', (last[1] - first[1]) / 1e6, 'MB',
               note=f'from token {first[0]} to {last[0]}; seen in between: '
               + ', '.join(f'{(used - first[1]) / 1e6:.1f} at {number}' for number, used in rows))]


def ask(plan: Scheduler, size: tuple[int, int], tokens: int, seed: int, device: torch.device,
        ) -> tuple[list[tuple[int, float]], list[tuple[int, int]]]:
    """
    Ask once and read the answer.

    :return: tokens so far and time of each text; tokens so far and bytes in use a few times.
    """
    request = Request(QUESTION, (Visual((Frame.from_rgb(picture(size, seed)),)),),
                      max_new_tokens=tokens)
    got: list[tuple[int, float]] = []
    rows: list[tuple[int, int]] = []
    looks = [EARLY, *(tokens * share // 8 for share in range(1, 8)), tokens - 1]
    for event in plan.answer(request):
        if isinstance(event, Delta):
            got.append((event.tokens, time.perf_counter()))
            # After what is timed, but for one look.
            while looks and event.tokens >= looks[0]:
                looks.pop(0)
                rows.append((event.tokens, in_use(device)))
        elif isinstance(event, Done) and len(event.answer.token_ids) != tokens:
            raise CannotRun(f'{len(event.answer.token_ids)} tokens came, {tokens} were asked')
    return got, rows


def in_use(device: torch.device) -> int:
    """Return the bytes of the device that are in use, by whomever."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free
