"""CUDA graphs by bucket: captured at first use, replayed afterwards, the least used given up."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

LOG = logging.getLogger('qwen_vl_ros.engine')


@dataclass(frozen=True)
class Captured:
    """
    What one capture has cost.

    :param key: of the bucket.
    :param prepare_ms: of choices made by timing, where none were remembered; on the host.
    :param ms: of the first run and the capture, on the host.
    :param bytes: that the device had less of afterwards.
    :param run_ms: of the first replay, on the device.
    """

    key: Hashable
    prepare_ms: float
    ms: float
    bytes: int
    run_ms: float


class Runner(Protocol):
    """What fills buffers and works on them; :class:`Graphs` does it by replaying graphs."""

    captured: list[Captured]

    def run(
        self, key: Hashable, fill: Callable[[], None], body: Callable[[], None],
        prepare: Callable[[], None],
    ) -> None:
        """See :meth:`Graphs.run`."""

    def clear(self) -> None:
        """Forget what belongs to buffers that are given up."""


class Direct:
    """Runs bodies as they are, without graphs."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []

    def run(
        self, key: Hashable, fill: Callable[[], None], body: Callable[[], None],
        prepare: Callable[[], None],
    ) -> None:
        """Fill the buffers and do what ``body`` does to them."""
        fill()
        body()

    def clear(self) -> None:
        """Do nothing: nothing is kept."""


class Turns:
    """
    Lets threads and streams use the same buffers one after the other.

    :param device: of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def take(self) -> Iterator[None]:
        """
        Work in the device's current stream, after what another stream still does.

        The device is the thread's own meanwhile: a launch goes to that, whatever its stream says.
        """
        if self._device.type != 'cuda':
            with self._lock:
                yield
            return
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_event(self._last)
            try:
                yield
            finally:
                self._last = torch.cuda.Event()
                self._last.record(stream)


class Graphs:
    """
    A bounded number of graphs over buffers that stay where they are.

    :param device: of the work.
    :param name: for the log.
    :param most: graphs kept.
    """

    def __init__(self, device: torch.device, name: str, most: int = 24) -> None:
        self._device = device
        self._name = name
        self._most = most
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        #: Every capture so far, oldest first.
        self.captured: list[Captured] = []

    def __len__(self) -> int:
        """Return the number of graphs held."""
        return len(self._graphs)

    def run(
        self, key: Hashable, fill: Callable[[], None], body: Callable[[], None],
        prepare: Callable[[], None],
    ) -> None:
        """
        Fill the buffers and do what ``body`` does to them, in the current stream.

        :param key: bodies of one key do the same to the same memory.
        :param fill: writes the inputs, which the body may spoil.
        :param body: launches work in the current stream and waits for nothing. At first use it is
            called twice: once so that all is set up, once to be captured.
        :param prepare: called once before a capture; may wait for the device.
        """
        fill()
        graph = self._graphs.get(key)
        if graph is None:
            self._capture(key, fill, body, prepare)
            return
        self._graphs.move_to_end(key)
        graph.replay()

    def clear(self) -> None:
        """Give all graphs up."""
        self._graphs.clear()

    def _capture(
        self, key: Hashable, fill: Callable[[], None], body: Callable[[], None],
        prepare: Callable[[], None],
    ) -> None:
        started = time.monotonic()
        prepare()
        ready = time.monotonic()
        free = torch.cuda.mem_get_info(self._device)[0]
        outer = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(outer)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                body()  # what is set up at first use must not be captured
                # Other threads go on using the device meanwhile.
                graph.capture_begin(capture_error_mode='thread_local')
                try:
                    body()
                except Exception:
                    # What it says of a capture that broke off would hide why.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            # Also after a failure: who gets the buffers next must not meet work that goes on.
            outer.wait_stream(self._stream)
        while len(self._graphs) >= self._most:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph
        took = (time.monotonic() - ready) * 1e3
        used = max(0, free - torch.cuda.mem_get_info(self._device)[0])
        fill()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(outer)
        graph.replay()
        end.record(outer)
        end.synchronize()
        self.captured.append(Captured(
            key, (ready - started) * 1e3, took, used, begin.elapsed_time(end)))
        LOG.info('%s: graph for %s captured in %.1f ms after %.1f ms of choosing, %.1f MB; it '
                 'runs %.2f ms', self._name, key, took, (ready - started) * 1e3, used / 1e6,
                 self.captured[-1].run_ms)
