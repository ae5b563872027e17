"""Sizes, resampling and patch order against transformers' image processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_reference import smart_resize as hf_resize
from hypothesis import given
from hypothesis import strategies as st

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.patches import (
    IMAGE_MEAN,
    IMAGE_STD,
    content_key,
    extract_patches,
    grid_of,
    smart_resize,
    uniform_keep,
)
from qwen_vl_ros.engine.types import Visual
from qwen_vl_ros.engine.vision import fold_pair, fold_still
from qwen_vl_ros.frame import Frame

SIDES = st.integers(1, 5000)


@given(SIDES, SIDES, st.sampled_from([(3136, 1003520), (784, 784), (50000, 60000)]))
def test_smart_resize_equals_transformers(height, width, limits):
    try:
        expected = hf_resize(height, width, 28, *limits)
    except ValueError:
        with pytest.raises(EngineError, match='too narrow') as caught:
            smart_resize(height, width, *limits)
        assert caught.value.code == ErrorCode.BAD_REQUEST
        return
    assert smart_resize(height, width, *limits) == expected


def test_ties_round_to_even():
    assert smart_resize(42, 70, 1, 10 ** 6) == (56, 56)


@pytest.mark.parametrize('size', [
    (640, 480), (1280, 720), (448, 336), (33, 77), (1000, 6), (100, 2000), (1, 1)])
def test_patches_are_those_of_transformers(size, picture, reference):
    frame = picture(*size)
    grid = grid_of((frame,), 3136, 1003520)
    ours = extract_patches((frame,), grid)
    values, expected_grid = reference.pixels(Visual((frame,)))
    assert list(grid) == expected_grid
    mean, std = (np.array(x)[:, None] for x in (IMAGE_MEAN, IMAGE_STD))
    halves = values.numpy().reshape(-1, 3, 2, 196)
    assert np.array_equal(halves[:, :, 0], halves[:, :, 1])
    bytes_ = (halves[:, :, 0] * std + mean) * 255
    assert np.abs(bytes_ - bytes_.round()).max() < 1e-2
    assert np.array_equal(bytes_.round().astype(np.uint8), ours.reshape(-1, 3, 196))


def test_a_narrow_picture_over_the_limit_is_refused(picture):
    with pytest.raises(EngineError, match='3164x28 = 88592 pixels, more than the limit of 50176'):
        grid_of((picture(4000, 20),), 784, 50176)


def test_a_column_of_pixels_and_a_grey_frame_are_pictures(reference):
    """C5: nothing guesses the channel axis."""
    column = Frame.from_rgb(np.arange(3000, dtype=np.uint8).reshape(1000, 1, 3))
    with pytest.raises(EngineError, match='1x1000 is too narrow'):
        grid_of((column,), 3136, 1003520)
    thin = Frame.from_rgb(np.tile(column.rgb(), (1, 6, 1)))
    grid = grid_of((thin,), 3136, 1003520)
    assert extract_patches((thin,), grid).shape == (grid[1] * grid[2], 588)
    grey = Frame(np.full(3 * 3, 77, np.uint8), 'mono8', 3, 3, 3)
    patches = extract_patches((grey,), grid_of((grey,), 3136, 1003520))
    assert patches.shape == (16, 588)
    assert (patches == 77).all()


def test_a_clip_repeats_an_odd_last_frame(picture):
    frames = tuple(picture(112, 112, seed) for seed in range(3))
    grid = grid_of(frames, 3136, 1003520)
    assert grid == (2, 8, 8)
    clip = extract_patches(frames, grid).reshape(2, 64, 3, 2, 196)
    stills = [extract_patches((f,), (1, 8, 8)).reshape(64, 3, 196) for f in frames]
    for slice_, half, still in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        assert np.array_equal(clip[slice_, :, :, half], stills[still])


def test_frames_of_a_clip_may_differ_in_size(picture):
    frames = (picture(112, 112, 0), picture(200, 100, 1))
    assert extract_patches(frames, grid_of(frames, 3136, 1003520)).shape == (64, 1176)


@pytest.mark.parametrize('dtype,bound', [
    (torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_the_fold_is_the_convolution(dtype, bound):
    """Folded weights against float64 arithmetic on the kernel as rounded to the dtype."""
    torch.manual_seed(0)
    kernel = torch.randn(64, 3, 2, 14, 14).mul_(0.03).to(dtype)
    first, second = torch.randint(0, 256, (2, 200, 3, 196), dtype=torch.uint8)
    mean, std = (torch.tensor(x, dtype=torch.double)[:, None] for x in (IMAGE_MEAN, IMAGE_STD))
    flat = kernel.double().view(64, 3, 2, 196)

    def relative(weight, bias, patches, pair):
        normal = (torch.stack(pair, 2).double() / 255 - mean[:, None]) / std[:, None]
        expected = torch.einsum('nctp,dctp->nd', normal, flat)
        ours = (patches.flatten(1).double() - 128) @ weight.double().T + bias.double()
        return ((ours - expected).norm() / expected.norm()).item()

    assert relative(*fold_still(kernel), first, (first, first)) < bound
    assert relative(*fold_pair(kernel), torch.stack((first, second), 2), (first, second)) < bound


@pytest.mark.parametrize('ratio', [0.05, 0.25, 0.33, 0.5, 0.9, 1.0])
def test_uniform_choice_is_even(ratio):
    grid = (2, 24, 32)
    keep = uniform_keep((), grid, ratio).reshape(2, 12, 16)
    assert np.array_equal(keep[0], keep[1])
    assert keep[0].sum() == round(ratio * 192)
    quarters = [keep[0][r:r + 6, c:c + 8].mean() for r in (0, 6) for c in (0, 8)]
    assert max(quarters) - min(quarters) < 0.15
    assert uniform_keep((), (1, 2, 2), 0.01).sum() == 1


def test_the_content_key_sees_pixels_size_and_units(picture):
    frame = picture(112, 112)
    grid = (1, 8, 8)
    keep = np.arange(16) < 8
    other = frame.data.copy()
    other[-1] ^= 1
    keys = [
        content_key((frame,), grid, None), content_key((frame,), grid, keep),
        content_key((frame,), grid, ~keep), content_key((frame,), (1, 4, 16), None),
        content_key((frame, frame), grid, None),
        content_key((Frame(other, 'rgb8', 112, 112, 336),), grid, None),
        content_key((Frame(frame.data, 'bgr8', 112, 112, 336),), grid, None)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == content_key((picture(112, 112),), grid, None)
    assert all(0 <= key < 1 << 62 for key in keys)
