"""
transformers' decoder with a static cache under torch.compile, in a process of its own.

    python -m benchmarks.stages._decode_theirs SHAPE

compiles, says ``ready``, waits for a line and prints the milliseconds of its steps as JSON.
Compiling takes a minute of processor time: several shapes do it side by side, and are timed one
after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import torch

from benchmarks.records import ROOT, CannotRun
from benchmarks.stages import _decode_models as models

#: Positions in the cache when steps are timed.
CONTEXT = 512

#: Steps that are timed, and those that compile and capture before.
STEPS, WARM = 40, 4


def times_of(model: models.TheirDecoder, ready: Callable[[], object] = lambda: None,
             ) -> list[float]:
    """
    Return milliseconds of steps from :data:`CONTEXT` on, each with its argmax.

    :param ready: called when all is warm.
    """
    model.prefill(list(range(CONTEXT)))
    token = torch.tensor([[7]], device=model.device)
    found = []
    for number in range(WARM + STEPS):
        if number == WARM:
            torch.cuda.synchronize(model.device)
            ready()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        position = torch.tensor([CONTEXT + number], device=model.device)
        start.record()
        token = model.step(token, position).argmax().view(1, 1)
        end.record()
        end.synchronize()
        if number >= WARM:
            found.append(start.elapsed_time(end))
    return found


class Compiled:
    """
    A process that compiles a shape.

    :param shape: 2b or 7b.
    """

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.stages._decode_theirs', shape], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """:raises CannotRun: where it did not come to be ready."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != 'ready':
            raise CannotRun(f'transformers, compiled, {self.shape}: it ended with code '
                            f'{self._process.wait()}')

    def times(self) -> list[float]:
        """Time its steps; the process ends with that."""
        said, _ = self._process.communicate('go\n')
        return [float(ms) for ms in json.loads(said)]


def main() -> None:
    """Compile, wait, time, print."""
    shape = sys.argv[1]
    device = torch.device('cuda', torch.cuda.current_device())
    model = models.TheirDecoder(shape, device, torch.bfloat16, 2 * CONTEXT, compiled=True)

    def ready() -> None:
        print('ready', flush=True)
        sys.stdin.readline()

    print(json.dumps(times_of(model, ready)))


if __name__ == '__main__':
    main()
