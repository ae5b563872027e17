"""
Several requests beside each other on one engine: stages that overlap, shared decode steps.

One thread owns the device. Over and over it puts the next unit of work of the most urgent request
onto the device (a picture or slice to encode, a chunk to prefill) and then runs one decode step of
all sequences that have come so far. On a GPU the first returns at once and runs on streams of less
urgency beside the step; on a CPU they take turns. A second thread looks for pictures and makes
patches. Greedy answers are those of :meth:`Engine.answer`: what is handed over is whole pictures
and slices, which never attend to each other in the encoder.
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from qwen_vl_ros.engine.decoder import SLOTS
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode, one_line
from qwen_vl_ros.engine.rounds import Rounds
from qwen_vl_ros.engine.running import Running
from qwen_vl_ros.engine.task import Listener, Priority, Task
from qwen_vl_ros.engine.types import Done, Event, Request
from qwen_vl_ros.measure.timeline import Timeline

LOG = logging.getLogger(__name__)

#: Seconds between two looks at the device while there is nothing else to do.
GLANCE_S = 0.0001

#: The same while somebody's first token is on its way.
NEAR_S = 0.00002

#: Longest time that a cancel goes unnoticed while nothing else happens, seconds.
NOTICE_S = 0.005


#: Longest time that another thread keeps the interpreter when the device's thread wants it.
SWITCH_S = 0.0005


@dataclass(frozen=True)
class ScheduleOptions:
    """
    How requests share an engine.

    :param max_sequences: requests under way at a time, 1 to :data:`SLOTS`; one place is kept free
        of continuous ones.
    :param overlap: off: one request after the other, as by :meth:`Engine.answer`.
    :param micro_batch: pictures or slices of a clip that are encoded and handed over together.
        Below 1, the share of one: an experiment; approximate, and the answer says so.
    :param waiting: requests that may wait; as many continuous ones beside them.
    """

    max_sequences: int = 4
    overlap: bool = True
    micro_batch: float = 1.0
    waiting: int = 8

    def __post_init__(self) -> None:
        """:raises EngineError: BAD_REQUEST that names the option."""
        if not 1 <= self.max_sequences <= SLOTS:
            raise EngineError(ErrorCode.BAD_REQUEST,
                              f'max_sequences {self.max_sequences} lies outside 1 to {SLOTS}')
        if not self.micro_batch > 0:
            raise EngineError(ErrorCode.BAD_REQUEST,
                              f'micro_batch is {self.micro_batch}; expected more than 0')

    @property
    def places(self) -> int:
        """Return how many requests may be under way."""
        return self.max_sequences if self.overlap else 1


class Scheduler:
    """
    Runs requests on an engine that nobody else uses meanwhile.

    :param engine: loaded; its caches bound what can run.
    """

    def __init__(self, engine: Engine, options: ScheduleOptions = ScheduleOptions()) -> None:
        self.engine = engine
        self.options = options
        self._numbers = itertools.count()
        self._waiting: list[Task] = []
        self._rounds = Rounds(engine, self._prepare)
        self._changed = threading.Condition()
        self._news = 0
        self._open = True
        self._error = EngineError(ErrorCode.INACTIVE, 'the scheduler was stopped')
        self._thread: threading.Thread | None = None
        self._host = ThreadPoolExecutor(2, 'prepare')
        #: What :meth:`_plan_rest` is to do.
        self._begun: list[tuple[Future[Running], Task, Running]] = []

    # Any thread

    def start(self) -> None:
        """Run on a thread of its own until :meth:`stop`."""
        # A thread that makes prompts may keep the interpreter for so long; by default that is
        # five decode steps of a fast GPU.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._settle()
        self._thread = threading.Thread(target=self._work, name='engine', daemon=True)
        self._thread.start()

    def stop(self, error: EngineError | None = None, timeout_s: float = 2.0) -> bool:
        """
        End every request and the threads; for good.

        :param error: what requests are told.
        :return: whether the thread has ended within ``timeout_s``.
        """
        error = error or EngineError(ErrorCode.INACTIVE, 'the scheduler was stopped')
        with self._changed:
            self._open = False
            waiting, self._waiting = self._waiting, []
            thread, self._thread = self._thread, None
            self._error = error
            self._changed.notify_all()
        for task in waiting:
            self._rounds.tell(task, error)
        self._host.shutdown(wait=False, cancel_futures=True)
        if thread is None:
            self._rounds.end_all(error)
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        """Wait for the device: others use the engine's buffers before and after."""
        device = self.engine.model.device
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        self._rounds.drain()

    def submit(
        self, request: Request | Callable[[], Request], listener: Listener, *,
        priority: Priority = Priority.INTERACTIVE, timeline: Timeline | None = None,
        cancelled: Callable[[], bool] = lambda: False, session: str = '',
    ) -> Task:
        """
        Let a request wait for its turn; returns at once.

        :param request: or what makes it when its turn has come, on another thread.
        :param listener: told its events on the scheduler's thread, at last :class:`Done` or an
            :class:`EngineError`. A request that is stopped before its turn ends with the error
            CANCELLED, one that is stopped later with :class:`Done`, as by :meth:`Engine.answer`.
        :param session: see :attr:`Request.session_id`, for a request that is still to be made.
        :raises EngineError: INACTIVE or QUEUE_FULL.
        """
        self.engine.check_open()
        if isinstance(request, Request):
            made = request
            session = request.session_id
            request = lambda: made  # noqa: E731
        with self._changed:
            if not self._open:
                raise EngineError(ErrorCode.INACTIVE, 'the scheduler was stopped')
            standing = priority == Priority.CONTINUOUS
            wait = sum((t.priority == Priority.CONTINUOUS) == standing for t in self._waiting)
            if wait >= self.options.waiting:
                raise EngineError(
                    ErrorCode.QUEUE_FULL, f'{wait} requests wait already; ask again later')
            task = Task(request, listener, (priority, next(self._numbers)),
                        timeline or Timeline(), cancelled, session)
            self._waiting.append(task)
            self._waiting.sort(key=lambda t: t.rank)
            self._news += 1
            self._changed.notify_all()
        return task

    def answer(
        self, request: Request, timeline: Timeline | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        priority: Priority = Priority.INTERACTIVE,
    ) -> Iterator[Event]:
        """
        Answer one request, as :meth:`Engine.answer` does; several threads may do so at a time.

        :raises EngineError: as the request ended.
        """
        events: queue.SimpleQueue[Event | EngineError] = queue.SimpleQueue()
        left = threading.Event()
        self.submit(request, events.put, priority=priority, timeline=timeline,
                    cancelled=lambda: left.is_set() or cancelled())
        try:
            while True:
                event = events.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if isinstance(event, Done):
                    return
        finally:
            left.set()

    @property
    def places(self) -> int:
        """Return how many requests may be under way at a time."""
        return min(self.options.places, self.engine.pool.slots)

    def room(self, priority: Priority) -> bool:
        """Say whether a request of a priority would be taken up at once."""
        with self._changed:
            return not self._waiting and self._has_place(priority)

    @property
    def under_way(self) -> int:
        """Return how many requests have been taken up and not ended."""
        return len(self._rounds.active)

    @property
    def finished(self) -> list[Timeline]:
        """Return the timelines of the newest answers."""
        return list(self._rounds.finished)

    # The thread that owns the device

    def _work(self) -> None:
        while self._open and self._thread is threading.current_thread():
            news = self._news
            try:
                worked = self.run_once()
            except Exception as error:
                if not self._open:
                    break  # the host's threads have gone
                LOG.exception('the scheduler failed')
                self._rounds.end_all(EngineError(
                    ErrorCode.UNKNOWN, f'{type(error).__name__}: {one_line(error)}'))
                continue
            if not worked:
                with self._changed:
                    if self._open and self._news == news and not self._startable():
                        self._changed.wait(self._patience())
        self._rounds.end_all(self._error)

    def _patience(self) -> float:
        """Return how long to wait for news, seconds."""
        if self._rounds.device_busy:
            return NEAR_S if self._rounds.choosing else GLANCE_S
        return NOTICE_S if self._rounds.active or self._waiting else 0.5

    def run_once(self) -> bool:
        """
        Do one round: take requests up, one unit of work, one decode step.

        :return: whether there was anything to do.
        """
        self._take_up()
        worked = self._rounds.advance()
        self._plan_rest()
        worked |= self._rounds.decode()
        return self._rounds.drain() or worked

    def _has_place(self, priority: Priority) -> bool:
        places = self.places
        active = len(self._rounds.active)
        if priority == Priority.CONTINUOUS and places > 1:
            return active < places - 1
        return active < places

    def _startable(self) -> Task | None:
        """Return the most urgent waiting request that can begin."""
        busy = {task.session for task in self._rounds.active if task.session}
        for task in self._waiting:
            if task.session not in busy and self._has_place(task.priority):
                return task
        return None

    def _take_up(self) -> None:
        while True:
            with self._changed:
                gone = [task for task in self._waiting if task.cancelled()]
                for task in gone:
                    self._waiting.remove(task)
                chosen = self._startable()
                idle = not self._rounds.active and len(self._waiting) == 1
                if chosen is not None:
                    self._waiting.remove(chosen)
                    self._rounds.add(chosen)
            for task in gone:
                self._rounds.tell(
                    task, EngineError(ErrorCode.CANCELLED, 'cancelled before its turn'))
            if chosen is None:
                return
            chosen.planning = self._begin_here(chosen) if idle else self._prepare(
                self._plan, chosen)

    def _prepare(self, work: Callable[..., object], *args: object) -> Future:
        future = self._host.submit(work, *args)
        future.add_done_callback(lambda _: self._notify())
        return future

    def _notify(self) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def _begin_here(self, task: Task) -> Future[Running]:
        """
        Plan here what the encoder waits for, where nobody else wants this thread.

        Each hand-over to another thread takes as long as cutting a picture into patches.
        """
        planned: Future[Running] = Future()
        try:
            self._begun.append((planned, task, self._begin_plan(task)))
        except Exception as error:
            planned.set_exception(error)
        return planned

    def _plan_rest(self) -> None:
        """
        Plan the rest of what was begun here, on the host's threads.

        Not before the encoder is at work: its launch would wait for the interpreter.
        """
        begun, self._begun = self._begun, []
        for one in begun:
            self._prepare(self._end_begun, *one)

    def _end_begun(self, planned: Future[Running], task: Task, run: Running) -> None:
        try:
            planned.set_result(self._end_plan(task, run))
        except Exception as error:
            planned.set_exception(error)

    def _plan(self, task: Task) -> Running:
        """Lay a request out and make its first patches, on the host's thread."""
        return self._end_plan(task, self._begin_plan(task))

    def _begin_plan(self, task: Task) -> Running:
        """Do what the encoder waits for."""
        task.timeline.add('queue', task.submitted_ns, time.monotonic_ns())
        run = Running(self.engine, task.make(), task.timeline, task.cancelled,
                      self.options.micro_batch)
        early = run.lay_out()
        if early is not None:
            task.early = early, self.engine.model.patches(early, task.timeline)
            self._notify()
        return run

    def _end_plan(self, task: Task, run: Running) -> Running:
        """Do the rest, while the encoder may be at work."""
        run.plan()
        for visual in run.visuals[:1]:
            if task.early is None and visual.key not in self.engine.features:
                task.patches[visual.key] = self._prepare(
                    self.engine.model.patches, visual, task.timeline)
        return run
