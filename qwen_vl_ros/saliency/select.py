"""
From maps to a keep mask: weights, budget, an always-keep region.

A budget, not a threshold: ``keep_ratio`` of the units are kept, rounded to a bucket so that
shapes repeat (one CUDA graph a bucket). A fixed threshold on a normalised map is there for
comparison; on real pictures it drops between a tenth and nine tenths, whatever was asked
(:func:`threshold_keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qwen_vl_ros.engine.patches import Grid
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.colour_edges import colour_edges
from qwen_vl_ros.saliency.gradient import contrast, gradient_magnitude
from qwen_vl_ros.saliency.region import Region, with_region
from qwen_vl_ros.saliency.weights import check_signals

#: A signal: (frames, one for each slice; rows; columns; question) -> float32 [T, rows, columns].
Signal = Callable[[Sequence[Frame], int, int, str], np.ndarray]

SIGNALS: dict[str, Signal] = {
    'gradient': lambda frames, rows, columns, question: gradient_magnitude(frames, rows, columns),
    'colour': lambda frames, rows, columns, question: colour_edges(frames, rows, columns),
    'contrast': lambda frames, rows, columns, question: contrast(frames, rows, columns),
}

#: Weights without a question, fitted on the training split (docs/accuracy.md).
WEIGHTS = {'gradient': 1.0, 'contrast': 0.3}


def normalised(values: np.ndarray) -> np.ndarray:
    """Return ranks scaled to [0, 1] over the whole map: signals of any unit become comparable."""
    flat = values.reshape(-1)
    ranks = np.empty(flat.size, np.float32)
    ranks[np.argsort(flat, kind='stable')] = np.arange(flat.size, dtype=np.float32)
    return (ranks / max(1, flat.size - 1)).reshape(values.shape)


def budget(units: int, ratio: float, least: int = 1, buckets: int = 16) -> int:
    """
    Return how many of ``units`` a ratio keeps: rounded up to a sixteenth, at least ``least``.

    Few different counts mean few captured graphs and compiled shapes.
    """
    step = max(1, units // buckets)
    wanted = -(-max(1, least, round(ratio * units)) // step) * step
    return min(units, wanted)


@dataclass
class UnitSelector:
    """
    Chooses the units of a picture by weighted signals; a selector for :class:`Options`.

    :param weights: signal name to weight; ranks of each signal are added up.
    :param signals: what the names mean.
    :param min_units: fewest units kept a slice.
    :param always: bool [rows, columns] kept in every slice (the path corridor, a polygon), by
        grid; counted into the budget, and kept even where it exceeds it.
    :param spread: how much the neighbours of a unit raise it, 0 to 1: a thing's border units say
        what it is as much as its middle.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    signals: Mapping[str, Signal] = field(default_factory=lambda: SIGNALS, repr=False)
    min_units: int = 8
    always: Region | None = None
    spread: float = 0.25

    def __post_init__(self) -> None:
        """:raises ValueError: an unknown signal or a weight that is not positive."""
        check_signals(self.weights, self.signals)

    def bind(self, engine: Any) -> None:
        """Hand the engine on to signals that ask the model; called by the engine itself."""
        for name in self.weights:
            bind = getattr(self.signals[name], 'bind', None)
            if bind is not None:
                bind(engine)

    def saliency(self, frames: Sequence[Frame], rows: int, columns: int, question: str = ''
                 ) -> np.ndarray:
        """Return the combined map, float32 [T, rows, columns] in [0, 1]."""
        total: np.ndarray = np.zeros((len(frames), rows, columns), np.float32)
        for name, weight in self.weights.items():
            total += weight * normalised(self.signals[name](frames, rows, columns, question))
        total /= sum(self.weights.values())
        if self.spread > 0:
            total = (1 - self.spread) * total + self.spread * neighbours(total)
        return total

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        """
        Choose units.

        :param frames: of a still, or of a clip oldest first.
        :param grid: (t, h, w) in patches.
        :param ratio: share of units to keep.
        :return: bool [t * h/2 * w/2].
        """
        t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        newest = slice_frames(frames, t)
        return top_units(self.saliency(newest, rows, columns, question), ratio,
                         least=self.min_units * t,
                         always=None if self.always is None else self.always(rows, columns))


def slice_frames(frames: Sequence[Frame], slices: int) -> list[Frame]:
    """Return the frame that stands for each temporal slice: the newer one of its pair."""
    return [frames[min(2 * s + 1, len(frames) - 1)] for s in range(slices)]


def neighbours(values: np.ndarray) -> np.ndarray:
    """Return the largest value among the eight units around each; [T, rows, columns]."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1)), mode='edge')
    _, rows, columns = values.shape
    shifted = [padded[:, r:r + rows, c:c + columns]
               for r in range(3) for c in range(3) if (r, c) != (1, 1)]
    return np.max(shifted, axis=0)


def top_units(values: np.ndarray, ratio: float, *, least: int = 1,
              always: np.ndarray | None = None) -> np.ndarray:
    """
    Keep the largest values within the budget; every slice keeps at least one unit.

    :param values: float32 [T, rows, columns].
    :param always: bool [rows, columns] kept in every slice.
    :return: bool [T * rows * columns].
    """
    t, count = values.shape[0], budget(values.size, ratio, least)
    scores = values.reshape(t, -1).astype(np.float64)
    if always is not None:
        scores = np.where(always.reshape(1, -1), np.inf, scores)
        count = with_region(count, always, t)
    # The best unit of each slice, so that no slice falls out of the prompt.
    scores[np.arange(t), scores.argmax(1)] = np.inf
    keep = np.zeros(values.size, bool)
    keep[np.argsort(-scores.reshape(-1), kind='stable')[:count]] = True
    return keep


def threshold_keep(values: np.ndarray, threshold: float = 0.3) -> np.ndarray:
    """
    Keep what is above a fixed threshold of the min-max normalised map, whatever that costs.

    Unbounded: the share kept depends on the picture (measured 11 to 89 % dropped on photographs
    for the gradient map), and in an empty scene something is always at 1. For comparison only.

    :return: bool [T * rows * columns].
    """
    low, high = values.min(), values.max()
    flat = values.reshape(-1)
    if high <= low:
        return np.ones(flat.size, bool)
    return (flat - low) / (high - low) >= threshold


@dataclass
class RandomSelector:
    """
    Keeps random units (PatchDropout at inference), new for each call.

    :param always: units that are kept first.
    """

    seed: int = 0
    always: Region | None = None

    def __post_init__(self) -> None:
        """Seed the generator."""
        self._rng = np.random.default_rng(self.seed)

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        """Choose units; see :class:`UnitSelector`."""
        t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        return top_units(self._rng.random((t, rows, columns)).astype(np.float32), ratio,
                         always=None if self.always is None else self.always(rows, columns))
