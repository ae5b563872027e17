"""Timing of device work without waiting for it, and a cache of encoded pictures."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from qwen_vl_ros.engine.lanes import active_lane
from qwen_vl_ros.measure.timeline import Span, Timeline

T = TypeVar('T')

#: Events kept for each device: making them takes longer than recording them.
SPARE = 512
_SPARE: dict[torch.device, list[torch.cuda.Event]] = {}


class DeviceClock:
    """
    Records stages of one request on its device.

    On a CPU that is the host clock. On CUDA each stage is a pair of events; they are read when the
    timeline is, placed on the host clock by one event recorded at the start of the request. Decode
    steps are timed by :func:`timed_step`.

    :param timeline: receives the spans.
    :param device: where the stages run.
    """

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self._timeline = timeline
        self._device = device
        self._spare = _SPARE.setdefault(device, [])
        #: The newest span, where it is a decode step's.
        self._step: Span | None = None
        if device.type == 'cuda':
            self._name = str(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(device))
            self._origin_ns = time.monotonic_ns()

    def beside(self, device: torch.device) -> DeviceClock:
        """Return a clock for the same request's stages on another device."""
        return self if device == self._device else DeviceClock(self._timeline, device)

    @contextmanager
    def stage(
        self, name: str, later: Callable[[], Mapping[str, Any]] | None = None, **cost: Any,
    ) -> Iterator[None]:
        """
        Time a block of device work; ``cost`` as in :meth:`Timeline.stage`.

        :param later: gives the cost when the work has been launched: the device need not wait.
        """
        if self._device.type != 'cuda':
            with self._timeline.stage(name, **cost) as span:
                yield
            vars(span).update(later() if later else {})
            return
        stream = torch.cuda.current_stream(self._device)
        lane = f'{self._name} {active_lane()}'.rstrip()
        begin = self._event()
        begin.record(stream)
        started = time.monotonic_ns()
        try:
            yield
        finally:
            end = self._event()
            end.record(stream)
            span = self._timeline.add(
                name, started, time.monotonic_ns(), stream=lane, **cost,
                **(later() if later else {}))
            self._step = None

            def resolve(span: Span) -> None:
                span.start_ns, span.end_ns = self._read(begin), self._read(end)
                self._spare_again(begin)
                self._spare_again(end)

            span._resolve = resolve

    def _event(self) -> torch.cuda.Event:
        try:
            return self._spare.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def _read(self, event: torch.cuda.Event) -> int:
        """Return when an event came, nanoseconds of the host's clock."""
        try:
            ms = self._origin.elapsed_time(event)
        except RuntimeError:  # it has not come; asking first would take as long as reading
            event.synchronize()
            ms = self._origin.elapsed_time(event)
        return self._origin_ns + int(ms * 1e6)

    def _spare_again(self, event: torch.cuda.Event) -> None:
        if len(self._spare) < SPARE:
            self._spare.append(event)


class _Step:
    """
    When a decode step began and ended, for all requests in it.

    :param clock: of any of them.
    :param begin: ``None`` where all of them had the step before in the same lane: this one began
        with the end of that, or when the host launched it, whatever came later.
    :param users: how many will read it.
    """

    __slots__ = ('_clock', '_last', 'begin', 'end')

    def __init__(self, clock: DeviceClock, begin: torch.cuda.Event | None, end: torch.cuda.Event,
                 users: int) -> None:
        self.begin, self.end = begin, end
        self._clock = clock
        self._last = [True] + [False] * (users - 1)

    def read(self) -> None:
        """Be told that a user has read; after the last one the events can be used again."""
        if self._last.pop():  # of one thread alone, whoever reads at the same time
            self._clock._spare_again(self.end)
            if self.begin is not None:
                self._clock._spare_again(self.begin)


class _StepOf:
    """What a request's span of a decode step is read from."""

    __slots__ = ('before', 'clock', 'cost', 'past', 'step')

    def __init__(self, step: _Step | None, clock: DeviceClock, before: Span | None,
                 cost: Callable[[int], Mapping[str, Any]], past: int) -> None:
        self.step, self.clock, self.before = step, clock, before
        self.cost, self.past = cost, past

    def __call__(self, span: Span) -> None:
        vars(span).update(self.cost(self.past))
        step = self.step
        if step is None:
            return
        span.end_ns = self.clock._read(step.end)
        if self.before is not None:
            span.start_ns = max(span.start_ns, self.before.end_ns)
        elif step.begin is not None:
            span.start_ns = self.clock._read(step.begin)
        step.read()


def timed_step(
    rows: Sequence[tuple[DeviceClock, int]], cost: Callable[[int], Mapping[str, Any]],
    run: Callable[[], T],
) -> T:
    """
    Run a decode step, and note it in the timelines of all requests in it.

    It comes for every token, so that what it takes counts: one event for all, and costs are
    computed by whoever reads the timeline.

    :param rows: each request's clock, all of one device, and the positions that it has cached.
    :param cost: of a request's share of the step, by those positions.
    :param run: launches it and waits for what was chosen.
    :return: what that returns; a step that fails is in no timeline.
    """
    first = rows[0][0]
    on_gpu = first._device.type == 'cuda'
    lane, begin = 'cpu', None
    if on_gpu:
        lane = f'{first._name} {active_lane()}'.rstrip()
        stream = torch.cuda.current_stream(first._device)
        for clock, _ in rows:
            if clock._step is None or clock._step.stream != lane:
                begin = first._event()
                begin.record(stream)
                break
    started = time.monotonic_ns()
    out = run()
    step = None
    if on_gpu:
        end = first._event()
        end.record(stream)
        step = _Step(first, begin, end, len(rows))
    ended = time.monotonic_ns()
    for clock, past in rows:
        before = clock._step
        if before is not None and before.stream != lane:
            before = None
        span = clock._timeline.add('token', started, ended, stream=lane, shared=len(rows))
        span._resolve = _StepOf(step, clock, before, cost, past)
        clock._step = span
    return out


class Arriving:
    """
    A small tensor on its way to the host.

    :param row: on whatever device; copied behind what its present stream does.
    """

    def __init__(self, row: Tensor) -> None:
        self._row = row
        self._event: torch.cuda.Event | None = None
        if row.is_cuda:
            self._row = torch.empty_like(row, device='cpu', pin_memory=True)
            self._row.copy_(row, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(row.device))

    def wait(self) -> Tensor:
        """Return it on the host, when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._row


class FeatureCache:
    """
    Merged tokens by content key, least recently used out first.

    :param most_bytes: of all tensors together.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[int, tuple[Tensor, int]] = OrderedDict()
        self._glances: Counter[int] = Counter()
        self._bytes = 0

    def get(self, key: int) -> Tensor | None:
        """Return the features [kept, width] stored under a content key."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: int, features: Tensor, glance: int = 0) -> None:
        """
        Store features; what does not fit at all is not kept.

        :param glance: :attr:`VisualToken.glance` of what they are of.
        """
        self._drop(key)
        if features.nbytes > self._most_bytes:
            return
        self._entries[key] = features, glance
        self._glances[glance] += 1
        self._bytes += features.nbytes
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: int) -> None:
        if key in self._entries:
            features, glance = self._entries.pop(key)
            self._bytes -= features.nbytes
            self._glances[glance] -= 1
            if not self._glances[glance]:
                del self._glances[glance]

    def clear(self) -> None:
        """Drop all features."""
        self._entries.clear()
        self._glances.clear()
        self._bytes = 0

    def may_hold(self, glance: int) -> bool:
        """Say whether features of a visual of such a glance are there; from any thread."""
        return glance in self._glances

    def __contains__(self, key: int) -> bool:
        """Say whether features are stored; safe to ask from other threads."""
        return key in self._entries

    def __len__(self) -> int:
        """Return the number of pictures held."""
        return len(self._entries)
