"""Attention entropy on the side: right values, and the encoder is not disturbed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.patches import extract_patches
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.attention_entropy import EntropyProbe, row_entropy

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


@pytest.fixture(scope='module')
def vision():
    engine = Engine.load(str(TINY), device='cpu')
    yield engine.model.vision
    engine.close()


def test_entropy_of_flat_and_of_sharp_rows():
    k = torch.eye(8)[None]
    assert row_entropy(torch.zeros(1, 2, 8), k).tolist() == pytest.approx([math.log(8)] * 2)
    assert row_entropy(1000 * torch.eye(8)[None, :3], k).max() < 1e-3


@pytest.mark.parametrize('family', ['relation', 'change'])
def test_the_probe_reads_and_changes_nothing(family, vision):
    frames = frames_of(next(items(family, 'test', 1)))
    grid = (len(frames) // 2 or 1, 24, 32)
    patches = torch.from_numpy(extract_patches(frames, grid, 14))
    units = torch.arange(0, 192 * grid[0], 3)
    with torch.inference_mode():
        for kept in (None, units):
            probe = EntropyProbe(len(vision.blocks))
            plain = vision.encode(patches, grid, kept)
            assert torch.equal(plain, vision.encode(patches, grid, kept, probe))
            values = probe.map(grid, None if kept is None else kept.numpy())
            assert values.shape == (grid[0], 12, 16) and values.dtype == np.float32
            assert values.min() >= 0 and values.std() > 0
    with pytest.raises(ValueError, match='expected 192'):
        probe.map((1, 24, 32))


def test_units_with_things_are_more_focused(vision):
    higher = 0
    for item in items('relation', 'test', 8):
        probe = EntropyProbe(len(vision.blocks))
        patches = torch.from_numpy(extract_patches(frames_of(item), (1, 24, 32), 14))
        with torch.inference_mode():
            vision.encode(patches, (1, 24, 32), probe=probe)
        focus = probe.map((1, 24, 32)).reshape(-1)
        mask = np.zeros(192, bool)
        mask[sorted(item.question.evidence)] = True
        higher += focus[mask].mean() > focus[~mask].mean()
    assert higher >= 6


def test_a_block_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match='block 9 is not one of'):
        EntropyProbe(6, 9)
