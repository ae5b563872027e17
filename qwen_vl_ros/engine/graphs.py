"""CUDA graphs by bucket: captured at first use, replayed afterwards, the least used given up."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

LOG = logging.getLogger('qwen_vl_ros.engine')


@dataclass(frozen=True)
class Captured:
    """
    What one capture has cost.

    :param key: of the bucket.
    :param ms: of the first run and the capture, on the host.
    :param bytes: that the device had less of afterwards.
    """

    key: Hashable
    ms: float
    bytes: int


class Graphs:
    """
    A bounded number of graphs over buffers that stay where they are.

    :param device: of the work.
    :param name: for the log.
    :param most: graphs kept.
    """

    def __init__(self, device: torch.device, name: str, most: int = 12) -> None:
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

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """
        Do what ``body`` does, in the current stream.

        :param key: bodies of one key do the same to the same memory.
        :param body: launches work in the current stream and waits for nothing. At first use it is
            called twice: once to run, once to be captured.
        """
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key, body)
        self._graphs.move_to_end(key)
        graph.replay()

    def clear(self) -> None:
        """Give all graphs up."""
        self._graphs.clear()

    def _capture(self, key: Hashable, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        started = time.monotonic()
        free = torch.cuda.mem_get_info(self._device)[0]
        outer = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(outer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            body()  # what is set up at first use must not be captured
            # Other threads go on using the device meanwhile.
            graph.capture_begin(capture_error_mode='thread_local')
            try:
                body()
            finally:
                graph.capture_end()
        outer.wait_stream(self._stream)
        while len(self._graphs) >= self._most:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph
        took = Captured(key, (time.monotonic() - started) * 1e3,
                        max(0, free - torch.cuda.mem_get_info(self._device)[0]))
        self.captured.append(took)
        LOG.info('%s: graph for %s captured in %.1f ms, %.1f MB', self._name, key, took.ms,
                 took.bytes / 1e6)
        return graph
