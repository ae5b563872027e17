"""Selectors by name, with what a node or a command line says about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwen_vl_ros.engine.patches import Grid, spread_rank, uniform_keep
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.gradient import gradient_magnitude
from qwen_vl_ros.saliency.region import Region
from qwen_vl_ros.saliency.select import (
    SIGNALS,
    RandomSelector,
    UnitSelector,
    slice_frames,
    threshold_keep,
    top_units,
)

Choose = Callable[[Sequence[Frame], Grid, float, str], np.ndarray]

#: Name of the light head's file beside a checkpoint's weights.
FILE = 'saliency_head.safetensors'
#: Decide before the encoder.
BEFORE = ('auto', 'head', 'next_frame', 'saliency', *SIGNALS, 'uniform', 'random', 'threshold')
#: Decide after it (see after_merger.py); the engine's own selector is then not asked.
AFTER = ('divprune', 'dart', 'fastv')
NAMES = (*BEFORE, *AFTER)


def make_selector(name: str, seed: int = 0, *, model: str | Path = '', head: str | Path = '',
                  min_units: int = 8, always: Region | None = None) -> Choose:
    """
    Return a selector by its name.

    :param name: one of :data:`NAMES`. 'auto' takes the head where the checkpoint has one, else
        'saliency' (gradient and contrast); 'next_frame' joins the same with what the last
        answer leaned on; those of :data:`AFTER` give the uniform grid, which is not asked but
        holds the region for :func:`after_merger.drop_after_merger`.
    :param seed: of 'random'.
    :param model: folder of the checkpoint, beside whose weights the head lies.
    :param head: another place of the head.
    :param min_units: fewest units kept a slice.
    :param always: units that are kept whatever they show: first, then the best others up to the
        budget.
    :raises ValueError: another name, or a head that is missing or broken.
    """
    if name in ('uniform', *AFTER):
        return uniform_keep if always is None else UniformWithRegion(always)
    if name == 'random':
        return RandomSelector(seed, always)
    if name == 'threshold':
        return ThresholdSelector(always)
    if name in SIGNALS:
        return UnitSelector({name: 1.0}, min_units=min_units, always=always)
    if name == 'saliency':
        return UnitSelector(min_units=min_units, always=always)
    if name == 'auto':
        has = bool(str(head)) or (bool(str(model)) and (Path(model) / FILE).is_file())
        name = 'head' if has else 'saliency'
        return make_selector(name, seed, model=model, head=head, min_units=min_units,
                             always=always)
    if name == 'head':
        return _head(model, head, min_units, always)
    if name == 'next_frame':
        from qwen_vl_ros.saliency.next_frame import (
            KNOWN,
            KNOWN_BESIDE_QUESTION,
            NextFrameSelector,
        )
        base: Any = make_selector('auto', model=model, head=head)
        known = KNOWN_BESIDE_QUESTION if 'head' in base.weights else KNOWN
        return NextFrameSelector(base, known=known, min_units=min_units, always=always)
    raise ValueError(f"selector '{name}' is not one of {', '.join(NAMES)}")


def _head(model: str | Path, head: str | Path, min_units: int, always: Region | None
          ) -> UnitSelector:
    from qwen_vl_ros.saliency.head_signal import HeadSignal
    signal = HeadSignal.load(model, head)
    return UnitSelector({'head': 1.0}, {'head': signal}, min_units, always, spread=0.0)


@dataclass(frozen=True)
class UniformWithRegion:
    """
    Keeps a region, and units spread evenly over the rest of the budget, whatever they show.

    :param always: the region; droppers after the merger read it here.
    """

    always: Region

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        """Choose units; see :class:`saliency.select.UnitSelector`."""
        t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        rank = -spread_rank(rows, columns).reshape(1, rows, columns).repeat(t, 0)
        return top_units(rank, ratio, always=self.always(rows, columns))


@dataclass(frozen=True)
class ThresholdSelector:
    """
    Keeps what is above 0.3 of the normalised gradient map, however much that is.

    :param always: a region that is kept besides.
    """

    always: Region | None = None

    def saliency(self, frames: Sequence[Frame], rows: int, columns: int, question: str = ''
                 ) -> np.ndarray:
        """Return the map, float32 [T, rows, columns]; the question is not looked at."""
        return gradient_magnitude(frames, rows, columns)

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        """
        Choose units.

        :param ratio: not looked at: a threshold is no budget (see :func:`threshold_keep`).
        """
        t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        values = self.saliency(slice_frames(frames, t), rows, columns, question)
        keep = threshold_keep(values).reshape(t, -1)
        keep[np.arange(t), values.reshape(t, -1).argmax(1)] = True
        if self.always is not None:
            keep |= self.always(rows, columns).reshape(1, -1)
        return keep.reshape(-1)
