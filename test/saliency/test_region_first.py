"""What is told of a region that was shown first: its kept units and its places, in the frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.answering import Fewer, _mapped, _region_first, answer
from qwen_vl_ros.saliency.roi import Window

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


@pytest.fixture
def engine(choosing_engine):
    return choosing_engine


def last(events):
    *_, done = events
    assert isinstance(done, Done)
    return done.answer


def test_kept_units_of_the_region_are_those_that_were_not_dropped_in_the_crop(engine):
    item = next(items('pointing', 'test', 1))
    request = Request(item.question.text, (Visual(frames_of(item)),), keep_ratio=0.33,
                      max_new_tokens=2)
    asked, window, grid = _region_first(engine, request, Fewer(region=0.3), Timeline(''))
    own = last(engine.answer(asked)).kept_units
    told = last(answer(engine, request, fewer=Fewer(region=0.3)))
    # The crop is the frame's own pixels here, so its units are the frame's.
    top, left = window.y // 28, window.x // 28
    expected = np.zeros(grid, bool)
    expected[top:top + own[1].shape[0], left:left + own[1].shape[1]] = own[1]
    assert (told.kept_units[0] == expected).all()
    assert told.kept_units[0].sum() + own[0].sum() == told.vision_tokens_kept


@pytest.mark.parametrize('crop', [(3, 4), (6, 8), (12, 16), (7, 9)])
def test_kept_units_of_a_resized_crop_lie_where_the_crop_lies(crop):
    window = Window(448, 336, 448, 336, 896, 672)  # rows and columns 6 to 11, 8 to 15 of 12 x 16
    whole = window.kept_units(np.ones(crop, bool), 12, 16)
    assert (whole == window.units(12, 16)).all() and whole.sum() == 48
    assert not window.kept_units(np.zeros(crop, bool), 12, 16).any()
    corner = np.zeros(crop, bool)
    corner[-1, -1] = True
    kept = window.kept_units(corner, 12, 16)
    assert kept[11, 15] and not kept[:10].any() and not kept[:, :14].any()


def test_bins_are_of_the_grid_in_which_the_model_saw_the_crop(engine):
    """A crop of a large frame is resized to the pixel limit; its bins are then larger."""
    rgb = np.random.default_rng(0).integers(0, 255, (1080, 1920, 3), np.uint8)
    request = Request('Where is the red ball?', (Visual((Frame.from_rgb(rgb),)),),
                      max_new_tokens=1)
    asked, window, grid = _region_first(engine, request, Fewer(region=0.5), Timeline(''))
    own = last(engine.answer(asked))
    rows, columns = own.kept_units[1].shape
    assert rows < window.height // 28 and columns < window.width // 28
    said = Done(replace(own, text=f'<x{columns - 1}><y{rows - 1}>'))
    told = last(_mapped(iter([said]), window, grid))
    held = np.argwhere(window.units(*grid))
    assert told.text == f'<x{held[-1, 1]}><y{held[-1, 0]}>'
