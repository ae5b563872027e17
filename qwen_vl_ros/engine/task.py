"""A request in the scheduler: what it waits for, and the device work that it has under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.lanes import Lane, Mark
from qwen_vl_ros.engine.offload import Prepared
from qwen_vl_ros.engine.prompt import VisualToken
from qwen_vl_ros.engine.running import Running
from qwen_vl_ros.engine.stages import DeviceClock
from qwen_vl_ros.engine.types import Event, Request
from qwen_vl_ros.measure.timeline import Timeline


class Priority(IntEnum):
    """Who goes first; within one priority, who came first."""

    INTERACTIVE = 0
    SERVICE = 1
    CONTINUOUS = 2


#: Told the events of a request; the last one is :class:`Done` or the error that ended it.
Listener = Callable[['Event | EngineError'], None]


@dataclass(eq=False)
class Task:
    """
    One request on its way.

    :param make: makes the request on the host's thread: pictures are chosen and decoded there.
    :param listener: told the events on the scheduler's thread.
    :param rank: priority, then number: smaller goes first.
    :param session: requests of one non-empty session come one after the other.
    """

    make: Callable[[], Request]
    listener: Listener
    rank: tuple[Priority, int]
    timeline: Timeline
    cancelled: Callable[[], bool]
    session: str = ''
    #: Monotonic clock when it was handed in, nanoseconds.
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    #: Its way through the stages, once it is planned.
    run: Running | None = None
    planning: Future[Running] | None = None
    #: Patches by the visual's key, made ahead or on their way.
    patches: dict[int, Future[Prepared]] = field(default_factory=dict)
    #: The first visual without its key, and its patches, both made before all is planned.
    early: tuple[VisualToken, Prepared] | None = None
    #: Its merged tokens and whether they are finite, encoded before all is planned.
    adopted: tuple[Tensor, Tensor] | None = None
    early_mark: Mark = field(default_factory=Mark)
    clock: DeviceClock | None = None
    opened: bool = False
    told_prefill: bool = False
    #: Of each part encoded: its place in the prompt, and the mark behind its work.
    encoded: list[tuple[int, int, Mark]] = field(default_factory=list)
    #: Behind the last work on the device that it has.
    marks: list[Mark] = field(default_factory=list)
    last: int = -1
    decoding: bool = False
    ended: bool = False
    #: What it holds cannot be trusted.
    spoiled: bool = False

    @property
    def priority(self) -> Priority:
        """Return its priority."""
        return self.rank[0]

    @property
    def quiet(self) -> bool:
        """Say whether the device has done all of its work."""
        self.marks = [mark for mark in self.marks if not mark.reached]
        return not self.marks

    def horizon(self) -> int:
        """
        Return the prompt's index up to which prefill should go now.

        The part encoded last is left for later while another one follows and something else can
        be done: prefill runs one part behind the encoder.
        """
        run = self.run
        assert run is not None
        if run.to_encode is None or not self.encoded or self.encoded[-1][2].reached:
            return run.ready
        return self.encoded[-1][0]


class Track:
    """
    The two lanes of one urgency, with at most so much work under way on each.

    :param depth: units of work that the device has at most; the next one is chosen when one is
        done, so that what is more urgent overtakes.
    """

    def __init__(self, vision: Lane, prefill: Lane, depth: int = 2) -> None:
        self.vision = vision
        self.prefill = prefill
        self._depth = depth
        self._flights: dict[str, list[Mark]] = {}

    def room(self, lane: Lane) -> bool:
        """Say whether another unit may go onto a lane."""
        flights = [mark for mark in self._flights.get(lane.name, ()) if not mark.reached]
        self._flights[lane.name] = flights
        return len(flights) < self._depth

    def took(self, lane: Lane, task: Task) -> Mark:
        """Note that a unit of a task went onto a lane; return the mark behind it."""
        mark = lane.mark()
        self._flights.setdefault(lane.name, []).append(mark)
        task.marks = [other for other in task.marks if not other.reached] + [mark]
        return mark

    @property
    def busy(self) -> bool:
        """Say whether the device has work of this track."""
        return any(not mark.reached for marks in self._flights.values() for mark in marks)
