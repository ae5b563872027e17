"""Logits, positions and greedy tokens against transformers, for every shape and kind of prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_checkpoints import SHAPES

from qwen_vl_ros.engine.types import Done, Request, Visual


def requests(picture):
    """Return name to request: every kind of prompt."""
    still = picture(448, 336)
    clip = [picture(168, 112, seed) for seed in range(10, 15)]
    three = tuple(Visual((f,)) for f in (
        picture(200, 150, 1), picture(90, 300, 2), picture(640, 480, 3)))
    return {
        'text': Request('What does the camera see?'),
        'still': Request('What does the camera see?', (Visual((still,)),)),
        'three': Request('left of the blue cone', three, system_prompt='the path'),
        'clip2': Request('is it blocked?', (Visual(tuple(clip[:2])),)),
        'clip3': Request('is it blocked?', (Visual(tuple(clip[:3])),)),
        'clip5': Request('机器人?', (Visual(tuple(clip)),)),
        'mixed': Request('a 😀', (Visual((still,)), Visual(tuple(clip[:4])), three[1])),
    }


KINDS = ['text', 'still', 'three', 'clip2', 'clip3', 'clip5', 'mixed']


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('shape', SHAPES)
def test_logits_of_every_position_equal_the_oracle(shape, kind, engines, references, picture):
    request = requests(picture)[kind]
    expected = references[shape].logits(request)
    prompt, logits = engines[shape].trace(request)
    assert prompt.ids.tolist() == references[shape].inputs(request)['input_ids'][0].tolist()
    worst = (logits - expected).abs().max() / expected.abs().max()
    assert worst < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize('kind', KINDS)
def test_positions_equal_the_oracle(kind, engine, reference, picture):
    request = requests(picture)[kind]
    prompt, _ = engine.trace(request)
    expected = reference.positions(request)
    assert np.array_equal(prompt.positions, expected)
    assert prompt.next_position == expected.max() + 1


@pytest.mark.parametrize('kind', ['text', 'still', 'three', 'clip5'])
@pytest.mark.parametrize('shape', SHAPES)
def test_64_greedy_tokens_equal_the_oracle(shape, kind, engines, references, picture):
    request = requests(picture)[kind]
    engine = engines[shape]
    ends, engine.end_tokens = engine.end_tokens, frozenset()
    try:
        done = list(engine.answer(Request(
            request.question, request.visuals, request.system_prompt, max_new_tokens=64)))[-1]
    finally:
        engine.end_tokens = ends
    assert isinstance(done, Done)
    assert list(done.answer.token_ids) == references[shape].generate(request, 64)
    assert done.answer.finish_reason == 'length'
