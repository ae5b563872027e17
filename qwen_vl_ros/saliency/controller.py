"""Holding a latency target: which resolution and share of tokens the next question gets."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """
    One rung of the ladder.

    :param keep: share of the units kept.
    :param pixels: share of the largest picture's pixels.
    """

    keep: float
    pixels: float = 1.0

    @property
    def cost(self) -> float:
        """Return the tokens relative to the uppermost rung."""
        return self.keep * self.pixels


#: From everything to little. Tokens go first: what is dropped is chosen, what is shrunk is not.
LADDER = (Level(1.0), Level(0.75), Level(0.5), Level(0.33), Level(0.33, 0.7), Level(0.33, 0.5),
          Level(0.33, 0.35))


class LatencyController:
    """
    Moves along :data:`LADDER` so that the median answer takes about the target.

    It goes down when the median of the last answers on a rung is over the target, and up when the
    next rung is expected to stay a margin below it: the gap between the two is the hysteresis, so
    that a steady load settles on one rung.

    :param target_ms: milliseconds; 0 stays on the uppermost rung.
    :param answers: on a rung before it is judged.
    :param margin: share of the target that a richer rung must be expected to leave free.
    """

    def __init__(self, target_ms: float = 0.0, answers: int = 5, margin: float = 0.15) -> None:
        self.target_ms = target_ms
        self._answers = answers
        self._margin = margin
        self._rung = 0
        self._times: deque[float] = deque(maxlen=answers)

    @property
    def level(self) -> Level:
        """Return what the next question gets."""
        return LADDER[self._rung] if self.target_ms > 0 else LADDER[0]

    def took(self, milliseconds: float) -> None:
        """Count an answer on the present rung, and move if it is time."""
        if not self.target_ms > 0:
            return
        self._times.append(milliseconds)
        if len(self._times) < self._answers:
            return
        median = statistics.median(self._times)
        if median > self.target_ms and self._rung + 1 < len(LADDER):
            self._move(1)
        elif self._rung and self._expected(median) < self.target_ms * (1 - self._margin):
            self._move(-1)

    def _expected(self, median: float) -> float:
        """Return an upper estimate of the next richer rung: all of the time grows with tokens."""
        return median * LADDER[self._rung - 1].cost / LADDER[self._rung].cost

    def _move(self, step: int) -> None:
        self._rung += step
        self._times.clear()
