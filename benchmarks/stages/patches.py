"""
From a camera frame to uint8 patches on the CPU, against transformers' image processors.

Frames and outputs are taken in turns from more memory than the caches hold, for everybody: a
camera's frame is not in the cache either. One-thread figures run with the process on one core and
are processor time, which other programs on that core do not lengthen; the others are wall time.
The processors do more than the kernel (they write float32, normalised and doubled); the encoder
behind the kernel does the rest inside its first product, which is what they are held against.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records import CannotRun, Record, alternate, median, record
from benchmarks.stages import _processors as processors
from benchmarks.stages._memory import extra_bytes
from qwen_vl_ros.engine.patches import smart_resize
from qwen_vl_ros.frame import ENCODINGS, Frame
from qwen_vl_ros.kernels.loader import KernelError
from qwen_vl_ros.kernels.patches import Patcher, available_isas

SIZES = ((640, 480), (1280, 720), (1920, 1080))
MAX_PIXELS = 1_003_520

#: More than the last-level cache of the machines that this is run on.
COLD = 160 << 20

PILLOW = 'transformers pillow processor'
TORCHVISION = 'transformers torchvision processor'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--seconds', type=float, default=3.0, help='for each thing that is timed')
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2, 4])
    names = [f'{w}x{h}' for w, h in SIZES]
    parser.add_argument('--sizes', nargs='+', metavar='WxH', default=names, choices=names,
                        help='of frames (all)')
    parser.add_argument('--torchvision', type=Path, metavar='FOLDER',
                        help='folder with an installed torchvision, where none is importable')


def run(args: argparse.Namespace) -> list[Record]:
    """Time all sizes."""
    try:
        isas = available_isas()
    except (FileNotFoundError, KernelError) as error:
        raise CannotRun(str(error)) from error
    # Before transformers is imported: it looks for torchvision once.
    torchvision = processors.torchvision(MAX_PIXELS, args.torchvision)
    baselines: dict[str, processors.Processor] = {PILLOW: processors.pillow(MAX_PIXELS)}
    if torchvision is None:
        print('torchvision cannot be imported beside this torch: its processor is left out')
    else:
        baselines[TORCHVISION] = torchvision
    found: list[Record] = []
    sizes = [size for size in SIZES if f'{size[0]}x{size[1]}' in args.sizes]
    for size in sizes:
        found += one_size(size, baselines, args)
    found += forms(isas, args)
    for size in sizes:
        found += memory(size)
    return found


def cases(size: tuple[int, int], encoding: str = 'rgb8') -> list[Frame]:
    """Return pictures with the statistics of pictures, in more memory than a cache holds."""
    width, height = size
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    rgb = np.repeat(np.repeat(coarse, 8, 0), 8, 1)[:height, :width]
    rgb = rgb // 2 + rng.integers(0, 128, rgb.shape, dtype=np.uint8)
    if encoding == 'rgb8':
        data = np.ascontiguousarray(rgb).reshape(-1)
        step = width * 3
    else:
        step = width * ENCODINGS[encoding]
        rows = height * 3 // 2 if encoding.startswith('nv') else height
        data = np.resize(rgb.reshape(-1), step * rows)
    return [Frame(data.copy(), encoding, width, height, step)
            for _ in range(max(3, COLD // data.size))]


def ours(patcher: Patcher, frames: list[Frame]) -> Callable[[int], object]:
    """Return a function that makes the patches of one frame after the other."""
    height, width = smart_resize(frames[0].height, frames[0].width, 3136, MAX_PIXELS)
    outs = [np.ones((height * width // 196, 588), np.uint8)
            for _ in range(max(3, COLD // (height * width * 3)))]
    return lambda i: patcher.patches(frames[i % len(frames)], height, width, outs[i % len(outs)])


def copying(frames: list[Frame]) -> Callable[[int], object]:
    """Return a function that copies one frame's bytes after the other."""
    outs = [np.ones_like(f.data) for f in frames]
    return lambda i: np.copyto(outs[i % len(outs)], frames[i % len(frames)].data)


def one_size(
    size: tuple[int, int], baselines: dict[str, processors.Processor], args: argparse.Namespace,
) -> list[Record]:
    """Time kernel, processors and a plain copy at one size."""
    frames = cases(size)
    pictures = [frame.rgb() for frame in frames]
    height, width = smart_resize(size[1], size[0], 3136, MAX_PIXELS)
    resized = f'{width}x{height}'
    name = f'{size[0]}x{size[1]}'
    moved = frames[0].data.size + height * width * 3

    def work(threads: int) -> dict[str, Callable[[int], object]]:
        ways: dict[str, Callable[[int], object]] = {
            'ours': ours(Patcher(threads), frames), 'copy': copying(frames)}
        for label, process in baselines.items():
            ways[label] = lambda i, p=process: p(pictures[i % len(pictures)])  # type: ignore[misc]
        return ways

    found: list[Record] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        with one_core() if threads == 1 else all_cores():
            times = alternate(work(threads), args.seconds, clock=clock_of(threads))
        cores = 1 if threads == 1 else len(os.sched_getaffinity(0))
        case: dict[str, Any] = {'size': name, 'resized': resized, 'path': 'cpu',
                                'variant': Patcher().isa, 'encoding': 'rgb8', 'threads': threads,
                                'cores': cores}
        value = median(times['ours'])
        note = 'processor time' if threads == 1 else f'wall time, load {os.getloadavg()[0]:.1f}'
        for label in baselines:
            found.append(record('patches', case, 'ms', value, 'ms', times=times['ours'],
                                baseline=(label, median(times[label])), note=note))
        rate = moved / value / 1e6
        copy = 2 * frames[0].data.size / median(times['copy']) / 1e6
        found.append(record('patches', case, 'gb_s', rate, 'GB/s', baseline=('copy', copy),
                            higher_is_better=True,
                            note='frame read and patches written once; a copy by one thread '
                                 'reads and writes'))
        found.append(record('patches', case, 'share_of_limit', rate / copy, '',
                            note='of the copy bandwidth of one thread in the same run'))
    moved_case = {'size': name, 'resized': resized, 'path': 'cpu', 'encoding': 'rgb8'}
    written = height * width // 196 * 1176 * 4
    found.append(record('patches', moved_case, 'mb', moved / 1e6, 'MB', kind='computed',
                        baseline=('float32 pixel_values alone', written / 1e6),
                        note='frame and patches'))
    return found


def forms(isas: tuple[str, ...], args: argparse.Namespace) -> list[Record]:
    """Time every instruction set and every encoding at 1280x720 on one core."""
    size = (1280, 720)
    found = []
    frames = {encoding: cases(size, encoding) for encoding in ENCODINGS}
    with one_core():
        times = alternate({isa: ours(Patcher(isa=isa), frames['rgb8']) for isa in isas},
                          args.seconds, clock=clock_of(1))
        for isa in isas:
            found.append(record(
                'patches', {'size': '1280x720', 'path': 'cpu', 'variant': isa, 'encoding': 'rgb8',
                            'threads': 1, 'form': 'instruction set'}, 'ms', median(times[isa]),
                'ms', times=times[isa], baseline=('scalar', median(times['scalar']))))
        times = alternate({e: ours(Patcher(), f) for e, f in frames.items()}, args.seconds / 2,
                          clock=clock_of(1))
        for encoding in ENCODINGS:
            found.append(record(
                'patches', {'size': '1280x720', 'path': 'cpu', 'variant': Patcher().isa,
                            'encoding': encoding, 'threads': 1, 'form': 'encoding'}, 'ms',
                median(times[encoding]), 'ms', times=times[encoding],
                baseline=('rgb8', median(times['rgb8']))))
    return found


def memory(size: tuple[int, int]) -> list[Record]:
    """Measure the peak memory beside frame and output, each in a fresh process of its own."""
    height, width = smart_resize(size[1], size[0], 3136, MAX_PIXELS)
    extra, others = (extra_bytes(what, size, (width, height)) for what in ('kernel', 'pillow'))
    case = {'size': f'{size[0]}x{size[1]}', 'path': 'cpu', 'variant': Patcher().isa, 'threads': 1}
    return [
        record('patches', case, 'mb', extra / 1e6, 'MB', baseline=(PILLOW, others / 1e6),
               note='peak resident memory beside frame and output, first call of a process'),
        record('patches', case, 'extra_over_output', extra / (height * width * 3), '',
               note='the same over the bytes of the patches')]


def clock_of(threads: int) -> Callable[[], float]:
    """Return the clock for work of so many threads."""
    return time.process_time if threads == 1 else time.perf_counter


@contextmanager
def one_core() -> Iterator[None]:
    """Keep the process on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def all_cores() -> Iterator[None]:
    """Change nothing; the counterpart of :func:`one_core`."""
    yield
