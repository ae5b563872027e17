"""Bytes of the projection's kernels, counted by the profiler (Nsight Compute) beside our own."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.records import ROOT
from benchmarks.stages._profiled import COUNT, RESIZED, SIZE, WIDTH

#: Read from and written to memory while the kernel runs, and written by the multiprocessors: what
#: a kernel writes is in the L2 cache when it ends, and goes to memory later.
READ, WRITTEN, STORED = (
    'dram__bytes_read.sum', 'dram__bytes_write.sum', 'l1tex__m_l1tex2xbar_write_bytes.sum')

SECONDS = 60


class NoProfiler(Exception):
    """Nsight Compute is not here, or may not count."""


@dataclass(frozen=True)
class Counted:
    """
    One launch.

    :param kernel: its name.
    :param read: bytes from memory, ``written`` to memory, ``stored``: that left multiprocessors.
    :param own_read: bytes that must be read once by our own count; ``own_written`` alike.
    """

    kernel: str
    read: int
    written: int
    stored: int
    own_read: int
    own_written: int

    @property
    def off(self) -> float:
        """Return counted over our own count, less one: memory's reads and the kernel's stores."""
        return (self.read + self.stored) / (self.own_read + self.own_written) - 1


def count() -> list[Counted]:
    """
    Run the kernels under the profiler.

    :return: frame to patches, patches to embeddings, frame to embeddings, and the product alone.
    :raises NoProfiler: with the last line that it said.
    """
    if shutil.which('ncu') is None:
        raise NoProfiler('ncu is not installed')
    done = subprocess.run(
        ['ncu', '--clock-control', 'none', '--csv', '--page', 'raw', '--metrics',
         ','.join((READ, WRITTEN, STORED)), '--kernel-name-base', 'function', '--kernel-name',
         'regex:^(make_patches|project|embed)', sys.executable, '-m',
         'benchmarks.stages._profiled'],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env={**os.environ})
    return parse(done.stdout.splitlines())


def parse(lines: Iterable[str]) -> list[Counted]:
    """
    Read what the profiler wrote: a line of names, one of units, and one for each launch.

    :raises NoProfiler: where that is not there.
    """
    lines = list(lines)
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise NoProfiler((lines or ['ncu said nothing'])[-1].strip())
    names, units, *rows = csv.reader(lines[start:])
    if len(rows) != 8 or any(units[names.index(name)] != 'byte'
                             for name in (READ, WRITTEN, STORED)):
        raise NoProfiler(f'{len(rows)} launches were counted, 8 expected')
    frame, patches = SIZE[0] * SIZE[1] * 3, RESIZED[0] * RESIZED[1] * 3
    weights, out = WIDTH * 608 * 2, WIDTH * 2
    own = ((frame, patches), (patches + weights, patches // 588 * out),
           (frame + weights, patches // 588 * out), (COUNT * 588 + weights, COUNT * out))
    found = []
    # The first round warms up.
    for row, (read, written) in zip(rows[4:], own):
        values = [int(row[names.index(name)].replace(',', '').replace('.', ''))
                  for name in (READ, WRITTEN, STORED)]
        found.append(Counted(row[names.index('Kernel Name')], *values, read, written))
    return found
