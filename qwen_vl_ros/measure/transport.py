"""Runs transfers between two devices with torch, as a setting of the grid says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from qwen_vl_ros.measure.interconnect import Setting, choose


class Mover:
    """
    Moves bytes from one of two devices to the other, in pieces, lanes and ways of a setting.

    On CPUs (for tests) the same pieces are copied in the same order, without streams.

    :param devices: both; direction 0 goes from the first to the second.
    """

    def __init__(self, devices: tuple[torch.device, torch.device]) -> None:
        self.devices = devices
        self._cuda = devices[0].type == 'cuda'
        self._host: dict[tuple[bool, int], Tensor] = {}
        self._streams: dict[tuple[int, int], Any] = {}

    def issue(self, setting: Setting, source: Tensor, target: Tensor, direction: int = 0) -> None:
        """
        Issue the copies of a transfer on streams of their own and return.

        :param source: uint8, at least ``setting.size`` bytes, on the direction's first device.
        :param target: the same on its second.
        """
        pieces = min(setting.chunks, max(1, setting.size // 4096))
        edges = [setting.size * i // pieces for i in range(pieces + 1)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            lane = number % setting.streams
            if setting.way == 'direct':
                with self._on(direction, lane):
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
                continue
            host = self._buffer(
                setting.way == 'staged pinned', direction, setting.size)[begin:end]
            with self._on(direction, lane):
                host.copy_(source[begin:end], non_blocking=True)
                arrived = self._mark(direction, lane)
            with self._on(1 - direction, lane, receiving=True):
                if arrived is not None:
                    torch.cuda.current_stream().wait_event(arrived)
                target[begin:end].copy_(host, non_blocking=True)

    def move(self, setting: Setting, source: Tensor, target: Tensor) -> None:
        """
        Move as a part of the work of both devices' current streams, in direction 0.

        The copies begin when that work so far is done, and later work on the target's stream
        finds them done; the host waits for nothing. The source must not be written again.
        """
        if not self._cuda:
            self.issue(setting, source, target)
            return
        currents = [torch.cuda.current_stream(device) for device in self.devices]
        before = [stream.record_event() for stream in currents]
        for lane in range(setting.streams):
            for device, receiving in ((0, False), (1, True)):
                stream = self._stream(device, lane, receiving)
                for event in before:
                    stream.wait_event(event)
        self.issue(setting, source, target)
        for lane in range(setting.streams):
            for device, receiving in ((0, False), (1, True)):
                stream = self._stream(device, lane, receiving)
                currents[1].wait_event(stream.record_event())
                (source, target)[device].record_stream(stream)

    def wait(self) -> None:
        """Wait for both devices."""
        if self._cuda:
            for device in self.devices:
                torch.cuda.synchronize(device)

    def _stream(self, device: int, lane: int, receiving: bool) -> Any:
        """Return a lane's stream; received pieces have streams of their own."""
        key = (device, lane + (1000 if receiving else 0))
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.devices[device])
        return self._streams[key]

    def _on(self, device: int, lane: int, receiving: bool = False) -> AbstractContextManager[Any]:
        if not self._cuda:
            return nullcontext()
        return torch.cuda.stream(self._stream(device, lane, receiving))

    def _mark(self, device: int, lane: int) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(self._streams[device, lane])
        return event

    def _buffer(self, pinned: bool, direction: int, size: int) -> Tensor:
        held = self._host.get((pinned, direction))
        if held is None or held.numel() < size:
            # Kept until nothing reads it any more: the larger one takes its place after that.
            self.wait()
            held = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and self._cuda)
            self._host[pinned, direction] = held
        return held


class Transport:
    """
    Timed copies between two devices.

    :param first: and ``second``: the devices; two CPUs in tests.
    :param most_bytes: of a transfer; buffers of that size are taken on both.
    """

    def __init__(self, first: str, second: str, most_bytes: int) -> None:
        self.devices = (torch.device(first), torch.device(second))
        self._mover = Mover(self.devices)
        self._source = [torch.randint(256, (most_bytes,), dtype=torch.uint8, device=d)
                        for d in self.devices]
        self._target = [torch.empty(most_bytes, dtype=torch.uint8, device=d)
                        for d in self.devices]

    def time_one(self, setting: Setting) -> float:
        """Run a setting; return the milliseconds from issue to arrival on both devices."""
        self._mover.wait()
        started = time.perf_counter_ns()
        for direction in (0, 1) if setting.both else (0,):
            self._mover.issue(
                setting, self._source[direction], self._target[1 - direction], direction)
        self._mover.wait()
        return (time.perf_counter_ns() - started) / 1e6

    def received(self, direction: int, size: int) -> bool:
        """Say whether the first ``size`` bytes have arrived."""
        return torch.equal(self._target[1 - direction][:size].cpu(),
                           self._source[direction][:size].cpu())


class HandOver:
    """
    Takes what an encoder made on one device to a decoder on another.

    :param source: the encoder's device; ``target`` the decoder's.
    :param tuning: rows of ``qwen_vl interconnect --json`` (see
        :func:`~qwen_vl_ros.measure.interconnect.load_tuning`); without any, one direct copy.
    """

    def __init__(
        self, source: torch.device, target: torch.device,
        tuning: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.source, self.target = source, target
        self._mover = Mover((source, target))
        self._tuning = [row for row in tuning if not row['both']]

    def setting(self, size: int) -> Setting:
        """Return how so many bytes are moved."""
        return choose(self._tuning, size) if self._tuning else Setting(size)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a copy on the target, without waiting for it."""
        out = torch.empty(x.shape, dtype=x.dtype, device=self.target)
        if x.numel():
            self._mover.move(
                self.setting(x.nbytes), x.contiguous().view(torch.uint8).reshape(-1),
                out.view(torch.uint8).reshape(-1))
        return out


def compute_ms(device: torch.device, patches: int = 1564, width: int = 1280, layers: int = 32,
               runs: int = 5) -> float:
    """
    Return the milliseconds of the encoder's matrix products for a 640x480 picture.

    :param patches: rows of the products; the defaults are Qwen2-VL's.
    """
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    x = torch.randn(patches, width, device=device).to(dtype)
    up = torch.randn(width, 4 * width, device=device).to(dtype)
    down = torch.randn(4 * width, width, device=device).to(dtype)
    square = torch.randn(width, width, device=device).to(dtype)
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
