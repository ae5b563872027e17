"""Shrinking by two products is adaptive pooling."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from qwen_vl_ros.saliency.shrinking import Shrinking, windows


@pytest.mark.parametrize(('size', 'wanted'), [(480, 119), (640, 161), (7, 7), (30, 28), (5, 12)])
def test_windows_are_those_of_adaptive_pooling(size, wanted):
    x = torch.randn(3, size, dtype=torch.float64)
    sums, inside = x @ windows(size, wanted).double().T, windows(size, wanted)
    assert torch.allclose(sums / inside.sum(1), adaptive_avg_pool1d(x, wanted))


@pytest.mark.parametrize('shape', [(48, 64, 3), (48, 64), (45, 31, 4), (20, 33, 2)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_it_errs_no_more_than_its_twin(shape, dtype):
    torch.manual_seed(sum(shape))
    planes = torch.randint(0, 256, (2, torch.Size(shape).numel()), dtype=torch.uint8)
    got = Shrinking(shape, (14, 21), dtype, 'cpu')(planes)
    plain = planes.view(2, *shape[:2], -1).permute(0, 3, 1, 2)
    exact = adaptive_avg_pool2d(plain.double(), (14, 21))
    twin = adaptive_avg_pool2d(plain.to(dtype), (14, 21))
    assert got.shape == exact.shape and got.stride(1) == 1
    assert (got - exact).abs().max() <= 2 * (twin - exact).abs().max() + 1e-4


def test_large_windows_do_not_overflow():
    white = torch.full((1, 300 * 400), 255, dtype=torch.uint8)
    got = Shrinking((300, 400), (14, 21), torch.float16, 'cpu')(white)
    assert torch.allclose(got, torch.full_like(got, 255.0))
