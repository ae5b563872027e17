"""
Time in which the device could have worked and did not, computed from timelines.

Two kinds of bubble in a pipeline of encoder, prefill and decoder::

    encode   ####....####
    prefill      ##......##        idle: a request waits, no stage of any runs on the device
    token          ####....####    starved: requests wait, none of them has come to decoding
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qwen_vl_ros.measure.timeline import Timeline

#: Stages of the device, and those of them that belong to decoding.
DEVICE = frozenset(('upload', 'encode', 'prefill', 'first_token', 'token'))
DECODE = frozenset(('first_token', 'token'))

#: Stages of the host that come before a request can be given to the device.
HOST = frozenset(('queue', 'decode_message', 'select', 'patches', 'image_age'))

Stretch = tuple[int, int]


@dataclass(frozen=True)
class Bubble:
    """
    What a window of time held.

    :param cycle_ms: from the first work that could run to the end of the last.
    :param idle_ms: of it, work waited and the device ran none.
    :param starved_ms: of it, requests were under way and none of them decoded.
    :param answers: finished in it.
    """

    cycle_ms: float
    idle_ms: float
    starved_ms: float
    answers: int

    @property
    def idle_share(self) -> float:
        """Return the bubble's share of the cycle, NaN without any."""
        return self.idle_ms / self.cycle_ms if self.cycle_ms else float('nan')

    @property
    def starved_share(self) -> float:
        """Return the share of the cycle in which decoding waited for vision, NaN without any."""
        return self.starved_ms / self.cycle_ms if self.cycle_ms else float('nan')


def bubble(timelines: Iterable[Timeline]) -> Bubble:
    """
    Find the bubbles of requests that ran beside or after each other.

    A request waits for the device from the end of its host stages before the first device stage
    (its patches are there) to the end of its last one. Time in which no request waits belongs to
    no cycle: nobody asked.
    """
    waiting: list[Stretch] = []
    busy: list[Stretch] = []
    decoding: list[Stretch] = []
    answers = 0
    for line in timelines:
        spans = line.spans
        device = [(s.start_ns, s.end_ns) for s in spans if s.name in DEVICE]
        if not device:
            continue
        answers += 1
        first, last = min(start for start, _ in device), max(end for _, end in device)
        ready = max((s.end_ns for s in spans if s.name in HOST and s.end_ns <= first),
                    default=first)
        waiting.append((ready, last))
        busy += device
        tokens = [(s.start_ns, s.end_ns) for s in spans if s.name in DECODE]
        if tokens:
            decoding.append((min(start for start, _ in tokens), max(end for _, end in tokens)))
    cycle = union(waiting)
    return Bubble(length(cycle) / 1e6, length(minus(cycle, union(busy))) / 1e6,
                  length(minus(cycle, union(decoding))) / 1e6, answers)


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the stretches of time that at least one covers, in order and apart."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def minus(whole: Sequence[Stretch], taken: Sequence[Stretch]) -> list[Stretch]:
    """Return what is left of ``whole`` without ``taken``; both in order and apart."""
    left = []
    for start, end in whole:
        for begin, stop in taken:
            if stop <= start or begin >= end:
                continue
            if begin > start:
                left.append((start, begin))
            start = max(start, stop)
        if end > start:
            left.append((start, end))
    return left


def length(stretches: Iterable[Stretch]) -> int:
    """Return the time that stretches cover together, which lie apart."""
    return sum(end - start for start, end in stretches)
