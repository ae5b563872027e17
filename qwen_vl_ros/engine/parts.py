"""
What is encoded at once: the unit of hand-over between the encoder and the language model.

Slices of a clip never attend to each other inside the encoder, so that a clip may be encoded slice
by slice: exact. A still cut into bands of unit rows may not: each band then attends to itself
alone, which is an experiment and approximate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from qwen_vl_ros.engine.prompt import VisualToken

#: Told apart in keys, so that no exact prefix or picture is taken for an approximate one.
BANDED = 0x2545F4914F6CDD1D


@dataclass(frozen=True)
class Part:
    """
    A stretch of a visual's kept tokens.

    :param start: first of the visual's kept merged tokens.
    :param stop: one past the last.
    :param first_slice: temporal slices whose patches are needed, first
    :param end_slice: and one past the last.
    :param units: int64, kept units counted from the first slice; ``None`` is all.
    """

    start: int
    stop: int
    first_slice: int
    end_slice: int
    units: np.ndarray | None = None

    def kept_per_slice(self, area: int) -> list[int]:
        """Return the kept units of each slice; ``area``: units of a slice."""
        count = self.end_slice - self.first_slice
        if self.units is None:
            return [area] * count
        return [int(n) for n in np.bincount(self.units // area, minlength=count)]


@dataclass
class Look:
    """
    A visual that the prompt needs, and how far it has come.

    :param visual: as planned.
    :param span: its place in the prompt.
    :param parts: still to be encoded, in order.
    :param done: merged tokens of the parts encoded, in order.
    :param cached: the features were there already.
    """

    visual: VisualToken
    span: tuple[int, int]
    parts: list[Part]
    done: list[Tensor] = field(default_factory=list)
    cached: bool = False

    @property
    def ready(self) -> int:
        """Return the prompt's index up to which features are there (or under way)."""
        return self.span[0] + sum(part.shape[0] for part in self.done)


def whole(visual: VisualToken) -> Part:
    """Return all of a visual as one part."""
    return Part(0, visual.kept, 0, visual.grid[0], visual.units)


def parts_of(visual: VisualToken, micro_batch: float) -> list[Part]:
    """
    Cut a visual.

    :param micro_batch: images or slices that are encoded together; below 1, the share of one.
    :return: parts in the order of the kept tokens; none is empty but that of an empty visual.
    """
    slices, area = visual.grid[0], visual.grid[1] * visual.grid[2] // 4
    if micro_batch >= 1:
        step = int(min(micro_batch, slices))
        spans = [(first * area, min(first + step, slices) * area)
                 for first in range(0, slices, step)]
    else:
        rows, columns = visual.grid[1] // 2, visual.grid[2] // 2
        band = max(1, math.ceil(rows * micro_batch)) * columns
        spans = [(first + begin, first + min(begin + band, area))
                 for first in range(0, slices * area, area) for begin in range(0, area, band)]
    if len(spans) == 1:
        return [whole(visual)]
    kept = np.arange(visual.total) if visual.units is None else visual.units
    parts = []
    for begin, end in spans:
        start, stop = (int(n) for n in np.searchsorted(kept, (begin, end)))
        if start == stop:
            continue
        first, last = begin // area, (end - 1) // area + 1
        full = visual.units is None and end - begin == (last - first) * area
        parts.append(Part(start, stop, first, last,
                          None if full else kept[start:stop] - first * area))
    return parts or [whole(visual)]


def banded(visual: VisualToken, micro_batch: float) -> VisualToken:
    """Return the visual under a key of its own where :func:`parts_of` cuts slices apart."""
    if micro_batch >= 1:
        return visual
    salt = BANDED ^ hash(micro_batch)
    return replace(visual, key=(visual.key ^ salt) & ((1 << 62) - 1))
