"""
Next-frame use: what the last answer leaned on says where to look now.

Grad-CAM on the frame at hand costs more than dropping saves. So the gradient of an answer is taken
after it has been said, and its map serves the camera's next frame: moved by the shift that was
seen, joined with the temporal difference (what is new must not be missed) and, behind both, with a
signal that knows the new frame itself. Each of them may also choose alone.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from qwen_vl_ros.engine.errors import one_line
from qwen_vl_ros.engine.patches import Grid, spread_rank
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.motion import MotionSignal, move_map, shifted, turned
from qwen_vl_ros.saliency.remembered import Camera
from qwen_vl_ros.saliency.select import (
    UnitSelector,
    neighbours,
    normalised,
    slice_frames,
    top_units,
)
from qwen_vl_ros.saliency.weights import REMEMBERED, check_signals

if TYPE_CHECKING:
    from qwen_vl_ros.engine.engine import Engine
    from qwen_vl_ros.engine.prompt import Prompt, VisualToken
    from qwen_vl_ros.engine.types import Request
    from qwen_vl_ros.saliency.reflecting import Said

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
#: Cameras remembered; the one looked at longest ago goes first.
CAMERAS = 16
#: Units that the picture moves until the map of a generic prompt is taken anew.
TURNED = 4.0
#: Height of the uniform grid under the signals where no signal knows the new frame.
TIE = 1e-3


def widen(values: np.ndarray) -> np.ndarray:
    """
    Let a map's peaks reach into the units around them: [T, rows, columns] float32.

    Gradients sit on few units of a thing, often its border; the thing is what has to be seen.
    """
    return (0.7 * values + 0.3 * np.maximum(values, neighbours(values))).astype(np.float32)


def evenly(rows: int, columns: int) -> np.ndarray:
    """Return float32 [rows, columns], up to :data:`TIE`: larger where the uniform grid begins."""
    ranks = spread_rank(rows, columns).reshape(rows, columns)
    return (TIE * (1 - ranks / (ranks.max() + 1))).astype(np.float32)


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
         weight: float = KNOWN, motion: float = 1.0) -> np.ndarray:
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
    :param motion: weight of the temporal difference.
    :return: float32 [T, rows, columns].
    """
    peak = float(cam.max())
    known = np.sqrt(widen(cam[None])[0] / peak) if peak > 0 else np.zeros_like(cam)
    known = shifted(known, shift)
    unseen = moved >= UNSEEN
    usual = float(np.median(moved[~unseen])) if not unseen.all() else 0.0
    stands_out = np.where(unseen, 0.0, np.maximum(moved - 2 * usual, 0.0))
    new = np.minimum(widen(stands_out) / (MOVED_TURNING if any(shift) else MOVED), 1.0)
    return (base + weight * known + motion * (new + 0.25 * unseen)).astype(np.float32)


@dataclass
class NextFrameSelector:
    """
    Chooses units by what is remembered of the camera, with a signal of the new frame or alone.

    The engine tells it of answers (:meth:`observe`), from any thread; the gradient is taken by
    :meth:`reflect` when there is time, at the latest before the next choice.

    :param base: whose map of the frame itself ranks what the others do not speak of; ``None``
        spreads evenly over the picture what they do not tell apart, and so everything at first.
    :param weights: of :data:`weights.REMEMBERED`. Those of motion and grad_cam, the map of the
        last answer to the same question, stand against the base's ranks as a whole, see
        :func:`join`; that of entropy, the attention of the last frame, against the base's weights:
        it costs a pass of the encoder while nothing else is to do.
    :param layers: decoder layers that the gradient passes; 0 is all.
    :param every: so many answers to the same question are reflected on once: in between the map
        moves on with the camera, and half of the gradients are saved.
    :param generic_every: the map of an answer is divided by that of a generic prompt, which is
        taken anew after so many of them, and where the picture has moved by :data:`TURNED`; 0
        never divides.
    :param min_units: fewest units kept a slice.
    :param always: bool [rows, columns] kept in every slice, by grid.
    """

    base: UnitSelector | None
    weights: Mapping[str, float] = field(
        default_factory=lambda: {'motion': 1.0, 'grad_cam': KNOWN})
    layers: int = 0
    every: int = 2
    generic_every: int = 0
    min_units: int = 8
    always: Callable[[int, int], np.ndarray] | None = None
    _cameras: OrderedDict[str, Camera] = field(default_factory=OrderedDict, repr=False)
    _said: Said | None = field(default=None, repr=False)
    _engine: Engine | None = field(default=None, repr=False)
    _blind: bool = field(default=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        """:raises ValueError: an unknown signal or a weight that is not positive."""
        check_signals(self.weights, REMEMBERED)

    def bind(self, engine: Engine) -> None:
        """
        Take the engine whose answers are reflected on; called by the engine itself.

        :raises ValueError: when the gradient is to pass more layers than the decoder has.
        """
        most = engine.model.config.language.layers
        if self.layers > most:
            raise ValueError(f'the gradient is to pass {self.layers} layers; expected 0 (all) to '
                             f'{most}, which the decoder has')
        self._engine = engine
        if self.base is not None:
            self.base.bind(engine)

    def forget(self) -> None:
        """Forget all cameras (a jump of the clock, another scene)."""
        with self._lock:
            self._cameras.clear()
            self._said = None

    def saliency(self, frames: Sequence[Frame], rows: int, columns: int, question: str = ''
                 ) -> np.ndarray:
        """Return the joined map, float32 [T, rows, columns]; the camera's state moves on."""
        if self.base is None:
            base = evenly(rows, columns)[None].repeat(len(frames), 0)
        else:
            base = normalised(self.base.saliency(frames, rows, columns, question))
        with self._lock:
            return self._joined(base, frames, rows, columns, question)

    def _joined(self, base: np.ndarray, frames: Sequence[Frame], rows: int, columns: int,
                question: str) -> np.ndarray:
        """Join the base's map [T, rows, columns] with what is remembered of the camera."""
        state = self._cameras.get(frames[-1].camera)
        if state is None or state.cam.shape != (rows, columns):
            return self._at_first(base, frames, rows, columns)
        shift, _ = moved = moved_since(state.signal, state.frame, frames[-1], rows, columns)
        state.chosen, state.shift = frames[-1], shift
        known = moved[1] < UNSEEN
        if known.any() and np.median(moved[1][known]) > CUT:
            self._cameras.pop(frames[-1].camera, None)
            return base
        differences = [state.signal.difference([f], rows, columns)[0] for f in frames[:-1]]
        cam = state.cam if state.question == question else np.zeros_like(state.cam)
        if state.focus is not None:
            own = 0.0 if self.base is None else sum(self.base.weights.values())
            share = self.weights['entropy'] / (own + self.weights['entropy'])
            # Units that were dropped from the last frame share one value.
            focus = normalised(move_map(state.focus, shift) + TIE * evenly(rows, columns))
            base = (1 - share) * base + share * focus
        return join(cam, shift, np.stack([*differences, moved[1]]), base,
                    self.weights.get('grad_cam', 0.0), self.weights.get('motion', 0.0))

    def _at_first(self, base: np.ndarray, frames: Sequence[Frame], rows: int, columns: int
                  ) -> np.ndarray:
        """Rank first frames; motion without a base holds a clip's slices against each other."""
        if self.base is not None or 'motion' not in self.weights:
            return base
        moved = MotionSignal().difference(frames, rows, columns)
        moved[0] = 0.0
        return join(np.zeros((rows, columns), np.float32), (0.0, 0.0), moved, base, 0.0,
                    self.weights['motion'])

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

    def _remember(self, frame: Frame, grid: Grid, question: str, keep: np.ndarray) -> Camera:
        rows, columns = grid[1] // 2, grid[2] // 2
        state = self._cameras.pop(frame.camera, None)
        if state is None or state.cam.shape != (rows, columns):
            state = Camera(frame, MotionSignal(), question,
                           np.zeros((rows, columns), np.float32), chosen=frame)
        state.follow(frame, rows, columns)
        state.signal.kept(frame, keep, rows, columns)
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
                from qwen_vl_ros.saliency.reflecting import Said
                self._said = Said(prompt, features, tuple(ids), tuple(visuals), request.question,
                                  request.system_prompt)

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
        return due and not {'grad_cam', 'entropy'}.isdisjoint(self.weights)

    def reflect(self) -> None:
        """
        Take the gradient of the last answer, if there is one that was not reflected on.

        Where the weights have no gradient (quantised ones on kernels of their own) that is said
        once, and the other signals choose alone.
        """
        with self._lock:
            said, self._said = self._said, None
            if said is not None and self._engine is not None:
                self._reflect_on(said, self._engine)

    def _reflect_on(self, said: Said, engine: Engine) -> None:
        from qwen_vl_ros.saliency.reflecting import focus_of

        maps = self._leaned_on(said, engine) if 'grad_cam' in self.weights else []
        for index, visual in enumerate(said.visuals):
            state = self._of(visual)
            if state is None:
                continue
            if maps:
                state.cam = maps[index]
            state.question, state.answers = said.question, 0
            if 'entropy' in self.weights:
                state.focus = focus_of(engine, visual)

    def _of(self, visual: VisualToken) -> Camera | None:
        """Return what is remembered of a visual's camera, if it is of the same grid."""
        state = self._cameras.get(visual.frames[-1].camera)
        shape = (visual.grid[1] // 2, visual.grid[2] // 2)
        return state if state is not None and state.cam.shape == shape else None

    def _leaned_on(self, said: Said, engine: Engine) -> list[np.ndarray]:
        """Return the map of each visual, [rows, columns]; none where there is no gradient."""
        from qwen_vl_ros.saliency.reflecting import leaned_on

        if self._blind:
            return []
        try:
            maps = leaned_on(engine, said, self.layers)
            return self._divided(maps, said, engine) if self.generic_every else maps
        except (RuntimeError, TypeError) as error:
            self._blind = True
            logging.getLogger(__name__).warning(
                'no gradient of the answer: %s; units are chosen without it', one_line(error))
            return []

    def _divided(self, maps: list[np.ndarray], said: Said, engine: Engine) -> list[np.ndarray]:
        """Divide the maps by those of a generic prompt; they are taken anew where they are old."""
        from qwen_vl_ros.saliency.grad_cam import divided
        from qwen_vl_ros.saliency.reflecting import usual_of

        states = [self._of(visual) for visual in said.visuals]
        if any(s is not None and (s.usual is None or s.usual_moved >= TURNED
                                  or s.usual_answers >= self.generic_every) for s in states):
            for state, usual in zip(states, usual_of(engine, said, self.layers)):
                if state is not None:
                    state.usual, state.usual_answers, state.usual_moved = usual, 0, 0.0
        out = []
        for state, values in zip(states, maps):
            if state is not None and state.usual is not None:
                values = divided(values, state.usual)
                state.usual_answers += 1
            out.append(values)
        return out
