"""Requests beside each other: the same answers as one after the other, whatever happens."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from engine_asking import QUESTION
from engine_schedules import Events, idle, scheduler

from qwen_vl_ros.engine import rounds
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler
from qwen_vl_ros.engine.task import Priority
from qwen_vl_ros.engine.types import Delta, Done, Request, Stage, Visual


@pytest.fixture
def engine(crowd):
    """Return an engine for several sequences, with nothing remembered."""
    crowd.reset_sessions()
    crowd.forget()
    return crowd


@pytest.fixture
def requests(picture):
    """Return requests of every kind: words alone, stills, clips, kept units, sampling."""
    frames = [picture(224, 168, seed) for seed in range(6)]
    base = Request(QUESTION, max_new_tokens=12)
    return [
        base,
        replace(base, visuals=(Visual((frames[0],)),)),
        replace(base, visuals=(Visual((frames[0],)), Visual((frames[1],)))),
        replace(base, visuals=(Visual(tuple(frames)),), question='the path'),
        replace(base, visuals=(Visual((frames[2],)),), keep_ratio=0.4),
        replace(base, visuals=(Visual((frames[3],)),), temperature=0.8, seed=5),
        replace(base, visuals=(Visual(tuple(frames[:5]), np.arange(144) % 7 < 3),)),
        replace(base, visuals=(Visual((frames[1],)),), max_new_tokens=1)]


def alone(engine, requests):
    """Return the token ids of requests that have the engine to themselves."""
    found = []
    for request in requests:
        engine.forget()
        found.append(list(engine.answer(request))[-1].answer.token_ids)
    engine.forget()
    return found


@pytest.mark.parametrize('seed', range(6))
def test_answers_do_not_depend_on_who_runs_beside(engine, requests, seed):
    """Random arrivals, priorities, cancels, deadlines and faults."""
    expected = alone(engine, requests)
    rng = random.Random(seed)
    plan = scheduler(engine, max_sequences=rng.choice([2, 3, 4]),
                     micro_batch=rng.choice([1.0, 2.0, 100.0]))
    plan._rounds._units = rng.choice([1, rounds.UNITS])  # as on a CPU, or as on a GPU
    waiting = [(i, rng.choice(['', '', 'cancel', 'deadline', 'fault'])) for i in range(8)] * 2
    rng.shuffle(waiting)
    under_way = []
    break_at = engine.model.prefill

    def fault(prompt, *rest):
        if any(prompt is other for other in broken):
            raise RuntimeError('as ordered')
        return break_at(prompt, *rest)

    broken = []
    engine.model.prefill = fault
    try:
        while waiting or not all(events.ended for *_, events in under_way):
            if waiting and rng.random() < 0.3:
                i, fate = waiting.pop()
                request = requests[i]
                if fate == 'deadline':
                    request = replace(request, deadline_s=rng.choice([1e-6, 0.02]))
                events = Events()
                try:
                    plan.submit(request, events, cancelled=events.flag.is_set,
                                priority=rng.choice(list(Priority)))
                except EngineError as error:
                    assert error.code == ErrorCode.QUEUE_FULL
                    continue
                under_way.append((i, fate, events))
            for _, fate, events in under_way:
                if fate == 'cancel' and rng.random() < 0.1:
                    events.flag.set()
            for task in plan._rounds.active:
                if task.run is not None and task.opened and any(
                        fate == 'fault' and events is task.listener
                        for _, fate, events in under_way):
                    broken.append(task.run.prompt)
            plan.run_once()
    finally:
        del engine.model.prefill
    for i, fate, events in under_way:
        if fate == 'fault' and events.error is not None:
            assert events.error.code == ErrorCode.UNKNOWN
            assert events.error.message == 'the answer failed: RuntimeError: as ordered'
            continue
        if events.error is not None:
            assert fate == 'cancel' and events.error.code == ErrorCode.CANCELLED
            continue
        answer = events.answer
        whole = expected[i]
        assert answer.token_ids == whole[:len(answer.token_ids)]
        if answer.token_ids != whole:
            assert (answer.finish_reason, fate) in (('cancelled', 'cancel'),
                                                    ('deadline', 'deadline'))
        assert events.text == answer.text
    idle(plan)
    assert alone(engine, requests) == expected


def test_threads_get_their_own_answers(engine, requests):
    expected = alone(engine, requests)
    plan = scheduler(engine, max_sequences=4)
    plan.start()
    found = {}

    def ask(i):
        found[i] = list(plan.answer(requests[i]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i][-1].answer.token_ids for i in range(8)] == expected
    kinds = [type(event) for event in found[2]]
    assert kinds[:3] == [Stage] * 3 and kinds[-1] is Done and set(kinds[3:-1]) <= {Delta}
    assert plan.stop()
    idle(plan)


def test_steps_are_shared_and_charged_in_shares(engine, requests):
    plan = scheduler(engine, max_sequences=4)
    several = [Events() for _ in range(3)]
    for events in several:
        plan.submit(replace(requests[1], max_new_tokens=10), events)
    while not all(events.ended for events in several):
        plan.run_once()
    steps = [span for events in several for span in events.answer.timeline.spans
             if span.name == 'token']
    assert {span.shared for span in steps} >= {3}
    weights = engine.info.weight_bytes
    for span in steps:
        assert weights // span.shared < span.bytes_read < weights // span.shared + weights // 4


def test_an_abandoned_answer_stops(engine, requests):
    plan = scheduler(engine)
    plan.start()
    events = plan.answer(replace(requests[1], max_new_tokens=500))
    next(events)
    events.close()
    end = time.monotonic() + 20
    while plan.under_way and time.monotonic() < end:
        time.sleep(0.01)
    assert plan.stop()
    idle(plan)


def test_questions_overtake_the_standing_one(engine, requests):
    """A place is kept free, and its vision goes first."""
    plan = scheduler(engine, max_sequences=2)
    standing = [Events() for _ in range(3)]
    for events in standing:
        plan.submit(requests[2], events, priority=Priority.CONTINUOUS)
    for _ in range(3):
        plan.run_once()
    assert plan.under_way == 1 and not plan.room(Priority.CONTINUOUS)
    question = Events()
    plan.submit(requests[1], question)
    while not question.ended:
        plan.run_once()
    assert not standing[1].stages
    while not all(events.ended for events in standing):
        plan.run_once()
    idle(plan)


def test_an_urgent_question_goes_first_within_a_round(engine, requests):
    plan = scheduler(engine, max_sequences=3)
    slow, fast = Events(), Events()
    plan.submit(requests[3], slow, priority=Priority.CONTINUOUS)
    plan.submit(requests[1], fast)
    order = []
    encode = engine.model.encode_part

    def note(visual, *rest):
        order.append(visual.clip)
        return encode(visual, *rest)

    engine.model.encode_part = note
    try:
        plan.settle()
        while not (slow.ended and fast.ended):
            plan.run_once()
    finally:
        del engine.model.encode_part
    assert order == [False, True, True, True]


def test_turns_of_a_session_come_one_after_the_other(engine, requests):
    first = replace(requests[1], session_id='s')
    second = Request('and what is left of it ?', session_id='s', max_new_tokens=8)
    expected = [list(engine.answer(r))[-1].answer for r in (first, second)]
    engine.reset_sessions()
    engine.forget()
    plan = scheduler(engine)
    found = [Events(), Events()]
    for request, events in zip((first, second), found):
        plan.submit(request, events)
    while not all(events.ended for events in found):
        plan.run_once()
    assert [e.answer.token_ids for e in found] == [a.token_ids for a in expected]
    assert found[1].answer.prompt_tokens == expected[1].prompt_tokens


def test_one_after_the_other_without_overlap(engine, requests):
    plan = scheduler(engine, overlap=False)
    found = [Events(), Events()]
    for events in found:
        plan.submit(requests[1], events)
    while not found[0].ended:
        plan.run_once()
        assert (plan.under_way <= 1 and not found[1].stages) or found[0].ended
    while not found[1].ended:
        plan.run_once()
    idle(plan)


def test_queues_are_bounded_and_a_stop_ends_all(engine, requests):
    plan = Scheduler(engine, ScheduleOptions(max_sequences=2, waiting=2))
    found = [Events() for _ in range(4)]
    for events in found[:2]:
        plan.submit(requests[1], events)
    with pytest.raises(EngineError) as caught:
        plan.submit(requests[1], found[2])
    assert caught.value.code == ErrorCode.QUEUE_FULL
    plan.submit(requests[1], found[2], priority=Priority.CONTINUOUS)
    plan.run_once()
    assert plan.stop(EngineError(ErrorCode.INACTIVE, 'gone'))
    assert [e.error.message for e in found[:3]] == ['gone'] * 3
    idle(plan)
    with pytest.raises(EngineError) as caught:
        plan.submit(requests[1], found[3])
    assert caught.value.code == ErrorCode.INACTIVE


def test_a_listener_that_raises_harms_nobody(engine, requests):
    expected = alone(engine, requests[1:2])[0]
    plan = scheduler(engine)
    good = Events()
    plan.submit(requests[0], lambda event: 1 / 0)
    plan.submit(requests[1], good)
    while not good.ended or plan.under_way:
        plan.run_once()
    assert good.answer.token_ids == expected
    idle(plan)


def test_what_makes_a_request_may_fail(engine, requests):
    plan = scheduler(engine)
    bad, good = Events(), Events()

    def make():
        raise EngineError(ErrorCode.STALE_IMAGE, 'too old')

    plan.submit(make, bad)
    plan.submit(lambda: requests[1], good)
    while not (bad.ended and good.ended):
        plan.run_once()
    assert bad.error.code == ErrorCode.STALE_IMAGE and good.answer.token_ids


@pytest.mark.parametrize('options, words', [
    ({'max_sequences': 0}, 'max_sequences 0 lies outside 1 to 8'),
    ({'max_sequences': 9}, 'max_sequences 9'),
    ({'micro_batch': 0.0}, 'micro_batch is 0.0'),
    ({'micro_batch': float('nan')}, 'micro_batch is nan')])
def test_options_are_checked(options, words):
    with pytest.raises(EngineError, match=words):
        ScheduleOptions(**options)


def test_caches_are_bounded_by_memory(folders):
    engine = Engine.load(str(folders['small']), device='cpu', max_context=256, max_sequences=8)
    config = engine.model.config.language
    one = 2 * config.layers * config.kv_heads * config.head_dim * 256 * 4
    assert engine.pool.slots == 8
    tight = Engine.load(str(folders['small']), device='cpu', max_context=256, max_sequences=8,
                        cache_bytes=3 * one)
    assert tight.pool.slots == 3
    plan = Scheduler(tight, ScheduleOptions(8))
    found = [Events() for _ in range(6)]
    for events in found:
        plan.submit(Request(QUESTION, max_new_tokens=4), events)
    while not all(events.ended for events in found):
        plan.run_once()
        assert tight.pool.used_bytes <= 3 * one
    assert len({e.answer.token_ids for e in found}) == 1
    with pytest.raises(EngineError, match='does not hold one cache'):
        Engine.load(str(folders['small']), device='cpu', max_context=256, cache_bytes=one - 1)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_answers_beside_each_other(folders, requests):
    """Streams, events and graphs instead of calls that wait."""
    engine = Engine.load(str(folders['small']), device='cuda', dtype='float32', max_context=1024,
                         repetition_window=0, max_sequences=4)
    expected = alone(engine, requests)
    plan = scheduler(engine, max_sequences=4)
    plan.start()
    for turn in range(3):
        found = [Events() for _ in requests]
        engine.forget()
        for number, (request, events) in enumerate(zip(requests, found)):
            plan.submit(request, events, priority=Priority((number + turn) % 3),
                        cancelled=events.flag.is_set)
        found[turn].flag.set()
        end = time.monotonic() + 60
        while not all(events.ended for events in found) and time.monotonic() < end:
            time.sleep(0.001)
        for number, events in enumerate(found):
            if number != turn:
                assert events.answer.token_ids == expected[number]
    assert plan.stop()
    idle(plan)
