"""
Next-frame use: what the last answer leaned on says where to look now.

Grad-CAM on the frame at hand costs more than dropping saves. So the gradient of an answer is taken
after it has been said, and its map serves the camera's next frame: moved by the shift that was
seen, joined with the temporal difference (what is new must not be missed) and, behind both, with a
signal that knows the new frame itself.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import cv2
import numpy as np

from qwen_vl_ros.engine.errors import one_line
from qwen_vl_ros.engine.patches import Grid
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.motion import MotionSignal, move_map, shift_of
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

#: Levels of temporal difference that count as much as the best unit of the frame's own map: of a
#: camera that stands still, and of one that turns, where much changes that does not matter.
MOVED = 60.0
MOVED_TURNING = 160.0
#: Difference of what was never seen.
UNSEEN = 255.0
#: Median difference, levels, from which on it is another scene: what is remembered is no help.
CUT = 25.0
#: Weight of the last answer's map against the ranks of the new frame's own, and against those of
#: one that has seen the question. These, and the levels above, are fitted on the training split.
KNOWN = 1.1
KNOWN_BESIDE_QUESTION = 0.25
#: A shift under this many units is noise of the estimate.
STILL = 0.06
#: Cameras remembered; the one looked at longest ago goes first.
CAMERAS = 16


def widen(values: np.ndarray) -> np.ndarray:
    """
    Let a map's peaks reach into the units around them: [T, rows, columns] float32.

    Gradients sit on few units of a thing, often its border; the thing is what has to be seen.
    """
    return (0.7 * values + 0.3 * np.maximum(values, neighbours(values))).astype(np.float32)


def turned(before: Frame, now: Frame, rows: int, columns: int) -> tuple[float, float]:
    """Return the shift of the picture in units (down, right), 0 where it is noise."""
    down, right = shift_of(before, now, rows, columns)
    return down * (abs(down) >= STILL), right * (abs(right) >= STILL)


def moved_since(signal: MotionSignal, before: Frame, now: Frame, rows: int, columns: int
                ) -> tuple[tuple[float, float], np.ndarray]:
    """
    Return the shift of the picture in units (down, right) and what changed beyond it.

    :param signal: holds what was last kept; it is moved by the shift.
    :return: (shift, float32 [rows, columns] levels).
    """
    shift = turned(before, now, rows, columns)
    if any(shift):
        signal.move(shift)
    return shift, signal.difference([now], rows, columns)[0]


def join(cam: np.ndarray, shift: tuple[float, float], moved: np.ndarray, base: np.ndarray,
         weight: float = KNOWN) -> np.ndarray:
    """
    Join the last answer's map, temporal difference and a map of the new frame.

    The third ranks what neither of the others speaks of. A change counts by how far it stands out
    of the picture's usual one: where the camera turns, everything changes a little. What has just
    come into view was never seen, and is raised a little without being known to matter.

    :param cam: [rows, columns], from 0, of the earlier frame; all 0 where nothing is known.
    :param shift: in units, down and right.
    :param moved: levels [T, rows, columns].
    :param base: [T, rows, columns] in [0, 1].
    :param weight: of the last answer's map.
    :return: float32 [T, rows, columns].
    """
    peak = float(cam.max())
    known = np.sqrt(widen(cam[None])[0] / peak) if peak > 0 else np.zeros_like(cam)
    known = shifted(known, shift)
    unseen = moved >= UNSEEN
    usual = float(np.median(moved[~unseen])) if not unseen.all() else 0.0
    stands_out = np.where(unseen, 0.0, np.maximum(moved - 2 * usual, 0.0))
    new = np.minimum(widen(stands_out) / (MOVED_TURNING if any(shift) else MOVED), 1.0)
    return (base + weight * known + new + 0.25 * unseen).astype(np.float32)


def shifted(values: np.ndarray, shift: tuple[float, float]) -> np.ndarray:
    """Move a map [rows, columns] by (down, right) in units; 0 comes in at the border."""
    matrix = np.array([[1, 0, shift[1]], [0, 1, shift[0]]], np.float32)
    return cv2.warpAffine(values.astype(np.float32), matrix, values.shape[::-1],
                          flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT, borderValue=0.0)


@dataclass
class _Camera:
    """What is remembered of one camera."""

    frame: Frame
    signal: MotionSignal
    grid: Grid
    question: str
    cam: np.ndarray
    focus: np.ndarray | None = None
    #: The frame that was chosen from last, and how the picture had moved since ``frame``.
    chosen: Frame | None = None
    shift: tuple[float, float] = (0.0, 0.0)
    #: Answers since one was reflected on; ``None`` before the first.
    answers: int | None = None

    def follow(self, frame: Frame, rows: int, columns: int) -> None:
        """Move what is known to a later frame of the camera."""
        if self.chosen is not frame:
            self.shift = turned(self.frame, frame, rows, columns)
        if any(self.shift):
            self.cam = shifted(self.cam, self.shift)
            if self.focus is not None:
                self.focus = move_map(self.focus, self.shift)
        self.frame, self.chosen, self.shift = frame, None, (0.0, 0.0)


@dataclass
class _Said:
    """An answer whose gradient has not been taken yet."""

    prompt: Prompt
    features: list[Placed]
    ids: tuple[int, ...]
    visuals: tuple[VisualToken, ...]
    question: str


@dataclass
class NextFrameSelector:
    """
    Chooses units by what the last answer to the same question leaned on; keeps state a camera.

    The engine tells it of answers (:meth:`observe`), from any thread; the gradient is taken by
    :meth:`reflect` when there is time, at the latest before the next choice.

    :param base: whose map of the frame itself ranks what the last answer does not speak of.
    :param layers: decoder layers that the gradient passes; ``None`` is all.
    :param known: weight of the last answer's map, see :func:`join`.
    :param every: so many answers to the same question are reflected on once: in between the map
        moves on with the camera, and half of the gradients are saved.
    :param focus: weight of the attention entropy of the last frame, 0 to 1, against the base; it
        costs a pass of the encoder while nothing else is to do.
    :param min_units: fewest units kept a slice.
    :param always: bool [rows, columns] kept in every slice, by grid.
    """

    base: UnitSelector
    layers: int | None = None
    known: float = KNOWN
    every: int = 2
    focus: float = 0.0
    min_units: int = 8
    always: Callable[[int, int], np.ndarray] | None = None
    _cameras: OrderedDict[str, _Camera] = field(default_factory=OrderedDict, repr=False)
    _said: _Said | None = field(default=None, repr=False)
    _engine: Engine | None = field(default=None, repr=False)
    _blind: bool = field(default=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def bind(self, engine: Engine) -> None:
        """Take the engine whose answers are reflected on; called by the engine itself."""
        self._engine = engine
        self.base.bind(engine)

    def forget(self) -> None:
        """Forget all cameras (a jump of the clock, another scene)."""
        with self._lock:
            self._cameras.clear()
            self._said = None

    def saliency(self, frames: Sequence[Frame], rows: int, columns: int, question: str = ''
                 ) -> np.ndarray:
        """Return the joined map, float32 [T, rows, columns]; the camera's state moves on."""
        base = normalised(self.base.saliency(frames, rows, columns, question))
        with self._lock:
            return self._joined(base, frames, rows, columns, question)

    def _joined(self, base: np.ndarray, frames: Sequence[Frame], rows: int, columns: int,
                question: str) -> np.ndarray:
        """Join the base's map [T, rows, columns] with what is remembered of the camera."""
        state = self._cameras.get(frames[-1].camera)
        if state is None or state.cam.shape != (rows, columns):
            return base
        shift, _ = moved = moved_since(state.signal, state.frame, frames[-1], rows, columns)
        state.chosen, state.shift = frames[-1], shift
        known = moved[1] < UNSEEN
        if known.any() and np.median(moved[1][known]) > CUT:
            self._cameras.pop(frames[-1].camera, None)
            return base
        differences = [state.signal.difference([f], rows, columns)[0] for f in frames[:-1]]
        cam = state.cam if state.question == question else np.zeros_like(state.cam)
        if state.focus is not None:
            base = (1 - self.focus) * base + self.focus * normalised(move_map(state.focus, shift))
        return join(cam, shift, np.stack([*differences, moved[1]]), base, self.known)

    def __call__(self, frames: Sequence[Frame], grid: Grid, ratio: float, question: str = ''
                 ) -> np.ndarray:
        """Choose units; see :class:`saliency.select.UnitSelector`."""
        t, rows, columns = grid[0], grid[1] // 2, grid[2] // 2
        newest = slice_frames(frames, t)
        with self._lock:
            self.reflect()
            values = self.saliency(newest, rows, columns, question)
            keep = top_units(values, ratio, least=self.min_units * t,
                             always=None if self.always is None else self.always(rows, columns))
            self._remember(newest[-1], grid, question, keep.reshape(t, -1)[-1])
        return keep

    def _remember(self, frame: Frame, grid: Grid, question: str, keep: np.ndarray) -> _Camera:
        rows, columns = grid[1] // 2, grid[2] // 2
        state = self._cameras.pop(frame.camera, None)
        if state is None or state.cam.shape != (rows, columns):
            state = _Camera(frame, MotionSignal(), grid, question,
                            np.zeros((rows, columns), np.float32), chosen=frame)
        state.follow(frame, rows, columns)
        state.signal.kept(frame, keep, rows, columns)
        state.grid = grid
        self._cameras[frame.camera] = state
        while len(self._cameras) > CAMERAS:
            self._cameras.popitem(last=False)
        return state

    def observe(self, request: Request, visuals: Sequence[VisualToken], prompt: Prompt,
                ids: Sequence[int]) -> None:
        """
        Take note of an answer; called by the engine.

        Answers within a longer conversation, or whose pictures are no longer in the cache, are
        passed over. It waits for a gradient that is being taken, and for a choice.
        """
        if self._engine is None or len(prompt.spans) != len(visuals) or not ids:
            return
        features = [(span, merged) for span, v in zip(prompt.spans, visuals)
                    if (merged := self._engine.features.get(v.key)) is not None]
        if len(features) != len(visuals):
            return
        with self._lock:
            if self._note(request, visuals):
                self._said = _Said(prompt, features, tuple(ids), tuple(visuals), request.question)

    def _note(self, request: Request, visuals: Sequence[VisualToken]) -> bool:
        """Follow the cameras to what was shown; tell whether the answer is to be reflected on."""
        due = False
        for visual in visuals:
            state = self._cameras.get(visual.frames[-1].camera)
            # A frame that was shown whole did not pass through a choice.
            if state is None or state.frame is not visual.frames[-1]:
                kept = visual.unit_map.reshape(-1)
                state = self._remember(visual.frames[-1], visual.grid, request.question, kept)
            if state.answers is not None:
                state.answers += 1
            due = due or (state.answers is None or state.answers >= self.every
                          or state.question != request.question)
        return due

    def reflect(self) -> None:
        """
        Take the gradient of the last answer, if there is one that was not reflected on.

        Where the weights have no gradient (quantised ones on kernels of their own) that is said
        once, and motion and the base choose alone.
        """
        with self._lock:
            said, self._said = self._said, None
            if said is None or self._engine is None or self._blind:
                return
            try:
                self._reflect_on(said, self._engine)
            except (RuntimeError, TypeError) as error:
                self._blind = True
                logging.getLogger(__name__).warning(
                    'no gradient of the answer: %s; next_frame goes by motion alone',
                    one_line(error))

    def _reflect_on(self, said: _Said, engine: Engine) -> None:
        from qwen_vl_ros.saliency.grad_cam import token_maps
        depth = self.layers or engine.model.config.language.layers
        maps = token_maps(engine, said.prompt, said.features, depth, said.ids)
        for values, visual in zip(maps, said.visuals):
            t, rows, columns = visual.grid[0], visual.grid[1] // 2, visual.grid[2] // 2
            whole = np.zeros(visual.total, np.float32)
            whole[np.arange(whole.size) if visual.units is None else visual.units] = values
            state = self._cameras.get(visual.frames[-1].camera)
            if state is not None and state.cam.shape == (rows, columns):
                state.cam = whole.reshape(t, rows, columns).max(0)
                state.question, state.answers = said.question, 0
                state.focus = self._focus_of(visual) if self.focus > 0 else None

    def _focus_of(self, visual: VisualToken) -> np.ndarray:
        """Run the encoder once more with a probe, which the answer itself had no time for."""
        import torch

        from qwen_vl_ros.engine.patches import extract_patches
        from qwen_vl_ros.saliency.attention_entropy import EntropyProbe
        assert self._engine is not None
        vision = self._engine.model.vision
        patches = torch.from_numpy(extract_patches(visual.frames, visual.grid))
        units = None if visual.units is None else torch.from_numpy(visual.units)
        probe = EntropyProbe(vision.config.depth)
        with torch.inference_mode():
            vision.encode(patches.to(vision.device), visual.grid, units, probe)
        return probe.map(visual.grid, visual.units)[-1]
