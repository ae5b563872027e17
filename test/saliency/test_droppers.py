"""Droppers that stand in other people's papers, on small cases that can be done by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen_vl_ros.saliency.droppers import dart, divprune, fastv, last_row_attention


def test_divprune_takes_one_of_each_direction():
    base = torch.eye(4)
    merged = base.repeat_interleave(3, 0) + 0.01 * torch.randn(
        12, 4, generator=torch.Generator().manual_seed(0))
    keep = divprune(merged, 4)
    assert keep.sum() == 4
    assert sorted(np.flatnonzero(keep) // 3) == [0, 1, 2, 3]
    assert divprune(merged, 12).all() and divprune(merged, 1).sum() == 1


def test_dart_drops_what_resembles_a_pivot():
    merged = torch.tensor([[9.0, 0], [1, 0], [1, 0.1], [0, 1], [0.1, 1]])
    keep = dart(merged, 3, pivots=1)
    assert keep.tolist() == [True, False, False, True, True]
    assert dart(merged, 2, pivots=8).sum() == 2


def test_what_is_always_kept_comes_first_and_counts():
    always = torch.zeros(12, dtype=torch.bool)
    always[[3, 4]] = True
    merged = torch.eye(4).repeat_interleave(3, 0)
    keep = divprune(merged, 4, always)
    # Two of the direction that the region holds, and the others as unlike it as can be.
    assert keep[3] and keep[4] and keep.sum() == 4 and len(set(np.flatnonzero(keep) // 3)) == 3
    scores = torch.arange(12.0)
    assert np.flatnonzero(fastv(scores, 4, always)).tolist() == [3, 4, 10, 11]
    assert np.flatnonzero(fastv(scores, 2, always)).tolist() == [3, 4]
    # Pivots, of the largest norm, are kept next.
    merged[11] *= 9
    kept = np.flatnonzero(dart(merged, 3, 1, always)).tolist()
    assert kept == [3, 4, 11]
    batch = torch.stack((merged, merged.flip(0)))
    assert divprune(batch, 5, always)[:, always].all()


def test_fastv_reads_one_row_of_attention():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(4, 8, generator=generator)
    k = torch.randn(2, 10, 8, generator=generator)
    wide = k.repeat_interleave(2, 0)
    full = ((wide @ q[..., None])[..., 0] / 8 ** 0.5).softmax(-1).mean(0)
    scores = last_row_attention(q, k)
    assert torch.allclose(scores, full, atol=1e-6)
    assert scores.sum().item() == pytest.approx(1, abs=1e-5)
    keep = fastv(scores, 3)
    assert keep.sum() == 3 and scores[torch.from_numpy(keep)].min() >= scores[
        torch.from_numpy(~keep)].max()
