"""What choosing costs: formulas against what runs, and the stage that carries them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.stages import _selection_cost as bench
from qwen_vl_ros.cli.main import main
from qwen_vl_ros.engine.costs import attention_flops, causal_pairs, decoder_cost
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.roboscene.evaluate import frames_of, say
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency import costs, grad_cam
from qwen_vl_ros.saliency.answering import AS_IT_IS, Fewer
from qwen_vl_ros.saliency.droppers import dart, divprune
from qwen_vl_ros.saliency.head import SaliencyHead
from qwen_vl_ros.saliency.reflecting import focus_of
from qwen_vl_ros.saliency.selectors import FILE, make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'
RATIO = 0.375  # 72 units


@pytest.fixture(scope='module')
def engine():
    engine = Engine.load(str(TINY), device='cpu', dtype='float32')
    yield engine
    engine.close()


def asked(name='relation'):
    item = next(items(name, 'test', 1))
    return item.question.text, frames_of(item)


def choose_by(engine, selector):
    getattr(selector, 'bind', lambda engine: None)(engine)
    engine.options = replace(engine.options, selector=selector)


def select_of(engine, fewer=AS_IT_IS):
    """Answer with few units; return the answer and the FLOPs of its stage ``select``."""
    question, frames = asked()
    got = say(engine, Request(question, (Visual(frames),), keep_ratio=RATIO), fewer)
    return got, sum(s.flops for s in got.timeline.spans if s.name == 'select')


@pytest.mark.parametrize(('depth', 'answer'), [(2, ()), (0, (5, 6, 7))])
def test_a_gradient_costs_what_torch_counts(engine, depth, answer):
    config = engine.model.config.language
    question, frames = asked()
    _, prompt, features = engine.look(Request(question, (Visual(frames),)))
    depth = depth or config.layers
    with FlopCounterMode(display=False) as counter, Timeline().stage('select') as span:
        grad_cam.token_maps(engine, prompt, features, depth, answer)
    # torch counts no fused attention on a CPU: forward once, backward two and a half times.
    tokens = prompt.ids.size + len(answer[:-1])
    attention = depth * attention_flops(causal_pairs(tokens, 0), config.width)
    assert span.flops - attention * 7 // 2 == counter.get_total_flops()
    assert span.bytes_read == 2 * engine.model.language.weight_bytes
    # It is more than the pass forward that it begins with, and less than four of them.
    forward = decoder_cost(config, tokens, 0, 0, 0, 4)['flops'] * depth / config.layers
    assert 1.9 * forward < span.flops < 4 * forward


def test_the_encoders_focus_costs_what_torch_counts(engine):
    question, frames = asked()
    visuals, _, _ = engine.look(Request(question, (Visual(frames),)))
    with FlopCounterMode(display=False) as counter, Timeline().stage('select') as span:
        focus_of(engine, visuals[0])
    config = engine.model.vision.config
    attention = config.depth * attention_flops((4 * UNITS) ** 2, config.width)
    assert span.flops - attention == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_droppers_cost_what_torch_counts():
    merged = torch.randn(UNITS, 192)
    for run, expected in ((lambda: divprune(merged, 72), costs.divprune(UNITS, 192, 72)),
                          (lambda: dart(merged, 72), costs.dart(UNITS, 192))):
        with FlopCounterMode(display=False) as counter:
            run()
        # Norms and comparisons are no products of matrices.
        assert counter.get_total_flops() <= expected['flops'] < 1.3 * counter.get_total_flops()


def test_an_answers_stage_carries_what_choosing_took(engine):
    words = len(engine.tokenizer(asked()[0], add_special_tokens=False)['input_ids'])
    head = SaliencyHead.load(TINY / FILE)
    found = {}
    for name in ('uniform', 'gradient', 'saliency', 'head'):
        selector = make_selector(name, model=TINY)
        choose_by(engine, selector)
        found[name] = select_of(engine)[1]
    assert found['uniform'] == 0
    assert found['gradient'] == costs.signal(UNITS)['flops'] == found['saliency'] // 2
    assert found['head'] == head.flops(GRID_H, GRID_W, words)
    # The words are read once; the picture is looked at each time.
    assert select_of(engine)[1] == head.flops(GRID_H, GRID_W, 0)


@pytest.mark.parametrize('name', ['divprune', 'dart', 'fastv'])
def test_what_drops_after_the_merger_says_what_it_took(engine, name):
    choose_by(engine, make_selector('uniform'))
    got, spent = select_of(engine, Fewer(dropper=name))
    config = engine.model.config
    expected = {'divprune': costs.divprune(UNITS, config.language.width, 72),
                'dart': costs.dart(UNITS, config.language.width),
                'fastv': costs.fastv(config.language, got.prompt_tokens + UNITS - 72, 1)}
    assert spent == expected[name]['flops'] > 0


def test_work_outside_a_stage_belongs_to_nobody():
    timeline = Timeline()
    with timeline.stage('select') as outer, Timeline().stage('encode') as inner:
        grid = np.zeros((28 * 2, 28 * 2, 3), np.uint8)
        from qwen_vl_ros.frame import Frame
        from qwen_vl_ros.saliency.gradient import contrast
        contrast([Frame.from_rgb(grid)], 2, 2)
    contrast([Frame.from_rgb(grid)], 2, 2)
    assert outer.flops == 0 and inner.flops == costs.signal(4)['flops']
    assert inner.bytes_read == grid.nbytes and inner.bytes_written == 16


def test_evaluation_counts_scoring_and_the_clock(tmp_path, capsys):
    found = {}
    for name in ('oracle', 'head', 'next_frame'):
        assert main(['eval', '--items', '2', '--family', 'relation', '--keep-ratio', '0.33',
                     '--select', name, '--json', str(tmp_path / 'out.json')]) == 0
        found[name], = json.loads((tmp_path / 'out.json').read_text())
    shown = capsys.readouterr().out
    head = SaliencyHead.load(TINY / FILE)
    assert found['oracle']['gflops_scoring'] == 0
    more = found['head']['gflops'] - found['oracle']['gflops']
    assert more == pytest.approx(found['head']['gflops_scoring'])
    assert more == pytest.approx(head.flops(GRID_H, GRID_W, 12) / 1e9, rel=0.05)
    # Half a gradient comes to what the head takes.
    assert found['next_frame']['gflops_scoring'] > 2 * more
    assert found['next_frame']['ms_reflect_median'] > 0
    assert found['head']['ms_reflect_median'] is None
    for record in found.values():
        assert 0 < record['ms_select_median'] < record['ms_median']
    assert 'scoring' in shown and 'ms after the answer before' in shown


def test_the_tables_methods_cost_what_the_engine_says(engine):
    """What is counted for the batched evaluation is what an answer of the engine carries."""
    head = SaliencyHead.load(TINY / FILE)
    config = engine.model.config
    for name in ('head', 'gradient', 'saliency'):
        selector = make_selector(name, model=TINY)
        choose_by(engine, selector)
        got, spent = select_of(engine)
        text = got.prompt_tokens - got.vision_tokens_kept
        counted = bench.scoring(config, head, name, 72, text)
        # The table counts the words around the question too.
        assert counted == pytest.approx(spent, rel=0.05)
