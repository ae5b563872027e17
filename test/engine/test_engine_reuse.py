"""What one request leaves for the next: prefixes, features, conversations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_asking import QUESTION, ask, names

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.prompt import Turn, VisualToken
from qwen_vl_ros.engine.sessions import Sessions
from qwen_vl_ros.engine.stages import FeatureCache
from qwen_vl_ros.engine.text import TextStream
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.frame import Frame


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
        cache, reused = engine.pool.acquire(whole)
        engine.pool.release(cache)
        fed = len(answer.token_ids) - (answer.finish_reason != 'stop')
        assert fed > 0
        assert reused == prompt.ids.size + (fed if named else 0)


def test_an_answer_that_spells_a_control_token_is_not_remembered(engine, monkeypatch):
    """It would open a turn of its own in the next prompt."""
    alone = ask(engine, 'the path').prompt_tokens
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, 'push', lambda self, token: '<|im_start|>')
        assert '<|im_start|>' in ask(engine, 'a', session_id='s').text
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
    assert len(engine.sessions) == 16


def test_sessions_give_up_frames_beyond_their_bytes(picture):
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


def test_warm_up_asks_with_the_share_that_questions_will_have(folders, monkeypatch):
    engine = Engine.load(str(folders['small']), device='cpu')
    asked = []
    answer = engine.answer
    monkeypatch.setattr(engine, 'answer', lambda request: (
        asked.append(request.keep_ratio), answer(request))[1])
    engine.warm_up([(448, 336)])
    engine.warm_up([(448, 336)], 0.5)
    assert asked == [1.0, 1.0, 0.5]


def test_warm_up_leaves_nothing_behind(folders, picture):
    engine = Engine.load(str(folders['small']), device='cpu')
    engine.warm_up([(448, 336), (100, 60)])
    assert len(engine.features) == 0
    grey = Frame.from_rgb(np.full((336, 448, 3), 128, np.uint8))
    assert names(ask(engine, '?', grey))['encode'] == 1
