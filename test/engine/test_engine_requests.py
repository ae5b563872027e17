"""Whole requests: events, costs, limits, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_asking import QUESTION, ask, names, refusal

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.prompt import PromptBuilder, Turn
from qwen_vl_ros.engine.types import Delta, Done, Request, Stage, Visual
from qwen_vl_ros.measure.timeline import STAGES


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
    assert names(answer) == {'select': 2, 'patches': 1, 'upload': 1, 'encode': 1, 'prefill': 1,
                             'first_token': 1, 'admit': 1, 'token': 7}
    spans = {s.name: s for s in answer.timeline.spans}
    assert set(spans) <= set(STAGES)
    assert spans['patches'].bytes_read == 640 * 480 * 3
    assert spans['patches'].bytes_written == 1564 * 588
    assert spans['upload'].bytes_read == 0  # the encoder reads them where they are
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


def test_a_template_that_tells_the_time_is_rendered_anew(engine):
    """All others are rendered once for the same words."""
    turn = (Turn('What time is it?', ()),)
    prompts = engine.prompts
    template = (Path(__file__).parents[2] / 'models/tiny/chat_template.json').read_text()
    template = json.loads(template)['chat_template']
    timed = PromptBuilder(
        engine.tokenizer, template + "{{ strftime_now('%f') }}", engine.model.config)
    assert (prompts.build(turn, None).ids == prompts.build(turn, None).ids).all()
    built = [timed.build(turn, None).ids.tolist() for _ in range(20)]
    assert any(other != built[0] for other in built)


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
    ({'deadline_s': math.nan}, 'deadline_s'),
    ({'deadline_s': math.inf}, 'deadline_s'),
    ({'seed': 1 << 63}, 'seed'),
    ({'seed': -(1 << 63) - 1}, 'seed'),
    ({'seed': 0.5}, 'seed'),
    ({'top_k': 1.5}, 'top_k'),
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
    assert ('bool [191]; expected bool [192] or [1, 12, 16] for a grid of 1x12x16 units'
            in error.message)
    visual = Visual((picture(448, 336),), np.ones((1, 16, 12), bool))
    assert 'bool [1, 16, 12]; expected' in refusal(engine, Request(QUESTION, (visual,))).message
    visual = Visual((picture(448, 336),), np.ones(192, int))
    assert 'int64 [192]' in refusal(engine, Request(QUESTION, (visual,))).message


def test_a_deadline_beyond_all_times_is_none(engine, picture):
    answer = ask_with(engine, Visual((picture(224, 224),)), deadline_s=1e300)
    assert answer.finish_reason != 'deadline' and answer.token_ids


def test_a_keep_mask_may_have_the_shape_of_the_grid(engine, picture):
    flat = np.arange(192) % 3 == 0
    answers = [ask_with(engine, Visual((picture(448, 336),), keep))
               for keep in (flat, flat.reshape(1, 12, 16))]
    assert answers[0].vision_tokens_kept == 64
    assert answers[0].token_ids == answers[1].token_ids


def ask_with(engine, visual, **more):
    request = Request(QUESTION, (visual,), max_new_tokens=4, **more)
    return list(engine.answer(request))[-1].answer


@pytest.mark.parametrize('temperature', [1e-45, 1e-38, 9e-5])
def test_a_temperature_next_to_nothing_is_greedy(engine, picture, temperature):
    visual = Visual((picture(224, 224),))
    assert ask_with(engine, visual, temperature=temperature).token_ids == ask_with(
        engine, visual).token_ids


def test_a_keep_ratio_drops_units(engine, picture):
    answer = list(engine.answer(Request(
        QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=2, keep_ratio=0.25)))[-1].answer
    assert (answer.vision_tokens_in, answer.vision_tokens_kept) == (192, 48)


def test_a_selector_is_asked_for_visuals_without_a_mask(folders, picture):
    seen = []

    def first_row(frames, grid, ratio, question):
        seen.append((len(frames), grid, ratio, question))
        return np.arange(192) < 16

    engine = Engine.load(str(folders['small']), device='cpu', selector=first_row)
    frame = picture(448, 336)
    request = Request(QUESTION, (Visual((frame,)), Visual((frame,), np.arange(192) < 5)),
                      max_new_tokens=1, keep_ratio=0.5)
    assert list(engine.answer(request))[-1].answer.vision_tokens_kept == 16 + 5
    assert seen == [(1, (1, 24, 32), 0.5, QUESTION)]


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
