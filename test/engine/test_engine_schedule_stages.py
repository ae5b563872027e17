"""What is put onto the device and when: streaming between stages, urgency, room, failures."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engine_asking import QUESTION
from engine_schedules import Events, idle, scheduler

from qwen_vl_ros.engine import lanes, rounds
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.parts import banded, parts_of, whole
from qwen_vl_ros.engine.prompt import VisualToken
from qwen_vl_ros.engine.running import Running
from qwen_vl_ros.engine.task import Priority
from qwen_vl_ros.engine.types import Request, Stage, Visual


@pytest.fixture
def engine(crowd):
    """Return an engine for several sequences, with nothing remembered."""
    crowd.reset_sessions()
    crowd.forget()
    return crowd


class SlowMark:
    """A mark that is reached when somebody says so."""

    def __init__(self, lane, number):
        self.lane, self.number, self.reached = lane, number, False


class SlowLane(lanes.Lane):
    """A lane whose device does nothing before it is told to; notes what is put onto it."""

    log: list[tuple[str, str]]
    made: list[SlowMark]

    def __init__(self, device, name, urgency):
        super().__init__(device, name, urgency)

    def mark(self):
        mark = SlowMark(self.name, len(SlowLane.made))
        SlowLane.made.append(mark)
        return mark

    def wait(self, mark):
        if not mark.reached:
            SlowLane.log.append((self.name, f'wait {mark.number}'))


def finish(name=''):
    """Let the device finish what lies on a lane (all of them without a name)."""
    for mark in SlowLane.made:
        if name in ('', mark.lane):
            mark.reached = True


@pytest.fixture
def slow(engine, monkeypatch):
    """Return a scheduler on a slow device, and what was put onto it in order."""
    SlowLane.log, SlowLane.made = [], []
    monkeypatch.setattr(rounds, 'Lane', SlowLane)
    model = engine.model
    for name in ('encode_part', 'prefill', 'step'):
        def note(*given, work, name):
            SlowLane.log.append((lanes.active_lane(), name))
            return work(*given)

        monkeypatch.setattr(model, name, partial(note, work=getattr(model, name), name=name))
    plan = scheduler(engine, max_sequences=3)
    yield plan, SlowLane.log
    finish()
    idle(plan)


def drive(plan, times=30):
    """Give the scheduler so many rounds, host work included."""
    plan.settle()
    for _ in range(times):
        plan.settle()
        plan.run_once()


def work(log, *lanes_):
    return [what for lane, what in log if lane in lanes_ and not what.startswith('wait')]


def test_a_clip_is_prefilled_one_slice_behind_the_encoder(slow, picture):
    """Words go first, slice k goes while slice k + 1 is encoded, and waits for its own mark."""
    plan, log = slow
    clip = Visual(tuple(picture(112, 112, seed) for seed in range(8)))
    events = Events()
    plan.submit(Request(QUESTION, (clip,), max_new_tokens=3), events)
    drive(plan)
    # The device has done nothing: two slices are under way, and the words before them.
    assert work(log, 'vision') == ['encode_part'] * 2
    run = plan._rounds.active[0].run
    assert work(log, 'prefill') == ['prefill'] * 2
    order = [what for lane, what in log if lane in ('vision', 'prefill')]
    assert order.index('prefill') > order.index('encode_part')
    first = next(m for m in SlowLane.made if m.lane == 'vision')
    assert ('prefill', f'wait {first.number}') in log
    assert Stage('decode') not in events
    run = plan._rounds.active[0].run
    assert run.prefilled == run.prompt.spans[0][0] + 16  # words and one slice of 4x4 units
    finish('vision')
    drive(plan)
    assert work(log, 'vision') == ['encode_part'] * 4
    assert work(log, 'prefill') == ['prefill'] * 2  # no room before these are done
    finish()
    drive(plan)
    finish()
    drive(plan)
    assert Stage('decode') in events
    finish()
    drive(plan)
    assert events.ended and events.answer.vision_tokens_in == 64


def test_the_next_frame_is_encoded_under_the_decoding_of_the_last(slow, picture):
    plan, log = slow
    first, second = Events(), Events()
    ask = [Request(QUESTION, (Visual((picture(112, 112, seed),)),), max_new_tokens=20)
           for seed in range(2)]
    plan.submit(ask[0], first, priority=Priority.CONTINUOUS)
    while Stage('decode') not in first:
        drive(plan, 1)
        finish()
    del log[:]
    plan.submit(ask[1], second, priority=Priority.CONTINUOUS)
    drive(plan, 12)
    assert work(log, 'vision continuous') == ['encode_part']
    # No step meanwhile: nobody waits for these words, and steps are shared by more afterwards.
    begun = [what for _, what in log].index('encode_part')
    assert work(log[begun:], 'decode') == [] and not first.ended and not second.ended
    finish()
    del log[:]
    drive(plan, 1)
    assert work(log, 'decode') == ['step']
    while not (first.ended and second.ended):
        drive(plan, 1)
        finish()
    expected = []
    for request in ask:
        plan.engine.forget()
        expected.append(list(plan.engine.answer(request))[-1].answer.token_ids)
    assert [e.answer.token_ids for e in (first, second)] == expected


def test_words_that_somebody_waits_for_are_not_held_up(slow, picture):
    plan, log = slow
    question, standing = Events(), Events()
    plan.submit(Request(QUESTION, (Visual((picture(112, 112),)),), max_new_tokens=30), question)
    while Stage('decode') not in question:
        drive(plan, 1)
        finish()
    plan.submit(Request(QUESTION, (Visual((picture(112, 112, 1),)),)), standing,
                priority=Priority.CONTINUOUS)
    del log[:]
    drive(plan, 10)
    assert work(log, 'vision continuous') == ['encode_part']
    assert len(work(log, 'decode')) == 10
    while not (question.ended and standing.ended):
        drive(plan, 1)
        finish()


def test_urgent_work_has_lanes_of_its_own(slow, picture):
    """An encoder busy with a standing frame does not hold a question up."""
    plan, log = slow
    standing, question = Events(), Events()
    frames = [Visual((picture(112, 112, seed),)) for seed in range(3)]
    plan.submit(Request(QUESTION, tuple(frames[:2])), standing, priority=Priority.CONTINUOUS)
    drive(plan, 5)
    assert work(log, 'vision continuous') == ['encode_part']  # one at a time
    plan.submit(Request(QUESTION, (frames[2],)), question)
    drive(plan, 5)
    assert work(log, 'vision') == ['encode_part']
    assert work(log, 'prefill')
    plan.stop()


def test_caches_come_back_when_the_device_is_done_with_them(slow, picture):
    plan, _ = slow
    events = Events()
    plan.submit(Request(QUESTION, (Visual((picture(112, 112),)),)), events,
                cancelled=events.flag.is_set)
    drive(plan, 5)
    events.flag.set()
    drive(plan, 1)
    assert events.answer.finish_reason == 'cancelled'
    assert plan.under_way == 0 and len(plan.engine.pool._in_use) == 1
    finish()
    drive(plan, 1)
    assert not plan.engine.pool._in_use


def visual(t, h, w, units=None):
    return VisualToken((t, h, w), t > 1, 7, units)


@pytest.mark.parametrize('micro_batch', [0.3, 0.5, 1, 2, 3.7, 100])
@pytest.mark.parametrize('shown', [
    visual(1, 4, 6), visual(5, 4, 6), visual(3, 2, 2),
    visual(5, 4, 6, np.arange(0, 30, 7)), visual(1, 6, 4, np.array([5])),
    visual(4, 4, 4, np.arange(4, 8))])
def test_parts_cover_what_is_kept_once(shown, micro_batch):
    parts = parts_of(shown, micro_batch)
    area = shown.grid[1] * shown.grid[2] // 4
    kept = np.arange(shown.total) if shown.units is None else shown.units
    reached = 0
    for part in parts:
        assert part.start == reached < part.stop
        reached = part.stop
        own = kept[part.start:part.stop]
        assert own.min() // area >= part.first_slice and own.max() // area < part.end_slice
        if part.units is None:
            assert (part.stop - part.start) == area * (part.end_slice - part.first_slice)
        else:
            assert np.array_equal(part.units + part.first_slice * area, own)
        assert sum(part.kept_per_slice(area)) == own.size
        if micro_batch >= 1:
            # Whatever attends to each other is encoded together: the units of a slice.
            for s in range(part.first_slice, part.end_slice):
                assert np.isin(kept[kept // area == s], own).all()
    assert reached == shown.kept


def test_bands_are_approximate_and_never_taken_for_whole_pictures(engine, picture):
    ask = Request(QUESTION, (Visual((picture(224, 224),)),), max_new_tokens=4)
    exact = list(engine.answer(ask))[-1].answer
    plan = scheduler(engine, micro_batch=0.5)
    events = Events()
    plan.submit(ask, events)
    while not events.ended:
        plan.run_once()
    assert events.answer.approximate == ('micro_batch',) and exact.approximate == ()
    encoded = [s for s in events.answer.timeline.spans if s.name == 'encode']
    assert len(encoded) == 2  # nothing of the exact picture was reused
    assert events.answer.confidence != pytest.approx(exact.confidence, rel=1e-6)
    again = list(engine.answer(ask))[-1].answer
    assert again.confidence == pytest.approx(exact.confidence, rel=1e-5)
    shown = visual(1, 4, 6)
    assert banded(shown, 1.0) is shown
    assert len({banded(shown, m).key for m in (0.25, 0.5, 1.0)}) == 3
    assert parts_of(shown, 1.0) == [whole(shown)]


def test_prefixes_are_copied_from_sequences_that_run(engine, picture):
    """Two questions about one picture: the second computes its own words alone."""
    frame = Visual((picture(224, 224),))
    one = Request('a red box stands left', (frame,), max_new_tokens=30)
    two = Request('the path is blocked', (frame,), max_new_tokens=8)
    expected = list(engine.answer(two))[-1].answer
    engine.forget()
    plan = scheduler(engine)
    first, second = Events(), Events()
    plan.submit(one, first)
    while Stage('decode') not in first:
        plan.run_once()
    plan.submit(two, second)
    while not (first.ended and second.ended):
        plan.run_once()
    names = [s.name for s in second.answer.timeline.spans]
    assert 'encode' not in names
    assert second.answer.token_ids == expected.token_ids
    written = sum(s.bytes_written for s in second.answer.timeline.spans if s.name == 'prefill')
    config = engine.model.config.language
    row = 2 * config.layers * config.kv_heads * config.head_dim * 4
    assert written < 20 * row
    idle(plan)


@pytest.mark.parametrize('fate', ['', 'refused', 'cancelled'])
def test_a_new_frame_is_encoded_while_its_request_is_planned(engine, picture, monkeypatch, fate):
    ask = Request(QUESTION, (Visual((picture(112, 112),)), Visual((picture(84, 112, 1),))),
                  max_new_tokens=8)
    expected = list(engine.answer(ask))[-1].answer.token_ids
    engine.forget()
    fresh = replace(ask, visuals=(Visual((picture(112, 112),)), Visual((picture(84, 112, 1),))))
    plan = scheduler(engine)
    encoded, going = [], threading.Event()
    work, planning = engine.model.encode_part, Running.plan

    def note(visual, *rest):
        encoded.append(visual)
        return work(visual, *rest)

    def slow(run):
        assert going.wait(20)
        if fate == 'refused':
            raise EngineError(ErrorCode.PROMPT_TOO_LONG, 'too long')
        planning(run)

    monkeypatch.setattr(engine.model, 'encode_part', note)
    monkeypatch.setattr(Running, 'plan', slow)
    events = Events()
    plan.submit(fresh, events, cancelled=events.flag.is_set)
    end = time.monotonic() + 20
    while not encoded and time.monotonic() < end:
        plan.run_once()
    assert len(encoded) == 1 and encoded[0].key == 0
    if fate == 'cancelled':
        events.flag.set()
    going.set()
    while not events.ended:
        plan.run_once()
    if fate == 'refused':
        assert events.error.code == ErrorCode.PROMPT_TOO_LONG
    elif fate == 'cancelled':
        assert events.answer.finish_reason == 'cancelled'
    else:
        assert events.answer.token_ids == expected
        assert [s.name for s in events.answer.timeline.spans].count('encode') == 2
        assert len(encoded) == 2
        # The same frames again: they have been hashed, their features are there.
        again = Events()
        plan.submit(replace(fresh, question='the path'), again)
        while not again.ended:
            plan.run_once()
        assert len(encoded) == 2
    idle(plan)
