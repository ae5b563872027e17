"""Runs transfers between two devices with torch, as a setting of the grid says."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from qwen_vl_ros.measure.interconnect import Setting


class Transport:
    """
    Copies between two devices.

    On two CPUs (for tests) the same pieces are copied in the same order, without streams.

    :param first: and ``second``: the devices.
    :param most_bytes: of a transfer; buffers of that size are taken on both.
    """

    def __init__(self, first: str, second: str, most_bytes: int) -> None:
        self.devices = (torch.device(first), torch.device(second))
        self._cuda = self.devices[0].type == 'cuda'
        self._source = [torch.randint(256, (most_bytes,), dtype=torch.uint8, device=d)
                        for d in self.devices]
        self._target = [torch.empty(most_bytes, dtype=torch.uint8, device=d)
                        for d in self.devices]
        self._host: dict[tuple[bool, int], Tensor] = {}
        self._streams: dict[tuple[int, int], Any] = {}

    def time_one(self, setting: Setting) -> float:
        """Run a setting; return the milliseconds from issue to arrival on both devices."""
        self._wait()
        started = time.perf_counter_ns()
        for direction in (0, 1) if setting.both else (0,):
            self._issue(setting, direction)
        self._wait()
        return (time.perf_counter_ns() - started) / 1e6

    def received(self, direction: int, size: int) -> bool:
        """Say whether the first ``size`` bytes have arrived."""
        return torch.equal(self._target[1 - direction][:size].cpu(),
                           self._source[direction][:size].cpu())

    def _issue(self, setting: Setting, direction: int) -> None:
        source, target = self._source[direction], self._target[1 - direction]
        pieces = min(setting.chunks, max(1, setting.size // 4096))
        edges = [setting.size * i // pieces for i in range(pieces + 1)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            lane = number % setting.streams
            if setting.way == 'direct':
                with self._on(direction, lane):
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
                continue
            host = self._buffer(setting.way == 'staged pinned', direction)[begin:end]
            with self._on(direction, lane):
                host.copy_(source[begin:end], non_blocking=True)
                arrived = self._mark(direction, lane)
            with self._on(1 - direction, lane, receiving=True):
                if arrived is not None:
                    torch.cuda.current_stream().wait_event(arrived)
                target[begin:end].copy_(host, non_blocking=True)

    def _on(self, device: int, lane: int, receiving: bool = False) -> AbstractContextManager[Any]:
        """Return the context of a lane's stream; received pieces have streams of their own."""
        if not self._cuda:
            return nullcontext()
        key = (device, lane + (1000 if receiving else 0))
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.devices[device])
        return torch.cuda.stream(self._streams[key])

    def _mark(self, device: int, lane: int) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(self._streams[device, lane])
        return event

    def _buffer(self, pinned: bool, direction: int) -> Tensor:
        key = (pinned, direction)
        if key not in self._host:
            size = self._source[direction].numel()
            self._host[key] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned
                                          and self._cuda)
        return self._host[key]

    def _wait(self) -> None:
        if self._cuda:
            for device in self.devices:
                torch.cuda.synchronize(device)


def compute_ms(device: torch.device, patches: int = 1564, width: int = 1280, layers: int = 32,
               runs: int = 5) -> float:
    """
    Return the milliseconds of the encoder's matrix products for a 640x480 picture.

    :param patches: rows of the products; the defaults are Qwen2-VL's.
    """
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    x = torch.ones(patches, width, device=device, dtype=dtype)
    up = torch.ones(width, 4 * width, device=device, dtype=dtype)
    down = torch.ones(4 * width, width, device=device, dtype=dtype)
    square = torch.ones(width, width, device=device, dtype=dtype)
    times = []
    for number in range(runs + 1):
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        started = time.perf_counter_ns()
        for _ in range(layers):
            for _ in range(4):
                torch.mm(x, square)
            torch.mm(torch.mm(x, up), down)
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        if number:
            times.append((time.perf_counter_ns() - started) / 1e6)
    return median(times)
