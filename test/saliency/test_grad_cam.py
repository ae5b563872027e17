"""Grad-CAM on merged tokens: gradients are right, and the map is where the evidence is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.grad_cam import run_layers, score_units

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


@pytest.fixture(scope='module')
def engine():
    loaded = Engine.load(str(TINY), device='cpu')
    yield loaded
    loaded.close()


def _request(item, **more) -> Request:
    return Request(item.question.text, (Visual(frames_of(item)),), **more)


def test_the_twin_equals_the_engines_prefill(engine):
    request = _request(next(items('pointing', 'test', 1)))
    _, prompt, features = engine.look(request)
    expected = engine.model.all_logits(prompt, features)
    with torch.no_grad():
        x = engine.model.embed(prompt, 0, features).clone()
        hidden = run_layers(engine.model.language, x, torch.from_numpy(prompt.positions),
                            engine.model.config.language.layers)
        got = engine.model.language.logits(hidden)
    assert torch.allclose(got, expected, atol=1e-4)


def test_the_gradient_is_that_of_finite_differences(engine):
    request = _request(next(items('attribute', 'test', 1)))
    _, prompt, ((span, merged),) = engine.look(request)
    language = engine.model.language

    def margin(tokens: torch.Tensor) -> torch.Tensor:
        x = language.embed(torch.from_numpy(prompt.ids)).clone()
        x = torch.cat((x[:span[0]], tokens, x[span[1]:]))
        hidden = run_layers(language, x, torch.from_numpy(prompt.positions),
                            engine.model.config.language.layers)
        best = language.logits(hidden[-1:])[0].topk(2).values
        return best[0] - best[1]

    tokens = merged.clone().requires_grad_()
    grad = torch.autograd.grad(margin(tokens), tokens)[0]
    direction = torch.randn(merged.shape, generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()
    step = 1e-2
    with torch.no_grad():
        up, down = (margin(merged + sign * step * direction) for sign in (1, -1))
    numeric = (up - down) / 2 / step
    assert float((grad * direction).sum()) == pytest.approx(float(numeric), rel=0.05, abs=2e-3)


@pytest.mark.parametrize('family', ['attribute', 'number', 'pointing'])
def test_the_map_points_at_the_evidence(family, engine):
    share, chance = [], []
    for item in items(family, 'test', 6):
        values = score_units(engine, _request(item))[0]
        assert values.shape == (1, 12, 16) and values.dtype == np.float32
        assert values.min() >= 0 and values.max() in (0, 1)
        evidence = sorted(item.question.evidence)
        best = np.argsort(-values.reshape(-1))[:max(4, len(evidence))]
        share.append(np.isin(best, evidence).mean())
        chance.append(len(evidence) / 192)
    assert np.mean(share) > 2.5 * np.mean(chance)


def test_fast_and_answer_targets_give_maps(engine):
    item = next(items('change', 'test', 1))
    request = _request(item)
    ids = list(engine.answer(request))[-1].answer.token_ids
    for maps in (score_units(engine, request, layers=2),
                 score_units(engine, request, answer=ids, generic=False)):
        assert len(maps) == 1 and maps[0].shape == (2, 12, 16)
        assert np.isfinite(maps[0]).all() and maps[0].max() == 1


def test_a_pruned_request_is_refused(engine):
    item = next(items('number', 'test', 1))
    with pytest.raises(ValueError, match='keep_ratio 1'):
        score_units(engine, _request(item, keep_ratio=0.5))
