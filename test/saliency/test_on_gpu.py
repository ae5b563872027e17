"""What holds of dropping on a CPU holds on a GPU, with the engine's own kernels where built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.roboscene.evaluate import earlier, frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.next_frame import NextFrameSelector
from qwen_vl_ros.saliency.select import UnitSelector
from qwen_vl_ros.saliency.selectors import make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'

pytestmark = pytest.mark.gpu


@pytest.fixture(scope='module')
def engine():
    loaded = Engine.load(str(TINY), device='cuda', selector=make_selector('head', model=TINY))
    yield loaded
    loaded.close()


def random_mask(units: int, seed: int) -> np.ndarray:
    mask = np.zeros(units, bool)
    mask[np.random.default_rng(seed).permutation(units)[:units // 3]] = True
    return mask


@pytest.mark.parametrize('family', ['relation', 'change'])
def test_keeping_everything_changes_no_bit(engine, family):
    for item in items(family, 'test', 3, 2):
        frames = frames_of(item)
        units = 192 * len(item.scenes)
        plain, masked = (engine.trace(Request(item.question.text, (Visual(frames, mask),)))[1]
                         for mask in (None, np.ones(units, bool)))
        assert torch.equal(plain, masked)


@pytest.mark.parametrize('family', ['number', 'change'])
def test_dropping_gives_the_logits_of_the_cpu(family):
    """On the CPU dropping equals masking the keys (test/engine/test_engine_oracles.py)."""
    cpu, gpu = (Engine.load(str(TINY), device=d, dtype='float32') for d in ('cpu', 'cuda'))
    for item in items(family, 'test', 2, 3):
        mask = random_mask(192 * len(item.scenes), 1)
        request = Request(item.question.text, (Visual(frames_of(item), mask),))
        expected, got = (e.trace(request)[1].cpu() for e in (cpu, gpu))
        assert (got - expected).abs().max() < 2e-3 * expected.abs().max()
        other = Request(item.question.text, (Visual(frames_of(item), ~mask),))
        assert (gpu.trace(other)[1].cpu()[-1] - expected[-1]).abs().max() > (
            0.01 * expected.abs().max())
    cpu.close()
    gpu.close()


def test_entropy_and_gradient_are_those_of_the_cpu():
    """Of an answer about a pruned frame: the encoder's focus, and what the answer leaned on."""
    item = next(items('attribute', 'test', 1, 7))
    request = Request(item.question.text, (Visual(frames_of(item)),), keep_ratio=0.5,
                      max_new_tokens=4)
    found = []
    for device in ('cpu', 'cuda'):
        selector = NextFrameSelector(UnitSelector(), {'entropy': 1.3, 'grad_cam': 1.1})
        engine = Engine.load(str(TINY), device=device, dtype='float32', selector=selector)
        said = next(e.answer for e in engine.answer(request) if isinstance(e, Done))
        selector.reflect()
        state, = selector._cameras.values()
        found.append((said.text, state.cam / state.cam.max(), state.focus / state.focus.max()))
        engine.close()
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1:], found[1][1:]):
        assert ours.std() > 0.01 and np.abs(ours - theirs).max() < 0.02


@pytest.mark.parametrize(('family', 'least'), [('pointing', 11), ('number', 10), ('change', 10)])
def test_answers_stay_right_with_a_third_of_the_units(engine, family, least):
    """Places are named in the whole picture's coordinates, whatever was dropped."""
    right = 0
    for item in items(family, 'test', 12, 4):
        request = Request(item.question.text, (Visual(frames_of(item)),), keep_ratio=0.33,
                          max_new_tokens=8)
        answer = next(e.answer for e in engine.answer(request) if isinstance(e, Done))
        assert answer.vision_tokens_kept < 0.4 * answer.vision_tokens_in
        right += answer.text == item.question.answer
    assert right >= least


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_the_head_computes_in_every_type(dtype):
    item = next(items('attribute', 'test', 1))
    frames, maps = frames_of(item), []
    for device, kind in (('cpu', 'float32'), ('cuda', dtype)):
        selector = make_selector('head', model=TINY, head_dtype=kind)
        engine = Engine.load(str(TINY), device=device, selector=selector)
        maps.append(selector.saliency(frames, 12, 16, item.question.text))
        assert selector.signals['head'].head.score.weight.dtype == getattr(torch, kind)
        engine.close()
    assert np.corrcoef(maps[0].reshape(-1), maps[1].reshape(-1))[0, 1] > 0.98


def test_the_head_in_int8_is_refused():
    with pytest.raises(ValueError, match='in int8 is for a CPU, the model is on cuda'):
        Engine.load(str(TINY), device='cuda',
                    selector=make_selector('head', model=TINY, head_dtype='int8'))


@pytest.mark.parametrize('name', ['motion', 'entropy', 'grad_cam'])
def test_a_remembered_signal_chooses_alone(name):
    selector = make_selector(name, generic_every=2)
    engine = Engine.load(str(TINY), device='cuda', selector=selector)
    item, kept = next(i for i in items('attribute', 'test', 20)
                      if abs(earlier(i).scenes[0].camera.cx - i.scenes[0].camera.cx) > 20), []
    for moment in (earlier(item), item):
        request = Request(item.question.text, (Visual(frames_of(moment)),), keep_ratio=0.33,
                          max_new_tokens=4)
        told = next(e.answer for e in engine.answer(request) if isinstance(e, Done))
        kept.append(told.kept_units[0])
    assert [k.sum() for k in kept] == [72, 72] and (kept[0] != kept[1]).any()
    engine.close()
