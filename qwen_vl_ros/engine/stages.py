"""Timing of device work without waiting for it, and a cache of encoded pictures."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.lanes import active_lane
from qwen_vl_ros.measure.timeline import Span, Timeline

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
        lane = self._lane()
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

            span._resolve = resolve

    def _lane(self) -> str:
        return f'{self._name} {active_lane()}'.rstrip() if self._device.type == 'cuda' else 'cpu'

    def _event(self) -> torch.cuda.Event:
        try:
            return self._spare.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def _read(self, event: torch.cuda.Event) -> int:
        """Return when an event came, nanoseconds of the host's clock; it can be used again."""
        try:
            ms = self._origin.elapsed_time(event)
        except RuntimeError:  # it has not come; asking first would take as long as reading
            event.synchronize()
            ms = self._origin.elapsed_time(event)
        if len(self._spare) < SPARE:
            self._spare.append(event)
        return self._origin_ns + int(ms * 1e6)


class _Cost:
    """Costs of a decode step, computed by whoever reads its span."""

    __slots__ = ('cost', 'past')

    def __init__(self, cost: Callable[[int], Mapping[str, Any]], past: int) -> None:
        self.cost, self.past = cost, past

    def __call__(self, span: Span) -> None:
        vars(span).update(self.cost(self.past))


def timed_step(
    rows: Mapping[int, tuple[DeviceClock, int]], cost: Callable[[int], Mapping[str, Any]],
    run: Callable[[], dict[int, Choice]],
) -> dict[int, Choice]:
    """
    Run a decode step, and note it in the timelines of all requests in it.

    It comes for every token, so that what it takes counts. Events would keep the GPU from going
    over to the next step at once (20 us of 1.1 ms on an H200); the kernels stamp their choices
    instead, and costs are computed by whoever reads the timeline. A step begins when it has been
    launched and the one before has ended.

    :param rows: by slot, a request's clock and the positions that it has cached.
    :param cost: of a request's share of the step, by those positions.
    :param run: launches what has to be and waits for the choices.
    :return: what that returns; a step that fails is in no timeline.
    """
    started = time.monotonic_ns()
    chosen = run()
    ended = time.monotonic_ns()
    lane = ''
    for slot, (clock, past) in rows.items():
        choice = chosen[slot]
        lane = lane or clock._lane()
        begin, before = choice.launched_ns or started, clock._step
        if before is not None and before.stream == lane and before.end_ns > begin:
            begin = before.end_ns
        # A stamp's place is known the better the more of them were seen: never before its begin.
        span = clock._timeline.add('token', begin, max(begin, choice.ended_ns or ended),
                                   stream=lane, shared=len(rows))
        span._resolve = _Cost(cost, past)
        clock._step = span
    return chosen


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
