"""Whole requests: what is refused, reused, cut off, and what the next request finds."""

from __future__ import annotations

import json
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.stages import FeatureCache
from qwen_vl_ros.engine.types import Delta, Done, Request, Stage, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import STAGES, Timeline

QUESTION = 'What does the camera see?'


def ask(engine, question=QUESTION, *frames, **more):
    """Return the answer of a request about stills."""
    visuals = tuple(Visual((f,)) for f in frames)
    return list(engine.answer(Request(question, visuals, max_new_tokens=8, **more)))[-1].answer


def names(answer):
    """Return how often each stage was timed."""
    spans = [s.name for s in answer.timeline.spans]
    return {name: spans.count(name) for name in spans}


def refusal(engine, request, **more):
    """Return the error that a request ends with."""
    with pytest.raises(EngineError) as caught:
        list(engine.answer(request, **more))
    return caught.value


def test_events_come_in_order_and_deltas_join(engine, picture):
    events = list(engine.answer(
        Request(QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=12)))
    assert events[:3] == [Stage('vision'), Stage('prefill'), Stage('decode')]
    deltas = [e for e in events[3:-1] if isinstance(e, Delta)]
    assert len(deltas) == len(events) - 4
    done = events[-1]
    assert isinstance(done, Done)
    assert ''.join(d.text for d in deltas) == done.answer.text
    assert done.answer.text == engine.tokenizer.decode(
        done.answer.token_ids, skip_special_tokens=True)
    assert deltas[-1].tokens == len(done.answer.token_ids)
    assert 0 < done.answer.confidence <= 1
    assert done.answer.margin > 0
    assert done.answer.vision_tokens_in == done.answer.vision_tokens_kept == 192


def test_text_alone_has_no_vision_stage(engine):
    events = list(engine.answer(Request(QUESTION, max_new_tokens=2)))
    assert Stage('vision') not in events
    assert events[-1].answer.vision_tokens_in == 0


def test_the_timeline_holds_every_stage_with_its_costs(engine, picture):
    answer = ask(engine, QUESTION, picture(640, 480))
    assert answer.finish_reason == 'length'
    assert names(answer) == {'select': 1, 'patches': 1, 'upload': 1, 'encode': 1, 'prefill': 1,
                             'first_token': 1, 'token': 7}
    spans = {s.name: s for s in answer.timeline.spans}
    assert set(spans) <= set(STAGES)
    assert spans['patches'].bytes_read == 640 * 480 * 3
    assert spans['patches'].bytes_written == 1564 * 588
    assert spans['upload'].bytes_read == 1564 * 588
    v, t = engine.model.config.vision, engine.model.config.language
    linear = v.width * (4 * v.width + 2 * v.mlp_width)
    encode = 2 * 1564 * 588 * v.width + v.depth * (
        2 * 1564 * linear + 4 * 1564 ** 2 * v.width)
    encode += 2 * 391 * (16 * v.width ** 2 + 4 * v.width * v.out_width)
    assert spans['encode'].flops == encode
    kv = t.kv_heads * t.head_dim
    past = answer.prompt_tokens + 6
    token = t.layers * (2 * (2 * t.width ** 2 + 2 * t.width * kv + 3 * t.width * t.mlp_width)
                        + 4 * (past + 1) * t.width) + 2 * t.width * t.vocab
    assert spans['token'].flops == token
    row = t.layers * 2 * kv * 4
    assert spans['token'].bytes_read == engine.info.weight_bytes + t.width * 4 + past * row
    assert spans['token'].bytes_written == row
    assert spans['prefill'].bytes_written == row * answer.prompt_tokens
    assert answer.timeline.time_to_first_token_ms() > 0


def test_a_new_question_on_the_same_frame_prefills_its_own_tokens(engine, picture):
    frame = picture(640, 480)
    first = ask(engine, 'a red box stands left', frame)
    second = ask(engine, 'the path is blocked', Frame.from_rgb(frame.rgb().copy()))
    spans = {s.name: s for s in second.timeline.spans}
    assert not {'patches', 'upload', 'encode'} & set(spans)
    row = engine.model.config.language.layers * 2 * 4 * (
        engine.model.config.language.kv_heads * engine.model.config.language.head_dim)
    assert spans['prefill'].bytes_written < 30 * row < first.prompt_tokens * row
    engine.forget()
    fresh = ask(engine, 'the path is blocked', frame)
    assert names(fresh)['encode'] == 1
    assert fresh.token_ids == second.token_ids
    assert fresh.confidence == pytest.approx(second.confidence, rel=1e-4)


def test_the_same_request_again_computes_one_position(engine, picture):
    frame = picture(448, 336)
    first = ask(engine, QUESTION, frame)
    again = ask(engine, QUESTION, frame)
    prefill = [s for s in again.timeline.spans if s.name == 'prefill']
    old = [s for s in first.timeline.spans if s.name == 'prefill']
    assert prefill[0].bytes_written * first.prompt_tokens == old[0].bytes_written
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize('change', ['pixel', 'keep', 'size', 'system', 'order'])
def test_nothing_is_reused_that_is_not_the_same(engine, picture, change):
    frame, other = picture(224, 224), picture(224, 224, 1)
    visuals = (Visual((frame,)), Visual((other,)))
    base = Request(QUESTION, visuals, max_new_tokens=8)
    list(engine.answer(base))
    rgb = frame.rgb().copy()
    rgb[:28, :28] ^= 255
    changed = {
        'pixel': Request(QUESTION, (Visual((Frame.from_rgb(rgb),)), visuals[1]), max_new_tokens=8),
        'keep': Request(QUESTION, (Visual((frame,), np.arange(64) % 3 > 0), visuals[1]),
                        max_new_tokens=8),
        'size': Request(QUESTION, (Visual((picture(224, 196),)), visuals[1]), max_new_tokens=8),
        'system': Request(QUESTION, visuals, 'the path', max_new_tokens=8),
        'order': Request(QUESTION, visuals[::-1], max_new_tokens=8)}[change]
    warm = list(engine.answer(changed))[-1].answer
    engine.forget()
    cold = list(engine.answer(changed))[-1].answer
    assert warm.token_ids == cold.token_ids
    assert warm.confidence == pytest.approx(cold.confidence, rel=1e-4)
    assert warm.prompt_tokens == cold.prompt_tokens


def test_two_questions_in_turn_keep_their_own_prefix(engine, picture):
    a, b = picture(448, 336, 1), picture(448, 336, 2)
    for _ in range(2):
        ask(engine, 'the red box', a)
        ask(engine, 'blue cone', b)
    assert 'encode' not in names(ask(engine, 'the pallet', a))
    assert 'encode' not in names(ask(engine, 'the pallet', b))


def test_answers_do_not_depend_on_what_came_before(engine, picture):
    """C10: one at a time; no state of one request (such as rope_deltas) reaches another."""
    requests = [
        Request(QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=8),
        Request(QUESTION, max_new_tokens=8),
        Request(QUESTION, (Visual((picture(90, 300),)), Visual((picture(200, 150),))),
                max_new_tokens=8),
        Request(QUESTION, (Visual(tuple(picture(112, 112, s) for s in range(5))),),
                max_new_tokens=8)]
    alone = []
    for request in requests:
        engine.forget()
        alone.append(list(engine.answer(request))[-1].answer.token_ids)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 1, 0]):
        for i in order:
            assert list(engine.answer(requests[i]))[-1].answer.token_ids == alone[i]


@pytest.mark.parametrize('count,slices', [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_any_number_of_frames_works(engine, picture, count, slices):
    """C11."""
    clip = Visual(tuple(picture(168, 112, seed) for seed in range(count)))
    answer = list(engine.answer(Request(QUESTION, (clip,), max_new_tokens=3)))[-1].answer
    assert answer.vision_tokens_in == slices * 6 * 4
    assert len(answer.token_ids) >= 1 or answer.finish_reason == 'stop'


def test_swapping_two_pictures_swaps_their_tokens(engine, picture):
    """C9."""
    wide, tall = Visual((picture(280, 84),)), Visual((picture(84, 280),))
    one, _ = engine.trace(Request(QUESTION, (wide, tall)))
    two, _ = engine.trace(Request(QUESTION, (tall, wide)))
    (a, b), (c, d) = one.spans, two.spans
    assert a[0] == c[0] and b[1] == d[1]
    assert np.array_equal(one.positions[:, slice(*a)] - one.positions[:, a[0], None],
                          two.positions[:, slice(*d)] - two.positions[:, d[0], None])
    assert set(one.positions[1, slice(*a)] - one.positions[1, a[0]]) == {0, 1, 2}
    assert set(two.positions[1, slice(*c)] - two.positions[1, c[0]]) == set(range(10))
    assert np.array_equal(one.names[slice(*a)], two.names[slice(*d)])


def test_the_pixel_limit_holds(folders, picture):
    """C3: a 4000x3000 frame gives at most max_pixels / 784 tokens; the answer says how many."""
    engine = Engine.load(str(folders['small']), device='cpu', max_pixels=200704)
    answer = ask(engine, QUESTION, picture(4000, 3000))
    assert 200 < answer.vision_tokens_in <= 200704 // 784
    grown = Engine.load(
        str(folders['small']), device='cpu', min_pixels=100352, max_pixels=200704)
    assert ask(grown, QUESTION, picture(30, 20)).vision_tokens_in >= 128


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(folders, picture):
    """C6: never cut, and refused before the encoder runs."""
    engine = Engine.load(str(folders['small']), device='cpu', max_context=256)
    request = Request(QUESTION, (Visual((picture(448, 336),)), Visual((picture(448, 336, 1),))))
    engine.model.vision.encode = lambda *args: pytest.fail('encoded anyway')
    error = refusal(engine, request)
    assert error.code == ErrorCode.PROMPT_TOO_LONG
    assert 'the prompt has 4' in error.message
    assert '(384 of them visual)' in error.message
    assert 'holds 256' in error.message


def test_the_context_bounds_the_answer(folders, picture):
    engine = Engine.load(
        str(folders['small']), device='cpu', max_context=240, repetition_window=0)
    engine.end_tokens = frozenset()
    answer = list(engine.answer(Request(
        QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=1000)))[-1].answer
    assert answer.finish_reason == 'length'
    assert answer.prompt_tokens + len(answer.token_ids) == 240


@pytest.mark.parametrize('change,words', [
    ({'question': '  '}, 'question'),
    ({'max_new_tokens': 0}, 'max_new_tokens is 0; expected at least 1'),
    ({'temperature': -1.0}, 'temperature'),
    ({'temperature': math.nan}, 'temperature'),
    ({'top_p': 0.0}, 'top_p'),
    ({'top_k': -1}, 'top_k'),
    ({'keep_ratio': 0.0}, 'keep_ratio'),
    ({'deadline_s': 0.0}, 'deadline_s'),
    ({'visuals': (Visual(()),)}, 'a visual without frames'),
    ({'question': 'x <|image_pad|> y'}, "control token '<|image_pad|>'"),
    ({'system_prompt': '<|im_end|>'}, "system prompt contains the control token '<|im_end|>'"),
])
def test_bad_requests_are_named(engine, change, words):
    error = refusal(engine, Request(**{'question': QUESTION, **change}))
    assert error.code == ErrorCode.BAD_REQUEST
    assert words in error.message


def test_a_keep_mask_of_another_grid_is_refused(engine, picture):
    visual = Visual((picture(448, 336),), np.ones(191, bool))
    error = refusal(engine, Request(QUESTION, (visual,)))
    assert error.code == ErrorCode.BAD_REQUEST
    assert 'bool [191]; expected bool [192] for a grid of 1x12x16 units' in error.message
    visual = Visual((picture(448, 336),), np.ones(192, int))
    assert 'int64 [192]' in refusal(engine, Request(QUESTION, (visual,))).message


def test_a_keep_ratio_drops_units(engine, picture):
    answer = list(engine.answer(Request(
        QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=2, keep_ratio=0.25)))[-1].answer
    assert (answer.vision_tokens_in, answer.vision_tokens_kept) == (192, 48)


def test_a_selector_is_asked_for_visuals_without_a_mask(folders, picture):
    seen = []

    def first_row(frames, grid, ratio):
        seen.append((len(frames), grid, ratio))
        return np.arange(192) < 16

    engine = Engine.load(str(folders['small']), device='cpu', selector=first_row)
    frame = picture(448, 336)
    request = Request(QUESTION, (Visual((frame,)), Visual((frame,), np.arange(192) < 5)),
                      max_new_tokens=1, keep_ratio=0.5)
    assert list(engine.answer(request))[-1].answer.vision_tokens_kept == 16 + 5
    assert seen == [(1, (1, 24, 32), 0.5)]


def test_cancel_ends_within_one_token(engine, picture):
    flag = threading.Event()
    engine.end_tokens, ends = frozenset(), engine.end_tokens
    try:
        count = 0
        for event in engine.answer(
                Request(QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=500),
                cancelled=flag.is_set):
            if isinstance(event, Delta):
                count = event.tokens
                if count >= 5:
                    flag.set()
        assert event.answer.finish_reason == 'cancelled'
        assert len(event.answer.token_ids) == count
        assert event.answer.text
    finally:
        engine.end_tokens = ends


@pytest.mark.parametrize('after', [0, 1, 2, 3])
def test_cancel_between_pictures_and_chunks(folders, picture, after):
    engine = Engine.load(str(folders['small']), device='cpu', prefill_chunk=100)
    polls = []

    def cancelled():
        polls.append(1)
        return len(polls) > after

    request = Request(
        QUESTION, (Visual((picture(224, 224),)), Visual((picture(224, 224, 1),))))
    events = list(engine.answer(request, cancelled=cancelled))
    answer = events[-1].answer
    assert (answer.finish_reason, answer.text, answer.token_ids) == ('cancelled', '', ())
    assert math.isnan(answer.confidence)
    assert names(answer).get('encode', 0) == min(after, 2)
    assert names(answer).get('prefill', 0) == max(0, after - 2)
    assert Stage('decode') not in events
    whole = list(engine.answer(request))[-1].answer
    engine.forget()
    assert whole.token_ids == list(engine.answer(request))[-1].answer.token_ids


def test_a_deadline_counts_from_submission_and_stops_the_work(engine, picture):
    """C14."""
    request = Request(QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=4000,
                      deadline_s=0.2)
    engine.end_tokens, ends = frozenset(), engine.end_tokens
    try:
        steps = []
        decode = engine.model.next_token
        engine.model.next_token = lambda *a: steps.append(1) or decode(*a)
        started = time.monotonic()
        answer = list(engine.answer(request))[-1].answer
        assert time.monotonic() - started < 2
        assert answer.finish_reason == 'deadline'
        assert len(steps) == len(answer.token_ids) - 1
        late = Timeline()
        late.start_ns -= 10 ** 9
        answer = list(engine.answer(request, late))[-1].answer
        assert (answer.finish_reason, answer.token_ids) == ('deadline', ())
    finally:
        engine.end_tokens = ends
        engine.model.__dict__.pop('next_token', None)


def test_an_abandoned_answer_leaves_the_engine_usable(engine, picture):
    frame = picture(448, 336)
    expected = ask(engine, QUESTION, frame).token_ids
    for stop_at in range(4):
        events = engine.answer(Request(QUESTION, (Visual((frame,)),)))
        for _ in range(stop_at + 1):
            next(events)
        events.close()
        assert ask(engine, QUESTION, frame).token_ids == expected
        engine.forget()


@pytest.mark.parametrize('error,code', [
    (RuntimeError('shape mismatch\nmore'), ErrorCode.UNKNOWN),
    (ValueError('odd'), ErrorCode.UNKNOWN),
    (MemoryError(), ErrorCode.OUT_OF_MEMORY),
    (torch.cuda.OutOfMemoryError('CUDA out of memory. Tried'), ErrorCode.OUT_OF_MEMORY),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
     ErrorCode.OUT_OF_MEMORY),
])
@pytest.mark.parametrize('where', ['encode', 'prefill', 'next_token'])
def test_a_failure_ends_the_request_with_its_reason(engine, picture, error, code, where):
    """C14 and out of memory: caches are given back and the next request works."""
    frame = picture(448, 336)
    expected = ask(engine, QUESTION, frame).token_ids
    engine.forget()

    def fail(*args):
        raise error

    setattr(engine.model, where, fail)
    try:
        caught = refusal(engine, Request(QUESTION, (Visual((frame,)),)))
    finally:
        delattr(engine.model, where)
    assert caught.code == code
    assert '\n' not in caught.message
    assert len(engine._features) == 0
    assert engine._pool.used_bytes == 0
    assert ask(engine, QUESTION, frame).token_ids == expected


def test_features_that_are_not_finite_concern_one_request(engine, picture):
    """C2."""
    bad, good = picture(224, 224, 1), picture(224, 224, 2)
    encode = engine.model.vision.encode

    def spoil(patches, grid, units=None):
        out = encode(patches, grid, units)
        out[3, 5] = torch.nan
        return out

    engine.model.vision.encode = spoil
    try:
        error = refusal(engine, Request(QUESTION, (Visual((bad,)),)))
    finally:
        del engine.model.vision.encode
    assert error.code == ErrorCode.NUMERICAL
    assert 'numerical failure' in error.message
    assert ask(engine, QUESTION, good).token_ids
    assert names(ask(engine, 'a box', bad))['encode'] == 1


def test_token_zero_over_and_over_is_no_answer(engine, picture):
    """C1."""
    deltas = []
    engine.model.first_token = engine.model.next_token = lambda *a: Choice(0, 1.0, 1.0, True)
    try:
        with pytest.raises(EngineError, match='numerical failure') as caught:
            for event in engine.answer(Request(QUESTION, max_new_tokens=64)):
                deltas += [event] if isinstance(event, Delta) else []
    finally:
        del engine.model.first_token, engine.model.next_token
    assert caught.value.code == ErrorCode.NUMERICAL
    assert deltas == []


def test_float16_survives_scores_beyond_its_range(folders, picture):
    """C1: query-key products of 1e6 overflow float16 (65504), the fused softmax does not."""
    engines = [Engine.load(str(folders['wide']), device='cpu', dtype=d)
               for d in ('float32', 'float16')]
    request = Request(QUESTION, (Visual((picture(224, 224),)),))
    for engine in engines:
        cfg = engine.model.config.language
        rows = (cfg.heads + cfg.kv_heads) * cfg.head_dim
        for layer in engine.model.language.layers:
            layer.qkv.weight[:rows] *= 60
            layer.qkv.bias[:rows] *= 60
    _, wide = engines[0].trace(request)
    _, half = engines[1].trace(request)
    x = engines[0].model.language
    scores = _largest_score(x, engines[0], request)
    assert scores > 65504
    assert half.isfinite().all()
    assert (half.float() - wide).abs().mean() < 0.05 * wide.abs().mean()


def _largest_score(language, engine, request):
    """Return the largest unscaled query-key product of the first layer."""
    prompt, _ = engine.trace(request)
    with torch.inference_mode():
        x = language.embed(torch.from_numpy(prompt.ids))
        layer = language.layers[0]
        from qwen_vl_ros.engine.layers import rms_norm
        cfg = language.config
        y = layer.qkv(rms_norm(x, layer.norm1, cfg.eps)).view(x.shape[0], -1, cfg.head_dim)
        q, k = y[:, :cfg.heads], y[:, cfg.heads:cfg.heads + 1]
        return (q.transpose(0, 1) @ k.permute(1, 2, 0)).abs().max().item()


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_agrees(folders, engines, picture, dtype):
    request = Request(QUESTION, (Visual((picture(448, 336),)),))
    half = Engine.load(str(folders['full']), device='cpu', dtype=dtype)
    _, expected = engines['full'].trace(request)
    _, logits = half.trace(request)
    assert logits.dtype == getattr(torch, dtype)
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < (0.08 if dtype == 'bfloat16' else 0.01)


def test_sessions_remember_and_forget(engine, picture):
    frame = picture(224, 224)
    first = ask(engine, 'a red box', frame, session_id='one')
    second = ask(engine, 'the path', session_id='one')
    assert second.prompt_tokens > first.prompt_tokens
    assert second.vision_tokens_in == 64
    assert 'encode' not in names(second)
    stranger = ask(engine, 'the path', session_id='two')
    assert stranger.vision_tokens_in == 0
    engine.reset_sessions()
    assert ask(engine, 'the path', session_id='one').prompt_tokens == stranger.prompt_tokens


def test_a_session_equals_the_whole_conversation(engine, reference, picture):
    frame = picture(224, 224)
    first = ask(engine, 'a red box', frame, session_id='s')
    assert first.finish_reason in ('stop', 'length')
    # The same picture again is not shown twice; the conversation about it goes on.
    second = ask(engine, 'the path', frame, session_id='s')
    assert second.vision_tokens_in == 64
    messages = [
        {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'a red box'}]},
        {'role': 'assistant', 'content': first.text},
        {'role': 'user', 'content': [{'type': 'text', 'text': 'the path'}]}]
    text = reference.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True)
    text = text.replace('<|image_pad|>', '<|image_pad|>' * 64)
    ids = reference.tokenizer(text, return_tensors='pt').input_ids
    assert second.prompt_tokens == ids.shape[1]
    values, grid = reference.pixels(Visual((frame,)))
    inputs = reference.wants({
        'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'pixel_values': values,
        'image_grid_thw': torch.tensor([grid]),
        'mm_token_type_ids': (ids == reference.model.config.image_token_id).int()})
    out = reference.model.generate(**inputs, pad_token_id=0, max_new_tokens=8, do_sample=False)
    tokens = [t for t in out[0, ids.shape[1]:].tolist() if t not in engine.end_tokens]
    assert list(second.token_ids) == tokens


def test_a_session_about_a_long_clip_equals_one_asked_afresh(engine, picture):
    """Its time axis reaches beyond the text after it, so decoded rows stand elsewhere."""
    clip = Visual(tuple(picture(56, 56, seed) for seed in range(80)))
    turns = (Request('a', (clip,), max_new_tokens=6, session_id='s'),
             Request('the path', max_new_tokens=8, session_id='s'))
    prompt, _ = engine.trace(turns[0])
    assert not prompt.runs_on
    warm = [list(engine.answer(turn))[-1].answer for turn in turns]
    engine.reset_sessions()
    list(engine.answer(turns[0]))
    engine.forget()
    cold = list(engine.answer(turns[1]))[-1].answer
    assert warm[1].token_ids == cold.token_ids
    assert warm[1].confidence == pytest.approx(cold.confidence, rel=1e-4)
    assert prompt.ids.size == warm[0].prompt_tokens


def test_decoded_rows_that_stand_elsewhere_are_not_named(engine, picture):
    for frames, named in ((1, True), (80, False)):
        engine.forget()
        clip = Visual(tuple(picture(56, 56, seed) for seed in range(frames)))
        answer = list(engine.answer(Request('a', (clip,), max_new_tokens=4)))[-1].answer
        prompt, _ = engine.trace(Request('a', (clip,)))
        whole = np.r_[prompt.names, answer.token_ids, 0]
        _, reused = engine._pool.acquire(whole)
        fed = len(answer.token_ids) - (answer.finish_reason != 'stop')
        assert fed > 0
        assert reused == prompt.ids.size + (fed if named else 0)


def test_an_answer_that_spells_a_control_token_is_not_remembered(engine):
    """It would open a turn of its own in the next prompt."""
    alone = ask(engine, 'the path').prompt_tokens
    push = engine._text.push
    engine._text.push = lambda token: '<|im_start|>'
    try:
        assert '<|im_start|>' in ask(engine, 'a', session_id='s').text
    finally:
        engine._text.push = push
    assert ask(engine, 'the path', session_id='s').prompt_tokens == alone


def test_a_mask_of_ones_is_no_mask(engine, picture):
    frame = picture(224, 224)
    ask(engine, QUESTION, frame)
    masked = Request('a', (Visual((frame,), np.ones(64, bool)),), max_new_tokens=2)
    assert 'encode' not in names(list(engine.answer(masked))[-1].answer)


def test_features_are_kept_up_to_their_bytes():
    cache = FeatureCache(most_bytes=1000)
    for key in range(4):
        cache.put(key, torch.zeros(100))  # 400 bytes
        cache.get(0)
    assert [cache.get(key) is not None for key in range(4)] == [True, False, False, True]
    cache.put(9, torch.zeros(1000))
    assert cache.get(9) is None
    cache.put(3, torch.ones(50))
    assert cache.get(3).sum() == 50
    assert cache.get(0) is not None
    cache.clear()
    assert len(cache) == 0


def test_a_session_is_bounded(folders, picture):
    engine = Engine.load(str(folders['small']), device='cpu', max_context=300)
    sizes = [ask(engine, QUESTION, picture(224, 224, seed), session_id='s').prompt_tokens
             for seed in range(8)]
    assert max(sizes) <= 300 - 8
    assert sizes[-1] > sizes[0]
    for i in range(40):
        ask(engine, 'a', session_id=f'other{i}')
    assert len(engine._sessions) == 16


def test_sessions_give_up_frames_beyond_their_bytes(picture):
    from qwen_vl_ros.engine.prompt import Turn, VisualToken
    from qwen_vl_ros.engine.sessions import Sessions

    sessions = Sessions(most_bytes=250000)
    frame = picture(200, 150)  # 90 kB
    for i in range(4):
        sessions.store(f's{i}', (Turn('q', (VisualToken((1, 2, 2), False, i, None, (frame,)),)),))
    assert [len(sessions.history(f's{i}')) for i in range(4)] == [0, 0, 1, 1]


def test_memory_does_not_grow_with_sizes(engine, picture):
    """C19: 100 requests of 100 sizes; the first five are the largest."""
    def resident():
        with open('/proc/self/statm', encoding='ascii') as file:
            return int(file.read().split()[1]) * 4096

    sizes = sorted(((28 * (4 + i % 10) + 1, 28 * (4 + i // 10)) for i in range(100)),
                   key=lambda s: -s[0] * s[1])
    assert len(set(sizes)) == 100
    for i, size in enumerate(sizes):
        list(engine.answer(Request('a', (Visual((picture(*size, seed=i),)),), max_new_tokens=2)))
        if i == 4:
            early = resident()
    assert resident() < early * 1.05


def test_a_schema_shapes_the_answer(engine, picture):
    pytest.importorskip('llguidance', reason='optional: pip install llguidance')
    schema = json.dumps({
        'type': 'object', 'additionalProperties': False,
        'properties': {'blocked': {'type': 'boolean'},
                       'what': {'enum': ['box', 'cone', 'nothing']}},
        'required': ['blocked', 'what']})
    for temperature in (0.0, 1.0):
        answer = list(engine.answer(Request(
            QUESTION, (Visual((picture(224, 224),)),), max_new_tokens=200, json_schema=schema,
            temperature=temperature, seed=3)))[-1].answer
        assert answer.finish_reason == 'stop'
        data = json.loads(answer.text)
        assert isinstance(data['blocked'], bool)
        assert data['what'] in ('box', 'cone', 'nothing')


@pytest.mark.parametrize('schema', ['{', '[1]', '{"type": "nonsense"}'])
def test_a_bad_schema_is_refused(engine, schema):
    pytest.importorskip('llguidance', reason='optional: pip install llguidance')
    assert refusal(
        engine, Request(QUESTION, json_schema=schema)).code == ErrorCode.BAD_SCHEMA


def test_a_schema_without_the_library_names_the_command(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, 'llguidance', None)
    error = refusal(engine, Request(QUESTION, json_schema='{"type": "object"}'))
    assert error.code == ErrorCode.BAD_SCHEMA
    assert 'pip install llguidance' in error.message


def test_warm_up_leaves_nothing_behind(folders, picture):
    engine = Engine.load(str(folders['small']), device='cpu')
    engine.warm_up([(448, 336), (100, 60)])
    assert len(engine._features) == 0
    grey = Frame.from_rgb(np.full((336, 448, 3), 128, np.uint8))
    assert names(ask(engine, '?', grey))['encode'] == 1


def test_a_closed_engine_refuses(folders):
    engine = Engine.load(str(folders['small']), device='cpu')
    engine.close()
    engine.close()
    assert refusal(engine, Request(QUESTION)).code == ErrorCode.INACTIVE
