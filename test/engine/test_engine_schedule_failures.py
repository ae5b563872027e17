"""Requests that are cut off or break beside others, and what they held."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from engine_asking import QUESTION
from engine_schedules import Events, idle, scheduler

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.types import Request, Visual


@pytest.fixture
def engine(crowd):
    """Return an engine for several sequences, with nothing remembered."""
    crowd.reset_sessions()
    crowd.forget()
    return crowd


@pytest.mark.parametrize('after', range(1, 9))
def test_a_cancel_is_noticed_before_the_next_unit_of_work(engine, picture, after):
    """Units: a picture, a chunk of 64 tokens, a step."""
    plan = scheduler(engine)
    units = []
    names = ('encode_part', 'prefill', 'step')
    for name in names:
        def note(*given, work):
            units.append(1)
            if len(units) == after:
                events.flag.set()
            return work(*given)

        setattr(engine.model, name, partial(note, work=getattr(engine.model, name)))
    events = Events()
    request = Request(QUESTION, (Visual((picture(224, 168),)), Visual((picture(168, 224),))))
    try:
        plan.submit(request, events, cancelled=events.flag.is_set)
        while not events.ended:
            plan.run_once()
    finally:
        for name in names:
            delattr(engine.model, name)
    assert events.answer.finish_reason == 'cancelled'
    assert len(units) == after
    idle(plan)


@pytest.mark.parametrize('error', [
    torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate'), MemoryError()])
@pytest.mark.parametrize('where', ['patches', 'encode_part', 'prefill', 'first_token'])
def test_no_memory_for_one_request_harms_no_other(engine, picture, error, where):
    others = [Request(QUESTION, (Visual((picture(112, 112, seed),)),), max_new_tokens=10)
              for seed in range(2)]
    expected = [list(engine.answer(r))[-1].answer.token_ids for r in others]
    engine.forget()
    poor = Request('the path', (Visual((picture(280, 280),)),), max_new_tokens=10)
    plan = scheduler(engine)
    found, bad = [Events(), Events()], Events()
    work = getattr(engine.model, where)

    def fail(*given):
        active = [t.run for t in plan._rounds.active
                  if t.listener is bad and t.run is not None]
        mine = {'patches': lambda: given[0].grid == (1, 20, 20),
                'encode_part': lambda: given[0].grid == (1, 20, 20),
                'prefill': lambda: active and given[0] is active[0].prompt,
                'first_token': lambda: active and given[-1] is getattr(active[0], 'clock', 0)}
        if mine[where]():
            raise error
        return work(*given)

    setattr(engine.model, where, fail)
    try:
        for request, events in zip([*others, poor], [*found, bad]):
            plan.submit(request, events)
        while not all(e.ended for e in (*found, bad)):
            plan.run_once()
    finally:
        delattr(engine.model, where)
    assert bad.error.code == ErrorCode.OUT_OF_MEMORY
    assert [e.answer.token_ids for e in found] == expected
    idle(plan)
    assert engine.pool.used_bytes <= 3 * engine.pool._make().rows.nbytes
    again = Events()
    plan.submit(poor, again)
    while not again.ended:
        plan.run_once()
    assert again.answer.token_ids


@pytest.mark.parametrize('times', [1, 2])
def test_no_memory_for_a_shared_step(engine, picture, times):
    """Once, what is only kept is given up and the step goes again; twice, it is the end."""
    ask = Request(QUESTION, (Visual((picture(112, 112),)),), max_new_tokens=10)
    expected = list(engine.answer(ask))[-1].answer.token_ids
    plan = scheduler(engine)
    found = [Events(), Events()]
    step, left = engine.model.decoder.step, [times]

    def fail(allowed=None):
        if left[0] and all(t.decoding for t in plan._rounds.active):
            left[0] -= 1
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return step(allowed)

    engine.model.decoder.step = fail
    try:
        for events in found:
            plan.submit(ask, events)
        while not all(e.ended for e in found):
            plan.run_once()
    finally:
        del engine.model.decoder.step
    idle(plan)
    if times == 1:
        assert [e.answer.token_ids for e in found] == [expected] * 2
    else:
        assert all(e.error.code == ErrorCode.OUT_OF_MEMORY for e in found)
    assert list(engine.answer(ask))[-1].answer.token_ids == expected


def test_a_row_that_breaks_down_ends_alone(engine, picture):
    ask = Request(QUESTION, (Visual((picture(112, 112),)),), max_new_tokens=10)
    expected = list(engine.answer(ask))[-1].answer.token_ids
    plan = scheduler(engine)
    found = [Events(), Events()]
    step = engine.model.step

    def spoil(rows, allowed):
        choices = step(rows, allowed)
        if len(choices) == 2:
            choices[1] = replace(choices[1], finite=False)
        return choices

    engine.model.step = spoil
    try:
        for events in found:
            plan.submit(ask, events)
        while not all(e.ended for e in found):
            plan.run_once()
    finally:
        del engine.model.step
    assert found[0].answer.token_ids == expected
    assert found[1].error.code == ErrorCode.NUMERICAL
    idle(plan)
