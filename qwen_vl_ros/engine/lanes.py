"""Lanes of device work: CUDA streams by name and urgency, and marks to wait for; none on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ACTIVE = threading.local()


def active_lane() -> str:
    """Return the name of the lane that this thread puts work on, '' outside of any."""
    return str(getattr(_ACTIVE, 'name', ''))


class Mark:
    """
    A place in a lane's work; reached when all work before it is done.

    :param event: ``None`` is reached already.
    """

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    @classmethod
    def here(cls, device: torch.device) -> Mark:
        """Return a mark behind all work in a device's current stream."""
        if device.type != 'cuda':
            return cls()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def wait(self) -> None:
        """Return when it is reached."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def reached(self) -> bool:
        """Say whether the work before it is done, without waiting."""
        if self.event is not None and self.event.query():
            self.event = None
        return self.event is None


class Lane:
    """
    A sequence of device work beside others.

    On a CPU work is done when the call returns, and a lane is a name alone.

    :param device: where it runs.
    :param name: shown in timelines.
    :param urgency: 0 is least; the blocks of more urgent lanes are scheduled first where the
        device has so many levels.
    """

    def __init__(self, device: torch.device, name: str, urgency: int) -> None:
        self.name = name
        self._stream: torch.cuda.Stream | None = None
        if device.type == 'cuda':
            self._stream = torch.cuda.Stream(device, priority=-urgency)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the work of a block onto this lane."""
        before, _ACTIVE.name = active_lane(), self.name
        try:
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield
        finally:
            _ACTIVE.name = before

    def mark(self) -> Mark:
        """Return a mark behind all work put onto this lane so far."""
        if self._stream is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)

    def wait(self, mark: Mark) -> None:
        """Let later work of this lane wait for a mark of another one; returns at once."""
        if self._stream is not None and mark.event is not None:
            self._stream.wait_event(mark.event)
