"""
Next-frame use: what the last answer leaned on says where to look now.

Grad-CAM on the frame at hand costs more than dropping saves. So the gradient of an answer is taken
after it has been said, and its map serves the camera's next frame: moved by the shift that was
seen, joined with the temporal difference (what is new must not be missed) and, behind both, with a
signal that knows the new frame itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import cv2
import numpy as np

from qwen_vl_ros.engine.patches import Grid
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.motion import MotionSignal, shift_of
from qwen_vl_ros.saliency.select import (
    UnitSelector,
    neighbours,
    normalised,
    slice_frames,
    top_units,
)

if TYPE_CHECKING:
    from qwen_vl_ros.engine.engine import Engine
    from qwen_vl_ros.engine.model import Placed
    from qwen_vl_ros.engine.prompt import Prompt, VisualToken
    from qwen_vl_ros.engine.types import Request

#: Levels of temporal difference that count as much as the strongest unit of the last map.
MOVED = 24.0
#: A shift under this many units is noise of the estimate.
STILL = 0.05
#: Cameras remembered; the one looked at longest ago goes first.
CAMERAS = 16


def widen(values: np.ndarray) -> np.ndarray:
    """
    Let a map's peaks reach into the units around them: [T, rows, columns] float32.

    Gradients sit on few units of a thing, often its border; the thing is what has to be seen.
    """
    return (0.7 * values + 0.3 * np.maximum(values, neighbours(values))).astype(np.float32)


def moved_since(signal: MotionSignal, before: Frame, now: Frame, rows: int, columns: int
                ) -> tuple[tuple[float, float], np.ndarray]:
    """
    Return the shift of the picture in units (down, right) and what changed beyond it.

    :param signal: holds what was last kept; it is moved by the shift.
    :return: (shift, float32 [rows, columns] levels).
    """
    shift = shift_of(before, now, rows, columns)
    if max(map(abs, shift)) < STILL:
        shift = 0.0, 0.0
    else:
        signal.move(shift)
    return shift, signal.difference([now], rows, columns)[0]


def join(cam: np.ndarray, shift: tuple[float, float], moved: np.ndarray, base: np.ndarray
         ) -> np.ndarray:
    """
    Join the last answer's map, temporal difference and a map of the new frame.

    A unit counts by the stronger of the first two; the third ranks what neither speaks of.

    :param cam: [rows, columns], from 0, of the earlier frame; all 0 where nothing is known.
    :param shift: in units, down and right.
    :param moved: levels [T, rows, columns].
    :param base: [T, rows, columns] in [0, 1].
    :return: float32 [T, rows, columns].
    """
    peak = float(cam.max())
    known = np.sqrt(widen(cam[None])[0] / peak) if peak > 0 else np.zeros_like(cam)
    matrix = np.array([[1, 0, shift[1]], [0, 1, shift[0]]], np.float32)
    known = cv2.warpAffine(known.astype(np.float32), matrix, known.shape[::-1],
                           flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT, borderValue=0.0)
    new = np.minimum(widen(moved) / MOVED, 1.0)
    return (np.maximum(known, new) + 0.6 * base).astype(np.float32)


@dataclass
class _Camera:
    """What is remembered of one camera."""

    frame: Frame
    signal: MotionSignal
    grid: Grid
    question: str
    cam: np.ndarray


@dataclass
class _Said:
    """An answer whose gradient has not been taken yet."""

    prompt: Prompt
    features: list[Placed]
    ids: tuple[int, ...]
    shown: list[tuple[str, Grid, np.ndarray | None]]
    question: str


@dataclass
class NextFrameSelector:
    """
    Chooses units by what the last answer to the same question leaned on; keeps state a camera.

    The engine tells it of answers (:meth:`observe`, which costs nothing); the gradient is taken by
    :meth:`reflect` when there is time, at the latest before the next choice.

    :param base: whose map of the frame itself ranks what the last answer does not speak of.
    :param layers: decoder layers that the gradient passes; ``None`` is all.
    :param min_units: fewest units kept a slice.
    :param always: bool [rows, columns] kept in every slice, by grid.
    """

    base: UnitSelector
    layers: int | None = None
    min_units: int = 8
    always: Callable[[int, int], np.ndarray] | None = None
    _cameras: OrderedDict[str, _Camera] = field(default_factory=OrderedDict, repr=False)
    _said: _Said | None = field(default=None, repr=False)
    _engine: Engine | None = field(default=None, repr=False)

    def bind(self, engine: Engine) -> None:
        """Take the engine whose answers are reflected on; called by the engine itself."""
        self._engine = engine
        self.base.bind(engine)

    def forget(self) -> None:
        """Forget all cameras (a jump of the clock, another scene)."""
        self._cameras.clear()
        self._said = None

    def saliency(self, frames: Sequence[Frame], rows: int, columns: int, question: str = ''
                 ) -> np.ndarray:
        """Return the joined map, float32 [T, rows, columns]; the camera's state moves on."""
        base = normalised(self.base.saliency(frames, rows, columns, question))
        state = self._cameras.get(frames[-1].camera)
        if state is None or state.cam.shape != (rows, columns):
            return base
        shift, _ = moved = moved_since(state.signal, state.frame, frames[-1], rows, columns)
        differences = [state.signal.difference([f], rows, columns)[0] for f in frames[:-1]]
        cam = state.cam if state.question == question else np.zeros_like(state.cam)
        return join(cam, shift, np.stack([*differences, moved[1]]), base)

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        """Choose units; see :class:`saliency.select.UnitSelector`."""
        self.reflect()
        t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        newest = slice_frames(frames, t)
        values = self.saliency(newest, rows, columns, question)
        keep = top_units(values, ratio, least=self.min_units * t,
                         always=None if self.always is None else self.always(rows, columns))
        self._remember(newest[-1], grid, question, keep.reshape(t, -1)[-1])
        return keep

    def _remember(self, frame: Frame, grid: Grid, question: str, keep: np.ndarray) -> None:
        rows, columns = grid[1] // 2, grid[2] // 2
        state = self._cameras.pop(frame.camera, None)
        if state is None or state.cam.shape != (rows, columns):
            state = _Camera(frame, MotionSignal(), grid, question,
                            np.zeros((rows, columns), np.float32))
        state.signal.kept(frame, keep, rows, columns)
        state.frame, state.grid = frame, grid
        self._cameras[frame.camera] = state
        while len(self._cameras) > CAMERAS:
            self._cameras.popitem(last=False)

    def observe(self, request: Request, visuals: Sequence[VisualToken], prompt: Prompt,
                ids: Sequence[int]) -> None:
        """
        Take note of an answer; called by the engine.

        Answers within a longer conversation, or whose pictures are no longer in the cache, are
        passed over.
        """
        if self._engine is None or len(prompt.spans) != len(visuals) or not ids:
            return
        features = [(span, merged) for span, v in zip(prompt.spans, visuals)
                    if (merged := self._engine.features.get(v.key)) is not None]
        if len(features) != len(visuals):
            return
        shown = [(v.frames[-1].camera, v.grid, v.units) for v in visuals]
        self._said = _Said(prompt, features, tuple(ids), shown, request.question)
        for visual in visuals:
            if visual.frames[-1].camera not in self._cameras:
                kept = visual.unit_map.reshape(-1)
                self._remember(visual.frames[-1], visual.grid, request.question, kept)

    def reflect(self) -> None:
        """Take the gradient of the last answer, if there is one that was not reflected on."""
        said, self._said = self._said, None
        if said is None or self._engine is None:
            return
        from qwen_vl_ros.saliency.grad_cam import token_maps
        depth = self.layers or self._engine.model.config.language.layers
        maps = token_maps(self._engine, said.prompt, said.features, depth, said.ids)
        for values, (camera, grid, units) in zip(maps, said.shown):
            t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
            whole = np.zeros(t * rows * columns, np.float32)
            whole[np.arange(whole.size) if units is None else units] = values
            state = self._cameras.get(camera)
            if state is not None and state.cam.shape == (rows, columns):
                state.cam = whole.reshape(t, rows, columns).max(0)
                state.question = said.question
