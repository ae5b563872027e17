"""
Peak memory of one call in a process that has made no such call before.

    python -m benchmarks.stages._memory kernel|pillow WIDTH HEIGHT RESIZED_WIDTH RESIZED_HEIGHT

prints the bytes beside input and output. A process that has called before would answer from memory
that its allocator kept.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def extra_bytes(what: str, size: tuple[int, int], resized: tuple[int, int]) -> int:
    """
    Measure in a fresh process.

    :param what: ``kernel`` or ``pillow``.
    :param size: width and height of the frame; ``resized`` alike.
    """
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.stages._memory', what, *map(str, (*size, *resized))],
        cwd=ROOT, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Measure here."""
    what = sys.argv[1]
    width, height, new_width, new_height = map(int, sys.argv[2:])
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    small = np.zeros((56, 56, 3), np.uint8)  # so that code is loaded before
    if what == 'kernel':
        from qwen_vl_ros.frame import Frame
        from qwen_vl_ros.kernels.patches import Patcher

        patcher = Patcher()
        patcher.patches(Frame.from_rgb(small), 56, 56)
        frame = Frame.from_rgb(picture)
        out = np.ones((new_height * new_width // 196, 588), np.uint8)  # ones: resident
        before = reset_peak()
        patcher.patches(frame, new_height, new_width, out)
        print(status('VmHWM') - before)
    else:
        from benchmarks.stages import _processors

        process = _processors.pillow(new_width * new_height)
        process(small)
        before = reset_peak()
        values = process(picture)
        print(status('VmHWM') - before - values.nbytes)


def reset_peak() -> int:
    """Set the peak to what is resident now and return that."""
    Path('/proc/self/clear_refs').write_text('5')
    return status('VmRSS')


def status(field: str) -> int:
    """Return a field of the process's memory status in bytes."""
    found = re.search(rf'{field}:\s+(\d+) kB', Path('/proc/self/status').read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == '__main__':
    main()
