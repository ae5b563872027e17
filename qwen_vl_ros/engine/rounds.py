"""Units of work on the device, for requests beside each other; the order is Scheduler's idea."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor

from qwen_vl_ros.engine.device import is_out_of_memory
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.lanes import Lane, Mark
from qwen_vl_ros.engine.offload import Prepared
from qwen_vl_ros.engine.parts import Look, whole
from qwen_vl_ros.engine.running import Running
from qwen_vl_ros.engine.stages import DeviceClock
from qwen_vl_ros.engine.task import Priority, Task, Track
from qwen_vl_ros.engine.types import Event, Stage
from qwen_vl_ros.measure.timeline import Timeline

LOG = logging.getLogger(__name__)

#: Units of work put onto a GPU between two decode steps at most.
UNITS = 4

#: Timelines that the bubble is computed from.
KEPT = 64


class Rounds:
    """
    Requests under way, most urgent first, and what is done for them.

    :param engine: nobody else uses it meanwhile.
    :param prepare: runs a function on the host's threads.
    """

    def __init__(self, engine: Engine, prepare: Callable[..., Future]) -> None:
        self.engine = engine
        self.active: list[Task] = []
        self.finished: deque[Timeline] = deque(maxlen=KEPT)
        device = engine.model.device
        self._prepare = prepare
        self._decode_lane = Lane(device, 'decode', 3)
        self._clock_lane = Lane(device, 'clock', 3)
        self._tracks = {
            True: Track(Lane(device, 'vision', 1), Lane(device, 'prefill', 2)),
            False: Track(Lane(device, 'vision continuous', 0),
                         Lane(device, 'prefill continuous', 0), depth=1)}
        self._draining: list[Task] = []
        self._acquired = Mark()
        self._units = UNITS if device.type == 'cuda' else 1

    def add(self, task: Task) -> None:
        """Take a request in whose planning has begun."""
        self.active.append(task)
        self.active.sort(key=lambda t: t.rank)

    @property
    def device_busy(self) -> bool:
        """Say whether the device is at work that was put onto it before."""
        return bool(self._draining) or any(track.busy for track in self._tracks.values())

    @property
    def choosing(self) -> bool:
        """Say whether the device will soon have chosen somebody's first token."""
        return any(task.run is not None and task.run.chooses for task in self.active)

    def advance(self) -> bool:
        """
        Run the next units of work of the most urgent request that has one.

        A GPU gets several at once: launching them takes less time than they do.
        """
        for done in range(self._units):
            if not self._advance():
                return done > 0
        return True

    def _advance(self) -> bool:
        for task in list(self.active):
            if task.decoding or task.planning is None:
                continue
            try:
                if not task.planning.done():
                    if self._encode_early(task):
                        return True
                    continue
                if task.run is None:
                    task.run = task.planning.result()
                if self._unit(task, task.run):
                    return True
            except Exception as error:
                self.fail(task, error)
                return True
        return False

    def _clock(self, task: Task) -> DeviceClock:
        if task.clock is None:
            with self._clock_lane.active():
                task.clock = DeviceClock(task.timeline, self.engine.model.device)
        return task.clock

    def _encode_early(self, task: Task) -> bool:
        """Encode a still whose request is still being planned; it is nearly always new."""
        track = self._track(task)
        if task.early is None or task.adopted is not None or not track.room(track.vision):
            return False
        visual, prepared = task.early
        if task.cancelled():
            return False
        clock = self._clock(task)
        with track.vision.active():
            task.adopted = self.engine.model.encode_part(visual, prepared, whole(visual), clock)
        task.early_mark = track.took(track.vision, task)
        return True

    def _held(self, tasks: Iterable[Task]) -> bool:
        """
        Say whether decoding lets vision go first now.

        A decode step and the encoder both want the whole device. Steps that wait until no frame
        can be taken up are shared by more sequences than steps that run as they can; for standing
        questions that is the better use of the device (measured: docs/architecture.md). Whoever
        waits for words is not held up, and the pictures of an urgent question go before the words
        of standing ones.
        """
        if any(task.priority < Priority.CONTINUOUS for task in tasks):
            return False
        return any(track.busy for track in self._tracks.values())

    def _track(self, task: Task) -> Track:
        return self._tracks[task.priority < Priority.CONTINUOUS]

    def _unit(self, task: Task, run: Running) -> bool:
        """Do a unit of a request's work before its decoding; ``False`` when it has to wait."""
        state = run.generated
        state.reason = run.stop()
        if state.reason:
            self._finish(task, run)
            return True
        track = self._track(task)
        if not task.opened:
            return self._open_caches(task, run, track)
        if self._encode(task, run, track) or self._prefill(task, run, track):
            return True
        if run.prefilled < run.prompt.ids.size or not task.quiet:
            return False
        with track.prefill.active():
            choice = run.first_choice()
        self.tell(task, Stage('decode'))
        self._accept(task, run, choice)
        if not task.ended:
            self._decode_lane.wait(track.prefill.mark())
            with self._decode_lane.active():
                run.admit(choice.token)
            task.decoding = True
        return True

    def _open_caches(self, task: Task, run: Running, track: Track) -> bool:
        if not self.engine.pool.available:
            return False
        clock = self._clock(task)
        # Rows are copied from caches whose owners work on other lanes.
        track.prefill.wait(self._acquired)
        with track.prefill.active():
            run.open(clock)
        self._acquired = track.prefill.mark()
        task.marks.append(self._acquired)
        task.opened = True
        if task.adopted is not None and run.adopt(*task.adopted):
            task.encoded.append((*run.looks[0].span, task.early_mark))
        task.adopted = None
        if run.looks:
            self.tell(task, Stage('vision'))
        return True

    def _encode(self, task: Task, run: Running, track: Track) -> bool:
        """Encode the next part, at most one ahead of prefill."""
        look = run.to_encode
        if look is None or not track.room(track.vision):
            return False
        patches = self._patches(task, look)
        behind = bool(task.encoded) and task.horizon() > run.prefilled
        if patches is None or (behind and track.room(track.prefill)):
            return False
        start = look.ready
        with track.vision.active():
            run.encode(look, patches)
        task.encoded.append((start, look.ready, track.took(track.vision, task)))
        if not look.parts:
            task.patches.pop(look.visual.key, None)
        return True

    def _patches(self, task: Task, look: Look) -> Prepared | None:
        """Return a visual's patches; ``None`` while they, and the next one's, are being made."""
        assert task.run is not None
        ahead = [other for other in task.run.looks if other.parts][:2]
        for other in ahead:
            if other.visual.key in task.patches:
                continue
            if task.early is not None and other.visual is task.run.visuals[0]:
                made: Future[Prepared] = Future()
                made.set_result(task.early[1])
                task.patches[other.visual.key] = made
            else:
                task.patches[other.visual.key] = self._prepare(task.run.patches, other)
        future = task.patches[look.visual.key]
        return future.result() if future.done() else None

    def _prefill(self, task: Task, run: Running, track: Track) -> bool:
        """Prefill what is ready, a chunk of it."""
        most = min(task.horizon() - run.prefilled, self.engine.options.prefill_chunk)
        if most <= 0 or not track.room(track.prefill):
            return False
        if not task.told_prefill:
            task.told_prefill = True
            self.tell(task, Stage('prefill'))
        for start, stop, mark in task.encoded:
            if start < run.prefilled + most and stop > run.prefilled:
                track.prefill.wait(mark)
        with track.prefill.active():
            run.prefill(most)
            if self._units > 1 and run.prefilled == run.prompt.ids.size:
                # At once: its many small kernels are launched while the GPU is at the prefill.
                run.launch_first()
        track.took(track.prefill, task)
        return True

    def decode(self) -> bool:
        """Run one token of every sequence that has come so far."""
        rows: dict[int, tuple[Task, Running]] = {}
        allowed: dict[int, Tensor] = {}
        for task in [task for task in self.active if task.decoding]:
            run = task.run
            assert run is not None and run.slot is not None
            try:
                run.generated.reason = run.stop()
                if run.generated.reason:
                    self._finish(task, run)
                    continue
                mask = run.allowed(task.last)
                if mask is not None:
                    allowed[run.slot] = mask
                rows[run.slot] = task, run
            except Exception as error:
                self.fail(task, error)
        if not rows or self._held(task for task, _ in rows.values()):
            return False
        for slot, choice in self._step(rows, allowed).items():
            task, run = rows[slot]
            try:
                self._accept(task, run, choice)
            except Exception as error:
                self.fail(task, error)
        return True

    def _step(self, rows: dict[int, tuple[Task, Running]],
              allowed: dict[int, Tensor]) -> dict[int, Choice]:
        """Step all; where there is no memory for it, once more without what is only kept."""
        clocks = {slot: (run.clock, run.prefilled) for slot, (_, run) in rows.items()}
        for again in (True, False):
            try:
                with self._decode_lane.active():
                    return self.engine.model.step(clocks, allowed)
            except Exception as error:
                if again and is_out_of_memory(error):
                    self.engine.drop_caches()
                    continue
                for task, _ in rows.values():
                    self.fail(task, error)
                return {}
        return {}

    def _accept(self, task: Task, run: Running, choice: Choice) -> None:
        task.last = choice.token
        delta = run.accept(choice)
        if delta is not None:
            self.tell(task, delta)
        if run.generated.reason:
            self._finish(task, run)

    def _finish(self, task: Task, run: Running) -> None:
        """End a request with what it has come to."""
        delta = run.end()
        if delta is not None:
            self.tell(task, delta)
        done = run.answer()
        self._leave(task)
        self.finished.append(task.timeline)
        self.tell(task, done)

    def fail(self, task: Task, error: Exception) -> None:
        """End a request with an error; others that run are not touched."""
        if task.ended:
            return
        shown = task.run.request if task.run is not None else None
        reason, task.spoiled = self.engine.explain(error, shown)
        self._leave(task)
        if task.spoiled:
            self.engine.drop_caches()
        self.tell(task, reason)

    def _leave(self, task: Task) -> None:
        """Take a request out; what it holds is given back when the device is done with it."""
        task.ended, task.decoding = True, False
        self.active.remove(task)
        if task.run is not None and task.run.slot is not None:
            with self._decode_lane.active():
                task.run.release()
            task.marks.append(self._decode_lane.mark())
        self._draining.append(task)
        self.drain()

    def drain(self) -> bool:
        """Give back what requests held that have ended, once the device is done with it."""
        quiet = [task for task in self._draining if task.quiet]
        for task in quiet:
            self._draining.remove(task)
            if task.run is not None:
                task.run.close(keep=not task.spoiled)
        return bool(quiet)

    def end_all(self, error: EngineError) -> None:
        """End every request with an error."""
        for task in list(self.active):
            self.fail(task, error)

    def tell(self, task: Task, event: Event | EngineError) -> None:
        """Tell a listener; nothing of its comes back."""
        try:
            task.listener(event)
        except Exception:
            LOG.exception('a listener failed')
