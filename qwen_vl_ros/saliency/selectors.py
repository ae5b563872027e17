"""Selectors by name, with what a node or a command line says about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwen_vl_ros.engine.patches import Grid, spread_rank, uniform_keep
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.gradient import gradient_magnitude
from qwen_vl_ros.saliency.next_frame import KNOWN, KNOWN_BESIDE_QUESTION, NextFrameSelector
from qwen_vl_ros.saliency.region import Region
from qwen_vl_ros.saliency.select import (
    SIGNALS,
    WEIGHTS,
    RandomSelector,
    Signal,
    UnitSelector,
    slice_frames,
    threshold_keep,
    top_units,
)
from qwen_vl_ros.saliency.weights import OF_FRAME, REMEMBERED, check_weights

Choose = Callable[[Sequence[Frame], Grid, float, str], np.ndarray]

#: Name of the light head's file beside a checkpoint's weights.
FILE = 'saliency_head.safetensors'
#: Decide before the encoder.
BEFORE = ('auto', 'head', 'next_frame', 'saliency', *SIGNALS, *REMEMBERED, 'uniform', 'random',
          'threshold')
#: Decide after it (see after_merger.py); the engine's own selector is then not asked.
AFTER = ('divprune', 'dart', 'fastv')
NAMES = (*BEFORE, *AFTER)


def make_selector(name: str, seed: int = 0, *, model: str | Path = '', head: str | Path = '',
                  min_units: int = 8, always: Region | None = None,
                  weights: Mapping[str, float] | None = None, gradient_layers: int = 0,
                  generic_every: int = 0, head_dtype: str = 'auto') -> Choose:
    """
    Return a selector by its name.

    :param name: one of :data:`NAMES`. 'auto' takes the head where the checkpoint has one, else
        'saliency' (gradient and contrast); 'next_frame' joins the same with what is remembered of
        the camera: motion and what the last answer leaned on; those of :data:`AFTER` give the
        uniform grid, which is not asked but holds the region for
        :func:`after_merger.drop_after_merger`.
    :param seed: of 'random'.
    :param model: folder of the checkpoint, beside whose weights the head lies.
    :param head: another place of the head.
    :param min_units: fewest units kept a slice.
    :param always: units that are kept whatever they show: first, then the best others up to the
        budget.
    :param weights: of the signals that 'saliency' or 'next_frame' combine; none are those fitted.
    :param gradient_layers: decoder layers that the gradient of an answer passes; 0 is all.
    :param generic_every: see :class:`next_frame.NextFrameSelector`.
    :param head_dtype: one of :data:`weights.HEAD_DTYPES`.
    :raises ValueError: another name, weights that do not fit it, or a head that is missing or
        broken.
    """
    check_weights(name, weights or {})
    if name in ('uniform', *AFTER):
        return uniform_keep if always is None else UniformWithRegion(always)
    if name == 'random':
        return RandomSelector(seed, always)
    if name == 'threshold':
        return ThresholdSelector(always)
    of_frame, remembered = _defaults(name, _has_head(model, head))
    if weights:
        of_frame, remembered = ({n: w for n, w in weights.items() if n in known}
                                for known in (OF_FRAME, REMEMBERED))
    base = None
    if of_frame:
        signals: dict[str, Signal] = dict(SIGNALS)
        if 'head' in of_frame:
            from qwen_vl_ros.saliency.head_signal import HeadSignal
            signals['head'] = HeadSignal.load(model, head, head_dtype)
        # The head scores whole things; the others find borders, which the neighbours belong to.
        base = UnitSelector(of_frame, signals, min_units, always,
                            spread=0.0 if 'head' in of_frame else 0.25)
        if not remembered:
            return base
    return NextFrameSelector(base, remembered, gradient_layers, generic_every=generic_every,
                             min_units=min_units, always=always)


def _has_head(model: str | Path, head: str | Path) -> bool:
    return bool(str(head)) or (bool(str(model)) and (Path(model) / FILE).is_file())


def _defaults(name: str, has_head: bool) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """
    Return a selector's weights of signals of the frame, and of what is remembered.

    :raises ValueError: for a selector that is none.
    """
    own = {'head': 1.0} if has_head else WEIGHTS
    if name == 'auto':
        return own, {}
    if name == 'next_frame':
        return own, {'motion': 1.0, 'grad_cam': KNOWN_BESIDE_QUESTION if has_head else KNOWN}
    if name == 'saliency':
        return WEIGHTS, {}
    if name in OF_FRAME:
        return {name: 1.0}, {}
    if name in REMEMBERED:
        return {}, {name: 1.0}
    raise ValueError(f"selector '{name}' is not one of {', '.join(NAMES)}")


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
