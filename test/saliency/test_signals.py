"""Signals, budget and masks: what they find, what they cost nothing to get right."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.roboscene.evaluate import frames_of, oracle
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.colour_edges import colour_edges
from qwen_vl_ros.saliency.gradient import contrast, gradient_magnitude
from qwen_vl_ros.saliency.motion import MotionSignal, move_map, shift_of
from qwen_vl_ros.saliency.samples import per_unit, unit_samples
from qwen_vl_ros.saliency.select import (
    RandomSelector,
    UnitSelector,
    budget,
    normalised,
    threshold_keep,
    top_units,
)
from qwen_vl_ros.saliency.selectors import make_selector

GRID = (1, 24, 32)


def picture(square: tuple[int, int] | None = None, noise: float = 0.0, seed: int = 0) -> Frame:
    """A grey 448x336 picture; with a bright 28-pixel square whose corner is at (x, y)."""
    # The square is as bright as the ground (BT.601): only its colour tells it apart.
    rgb = np.full((336, 448, 3), 100, np.float32)
    if square:
        x, y = square
        rgb[y:y + 28, x:x + 28] = (200, 60, 60)
    rgb += np.random.default_rng(seed).normal(0, noise, rgb.shape) if noise else 0
    return Frame.from_rgb(np.clip(rgb, 0, 255).astype(np.uint8))


@pytest.mark.parametrize('signal', [gradient_magnitude, contrast])
def test_a_square_is_found_where_it_is(signal):
    values = signal([picture((10 * 28, 5 * 28))], 12, 16)
    assert values.shape == (1, 12, 16) and values.dtype == np.float32
    row, column = np.unravel_index(values[0].argmax(), (12, 16))
    assert abs(row - 5) <= 1 and abs(column - 10) <= 1
    far = np.ones((12, 16), bool)
    far[3:8, 8:13] = False
    assert values[0][far].max() < 0.2 * values.max()


def test_samples_of_every_encoding_agree():
    frame = picture((84, 84))
    rgb = unit_samples(frame, 12, 16)
    assert rgb.shape == (84, 112, 3) and rgb[0, 0].tolist() == [100, 100, 100]
    grey = np.ascontiguousarray(frame.rgb()[..., 0])
    mono = unit_samples(Frame(grey.reshape(-1), 'mono8', 448, 336, 448), 12, 16)
    assert (mono[..., 0] == rgb[..., 0]).all()
    yuyv = np.full((336, 448, 2), 90, np.uint8)
    yuyv[..., 0] = grey
    uyvy = np.ascontiguousarray(yuyv[..., ::-1])
    nv12 = np.concatenate([grey, np.full((168, 448), 90, np.uint8)])
    for data, encoding, step in ((yuyv, 'yuyv', 896), (uyvy, 'uyvy', 896), (nv12, 'nv12', 448)):
        got = unit_samples(Frame(data.reshape(-1), encoding, 448, 336, step), 12, 16)
        assert got.shape == (84, 112, 3)
        assert np.abs(got[..., 0] - rgb[..., 0]).max() <= 1 and (got[..., 1:] == 90).all()


def test_a_colour_stands_out_of_a_texture_without_one():
    """Gradients prefer gravel to a thing of one colour that is as bright; colour edges do not."""
    rng = np.random.default_rng(0)
    stones = rng.integers(50, 150, (28, 38), dtype=np.uint8)
    grey = np.kron(stones, np.ones((12, 12), np.uint8))[:336, :448]
    rgb = np.repeat(grey[..., None], 3, 2)
    rgb[:168] = 100
    rgb[60:110, 200:250] = (160, 80, 60)  # as bright as the wall around it
    on = np.zeros((12, 16), bool)
    on[2:4, 7:9] = True
    frame = Frame.from_rgb(rgb)
    colour, plain = (f([frame], 12, 16)[0] for f in (colour_edges, gradient_magnitude))
    assert colour[on].min() > 2 * colour[6:].max() and plain[on].max() < plain[6:].max()
    yuv = cv2.cvtColor(rgb, cv2.COLOR_RGB2YUV_I420)
    chroma = yuv[336:].reshape(2, -1).T.reshape(168, 448)
    sent = Frame(np.concatenate((yuv[:336], chroma)).reshape(-1), 'nv12', 448, 336, 448)
    again = colour_edges([sent], 12, 16)[0]
    assert again[on].min() > 2 * again[6:].max()
    mono = Frame(np.ascontiguousarray(rgb[..., 0]).reshape(-1), 'mono8', 448, 336, 448)
    assert colour_edges([mono], 12, 16)[0].argmax() // 16 >= 1


def test_noise_is_no_motion_and_a_new_thing_is():
    motion = MotionSignal()
    first = picture(noise=4, seed=1)
    assert (motion.difference([first], 12, 16) == 255).all()
    motion.kept(first, np.ones(192, bool), 12, 16)
    assert (motion.difference([picture(noise=4, seed=2)], 12, 16) == 0).all()
    entered = motion.difference([picture((0, 140), noise=4, seed=3)], 12, 16)
    assert entered[0, 5, 0] > 20 and (entered[0, :, 2:] == 0).all()


def test_what_was_not_kept_still_counts_as_unseen():
    motion = MotionSignal()
    motion.kept(picture(), np.ones(192, bool), 12, 16)
    changed = picture((140, 140))
    nothing = np.zeros(192, bool)
    motion.kept(changed, nothing, 12, 16)
    assert motion.difference([changed], 12, 16)[0, 5, 5] > 20
    motion.kept(changed, ~nothing, 12, 16)
    assert motion.difference([changed], 12, 16).max() == 0
    motion.reset()
    assert motion.difference([changed], 12, 16).min() == 255


def test_a_thing_that_enters_a_rendered_scene_is_kept_at_once():
    for item in items('change', 'test', 10):
        before, _, after, _ = frames_of(item)
        motion = MotionSignal()
        motion.kept(before, np.ones(192, bool), 12, 16)
        values = motion.difference([after], 12, 16)
        keep = top_units(values, 0.25)
        moved = [u - 192 for u in item.question.evidence if u >= 192]
        assert keep[moved].mean() > 0.5


def test_a_shift_is_measured_and_a_map_follows_it():
    texture = np.random.default_rng(0).integers(0, 255, (24, 32), dtype=np.uint8)
    big = np.kron(texture, np.ones((20, 20), np.uint8))
    a = Frame.from_rgb(np.repeat(big[:336, :448, None], 3, 2))
    b = Frame.from_rgb(np.repeat(big[:336, 28:476, None], 3, 2))  # the picture moved one unit left
    down, right = shift_of(a, b, 12, 16)
    assert abs(right + 1) < 0.25 and abs(down) < 0.25
    values = np.zeros((12, 16), np.float32)
    values[4, 8] = 1
    moved = move_map(values, (0.0, -1.0))
    assert moved[4, 7] == 1 and moved[4, 8] == 0
    assert moved[:, 15].min() == 1  # nothing is known of what came in
    assert shift_of(picture(), picture(noise=8), 12, 16) == (0.0, 0.0)


def test_budget_is_a_bucket_and_never_nothing():
    assert budget(192, 1.0) == 192 and budget(192, 0.33) == 72 and budget(192, 1e-6) == 12
    assert budget(192, 0.01, least=50) == 60 and budget(3, 0.1) == 1
    assert {budget(192, r / 100) for r in range(1, 101)} == set(range(12, 193, 12))


def test_top_units_keeps_the_best_the_region_and_a_unit_of_every_slice():
    values = np.zeros((2, 12, 16), np.float32)
    values[0] = np.arange(192).reshape(12, 16)
    keep = top_units(values, 0.25).reshape(2, 192)
    assert keep.sum() == 96 and keep[1].sum() == 1 and keep[0, -95:].all()
    corridor = np.zeros((12, 16), bool)
    corridor[:, 7] = True
    keep = top_units(values, 0.01, always=corridor).reshape(2, 12, 16)
    assert keep[:, :, 7].all()


def test_selector_counts_and_repeats():
    frame = picture((84, 84), noise=3)
    for ratio in (0.11, 0.33, 0.5, 0.75):
        mask = UnitSelector()([frame], GRID, ratio)
        assert mask.dtype == bool and mask.sum() == budget(192, ratio, 8)
        assert mask[3 * 16 + 3]
        assert (mask == UnitSelector()([frame], GRID, ratio)).all()
    assert UnitSelector()([frame], GRID, 1.0).all()
    chosen = make_selector('random', 1)
    assert (chosen([frame], GRID, 0.5) != chosen([frame], GRID, 0.5)).any()
    assert RandomSelector(3)([frame], GRID, 0.25).sum() == 48


def test_bad_names_and_weights_are_named():
    with pytest.raises(ValueError, match="selector 'magic' is not one of auto"):
        make_selector('magic')
    with pytest.raises(ValueError, match="signal 'magic' is not one of gradient"):
        UnitSelector({'magic': 1.0})
    with pytest.raises(ValueError, match='weight of gradient is 0'):
        UnitSelector({'gradient': 0.0})


def test_a_fixed_threshold_is_no_budget():
    shares = [threshold_keep(gradient_magnitude([frames_of(i)[0]], 12, 16)).mean()
              for i in items('attribute', 'test', 12)]
    assert max(shares) > 2 * min(shares)
    assert threshold_keep(np.zeros((1, 2, 2), np.float32)).all()


def test_signals_find_the_evidence_better_than_chance():
    recall = {name: [] for name in ('saliency', 'gradient', 'contrast', 'uniform')}
    for item in items('relation', 'test', 15):
        evidence = sorted(item.question.evidence)
        for name, values in recall.items():
            mask = make_selector(name)(frames_of(item), GRID, 0.33)
            values.append(mask[evidence].mean())
        assert oracle(item, (), 0.5)[evidence].all()
    mean = {name: np.mean(values) for name, values in recall.items()}
    assert mean['uniform'] < 0.5 < 0.75 < min(mean['gradient'], mean['contrast'])
    assert mean['saliency'] > 0.85


def test_small_helpers():
    assert per_unit(np.arange(16.0).reshape(4, 4), 2, 2).tolist() == [[2.5, 4.5], [10.5, 12.5]]
    ranks = normalised(np.array([[3.0, 1.0], [2.0, 9.0]], np.float32))
    assert ranks.reshape(-1).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 1])
