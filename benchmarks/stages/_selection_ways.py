"""Every method of the table as the engine is asked, with 72 of 192 units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.stages._selection_methods import WINDOW, best_window
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.model import Placed
from qwen_vl_ros.engine.patches import Grid, uniform_keep
from qwen_vl_ros.engine.prompt import Prompt
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.roboscene.evaluate import oracle
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W
from qwen_vl_ros.roboscene.items import Item
from qwen_vl_ros.saliency import grad_cam
from qwen_vl_ros.saliency.after_merger import DROPPERS
from qwen_vl_ros.saliency.answering import AS_IT_IS, Fewer
from qwen_vl_ros.saliency.select import normalised, slice_frames, top_units
from qwen_vl_ros.saliency.selectors import make_selector

#: 72 of 192 units: the budget's sixteenths.
RATIO = 0.375
#: Pixels of a picture of 7 x 10 units.
SMALLER = 70 * 784
#: Share of the frame that is shown at full resolution beside an overview of 32 units.
REGION = 0.2


@dataclass(frozen=True)
class Way:
    """
    How the engine is asked under a method.

    :param selector: of the engine.
    :param mask: chooses before the request is made, and takes its time within ``select``; what
        gives ``None`` leaves it to the others.
    :param dropper: what ``fewer.dropper`` names, where the package has none of that name.
    :param max_pixels: of the picture; 0 leaves the engine's.
    """

    selector: Any = uniform_keep
    ratio: float = RATIO
    fewer: Fewer = AS_IT_IS
    mask: Callable[[Item, Frame], np.ndarray | None] | None = None
    dropper: Callable[..., np.ndarray] | None = None
    max_pixels: int = 0

    @property
    def looks_back(self) -> bool:
        """Tell whether the method needs the answer about the moment before."""
        return hasattr(self.selector, 'observe')

    @property
    def reflects(self) -> bool:
        """Tell whether it works something out of that answer."""
        return self.looks_back and not {'grad_cam', 'entropy'}.isdisjoint(self.selector.weights)

    def enter(self, engine: Engine) -> None:
        """Let the engine choose in this way."""
        if hasattr(self.selector, 'bind'):
            self.selector.bind(engine)
        engine.options = replace(engine.options, selector=self.selector)
        if self.max_pixels:
            engine.set_pixels(engine.options.min_pixels, self.max_pixels)
        if self.dropper is not None:
            DROPPERS[self.fewer.dropper] = self.dropper

    def leave(self, engine: Engine, limits: tuple[int, int]) -> None:
        """Undo that; ``limits`` of pixels were the engine's before."""
        engine.set_pixels(*limits)
        if self.dropper is not None:
            del DROPPERS[self.fewer.dropper]


def ways(engine: Engine, folder: Path, head: Path) -> dict[str, Way]:
    """
    Return all methods; the full frame comes first.

    :param folder: of the checkpoint.
    :param head: file of the light head.
    """
    scorer = make_selector('head', model=folder, head=head)
    scorer.bind(engine)  # type: ignore[attr-defined]
    after = _HeadAfter(scorer)
    found = {'full': Way(ratio=1.0), 'head': Way(scorer),
             'next_frame': Way(make_selector('next_frame')),
             'next_head': Way(make_selector('next_frame', model=folder, head=head))}
    found |= {name: Way(make_selector(name)) for name in (
        'saliency', 'colour', 'gradient', 'contrast', 'motion', 'entropy', 'uniform', 'random',
        'threshold')}
    found |= {
        'window': Way(_Window(scorer)),
        'roi': Way(scorer, 1.0, Fewer(region=REGION)),
        'downsample': Way(ratio=1.0, max_pixels=SMALLER),
        'head_after': Way(fewer=Fewer('head_after'), mask=after.look, dropper=after.drop)}
    found |= {name: Way(fewer=Fewer(name)) for name in ('divprune', 'dart', 'fastv')}
    return found | {
        'grad_cam_2': Way(fewer=Fewer('grad_cam_2'), dropper=_two_layers),
        'grad_cam': Way(mask=lambda item, frame: _same_frame(engine, item, frame)),
        'oracle': Way(mask=lambda item, frame: oracle(item, (frame,), RATIO))}


@dataclass
class _Window:
    """Keeps the best window of the head's map, filled up by it."""

    scorer: Any

    def bind(self, engine: Engine) -> None:
        self.scorer.bind(engine)

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        rows, columns = grid[1] // 2, grid[2] // 2
        ranks = normalised(self.scorer.saliency(slice_frames(frames, grid[0]), rows, columns,
                                                question))
        row, column = (int(x) for x in best_window(torch.from_numpy(ranks.sum(0)[None]), WINDOW))
        ranks[:, row:row + WINDOW[0], column:column + WINDOW[1]] += 2
        return top_units(ranks, ratio)


@dataclass
class _HeadAfter:
    """Keeps the merged tokens that the head would have kept before the encoder."""

    scorer: Any
    shown: tuple[str, Frame] | None = None

    def look(self, item: Item, frame: Frame) -> None:
        """Take note of what will be asked: a dropper gets merged tokens alone."""
        self.shown = item.question.text, frame

    def drop(self, engine: Engine, prompt: Prompt, features: list[Placed], index: int, count: int,
             always: Tensor | None) -> np.ndarray:
        """Choose by the head's map of the same picture."""
        assert self.shown is not None
        question, frame = self.shown
        return _best(self.scorer.saliency([frame], GRID_H, GRID_W, question).reshape(-1), count)


def _two_layers(engine: Engine, prompt: Prompt, features: list[Placed], index: int, count: int,
                always: Tensor | None) -> np.ndarray:
    """Choose by the gradient through two layers of the decoder."""
    return _best(grad_cam.token_maps(engine, prompt, features, 2, ())[index], count)


def _same_frame(engine: Engine, item: Item, frame: Frame) -> np.ndarray:
    """Choose by Grad-CAM of the frame that is asked about."""
    request = Request(item.question.text, (Visual((frame,)),))
    values, = grad_cam.score_units(engine, request, generic=False)
    return top_units(values, RATIO)


def _best(values: np.ndarray, count: int) -> np.ndarray:
    keep = np.zeros(values.size, bool)
    keep[np.argsort(-values, kind='stable')[:count]] = True
    return keep
