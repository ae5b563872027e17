"""Continuous mode: the standing question about the newest frames, camera by camera."""

from __future__ import annotations

from collections.abc import Callable

from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.types import Delta, Stage
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.perception import Perception
from qwen_vl_ros.node.requests import Job, Outcome, Question, Queued
from qwen_vl_ros.standing import AHEAD, Standing

#: Told the events of one question, besides the topics.
Watch = Callable[[Job, 'Queued | Stage | Delta | Outcome'], None]

#: Queues a question that is made given its id; raises EngineError where it is refused.
Start = Callable[[Callable[[str], Question], Watch], Job]


class ContinuousMode:
    """
    Asks the standing question of cameras whose turn it is.

    A camera that is due keeps its turn until there is a place for it: of two that are due at the
    same moment, the second is asked when the first makes room. Under too much load they alternate.

    :param start: queues a question.
    :param log: for what is refused.
    :param wake: called, on whatever thread, when a place became free: :meth:`pump` soon.
    """

    def __init__(self, start: Start, log: Callable[[str], object],
                 wake: Callable[[], object] = lambda: None) -> None:
        self._start = start
        self._log = log
        self._wake = wake
        self._standing: Standing | None = None
        self._due: set[str] = set()

    def restart(self) -> None:
        """Forget what is under way: it has been ended."""
        self._standing = None
        self._due.clear()

    def tick(self, settings: Settings, perception: Perception) -> None:
        """Begin a period: each camera is due, and those for which there is a place are asked."""
        self._due.update(settings.standing_cameras())
        self.pump(settings, perception)

    def pump(self, settings: Settings, perception: Perception) -> None:
        """Ask about the newest frame of each camera that is due and for which there is a place."""
        if not settings.continuous_enable:
            self._due.clear()
            return
        names = settings.standing_cameras()
        requests = perception.requests
        if self._standing is None or self._standing.sources != names:
            self._standing = Standing(names, AHEAD if perception.overlap is not None else 0)
            requests.standing = len(names)
        for _ in names:
            if perception.overlap is None and (requests.busy or requests.depth):
                return
            name = self._standing.next(
                [n for n in names if n in self._due and perception.store.is_new(n)])
            if name is None:
                return
            if self._ask(name, settings, self._standing):
                self._due.discard(name)

    def _ask(self, name: str, settings: Settings, standing: Standing) -> bool:
        """Return whether the question was taken."""
        decoded: list[bool] = []

        def make(number: str) -> Question:
            return Question(
                settings.continuous_question, cameras=(name,),
                num_frames=settings.continuous_num_frames,
                deadline_s=settings.generation_deadline_s, source='continuous', question_id=number)

        def watch(job: Job, event: Queued | Stage | Delta | Outcome) -> None:
            if isinstance(event, Stage) and event.name == 'decode':
                decoded.append(True)
                standing.decoding(name)
                self._wake()
            elif isinstance(event, Outcome):
                standing.ended(name, bool(decoded))
                self._wake()

        try:
            self._start(make, watch)
        except EngineError as error:
            standing.ended(name, False)
            self._log(f'standing question put off: {error.message}')
            return False
        return True
