"""The checkpoint that ships: transformers' logits, tokens and positions, and right answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_reference import Reference

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.roboscene.evaluate import evaluate, frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.roboscene.questions import FAMILIES

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


@pytest.fixture(scope='module')
def tiny():
    engine = Engine.load(str(TINY), device='cpu')
    yield engine
    engine.close()


@pytest.fixture(scope='module')
def oracle():
    return Reference(TINY, pixels=(3136, 153600))


def requests():
    still = Visual(frames_of(next(items('relation', 'test', 1))))
    clip = Visual(frames_of(next(items('change', 'test', 1))))
    others = [Visual(frames_of(i)) for i in items('far', 'test', 2)]
    return {
        'text': Request('What do you see?'),
        'still': Request('What do you see?', (still,)),
        'three': Request('Is the path blocked?', (still, *others), system_prompt='the path'),
        'clip': Request('What moved?', (clip,)),
    }


@pytest.mark.parametrize('kind', ['text', 'still', 'three', 'clip'])
def test_the_tiny_checkpoint_equals_the_oracle(kind, tiny, oracle):
    request = requests()[kind]
    prompt, logits = tiny.trace(request)
    expected = oracle.logits(request)
    assert (logits - expected).abs().max() / expected.abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert np.array_equal(prompt.positions, oracle.positions(request))


@pytest.mark.parametrize('kind', ['text', 'still', 'three', 'clip'])
def test_64_greedy_tokens_of_the_tiny_checkpoint_equal_the_oracle(kind, tiny, oracle):
    request = Request(requests()[kind].question, requests()[kind].visuals, max_new_tokens=64)
    ends, tiny.end_tokens = tiny.end_tokens, frozenset()
    window, tiny.options = tiny.options, tiny.options.__class__(
        **{**vars(tiny.options), 'repetition_window': 0})
    try:
        said = next(e for e in tiny.answer(request) if isinstance(e, Done)).answer
    finally:
        tiny.end_tokens, tiny.options = ends, window
    assert list(said.token_ids) == oracle.generate(request, 64)


@pytest.mark.parametrize('family', FAMILIES)
def test_the_tiny_checkpoint_answers(family, tiny):
    score = next(iter(evaluate(tiny, [family], count=12)))
    # The card says 0.87 (count) to 1.0: fewer than 8 of 12 happens once in 10,000 runs at 0.87.
    assert score.right >= 8, score.wrong
    assert score.kept == (384 if family == 'change' else 192)


def test_without_the_picture_it_cannot(tiny):
    score = next(iter(evaluate(tiny, ['pointing'], count=12, floor='shuffled')))
    assert score.right <= 3


def test_larger_pictures_come_down_to_the_size_it_was_trained_on(tiny):
    from qwen_vl_ros.frame import Frame
    frame = Frame.from_rgb(np.full((480, 640, 3), 90, np.uint8))
    done = list(tiny.answer(Request('Is the path blocked?', (Visual((frame,)),))))[-1]
    assert done.answer.vision_tokens_in == 192
    assert tiny.info.max_pixels == 153600
