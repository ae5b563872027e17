"""
The encoder from uint8 patches on the GPU to merged tokens, beside transformers'.

Both have the same random weights of an official shape. Times are wall clock, from the call to the
result on the device. Also: errors against float32 over a sweep of grids, the cost of a capture,
and what share of a large product's rate, measured in the same run, is reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages._halves import (
    COMPILED,
    EAGER,
    Halves,
    in_float32,
    merged,
    pixel_values,
    product_rate,
    relative,
    wall_ms,
)
from qwen_vl_ros.engine.costs import encode_cost
from qwen_vl_ros.engine.patches import smart_resize
from qwen_vl_ros.engine.quantize_vision import quantize_vision

Grid = tuple[int, int, int]

#: Grids of the error sweep beside random ones: a single unit, and pictures of 1:100 and 100:1.
EXTREMES: tuple[Grid, ...] = ((1, 2, 2), (1, 2, 200), (1, 200, 2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--shape', choices=('2b', '7b'), default='2b')
    parser.add_argument('--dtype', choices=('bfloat16', 'float16'), default='bfloat16')
    parser.add_argument('--size', nargs='+', default=['640x480', '1280x720'])
    parser.add_argument('--keep', type=float, nargs='+', default=[1.0, 0.5, 0.33])
    parser.add_argument('--frames', type=int, default=8, help='of the clip; 0 leaves it out')
    parser.add_argument('--seconds', type=float, default=1.0, help='for each thing that is timed')
    parser.add_argument('--grids', type=int, default=12, help='random ones of the error sweep')
    parser.add_argument('--no-compiled', action='store_true', help='leave torch.compile out')
    parser.add_argument('--no-int8', action='store_true', help='leave INT8 out')


def run(args: argparse.Namespace) -> list[Record]:
    """Measure errors, then times."""
    bench = Bench(args)
    with torch.inference_mode():
        found = bench.errors()
        cases: list[tuple[str, Grid]] = []
        for size in args.size:
            width, height = map(int, size.split('x'))
            h, w = smart_resize(height, width, 56 * 56, 1280 * 784, 28)
            cases.append((size, (1, h // 14, w // 14)))
        if args.frames:
            size, (_, h, w) = cases[0]
            cases.append((f'{size}x{args.frames}', ((args.frames + 1) // 2, h, w)))
        for size, grid in cases:
            found += bench.times(size, grid)
        if not args.no_compiled:
            bench.compile()
            for size, grid in cases:
                found += bench.against_compiled(size, grid)
        if not args.no_int8:
            found += bench.int8(cases)
    return found


class Bench:
    """What all measurements share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.halves = Halves(args.shape, getattr(torch, args.dtype))
        self.encoder = self.halves.vision
        if self.encoder.fused is None:
            raise CannotRun('the fused encoder is not there: see the log')
        self.theirs: Any = self.halves.their_vision
        self.rng = np.random.default_rng(1)
        self.rate = product_rate(self.halves.dtype)
        self.ours: dict[tuple[str, float], list[float]] = {}
        #: Of blocks that torch.compile has seen.
        self.compiled = False

    def case(self, **more: Any) -> dict[str, Any]:
        """Return the keys that name a measurement."""
        return {'model': self.args.shape, 'dtype': self.args.dtype, **more}

    def patches(self, grid: Grid) -> Tensor:
        """Return random patches with structure larger than a patch."""
        t, h, w = grid
        rows = torch.from_numpy(self.rng.integers(0, 200, (t * h * w, 1))).cuda()
        noise = torch.randint(0, 56, (t * h * w, 588 * (2 if t > 1 else 1)), device='cuda')
        return (rows + noise).to(torch.uint8)

    def errors(self) -> list[Record]:
        """Hold ours and theirs against float32, grid by grid; the worst ratio counts."""
        exact = in_float32(self.theirs)
        grids = list(EXTREMES)
        for _ in range(self.args.grids):
            h, w = (2 * int(n) for n in self.rng.integers(1, 30, 2))
            grids.append((int(self.rng.integers(1, 4)), h, w))
        rows = []
        for grid in grids:
            patches = self.patches(grid)
            values = pixel_values(patches)
            where = torch.tensor([grid], device='cuda')
            expected = merged(exact(values, grid_thw=where))
            other = relative(merged(self.theirs(
                values.to(self.halves.dtype), grid_thw=where)), expected)
            own = relative(self.encoder.encode(patches, grid), expected)
            rows.append((own / other, own, other, grid))
        worst = max(rows)
        note = f'Frobenius norm; {len(rows)} grids, that with the worst ratio is {worst[3]}'
        return [
            record('encoder', self.case(path='cuda', variant='worst of a sweep'),
                   'relative_error', worst[1], '', baseline=(EAGER, worst[2]), note=note,
                   runs=len(rows)),
            record('encoder', self.case(path='cuda', variant='mean of a sweep'),
                   'relative_error', sum(r[1] for r in rows) / len(rows), '',
                   baseline=(EAGER, sum(r[2] for r in rows) / len(rows)), runs=len(rows)),
            record('encoder', self.case(path='cuda', variant='large product, cuBLAS'), 'tflop_s',
                   self.rate, 'TFLOP/s', note='8192 x 8192 x 8192, random numbers')]

    def units(self, grid: Grid, keep: float) -> Tensor | None:
        """Return which units are kept, or ``None`` for all."""
        count = grid[0] * grid[1] * grid[2] // 4
        if keep >= 1:
            return None
        return torch.from_numpy(np.sort(self.rng.permutation(count)[:round(keep * count)]))

    def work(self, grid: Grid, units: Tensor | None) -> Callable[[int], Tensor]:
        """Return our pass over rotating pictures."""
        patches = [self.patches(grid) for _ in range(4)]
        return lambda i: self.encoder.encode(patches[i % 4], grid, units)

    def theirs_of(self, grid: Grid) -> Callable[[int], object]:
        """Return their pass over rotating pictures, values on the device."""
        values = [pixel_values(self.patches(grid)).to(self.halves.dtype) for _ in range(4)]
        where = torch.tensor([grid], device='cuda')
        return lambda i: self.theirs(values[i % 4], grid_thw=where)

    def times(self, size: str, grid: Grid) -> list[Record]:
        """Time a size at all keep ratios, and the capture that a new size costs."""
        args, fused, found = self.args, self.encoder.fused, []
        assert fused is not None
        other = median(wall_ms(self.theirs_of(grid), args.seconds))
        for keep in args.keep:
            units = self.units(grid, keep)
            work = self.work(grid, units)
            before = len(fused.graphs.captured)
            work(0)
            captured = fused.graphs.captured[before:]
            times = self.ours[size, keep] = wall_ms(work, args.seconds)
            counts = np.full(grid[0], grid[1] * grid[2])
            if units is not None:
                counts = 4 * np.bincount(units.numpy() // (grid[1] * grid[2] // 4),
                                         minlength=grid[0])
            flops = encode_cost(self.halves.shape.vision, 588 * (2 if grid[0] > 1 else 1),
                                counts.tolist(), 0, 2)['flops']
            case = self.case(size=size, keep=keep, path='cuda', variant='fused')
            forms = ', '.join(sorted(set(fused.forms.values())))
            note = f'{int(counts.sum())} patches, attention {forms}' + (
                '; the baseline sees all' if keep < 1 else '')
            rate = flops / median(times) / 1e9
            found += [
                record('encoder', case, 'ms', median(times), 'ms', times=times,
                       baseline=(EAGER, other), note=note),
                record('encoder', case, 'tflop_s', rate, 'TFLOP/s', note=note),
                record('encoder', case, 'share_of_limit', rate / self.rate, '',
                       note=f'of {self.rate:.0f} TFLOP/s, a large product in the same run')]
            if captured:
                found.append(record(
                    'encoder', case, 'capture_ms', captured[0].ms, 'ms',
                    note='first pass of a new size, on the host: a run and a capture'))
                found.append(record('encoder', case, 'choice_ms', captured[0].prepare_ms, 'ms',
                                    note='timing of algorithms, once for a size and device'))
                found.append(record('encoder', case, 'capture_mb', captured[0].bytes / 1e6, 'MB'))
        found.append(record('encoder', self.case(size=size, path='cuda', variant='buffers'), 'mb',
                            fused.buffer_bytes / 1e6, 'MB', note='beside weights and workspace'))
        return found

    def compile(self) -> None:
        """Compile their blocks: one graph serves all 32, which have the same shapes."""
        for block in self.theirs.blocks:
            block.compile(dynamic=False)
        self.compiled = True

    def against_compiled(self, size: str, grid: Grid) -> list[Record]:
        """Time the compiled reference on a size."""
        other = median(wall_ms(self.theirs_of(grid), self.args.seconds))
        case = self.case(size=size, keep=1.0, path='cuda', variant='fused')
        return [record('encoder', case, 'ms', median(times), 'ms', times=times,
                       baseline=(COMPILED, other))
                for (name, keep), times in self.ours.items() if (name, keep) == (size, 1.0)]

    def int8(self, cases: list[tuple[str, Grid]]) -> list[Record]:
        """Quantise the encoder (it stays so) and time it again."""
        plain = {size: self.work(grid, None)(0).clone() for size, grid in cases}
        kind = quantize_vision(self.encoder, 'int8', gate=False)
        found = []
        for size, grid in cases:
            work = self.work(grid, None)
            work(0)
            times = wall_ms(work, self.args.seconds)
            case = self.case(size=size, keep=1.0, path='cuda', variant=kind.name)
            bf16 = self.ours.get((size, 1.0))
            found.append(record(
                'encoder', case, 'ms', median(times), 'ms', times=times,
                baseline=(f'ours in {self.args.dtype}', median(bf16)) if bf16 else None,
                note=kind.note))
        del plain
        return found
