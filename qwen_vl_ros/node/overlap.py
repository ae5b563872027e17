"""Questions on the engine's scheduler: beside each other, told from a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qwen_vl_ros.engine.constrain import is_json
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Answer, Delta, Done, Event, Request, Stage
from qwen_vl_ros.measure.bubble import Bubble, bubble
from qwen_vl_ros.node.requests import Job, Outcome

if TYPE_CHECKING:
    from qwen_vl_ros.engine.schedule import Scheduler
    from qwen_vl_ros.engine.task import Priority


class Overlap:
    """
    Runs jobs on a scheduler.

    Events are told on one thread of their own: publishing takes as long as a decode step, and the
    thread that feeds the device must not wait for it.

    :param plan: started here, ended by :meth:`stop`.
    :param prepare: makes a job's request, on the scheduler's host threads.
    """

    def __init__(self, plan: Scheduler, prepare: Callable[[Job], Request]) -> None:
        self.plan = plan
        self._make = prepare
        self._events: queue.SimpleQueue[tuple[Callable[..., None], object] | None] = (
            queue.SimpleQueue())
        self._teller = threading.Thread(target=self._tell, name='tell', daemon=True)
        self._teller.start()
        plan.start()

    def stop(self, timeout_s: float) -> bool:
        """End all questions; return whether the scheduler has let go of the engine."""
        ended = self.plan.stop(timeout_s=timeout_s)
        if ended:
            self._events.put(None)
            self._teller.join(timeout_s)
        # Otherwise what is still to be told, when the engine lets go, must find its thread.
        return ended

    def pipeline(self) -> Bubble:
        """Return the bubbles of the newest answers."""
        return bubble(self.plan.finished)

    @property
    def places(self) -> int:
        """See :attr:`Runner.places`."""
        return self.plan.places

    def room(self, job: Job) -> bool:
        """See :meth:`Runner.room`."""
        return self.plan.room(priority_of(job))

    def run(self, job: Job, ended: Callable[[Outcome], None]) -> None:
        """See :meth:`Runner.run`."""
        made: list[Request] = []

        def make() -> Request:
            made.append(self._make(job))
            return made[0]

        def listener(event: Event | EngineError) -> None:
            if isinstance(event, (Stage, Delta)):
                self._events.put((job.tell, event))
            else:
                self._events.put((ended, conclude(job, event, made)))

        self.plan.submit(
            make, listener, priority=priority_of(job), timeline=job.timeline,
            cancelled=job.should_stop, session=str(job.question.options.get('session_id', '')))

    def _tell(self) -> None:
        while (entry := self._events.get()) is not None:
            tell, event = entry
            tell(event)


def priority_of(job: Job) -> Priority:
    """Return who goes first: what somebody waits for, then services, then the rest."""
    from qwen_vl_ros.engine.task import Priority

    return {'continuous': Priority.CONTINUOUS, 'service': Priority.SERVICE}.get(
        job.question.source, Priority.INTERACTIVE)


def conclude(job: Job, event: Done | EngineError, made: list[Request]) -> Outcome:
    """Return the outcome that a scheduler's last event stands for."""
    if isinstance(event, Done):
        return outcome_of(job, event.answer, made[0])
    if job.stopped is not None and event.code == ErrorCode.CANCELLED:
        return job.stopped
    return Outcome(event.code, event.message)


def outcome_of(job: Job, answer: Answer, request: Request) -> Outcome:
    """Return the outcome of a question that the engine has answered, wholly or in part."""
    answer = replace(answer, approximate=(*answer.approximate, *job.approximate))
    stopped = job.stopped
    if stopped is None or answer.finish_reason not in ('cancelled', 'deadline'):
        if request.json_schema and not is_json(answer.text):
            return Outcome(
                ErrorCode.BAD_SCHEMA,
                f'the answer ended ({answer.finish_reason}) before it was whole JSON; a '
                'larger max_new_tokens or a simpler schema may help', answer)
        return Outcome(ErrorCode.NONE, answer=answer)
    reason = 'deadline' if stopped.code == ErrorCode.DEADLINE else 'cancelled'
    return replace(stopped, answer=replace(answer, finish_reason=reason))
