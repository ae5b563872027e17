"""
The node's core without ROS: messages and questions in, events and an outcome out.

The node feeds it from subscriptions and callbacks; a test or a program can do so by hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from qwen_vl_ros.decode import FrameError
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.patches import grid_of
from qwen_vl_ros.engine.types import Delta, Done, Request, Stage, Visual
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.node.overlap import Overlap, outcome_of
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.requests import Job, Outcome, Requests
from qwen_vl_ros.pipeline import (
    AskOptions,
    FrameStore,
    age_ns,
    build_request,
    frame_from_message,
)
from qwen_vl_ros.saliency.answering import AS_IT_IS
from qwen_vl_ros.saliency.answering import answer as ask_with
from qwen_vl_ros.saliency.controller import LatencyController


class EngineLike(Protocol):
    """
    What the node asks of an engine (see :mod:`qwen_vl_ros.engine.engine`).

    One that has ``scheduler`` as well can answer several questions beside each other.
    """

    @property
    def info(self) -> Any:
        """Return facts about the loaded model."""

    def answer(self, request: Request, timeline: Timeline | None = None,
               cancelled: Callable[[], bool] = ...) -> Iterator[Stage | Delta | Done]:
        """Answer one question; raises :class:`EngineError`."""

    def set_pixels(self, min_pixels: int, max_pixels: int) -> None:
        """Change the limits of resized pictures, which :attr:`info` shows."""

    def reset_sessions(self) -> None:
        """Forget all multi-turn histories."""

    def close(self) -> None:
        """Free the model's memory."""


class Perception:
    """
    Newest frames, waiting questions and the engine, put together.

    :param engine: nobody else uses it from :meth:`start` to :meth:`stop`.
    :param settings: live ones may be swapped by assigning :attr:`settings`.
    :param ros_now_ns: clock of the pictures' stamps, nanoseconds.
    :param info_changed: called when the engine's ``info`` has changed.
    """

    def __init__(self, engine: EngineLike, settings: Settings, ros_now_ns: Callable[[], int],
                 info_changed: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.settings = settings
        self._template = settings.template()
        self._ros_now_ns = ros_now_ns
        self._info_changed = info_changed
        self._limits = (settings.vision_min_pixels, settings.vision_max_pixels)
        self._forget = False
        self._latency = LatencyController()
        self._preparing = threading.Lock()
        self.store = FrameStore(tuple(settings.camera_topics()), settings.clip_length)
        self.requests = Requests(self.answer, settings.queue_size, self._check_newest)
        self.overlap: Overlap | None = None

    def start(self) -> None:
        """Take questions from now on, about the cameras in the settings."""
        settings = self.settings
        self.store = FrameStore(tuple(settings.camera_topics()), settings.clip_length)
        self.requests.size = settings.queue_size
        self.requests.standing = len(settings.standing_cameras())
        # What asks twice, or looks before it asks, holds the engine for itself.
        alone = settings.fewer() != AS_IT_IS
        if settings.scheduler_overlap and not alone and hasattr(self.engine, 'scheduler'):
            self.overlap = Overlap(
                self.engine.scheduler(settings.scheduler_max_sequences,
                                      micro_batch=settings.scheduler_micro_batch),
                self._prepare)
        self.requests.runner = self.overlap
        try:
            self.requests.start()
        except RuntimeError:
            self._end_overlap(0.0)
            raise

    def stop(self, why: str = 'the node was deactivated', timeout_s: float = 2.0) -> bool:
        """End all questions, drop all frames; see :meth:`Requests.stop`."""
        ended = self.requests.stop(Outcome(ErrorCode.INACTIVE, why), timeout_s)
        ended = self._end_overlap(timeout_s) and ended
        self.store.clear()
        return ended

    def _end_overlap(self, timeout_s: float) -> bool:
        overlap, self.overlap, self.requests.runner = self.overlap, None, None
        return overlap is None or overlap.stop(timeout_s)

    def receive(self, camera: str, message: Any) -> None:
        """Keep a camera's message until a newer one comes; it is decoded when somebody asks."""
        self.store.offer(camera, message, now_ns=self._ros_now_ns(),
                         received_ns=time.monotonic_ns(), lazy=True)

    def forget_sessions(self) -> None:
        """Forget all multi-turn histories before the next question."""
        self._forget = True

    def answer(self, job: Job) -> Outcome:
        """
        Answer one question on this thread and tell its listener the stages and deltas.

        :raises EngineError: see :class:`ErrorCode`.
        """
        request = self._prepare(job)
        answer = None
        settings = self.settings
        fewer = replace(settings.fewer(), least_units=settings.pruning_min_units)
        for event in ask_with(self.engine, request, job.timeline, job.should_stop, fewer=fewer):
            if isinstance(event, Done):
                answer = event.answer
            else:
                job.tell(event)
        if answer is None:
            raise EngineError(ErrorCode.UNKNOWN, 'the engine ended without an answer')
        return outcome_of(job, answer, request)

    def _prepare(self, job: Job) -> Request:
        """
        Choose and decode a question's pictures and make its request, on whatever thread.

        :raises EngineError: see :class:`ErrorCode`.
        """
        settings = self.settings
        with job.timeline.stage('decode_message'):
            visuals = self._look(job, settings)
        with self._preparing:
            if self._forget:
                self._forget = False
                self.engine.reset_sessions()
            self._latency.target_ms = settings.target_latency_ms
            if visuals and self._latency.level.cost < 1:
                job.approximate = ('target_latency_ms',)
            limits = self._pixel_limits(job, settings)
            if limits != self._limits:
                self.engine.set_pixels(*limits)
                self._limits = limits
                self._info_changed()
        return self._request(job, visuals, settings, limits)

    def _pixel_limits(self, job: Job, settings: Settings) -> tuple[int, int]:
        """Return the limits of resized pictures; a latency target shrinks the largest shown."""
        least, most = settings.vision_min_pixels, settings.vision_max_pixels
        share = self._latency.level.pixels
        if share < 1 and job.frames:
            shown = max(f.width * f.height for f in job.frames)
            most = max(least, round(min(most, shown) * share))
        return least, most

    def _look(self, job: Job, settings: Settings) -> tuple[Visual, ...]:
        """Return the question's pictures and note whose they are and how old."""
        question = job.question
        now_ns, steady_ns = self._ros_now_ns(), time.monotonic_ns()
        if question.messages:
            visuals = tuple(Visual((self._own_picture(number, message),))
                            for number, message in enumerate(question.messages))
        else:
            limit = settings.max_image_age_s if question.max_age_s is None else question.max_age_s
            if question.num_frames > settings.clip_length:
                raise EngineError(
                    ErrorCode.BAD_REQUEST,
                    f'num_frames is {question.num_frames}; at most {settings.clip_length} frames '
                    'are kept (clip.length)')
            visuals = self.store.select(
                question.cameras, num_frames=question.num_frames, now_ns=now_ns,
                now_received_ns=steady_ns, max_age_ns=int(limit * 1e9) if limit > 0 else None)
            newest = min(age_ns(v.frames[-1], now_ns, steady_ns) for v in visuals)
            job.image_age_ns = newest
            job.timeline.add('image_age', steady_ns - newest, steady_ns)
        job.frames = tuple(visual.frames[-1] for visual in visuals)
        return visuals

    def _own_picture(self, number: int, message: Any) -> Any:
        try:
            return frame_from_message(message, received_ns=time.monotonic_ns())
        except FrameError as error:
            raise EngineError(
                ErrorCode.BAD_ENCODING, f'picture {number} of the question: {error.reason}'
            ) from None

    def _request(self, job: Job, visuals: tuple[Visual, ...], settings: Settings,
                 limits: tuple[int, int]) -> Request:
        question = job.question
        ratio = settings.pruning_keep_ratio if settings.pruning_enable else 1.0
        own = dict(question.options)
        ratio = min(own.pop('keep_ratio', ratio), self._latency.level.keep)
        if ratio < 1 and visuals:
            least = settings.pruning_min_units / self._units(visuals, limits)
            ratio = max(ratio, min(1.0, least))
        options = AskOptions(
            system_prompt=settings.prompt_system or None,
            max_new_tokens=settings.generation_max_new_tokens,
            temperature=settings.generation_temperature)
        if not question.text.strip():
            raise EngineError(ErrorCode.BAD_REQUEST, 'the question is empty')
        return build_request(
            self._template.replace('{question}', question.text), visuals, options,
            **{**own, 'keep_ratio': ratio, 'request_id': question.question_id})

    def _units(self, visuals: tuple[Visual, ...], limits: tuple[int, int]) -> int:
        """
        Return the vision tokens of the smallest picture, as large as it will be shown.

        :param limits: of resized pictures; the checkpoint's own may be lower.
        """
        most = min(limits[1], self.engine.info.max_pixels)
        grids = (grid_of(visual.frames, limits[0], most) for visual in visuals)
        return min(h * w // 4 for _, h, w in grids)

    def _check_newest(self) -> None:
        """Do what nobody waits for: decode newest frames, so that a bad camera is named early."""
        for camera in self.store.cameras:
            self.store.newest(camera)
        # A selector that learns from answers does so while nobody waits.
        selector = getattr(getattr(self.engine, 'options', None), 'selector', None)
        reflect = getattr(selector, 'reflect', None)
        if reflect is not None and not (self.overlap and self.requests.busy):
            reflect()

    def count(self, job: Job, outcome: Outcome) -> None:
        """Take note of how long a question took, for the latency target."""
        if outcome.code == ErrorCode.NONE:
            self._latency.took(job.timeline.total_ms())
