"""
From a frame on the GPU to patch embeddings, against transformers' processor and Conv3d.

Times are those of CUDA graphs of many calls over rotating buffers that together exceed the L2
cache, so that neither launches nor a warm cache are measured. The processor works on the host side
between its kernels and is timed by the clock around it, synchronised, picture already on the GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages import _counters
from benchmarks.stages import _processors as processors
from qwen_vl_ros.engine.embedding import pair_projections, still_projection
from qwen_vl_ros.engine.offload import Offload
from qwen_vl_ros.engine.patches import IMAGE_MEAN, IMAGE_STD, grid_of, smart_resize
from qwen_vl_ros.engine.vision import fold_pair, fold_still
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.cuda import CudaKernels, Projection
from qwen_vl_ros.kernels.loader import KernelError
from qwen_vl_ros.kernels.patches import Patcher

SIZES = ((640, 480), (1280, 720), (1920, 1080))
MAX_PIXELS = 1_003_520
WIDTH = 1280

PARTS = ('errors', 'products', 'pairs', 'frames', 'ways', 'counters')

#: Bytes of rotating buffers: three times the L2 cache of an H200.
COLD = 180 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--calls', type=int, default=60, help='calls in a graph')
    parser.add_argument('--replays', type=int, default=30)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS))


def run(args: argparse.Namespace) -> list[Record]:
    """Check that the kernels are right, then time them."""
    if not torch.cuda.is_available():
        raise CannotRun('torch finds no CUDA device')
    try:
        kernels = CudaKernels()
    except (FileNotFoundError, KernelError) as error:
        raise CannotRun(str(error)) from error
    bench = Bench(args, kernels)
    found = bench.copy()
    for part in args.parts:
        found += {
            'errors': bench.errors,
            'products': lambda: bench.products(1564) + bench.products(4784),
            'pairs': lambda: bench.pairs(1564) + bench.pairs(4784),
            'frames': bench.all_frames,
            'ways': lambda: ways(bench.conv),
            'counters': counted}[part]()
    return found


def ways(conv: torch.Tensor) -> list[Record]:
    """Time the ways over the CPU and over the GPU as ``preprocess.device: auto`` does."""
    found = []
    for width, height in SIZES:
        offload = Offload(conv)
        rgb = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
        frame = Frame.from_rgb(rgb)
        grid = grid_of([frame], 3136, MAX_PIXELS)
        chosen = offload.choose(frame, grid)
        for name, profile in offload.profiles[width, height, grid[1], grid[2]].items():
            case = {'size': f'{width}x{height}', 'encoding': 'rgb8', 'path': 'cuda',
                    'variant': f'camera buffer to embeddings, way {name}'}
            found.append(record(
                'projection', case, 'ms', profile.total_ms, 'ms',
                note=f'CPU {profile.cpu_ms:.3f}, transfer {profile.transfer_ms:.3f}, GPU '
                f'{profile.gpu_ms:.3f} ms, each waited for; auto takes {chosen}'))
    return found


def counted() -> list[Record]:
    """Let the profiler count bytes where it may; our own count stands beside it."""
    try:
        launches = _counters.count()
    except (_counters.NoProfiler, OSError, subprocess.TimeoutExpired) as error:
        print(f'bytes are computed only: {error}')
        return []
    names = ('frame to patches', 'patches to embeddings', 'one launch to embeddings',
             'uint8 patches to embeddings')
    found = []
    for name, launch in zip(names, launches):
        case = {'size': '1280x720', 'patches': 4784, 'path': 'cuda', 'variant': name}
        if launch is launches[-1]:
            case = {'patches': 1564, 'path': 'cuda', 'variant': name}
        own = launch.own_read + launch.own_written
        found.append(record(
            'projection', case, 'mb_memory', (launch.read + launch.written) / 1e6, 'MB',
            baseline=('every input and output once, computed', own / 1e6), note='bytes that went '
            'to and from memory while the kernel ran, by Nsight Compute'))
        found.append(record(
            'projection', case, 'count_off', launch.off, '', note='counted over computed bytes, '
            f'less 1: {launch.read} read from memory and {launch.stored} stored by the kernel, '
            f'computed {launch.own_read} and {launch.own_written}'))
    return found


class Bench:
    """What all measurements share."""

    def __init__(self, args: argparse.Namespace, kernels: CudaKernels) -> None:
        torch.manual_seed(0)
        self.args, self.kernels = args, kernels
        self.conv = torch.randn(WIDTH, 3, 2, 14, 14, device='cuda').mul_(0.03).bfloat16()
        self.projection = still_projection(self.conv, torch.float16)
        self.weight, self.bias = fold_still(self.conv)
        self.bandwidth = 0.0

    def graph(self, call: Callable[[int], object]) -> list[float]:
        """Return milliseconds of a call, one figure for each replay of a graph of many."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(3):
                call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(self.args.calls):
                call(i)
        times = []
        for i in range(self.args.replays + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(start.elapsed_time(end) / self.args.calls)
        del graph
        return times

    def copy(self) -> list[Record]:
        """Measure the copy bandwidth of the device."""
        big = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')
        other = torch.empty_like(big)
        times = []
        for i in range(23):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            other.copy_(big)
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(2 * big.numel() / start.elapsed_time(end) / 1e6)
        self.bandwidth = median(times)
        return [record('projection', {'path': 'cuda', 'variant': 'device copy'}, 'gb_s',
                       self.bandwidth, 'GB/s', note='1 GiB, read and written')]

    def errors(self) -> list[Record]:
        """Hold kernel and transformers' own way against float64 on the same bf16 kernel."""
        patches = torch.randint(0, 256, (1564, 588), dtype=torch.uint8, device='cuda')
        mean, std = (torch.tensor(x, device='cuda', dtype=torch.double)[:, None]
                     for x in (IMAGE_MEAN, IMAGE_STD))
        normal = (patches.double().reshape(-1, 3, 196) / 255 - mean) / std
        pair = torch.stack((normal, normal), 2).flatten(1)
        expected = pair @ self.conv.double().flatten(1).T

        def relative(got: torch.Tensor) -> float:
            return ((got.double() - expected).norm() / expected.norm()).item()

        theirs = relative(F.conv3d(pair.float().bfloat16().reshape(-1, 3, 2, 14, 14),
                                   self.conv).flatten(1))
        found = []
        for name, dtype in (('bf16', torch.bfloat16), ('fp32', torch.float32)):
            ours = relative(self.kernels.project(patches, self.projection, dtype=dtype))
            found.append(record(
                'projection', {'path': 'cuda', 'variant': f'fp16 weights, {name} out'},
                'relative_error', ours, '', baseline=('transformers bf16 Conv3d', theirs),
                note='Frobenius norm against float64'))
        return found

    def products(self, count: int) -> list[Record]:
        """Time the projection alone against torch's (cuBLASLt)."""
        sets = max(3, COLD // (count * (588 + 2 * WIDTH)))
        patches = [torch.randint(0, 256, (count, 588), dtype=torch.uint8, device='cuda')
                   for _ in range(min(sets, 24))]
        n = len(patches)
        centred = [p.bfloat16() - 128 for p in patches]
        padded = [F.pad(c, (0, 608 - 588)) for c in centred]
        wide = F.pad(self.weight, (0, 608 - 588))
        # The offset of 128 in the bias: the bytes are converted by one copy, nothing else.
        shifted = (self.bias.double() - 128 * self.weight.double().sum(1)).bfloat16()
        # As exact as ours: weights in float16, one more rounding to bf16 behind it.
        half, bias = (t.half() for t in fold_still(self.conv.float()))
        half = F.pad(half, (0, 608 - 588))
        halves = [torch.zeros(count, 608, dtype=torch.half, device='cuda') for _ in patches]
        moved = (bias.double() - 128 * half.double().sum(1)).half()

        def keep(make: Callable[[int], torch.Tensor]) -> Callable[[int], None]:
            held: list[torch.Tensor | None] = [None] * n

            def call(i: int) -> None:
                held[i % n] = make(i % n)  # results live on: outputs rotate too

            return call

        ways: dict[str, Callable[[int], None]] = {
            'ours, uint8 in': keep(lambda i: self.kernels.project(
                patches[i], self.projection, dtype=torch.bfloat16)),
            'cuBLASLt, uint8 in, K 588': keep(lambda i: F.linear(
                patches[i].bfloat16() - 128, self.weight, self.bias)),
            'cuBLASLt, uint8 in, K 608': keep(lambda i: (
                padded[i][:, :588].copy_(patches[i]), F.linear(padded[i], wide, shifted))[1]),
            'cuBLASLt, uint8 in, fp16 weights, K 608': keep(lambda i: (
                halves[i][:, :588].copy_(patches[i]),
                F.linear(halves[i], half, moved).bfloat16())[1]),
            'cuBLASLt, bf16 in, K 588': keep(lambda i: F.linear(
                centred[i], self.weight, self.bias)),
            'cuBLASLt, bf16 in, K 608': keep(lambda i: F.linear(padded[i], wide, self.bias)),
        }
        times = {name: self.graph(way) for name, way in ways.items()}
        ours = times['ours, uint8 in']
        least = count * 588 + self.weight.nbytes + count * WIDTH * 2
        case: dict[str, Any] = {'patches': count, 'dtype': 'bf16', 'path': 'cuda'}
        found = [record('projection', {**case, 'variant': 'uint8 patches to embeddings'}, 'ms',
                        median(ours), 'ms', times=ours, baseline=(name, median(other)))
                 for name, other in times.items() if name != 'ours, uint8 in']
        found.append(record('projection', {**case, 'variant': 'uint8 patches to embeddings'},
                            'tflop_s', 2 * count * 588 * WIDTH / median(ours) / 1e9, 'TFLOP/s'))
        found.append(record('projection', {**case, 'variant': 'uint8 patches to embeddings'},
                            'mb', least / 1e6, 'MB', kind='computed', note='least DRAM traffic'))
        return found

    def pairs(self, count: int) -> list[Record]:
        """Time a pair of frames with both halves in one product, and with a half that is kept."""
        both = [torch.randint(0, 256, (count, 1176), dtype=torch.uint8, device='cuda')
                for _ in range(12)]
        newer = [torch.randint(0, 256, (count, 588), dtype=torch.uint8, device='cuda')
                 for _ in range(12)]
        whole = Projection.make(*fold_pair(self.conv.half()))
        first, second = pair_projections(self.conv, torch.float16)
        kept = [self.kernels.project(x, first, dtype=torch.float32) for x in newer]
        held: list[torch.Tensor | None] = [None] * 12

        def product(i: int) -> None:
            held[i % 12] = self.kernels.project(both[i % 12], whole, dtype=torch.bfloat16)

        def half(i: int) -> None:
            held[i % 12] = self.kernels.project(
                newer[i % 12], second, addend=kept[i % 12], dtype=torch.bfloat16)

        times = {'product': self.graph(product), 'half': self.graph(half)}
        return [record(
            'projection', {'patches': count, 'dtype': 'bf16', 'path': 'cuda',
                           'variant': 'pair, older half kept'}, 'ms', median(times['half']), 'ms',
            times=times['half'],
            baseline=('both halves in one product', median(times['product'])))]

    def all_frames(self) -> list[Record]:
        """Time all sizes of pictures."""
        process = processors.torchvision(MAX_PIXELS, device='cuda')
        return [one for size in SIZES for one in self.frames(size, process)]

    def frames(self, size: tuple[int, int], process: processors.Processor | None) -> list[Record]:
        """Time a frame on the device to patches and to embeddings, fused and not."""
        width, height = size
        new_height, new_width = smart_resize(height, width, 3136, MAX_PIXELS)
        count = new_height * new_width // 196
        rgb = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        frame = Frame.from_rgb(rgb)
        pixels = [torch.from_numpy(frame.data).cuda().clone()
                  for _ in range(min(24, max(3, COLD // (frame.data.size + count * 2 * WIDTH))))]
        n = len(pixels)
        name = f'{width}x{height}'
        kernels, projection = self.kernels, self.projection
        same = kernels.patches(frame, pixels[0], new_height, new_width)
        if not np.array_equal(same.cpu().numpy(), Patcher().patches(frame, new_height, new_width)):
            raise CannotRun(f'{name}: the bytes of GPU and CPU differ')
        out = torch.bfloat16
        if not torch.equal(
                kernels.embed(frame, pixels[0], new_height, new_width, projection, dtype=out),
                kernels.project(same, projection, dtype=out)):
            raise CannotRun(f'{name}: fused and separate embeddings differ')
        held: list[torch.Tensor | None] = [None] * n

        def patches(i: int) -> None:
            held[i % n] = kernels.patches(frame, pixels[i % n], new_height, new_width)

        def separate(i: int) -> None:
            held[i % n] = kernels.project(
                kernels.patches(frame, pixels[i % n], new_height, new_width), projection,
                dtype=out)

        def fused(i: int) -> None:
            held[i % n] = kernels.embed(
                frame, pixels[i % n], new_height, new_width, projection, dtype=out)

        case = {'size': name, 'resized': f'{new_width}x{new_height}', 'encoding': 'rgb8',
                'dtype': 'bf16', 'path': 'cuda'}
        baseline = None
        if process is not None:
            baseline = ('transformers torchvision processor on the GPU and Conv3d',
                        median(self.theirs(process, pixels[0].reshape(height, width, 3))))
        found = []
        for variant, call in (('frame to patches', patches),
                              ('two launches to embeddings', separate),
                              ('one launch to embeddings', fused)):
            times = self.graph(call)
            value = median(times)
            last = count * (588 if call is patches else 2 * WIDTH)
            moved = frame.data.size + last + (0 if call is patches else self.weight.nbytes)
            if call is separate:
                moved += 2 * count * 588
            found.append(record('projection', {**case, 'variant': variant}, 'ms', value, 'ms',
                                times=times, baseline=None if call is patches else baseline))
            found.append(record('projection', {**case, 'variant': variant}, 'gb_s',
                                moved / value / 1e6, 'GB/s', baseline=('copy', self.bandwidth),
                                higher_is_better=True, note='bytes computed, not counted'))
        pinned = torch.from_numpy(frame.data).pin_memory()

        def uploaded(i: int) -> None:
            pixels[i % n].copy_(pinned, non_blocking=True)
            fused(i)

        def in_place(i: int) -> None:
            held[i % n] = kernels.embed(
                frame, pinned, new_height, new_width, projection, dtype=out)

        for variant, call in (('pinned frame, copied, to embeddings', uploaded),
                              ('pinned frame, read in place, to embeddings', in_place)):
            times = self.graph(call)
            found.append(record('projection', {**case, 'variant': variant}, 'ms', median(times),
                                'ms', times=times))
        return found

    def theirs(self, process: processors.Processor, rgb: torch.Tensor) -> list[float]:
        """Return milliseconds of processor and Conv3d, picture on the device."""
        times = []
        for i in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            values = process(rgb)
            F.conv3d(values.bfloat16().reshape(-1, 3, 2, 14, 14), self.conv)
            torch.cuda.synchronize()
            if i >= 10:
                times.append((time.perf_counter() - start) * 1e3)
        return times

