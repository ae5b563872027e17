"""Encoder and decoder on devices of their own: the same answers, tokens by the tuning table."""

from __future__ import annotations

import json

import pytest
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.share import share


def answer(engine, picture):
    request = Request('what colour is the largest thing ?', (Visual((picture(320, 240),)),),
                      max_new_tokens=6)
    return next(e.answer for e in engine.answer(request) if isinstance(e, Done))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / 'tuning.json'
    path.write_text(json.dumps({'tuning': [
        {'both': False, 'size': 1 << 15, 'way': 'staged pinned', 'streams': 2, 'chunks': 3}]}))
    return str(path)


def test_two_devices_answer_as_one(picture, table, monkeypatch):
    folder = str(share('models', 'tiny'))
    one, two = Engine.load(folder, device='cpu'), Engine.load(
        folder, device='cpu', encoder_device='cpu:0', interconnect=table)
    moved = []
    mover = two.model.hand_over._mover
    issue = mover.issue
    monkeypatch.setattr(mover, 'issue', lambda setting, *more: (
        moved.append(setting), issue(setting, *more)))
    expected, got = answer(one, picture), answer(two, picture)
    assert got.token_ids == expected.token_ids and got.text == expected.text
    assert [(s.way, s.streams, s.chunks) for s in moved] == [('staged pinned', 2, 3)]
    assert moved[0].size == got.vision_tokens_kept * two.model.config.language.width * 4
    assert one.model.hand_over is None


def test_a_table_that_is_none_is_named(tmp_path):
    folder = str(share('models', 'tiny'))
    with pytest.raises(EngineError, match=r'none.json cannot be read'):
        Engine.load(folder, device='cpu', encoder_device='cpu:0',
                    interconnect=str(tmp_path / 'none.json'))


@pytest.mark.gpu
@pytest.mark.parametrize(('device', 'encoder'), [
    ('cuda:0', 'cuda:1'), ('cuda:1', 'cuda:0'), ('cuda:1', 'cuda:1')])
@pytest.mark.parametrize('scheduled', [False, True])
def test_two_gpus_answer_as_one(picture, table, device, encoder, scheduled):
    if torch.cuda.device_count() < 2:
        pytest.skip('one GPU only')
    folder = str(share('models', 'tiny'))
    expected = answer(Engine.load(folder, device='cuda:0'), picture)
    engine = Engine.load(folder, device=device, encoder_device=encoder, interconnect=table)
    if not scheduled:
        got = answer(engine, picture)
    else:
        plan = engine.scheduler(2)
        plan.start()
        got = answer(plan, picture)
        plan.stop()
    assert got.token_ids == expected.token_ids
