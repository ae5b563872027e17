"""
This machine, measured: peak bandwidth and arithmetic, and how many rows it takes to reach them.

The sweep multiplies the shapes of the model (patch projection, MLP of encoder and decoder) by ever
more rows and holds each time against the roofline of the two measured peaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qwen_vl_ros.measure.devices import Device, Mode

#: (name, inputs, outputs) of the matrices that are swept: Qwen2-VL-2B's.
GEMMS = (('projection', 588, 1280), ('encoder MLP', 1280, 5120), ('decoder MLP', 1536, 8960))

#: Bytes that no cache holds: a buffer of this size is read between two runs of a GEMM.
COLD_BYTES = {'cpu': 256 << 20, 'cuda': 512 << 20}


@dataclass(frozen=True)
class Point:
    """
    One size of the sweep.

    :param attainable_ms: by the roofline of the measured peaks.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    ms: float
    flops: int
    bytes: int
    attainable_ms: float

    @property
    def tflops(self) -> float:
        """Return the measured rate, 1e12 FLOPs a second."""
        return self.flops / self.ms / 1e9

    @property
    def gb_s(self) -> float:
        """Return the measured rate, 1e9 bytes a second."""
        return self.bytes / self.ms / 1e6

    @property
    def density(self) -> float:
        """Return FLOPs a byte."""
        return self.flops / self.bytes


def timed(work: Callable[[], Any], device: torch.device, runs: int,
          between: Callable[[], Any] | None = None,
          middle: Callable[[list[float]], float] = median) -> float:
    """
    Return the median milliseconds of ``work``, after one run that does not count.

    :param between: run before each, untimed; for example to empty caches.
    :param middle: of the times; ``min`` for a peak, which a disturbance can only lower.
    """
    times = []
    for number in range(runs + 1):
        if between is not None:
            between()
        if device.type == 'cuda':
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            spent = begin.elapsed_time(end)
        else:
            started = time.perf_counter_ns()
            work()
            spent = (time.perf_counter_ns() - started) / 1e6
        if number:
            times.append(spent)
    return middle(times)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return what the engine computes in on a device: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == 'cuda' else torch.float32


def measure_device(device: torch.device, runs: int = 9) -> Device:
    """
    Measure bandwidth (the better of reading and copying), GEMM rate and the time of a launch.

    :return: a device with the one mode ``measured``.
    """
    words = COLD_BYTES[device.type] // 4
    source = torch.ones(words, device=device)
    target = torch.empty_like(source)
    copied = timed(lambda: target.copy_(source), device, runs, middle=min)
    summed = timed(source.sum, device, runs, middle=min)
    gb_s = max(2 * source.nbytes / copied, source.nbytes / summed) / 1e6
    side = 8192 if device.type == 'cuda' else 1024
    dtype = default_dtype(device)
    # Random: products of constant matrices take less power, and run faster than real ones.
    a = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty_like(a)
    multiplied = timed(lambda: torch.mm(a, a, out=product), device, runs, middle=min)
    small = torch.ones(16, device=device, dtype=dtype)
    count = 200

    def launches() -> None:
        for _ in range(count):
            small.add_(1)

    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'this CPU'
    return Device(
        name, 'measured',
        {'measured': Mode(gb_s, 2 * side ** 3 / multiplied / 1e9)},
        launch_us=timed(launches, device, runs) / count * 1e3,
        source=f'measured: best of copy and sum of {source.nbytes >> 20} MiB, {side}x{side} '
               f'product in {str(dtype).removeprefix("torch.")}, {count} small operations')


def sweep(device: torch.device, measured: Device, most_rows: int = 4096,
          runs: int = 5) -> Iterator[Point]:
    """Yield each GEMM's points for 1, 4, 16 … ``most_rows`` rows, weights read from memory."""
    mode = measured.modes['measured']
    dtype = default_dtype(device)
    cold = torch.ones(COLD_BYTES[device.type] // 4, device=device)
    size = torch.empty(0, dtype=dtype).element_size()
    for name, inputs, outputs in GEMMS:
        weight = torch.randn(inputs, outputs, device=device).to(dtype)
        rows = 1
        while rows <= most_rows:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            out = torch.empty(rows, outputs, device=device, dtype=dtype)
            # The model streams its weights: what an earlier run left in a cache must not help.
            ms = timed(partial(torch.mm, x, weight, out=out), device, runs, cold.sum)
            flops = 2 * rows * inputs * outputs
            moved = size * (rows * inputs + inputs * outputs + rows * outputs)
            yield Point(name, rows, inputs, outputs, ms, flops, moved, max(
                flops / mode.tflops / 1e9, moved / mode.gb_s / 1e6, measured.launch_us / 1e3))
            rows *= 4


def plot(points: list[Point], measured: Device, path: Path) -> None:
    """
    Draw measured rates under the measured roof and against the number of rows.

    :raises ImportError: without matplotlib.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    mode = measured.modes['measured']
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    densities = [p.density for p in points]
    axis = [min(densities) / 2, mode.tflops * 1e3 / mode.gb_s, max(densities) * 2]
    left.loglog(axis, [min(d * mode.gb_s / 1e3, mode.tflops) for d in axis], color='0.4',
                label=f'roof: {mode.gb_s:.0f} GB/s, {mode.tflops:.3g} TFLOP/s')
    for name, inputs, outputs in GEMMS:
        own = [p for p in points if p.name == name]
        label = f'{name} {inputs}x{outputs}'
        left.loglog([p.density for p in own], [p.tflops for p in own], 'o-', label=label)
        right.semilogx([p.rows for p in own], [p.attainable_ms / p.ms for p in own], 'o-',
                       label=label)
    left.set(xlabel='FLOPs a byte', ylabel='TFLOP/s', title='measured under the roof')
    right.set(xlabel='rows (patches or tokens)', ylabel='share of the roof', ylim=(0, 1.15),
              title='saturation')
    left.legend(fontsize=8)
    right.grid(alpha=0.3)
    figure.suptitle(f'{measured.title}: {measured.source}', fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
