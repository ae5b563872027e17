"""
Questions that wait, and those that the engine is at.

Nothing here knows ROS. Callbacks :meth:`Requests.submit` and go; what happens to a question is
told to its listener from another thread: the worker's, the runner's, or that of
:meth:`Requests.tick`, when time was up.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Answer, Delta, Stage
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline

LOG = logging.getLogger(__name__)

#: An answer whose engine does not stop at the deadline is reported without it after this long.
GRACE_NS = 500_000_000

#: Sources that let others go first; among equals, who came first.
RANKS = {'service': 1, 'continuous': 2}

#: Different faults that are logged, each once: a standing question can fail again and again.
LOGGED = 100


@dataclass(frozen=True)
class Question:
    """
    One question, as it came from a client.

    :param text: the user's words.
    :param cameras: whose newest pictures to look at; none means the first camera.
    :param messages: ``sensor_msgs`` pictures that came along; then no camera is read.
    :param num_frames: newest frames of each camera, 1 for stills.
    :param max_age_s: older pictures are refused; ``None`` is the node's limit.
    :param options: fields of :class:`~qwen_vl_ros.engine.types.Request` that it sets itself.
    :param deadline_s: seconds from submission.
    :param source: ``action`` and ``topic`` go first, then ``service``, then ``continuous`` (which
        does not count for the queue's size).
    :param question_id: appears in everything that is published about it.
    """

    text: str
    cameras: tuple[str, ...] = ()
    messages: tuple[Any, ...] = ()
    num_frames: int = 1
    max_age_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 30.0
    source: str = 'topic'
    question_id: str = ''


@dataclass(frozen=True)
class Outcome:
    """
    How a question ended.

    :param code: NONE, or why there is no (whole) answer.
    :param message: one sentence for a person; empty for NONE.
    :param answer: the engine's, also a part of one at DEADLINE and CANCELLED.
    """

    code: ErrorCode
    message: str = ''
    answer: Answer | None = None


@dataclass(frozen=True)
class Queued:
    """The question waits; ``position`` others come before it."""

    position: int


Listener = Callable[['Job', 'Queued | Stage | Delta | Outcome'], None]


class Job:
    """
    A question on its way.

    :param listener: told every event; the last one is an :class:`Outcome`, told exactly once.
    """

    def __init__(self, question: Question, listener: Listener) -> None:
        self.question = question
        self.timeline = Timeline(question.question_id)
        self.deadline_ns = self.timeline.start_ns + int(question.deadline_s * 1e9)
        self.frames: tuple[Frame, ...] = ()
        self.image_age_ns = 0
        #: What the node does beside the engine that can change the answer; see Answer.
        self.approximate: tuple[str, ...] = ()
        self.listener_errors = 0
        self._listener = listener
        self._stop: Outcome | None = None
        self._ended = False
        self._lock = threading.Lock()

    def stop(self, outcome: Outcome) -> None:
        """Ask a running answer to end before its next token, for the reason in ``outcome``."""
        self._stop = self._stop or outcome

    def should_stop(self) -> bool:
        """Say whether the answer is to end now; the engine asks between tokens."""
        if self._stop is None and time.monotonic_ns() >= self.deadline_ns:
            self.stop(self.too_late())
        return self._stop is not None

    @property
    def stopped(self) -> Outcome | None:
        """Return why the answer was asked to end, if it was."""
        return self._stop

    @property
    def ended(self) -> bool:
        """Say whether the outcome has been told."""
        return self._ended

    def too_late(self) -> Outcome:
        """Return the outcome of a question whose time is up."""
        return Outcome(ErrorCode.DEADLINE,
                       f'no complete answer within {self.question.deadline_s:g} s')

    def tell(self, event: Queued | Stage | Delta | Outcome) -> None:
        """Tell the listener; nothing after the outcome, and no exception of its comes back."""
        with self._lock:
            if self._ended:
                return
            self._ended = isinstance(event, Outcome)
            try:
                self._listener(self, event)
            except Exception:
                self.listener_errors += 1
                LOG.exception('could not publish an event of question %s',
                              self.question.question_id)


class Runner(Protocol):
    """Runs several questions beside each other."""

    @property
    def places(self) -> int:
        """Return how many questions may be under way at a time."""

    def room(self, job: Job) -> bool:
        """Say whether a question would be taken up at once."""

    def run(self, job: Job, ended: Callable[[Outcome], None]) -> None:
        """
        Take a question up and return; ``ended`` is called once, from whatever thread.

        :raises EngineError: when it is refused; then ``ended`` is not called.
        """


class Requests:
    """
    Bounded queue and worker thread.

    :param answer: runs a job on the engine, called on the worker's thread only; raises
        :class:`EngineError` or anything else.
    :param size: questions that may wait, those of continuous mode left out.
    :param idle: called on the worker's thread about once a second while nothing waits.
    """

    def __init__(self, answer: Callable[[Job], Outcome], size: int,
                 idle: Callable[[], None] | None = None) -> None:
        self._answer = answer
        self._idle = idle or (lambda: None)
        self.size = size
        #: Standing questions that may wait.
        self.standing = 1
        #: What runs questions beside each other; ``None`` is one after the other.
        self.runner: Runner | None = None
        self._waiting: list[tuple[int, int, Job]] = []
        self._numbers = itertools.count()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._open = False
        self._thread: threading.Thread | None = None
        self._logged: set[str] = set()

    def start(self) -> None:
        """
        Take questions from now on.

        :raises RuntimeError: when the engine has not let go of a question from before the stop.
        """
        with self._changed:
            if self._running:
                raise RuntimeError('the engine is still busy with a question from before')
            self._open = True
            self._thread = threading.Thread(target=self._work, name='engine', daemon=True)
            self._thread.start()

    def stop(self, outcome: Outcome, timeout_s: float = 2.0) -> bool:
        """
        End every question with ``outcome`` and the thread; can be started again.

        :return: whether the thread has ended within ``timeout_s``; it ends as soon as the engine
            lets go.
        """
        with self._changed:
            self._open = False
            waiting, self._waiting = self._waiting, []
            running, thread, self._thread = list(self._running), self._thread, None
            self._changed.notify_all()
        for _, _, job in waiting:
            job.tell(outcome)
        for job in running:
            job.stop(outcome)
        if thread is not None:
            thread.join(timeout_s)
        for job in running:
            job.tell(outcome)
        return thread is None or not thread.is_alive()

    @property
    def depth(self) -> int:
        """Return how many questions wait."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Say whether a question is being answered."""
        return bool(self._running)

    def submit(self, job: Job) -> None:
        """
        Let a question wait for its turn; returns at once.

        :raises EngineError: QUEUE_FULL or INACTIVE.
        """
        rank = RANKS.get(job.question.source, 0)
        standing = rank == RANKS['continuous']
        with self._changed:
            if not self._open:
                raise EngineError(ErrorCode.INACTIVE, 'the node is not active')
            wait = sum((r == RANKS['continuous']) == standing for r, _, _ in self._waiting)
            # Those for which a place is free are about to leave the queue.
            places = 1 if self.runner is None else self.runner.places
            free = 0 if standing else max(0, places - len(self._running))
            if wait >= (self.standing if standing else self.size + free):
                raise EngineError(
                    ErrorCode.QUEUE_FULL,
                    f'{wait} questions wait already (queue.size); ask again later')
            heapq.heappush(self._waiting, (rank, next(self._numbers), job))
            self._changed.notify_all()
        self._tell_positions()

    def cancel(self, job: Job) -> None:
        """Take a waiting question out, or stop a running one before its next token."""
        outcome = Outcome(ErrorCode.CANCELLED, 'cancelled by the client')
        job.stop(outcome)
        if self._remove(job):
            job.tell(outcome)
            self._tell_positions()

    def tick(self) -> None:
        """End the questions whose time is up; call it several times a second."""
        now = time.monotonic_ns()
        with self._changed:
            late = [job for _, _, job in self._waiting if job.deadline_ns <= now]
            running = list(self._running)
        for job in late:
            if self._remove(job):
                job.tell(job.too_late())
        if late:
            self._tell_positions()
        for job in running:
            if job.deadline_ns + GRACE_NS <= now:
                job.tell(job.too_late())

    def _remove(self, job: Job) -> bool:
        with self._changed:
            left = [entry for entry in self._waiting if entry[2] is not job]
            found = len(left) < len(self._waiting)
            heapq.heapify(left)
            self._waiting = left
        return found

    def _tell_positions(self) -> None:
        with self._changed:
            ahead = len(self._running)
            places = [(place + ahead, entry[2])
                      for place, entry in enumerate(sorted(self._waiting, key=lambda e: e[:2]))]
        for place, job in places:
            job.tell(Queued(place))

    def _next(self) -> Job | None:
        """Return the next question; ``None`` after a second without one, or at the end."""
        with self._changed:
            entry = self._first()
            if entry is None and self._thread is threading.current_thread():
                self._changed.wait(1.0)
                entry = self._first()
            if entry is not None and self._thread is threading.current_thread():
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                self._running.append(entry[2])
                return entry[2]
        return None

    def _first(self) -> tuple[int, int, Job] | None:
        """Return the first of those that wait for which there is room."""
        if self.runner is None:
            return min(self._waiting, default=None)
        return min((e for e in self._waiting if self.runner.room(e[2])), default=None)

    def _work(self) -> None:
        while self._thread is threading.current_thread():
            job = self._next()
            if job is None:
                if self._thread is threading.current_thread():
                    self._guarded(self._idle)
                continue
            self._tell_positions()
            job.timeline.add('queue', job.timeline.start_ns, time.monotonic_ns())
            self._take_up(job)

    def _take_up(self, job: Job) -> None:
        if self.runner is None or job.should_stop():
            self._end(job, self._run(job))
            return
        try:
            self.runner.run(job, lambda outcome: self._end(job, outcome))
        except EngineError as error:
            self._end(job, Outcome(error.code, error.message))

    def _end(self, job: Job, outcome: Outcome) -> None:
        with self._changed:
            self._running.remove(job)
            self._changed.notify_all()
        job.tell(outcome)

    def _run(self, job: Job) -> Outcome:
        if job.should_stop():
            assert job.stopped is not None
            return job.stopped
        try:
            return self._answer(job)
        except EngineError as error:
            return Outcome(error.code, error.message)
        except MemoryError as error:
            return Outcome(ErrorCode.OUT_OF_MEMORY, f'out of memory: {error}')
        except Exception as error:
            return Outcome(ErrorCode.UNKNOWN, self._log('a question failed', error))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._log('checking the newest frames failed', error)

    def _log(self, what: str, error: Exception) -> str:
        """Log a fault once with its traceback; return it as one sentence."""
        sentence = f'{type(error).__name__}: {error}'
        if sentence not in self._logged and len(self._logged) < LOGGED:
            self._logged.add(sentence)
            LOG.exception(what)
        return sentence
