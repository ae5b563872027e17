"""Bubbles of made-up timelines."""

from __future__ import annotations

import math
import random

import pytest

from qwen_vl_ros.measure.bubble import bubble, length, minus, union
from qwen_vl_ros.measure.timeline import Timeline

MS = 1_000_000


def line(*spans):
    """Return a timeline of (name, start, end) in milliseconds."""
    made = Timeline()
    made.start_ns = 0
    for name, start, end in spans:
        made.add(name, int(start * MS), int(end * MS))
    return made


def test_one_answer_after_the_other():
    first = line(('select', 0, 1), ('patches', 1, 3), ('upload', 3, 4), ('encode', 4, 10),
                 ('prefill', 11, 13), ('first_token', 13, 14), ('token', 15, 18))
    found = bubble([first])
    assert (found.cycle_ms, found.idle_ms, found.answers) == (15, 2, 1)
    assert found.starved_ms == 10  # from the patches to the first token
    assert found.idle_share == pytest.approx(2 / 15)
    second = line(('patches', 20, 22), ('encode', 22, 28), ('prefill', 28, 30),
                  ('first_token', 30, 31))
    both = bubble([first, second])
    # From 18 to 22 nobody waited for the device.
    assert (both.cycle_ms, both.idle_ms, both.starved_ms) == (15 + 9, 2, 10 + 8)


def test_overlap_fills_gaps():
    first = line(('encode', 0, 4), ('prefill', 4, 6), ('first_token', 6, 7), ('token', 8, 9),
                 ('token', 10, 11))
    second = line(('patches', 5, 6), ('encode', 7, 10), ('prefill', 10, 12),
                  ('first_token', 12, 13))
    assert bubble([first]).idle_ms == 2
    together = bubble([first, second])
    assert (together.cycle_ms, together.idle_ms) == (13, 0)
    # Nobody decoded before 6, and from 11 to 12.
    assert together.starved_ms == 7
    assert together.starved_share == pytest.approx(7 / 13)


def test_host_work_during_the_device_s_does_not_begin_the_wait_anew():
    found = bubble([line(('patches', 0, 1), ('encode', 2, 4), ('patches', 3, 5), ('encode', 6, 8),
                         ('publish', 9, 10))])
    assert (found.cycle_ms, found.idle_ms, found.starved_ms) == (7, 3, 7)


def test_nothing_gives_no_share():
    for lines in ([], [line(('select', 0, 1))]):
        found = bubble(lines)
        assert (found.cycle_ms, found.answers) == (0, 0)
        assert math.isnan(found.idle_share) and math.isnan(found.starved_share)


def test_stretches_as_sets_of_points():
    rng = random.Random(0)
    for _ in range(200):
        a, b = ([(s, s + rng.randrange(0, 9)) for s in rng.choices(range(40), k=rng.randrange(6))]
                for _ in range(2))

        def points(stretches):
            return {p for start, end in stretches for p in range(start, end)}

        assert points(union(a)) == points(a)
        assert length(union(a)) == len(points(a))
        left = minus(union(a), union(b))
        assert points(left) == points(a) - points(b)
        assert length(left) == len(points(left))
