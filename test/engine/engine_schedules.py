"""Schedulers driven by hand, and listeners that keep what they are told."""

from __future__ import annotations

import threading
import time

from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler
from qwen_vl_ros.engine.types import Delta, Done, Stage


class Events(list):
    """A listener; ``flag`` cancels."""

    def __init__(self):
        super().__init__()
        self.flag = threading.Event()

    def __call__(self, event):
        assert not self.ended
        self.append(event)

    @property
    def ended(self):
        return bool(self) and isinstance(self[-1], (Done, EngineError))

    @property
    def answer(self):
        assert isinstance(self[-1], Done), self[-1]
        return self[-1].answer

    @property
    def error(self):
        return self[-1] if isinstance(self[-1], EngineError) else None

    @property
    def text(self):
        return ''.join(event.text for event in self if isinstance(event, Delta))

    @property
    def stages(self):
        return [event.name for event in self if isinstance(event, Stage)]


class Driven(Scheduler):
    """A scheduler without a thread of its own, which is not driven for ever."""

    def __init__(self, *given):
        super().__init__(*given)
        self.until = time.monotonic() + 60

    def run_once(self):
        assert time.monotonic() < self.until, 'requests do not come to their end'
        return super().run_once()

    def settle(self):
        """Take up what waits, until all that the host does for it is done."""
        self._take_up()
        self._plan_rest()
        for task in list(self._rounds.active):
            task.planning.exception()
            for patches in task.patches.values():
                patches.exception()


def scheduler(engine, waiting=32, **options):
    """Return a scheduler to be driven by :meth:`run_once`."""
    return Driven(engine, ScheduleOptions(waiting=waiting, **options))


def idle(plan):
    """Check that nothing is held by requests that have ended."""
    plan.run_once()
    assert plan.under_way == 0 and not plan._rounds._draining
    pool = plan.engine.pool
    assert not pool._in_use and pool.available
    assert all(slot is None for slot in plan.engine.model.decoder._slots)
