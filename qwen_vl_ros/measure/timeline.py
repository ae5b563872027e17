"""A request's stages with start, end, bytes and FLOPs; the only place that measures time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

#: Stage names in the order in which a request passes them. ``token`` repeats; ``admit`` is what
#: the host does between the first token and the next: the choice is kept, the decoder takes over.
STAGES = ('image_age', 'queue', 'decode_message', 'patches', 'upload', 'select', 'encode',
          'prefill', 'first_token', 'admit', 'token', 'publish')

#: The innermost stage that is open on each thread.
_OPEN = threading.local()


@dataclass
class Span:
    """
    One stage of one request.

    :param name: one of :data:`STAGES`.
    :param start_ns: monotonic clock, nanoseconds.
    :param end_ns: monotonic clock, nanoseconds.
    :param stream: where it ran: ``'cpu'`` or the name of a CUDA stream.
    :param bytes_read: bytes that the stage must read from memory (computed from shapes).
    :param bytes_written: bytes that it must write.
    :param flops: floating-point operations (a multiply-add counts two).
    :param shared: requests that shared the stage and, evenly, the bytes of its weights.
    """

    name: str
    start_ns: int
    end_ns: int
    stream: str = 'cpu'
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    shared: int = 1
    _resolve: Callable[[Span], None] | None = field(default=None, repr=False, compare=False)

    @property
    def ms(self) -> float:
        """Return the duration in milliseconds."""
        return (self.end_ns - self.start_ns) / 1e6


def spend(flops: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
    """
    Add work to the innermost :meth:`Timeline.stage` that is open on this thread; else do nothing.

    For what does not know whose stage it works in: a selector's signals, a dropper.
    """
    span: Span | None = getattr(_OPEN, 'span', None)
    if span is not None:
        span.flops += flops
        span.bytes_read += bytes_read
        span.bytes_written += bytes_written


class Timeline:
    """
    Collects spans of one request; cheap enough to be always on.

    CUDA stages are recorded with a pair of events per span and resolved on first read, after the
    request: nothing is synchronised while it runs.
    """

    def __init__(self, request_id: str = '') -> None:
        self.request_id = request_id
        self.start_ns = time.monotonic_ns()
        self._spans: list[Span] = []
        self._resolving = threading.Lock()

    @contextmanager
    def stage(self, name: str, **cost: Any) -> Iterator[Span]:
        """
        Time a block on the host clock; what it calls may :func:`spend`.

        :param name: one of :data:`STAGES`.
        :param cost: ``stream``, ``bytes_read``, ``bytes_written``, ``flops``; the yielded span
            may also be filled in later.
        """
        span = Span(name, time.monotonic_ns(), 0, **cost)
        around, _OPEN.span = getattr(_OPEN, 'span', None), span
        try:
            yield span
        finally:
            _OPEN.span = around
            span.end_ns = time.monotonic_ns()
            self._spans.append(span)

    def add(self, name: str, start_ns: int, end_ns: int, **cost: Any) -> Span:
        """Record a stage that was timed elsewhere (same clock: ``time.monotonic_ns``)."""
        span = Span(name, start_ns, end_ns, **cost)
        self._spans.append(span)
        return span

    @property
    def spans(self) -> list[Span]:
        """Return all spans, resolved, ordered by start."""
        with self._resolving:
            for span in self._spans:
                if span._resolve is not None:
                    resolve, span._resolve = span._resolve, None
                    resolve(span)
        return sorted(self._spans, key=lambda s: s.start_ns)

    def ms(self, name: str) -> float:
        """Return the milliseconds spent in all spans of that name (0 when there are none)."""
        return sum(s.ms for s in self.spans if s.name == name)

    def total_ms(self) -> float:
        """Return the time from creation to the end of the last span."""
        spans = self.spans
        return (max(s.end_ns for s in spans) - self.start_ns) / 1e6 if spans else 0.0

    def time_to_first_token_ms(self) -> float:
        """Return the time from creation to the end of ``first_token`` (NaN before it)."""
        ends = [s.end_ns for s in self.spans if s.name == 'first_token']
        return (ends[0] - self.start_ns) / 1e6 if ends else float('nan')

    def busy_ms(self) -> float:
        """
        Return the time from creation to the last end in which at least one stage ran.

        Overlapping stages count once; ``image_age``, which lies before the request, not at all.
        """
        covered, reached = 0, self.start_ns
        for span in self.spans:
            if span.name != 'image_age' and span.end_ns > reached:
                covered += span.end_ns - max(span.start_ns, reached)
                reached = span.end_ns
        return covered / 1e6

    def unaccounted_ms(self) -> float:
        """Return the part of :meth:`total_ms` in which no stage ran: what nobody measures."""
        return max(0.0, self.total_ms() - self.busy_ms())

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as JSON-ready data; times in milliseconds from its start."""
        return {
            'request_id': self.request_id,
            'spans': [
                {'name': s.name, 'start_ms': (s.start_ns - self.start_ns) / 1e6, 'ms': s.ms,
                 'stream': s.stream, 'bytes_read': s.bytes_read,
                 'bytes_written': s.bytes_written, 'flops': s.flops}
                for s in self.spans],
        }
