"""
What quantised weights cost in accuracy: the same items asked of every form, pair by pair.

The shipped model answers RoboScene-VQA with the decoder's weights as they are, in INT8 and in
INT4. Most answers are the same, so that the difference on the same items is known far better than
either accuracy. Items are shared out over processes, each with engines of its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.records import Record, record
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.roboscene.evaluate import frames_of, say
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.roboscene.questions import FAMILIES
from qwen_vl_ros.share import share

#: Points that a form may lose.
BOUNDS = {'int8': 0.5, 'int4': 1.5}

#: Which forms got an item right, in the order of :data:`FORMS`; counted by family.
FORMS = ('none', 'int8', 'int4')
Outcomes = Counter[tuple[str, tuple[bool, ...]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--items', type=int, default=40, help='of each family (%(default)s)')
    parser.add_argument('--jobs', type=int, default=1, help='processes (%(default)s)')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--dtype', default='auto')


def run(args: argparse.Namespace) -> list[Record]:
    """Ask all items and compare."""
    found: Outcomes = Counter()
    work = [(args.items, number, args.jobs, args.device, args.dtype)
            for number in range(args.jobs)]
    if args.jobs == 1:
        parts = [asked(*work[0])]
    else:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context('spawn')) as pool:
            parts = list(pool.map(asked, *zip(*work)))
    for part, _ in parts:
        found += part
    dtype, path, decoder = parts[0][1]
    out = []
    count = found.total()
    plain = sum(n for (_, right), n in found.items() if right[0]) / count
    for place, form in enumerate(FORMS[1:], 1):
        lost, half = paired([((right[0], right[place]), n) for (_, right), n in found.items()])
        families = ', '.join(
            f'{name} {100 * paired(rows)[0]:+.2f}' for name in FAMILIES
            if (rows := [((right[0], right[place]), n)
                         for (family, right), n in found.items() if family == name]))
        out.append(record(
            'eval', {'model': 'tiny', 'dtype': form, 'keep': 1.0, 'family': 'all',
                     'split': 'test', 'path': path},
            'points_lost', 100 * lost, 'points', runs=count,
            interval=[100 * (lost - half), 100 * (lost + half)], bound=BOUNDS[form],
            note=f'of {100 * plain:.2f} % with {dtype}, {count} items asked of both, 95 % '
            f'interval of the paired difference {100 * (lost - half):+.2f} to '
            f'{100 * (lost + half):+.2f}; {decoder}; by family: {families}'))
        print(f'{form}: {out[-1]["note"]}')
    return out


def asked(count: int, number: int, jobs: int, device: str, dtype: str,
          ) -> tuple[Outcomes, tuple[str, str, str]]:
    """
    Ask one process's share of the items of every form.

    :param count: items of each family, of which every ``jobs``-th from ``number`` on is asked.
    :return: outcomes; dtype, kind of device and class of the decoder.
    """
    if jobs > 1:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // jobs))
    folder = str(share('models', 'tiny'))
    engines = [Engine.load(folder, device=device, dtype=dtype, quantization=form)
               for form in FORMS]
    found: Outcomes = Counter()
    for family in FAMILIES:
        for item in list(items(family, 'test', count, 0))[number::jobs]:
            request = Request(item.question.text, (Visual(frames_of(item)),), max_new_tokens=32)
            found[family, tuple(say(engine, request).text == item.question.answer
                                for engine in engines)] += 1
    model = engines[0].model
    about = (engines[0].info.dtype, model.device.type, type(model.decoder).__name__)
    for engine in engines:
        engine.close()
    return found, about


def paired(rows: Sequence[tuple[tuple[bool, bool], int]]) -> tuple[float, float]:
    """
    Return the mean of first less second, and half of its 95 % interval.

    By the variance of the differences, each of which is -1, 0 or 1 (McNemar's table).

    :param rows: whether each of two was right, and how often that came.
    """
    count = sum(n for _, n in rows)
    first = sum(n for (a, b), n in rows if a and not b)
    second = sum(n for (a, b), n in rows if b and not a)
    mean = (first - second) / count
    variance = ((first + second) / count - mean * mean) / count
    # Without any pair that differs: the rule of three.
    return mean, 1.96 * math.sqrt(variance) if first + second else 3 / count
