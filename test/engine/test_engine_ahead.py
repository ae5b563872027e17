"""What is begun before all is known: the first picture, and the choice of the first token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_asking import QUESTION, ask, names, refusal
from engine_schedules import Events, idle, scheduler

from qwen_vl_ros.engine.cuda_prefill import CudaPrefill
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.graphs import Direct
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.prompt import Turn
from qwen_vl_ros.engine.stages import FeatureCache
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import GLANCED, Frame
from qwen_vl_ros.kernels.encoder_plain import PlainKernels, PlainProducts
from qwen_vl_ros.kernels.prompt import PlainPrompt


@pytest.fixture
def ahead(engine, monkeypatch):
    """Return an engine that begins as on a GPU."""
    monkeypatch.setattr(engine.model, 'runs_ahead', True)
    return engine


def unseen(frame):
    """Return the frame with one byte changed that a glance does not look at."""
    data = frame.data.copy()
    data[1 + data.size // 2 // max(1, data.size // GLANCED) * max(1, data.size // GLANCED)] ^= 1
    return Frame(data, frame.encoding, frame.width, frame.height, frame.step)


@pytest.mark.parametrize('keep', [1.0, 0.4])
def test_answers_are_the_same(engine, picture, monkeypatch, keep):
    frames = picture(320, 224), picture(320, 224, 1)
    expected = ask(engine, QUESTION, *frames, keep_ratio=keep)
    engine.forget()
    monkeypatch.setattr(engine.model, 'runs_ahead', True)
    got = ask(engine, QUESTION, *frames, keep_ratio=keep)
    assert got.token_ids == expected.token_ids
    assert names(got) == names(expected)
    encode, *_, select = sorted(
        (s for s in got.timeline.spans if s.name in ('encode', 'select')),
        key=lambda s: (s.name == 'select', s.start_ns))
    assert encode.start_ns < select.start_ns  # the keys come after the first picture


def test_a_picture_that_was_seen_is_not_encoded_again(ahead, picture):
    frame = picture(320, 224)
    ask(ahead, QUESTION, frame)
    again = ask(ahead, 'a box', Frame.from_rgb(frame.rgb().copy()))
    assert 'encode' not in names(again)


def test_a_picture_that_only_looks_alike_is_another_one(ahead, picture):
    frame = picture(320, 224)
    other = unseen(frame)
    assert other.glance == frame.glance and other.digest != frame.digest
    assert picture(320, 224, 1).glance != frame.glance
    assert Frame(frame.data, 'bgr8', 320, 224, frame.step).glance != frame.glance
    ask(ahead, QUESTION, frame)
    assert names(ask(ahead, QUESTION, other))['encode'] == 1


def test_what_was_encoded_in_vain_leaves_nothing(ahead, picture):
    """The caches hold the visual already."""
    frame = picture(320, 224)
    first = ask(ahead, QUESTION, frame)
    ahead.features.clear()  # the rows of the cache stay
    again = ask(ahead, QUESTION, frame)
    assert again.token_ids == first.token_ids and len(ahead.features) == 0


@pytest.mark.parametrize('session', ['', 'chat'])
def test_a_text_that_is_too_long_is_refused_before_a_still_is_encoded(
        ahead, picture, monkeypatch, session):
    first = ask(ahead, QUESTION, picture(320, 224), session_id=session)
    long = Request('the path ' * 4000, (Visual((picture(320, 224, 2),)),), session_id=session)
    with monkeypatch.context() as patched:
        for name in ('patches', 'encode_part'):
            patched.setattr(ahead.model, name, lambda *_: pytest.fail('begun in vain'))
        error = refusal(ahead, long)
        plan, events = scheduler(ahead), Events()
        plan.submit(long, events)
        while not events.ended:
            plan.run_once()
        idle(plan)
    for refused in (error, events.error):
        assert refused.code == ErrorCode.PROMPT_TOO_LONG
        assert '(88 of them visual)' in refused.message
    assert ahead.pool.available
    ahead.forget()
    ahead.reset_sessions()
    assert ask(ahead, QUESTION, picture(320, 224)).token_ids == first.token_ids


@pytest.mark.parametrize('keep', [1.0, 0.4])
def test_tokens_are_counted_as_they_are_laid_out(engine, picture, keep):
    visuals, prompt, _ = engine.look(Request(
        QUESTION, (Visual((picture(320, 224),)), Visual((picture(84, 112),) * 3)),
        keep_ratio=keep))
    turns = (Turn('hello', visuals[:1], 'a box'), Turn(QUESTION, visuals))
    for system in (None, 'be brief'):
        assert engine.prompts.count(turns, system) == engine.prompts.build(turns, system).ids.size
    assert engine.prompts.count((Turn(QUESTION, visuals),), None) == prompt.ids.size


def test_a_request_that_was_cancelled_encodes_nothing(ahead, picture):
    events = list(ahead.answer(Request(QUESTION, (Visual((picture(320, 224),)),)),
                               cancelled=lambda: True))
    assert events[-1].answer.finish_reason == 'cancelled'
    assert 'encode' not in names(events[-1].answer)


def test_glances_go_with_what_they_stand_for():
    cache = FeatureCache(most_bytes=1000)
    cache.put(1, torch.zeros(100), 7)
    cache.put(2, torch.zeros(100), 7)
    assert cache.may_hold(7) and not cache.may_hold(8)
    cache.put(3, torch.zeros(100), 8)  # the oldest goes
    assert cache.may_hold(7) and cache.may_hold(8)
    cache.put(2, torch.zeros(150), 9)
    assert not cache.may_hold(7) and cache.may_hold(9)
    cache.clear()
    assert not cache.may_hold(9)


def test_an_idle_scheduler_plans_on_its_own_thread(crowd, picture):
    """The first of two that come together, and one whose picture cannot be made, do not."""
    crowd.forget()
    plan = scheduler(crowd, max_sequences=3)
    made = []

    def make(number):
        def call():
            made.append(number)
            if number == 2:
                raise EngineError(ErrorCode.BAD_REQUEST, 'no picture')
            return Request(QUESTION, (Visual((picture(224, 224, number),)),), max_new_tokens=2)
        return call

    listeners = [Events() for _ in range(3)]
    for number in (2, 0):
        plan.submit(make(number), listeners[number])
        plan._take_up()
        assert made[-1] == number
        while not listeners[number].ended:
            plan.run_once()
    assert listeners[2].error.code == ErrorCode.BAD_REQUEST
    assert isinstance(listeners[0][-1], Done)
    idle(plan)


@pytest.mark.parametrize('sizes', [(9,), (64,), (70, 12), (130, 65)])
def test_prefill_gives_the_hidden_states_that_are_wanted(engine, monkeypatch, sizes):
    monkeypatch.setattr('qwen_vl_ros.engine.cuda_prefill.MOST', 128)
    language = engine.model.language
    fused = CudaPrefill(language, PlainKernels(), PlainProducts(), Direct(), PlainPrompt())
    caches = [KVCache(language.config, 256, language.device, language.dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    start = 0
    with torch.inference_mode():
        for number, size in enumerate(sizes):
            wanted = 1 if number == len(sizes) - 1 else 0
            x = language.embed(torch.randint(0, language.config.vocab, (size,),
                                             generator=generator))
            positions = torch.arange(start, start + size).repeat(3, 1)
            got = fused.run(x, positions, caches[0], start, wanted)
            expected = language.prefill(x, positions, caches[1], start, wanted)
            assert got.shape == expected.shape == (wanted, language.config.width)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            start += size
    end = slice(0, start)
    torch.testing.assert_close(caches[0].rows[:, :, :, end], caches[1].rows[:, :, :, end],
                               rtol=1e-4, atol=1e-4)


def test_the_first_token_is_the_same_in_one_launch(engine, monkeypatch, picture):
    frame = picture(320, 224)
    expected = ask(engine, QUESTION, frame)
    engine.forget()
    language = engine.model.language
    monkeypatch.setattr(language, 'fused', CudaPrefill(
        language, PlainKernels(), PlainProducts(), Direct(), PlainPrompt()))
    got = ask(engine, QUESTION, frame)
    assert got.token_ids == expected.token_ids
    assert np.isclose(got.margin, expected.margin, rtol=1e-2)
    assert got.confidence == pytest.approx(expected.confidence, rel=1e-3)
