"""Regions, the latency controller, crops, droppers and the way back to the full frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Delta, Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.after_merger import DROPPERS, drop_after_merger
from qwen_vl_ros.saliency.answering import (
    FULL_FRAME,
    REGION,
    Fewer,
    _region_first,
    _say_no_region,
    answer,
)
from qwen_vl_ros.saliency.controller import LADDER, LatencyController
from qwen_vl_ros.saliency.picture import explain
from qwen_vl_ros.saliency.region import _told, parse_region, within
from qwen_vl_ros.saliency.roi import Window, best_window, overview_and_crop
from qwen_vl_ros.saliency.select import budget
from qwen_vl_ros.saliency.selectors import BEFORE, make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


@pytest.fixture
def engine(choosing_engine):
    return choosing_engine


def request_of(item, ratio: float = 1.0) -> Request:
    return Request(item.question.text, (Visual(frames_of(item)),), keep_ratio=ratio,
                   max_new_tokens=8)


def done(events):
    told = list(events)
    assert isinstance(told[-1], Done)
    assert ''.join(e.text for e in told if isinstance(e, Delta)) == told[-1].answer.text
    return told[-1].answer


# Regions

def test_a_polygon_covers_the_units_it_touches():
    mask = parse_region('0,0.5 1,0.5 1,1 0,1')(12, 16)
    assert mask[6:].all() and not mask[:5].any()
    corridor = parse_region('corridor')(12, 16)
    assert corridor[11, 3:13].all() and not corridor[0].any() and corridor[7, 7:9].all()
    assert parse_region(' ') is None


@pytest.mark.parametrize(('text', 'expected'), [
    ('path', "'path' of the region 'path' is not a corner"), ('0,0 1,1', 'has 2 corners'),
    ('0,0 1,1 2,0', "'2,0' of the region lies outside"), ('0,0 1,x 1,1', "'1,x' of the region")])
def test_a_region_that_cannot_be_read_is_named(text, expected):
    with pytest.raises(ValueError, match=expected):
        parse_region(text)


@pytest.mark.parametrize('name', sorted(set(BEFORE) - {'head'}))
def test_the_region_is_kept_by_every_selector(name):
    region = parse_region('corridor')
    frames = frames_of(next(items('path', 'test', 1)))
    keep = make_selector(name, always=region)(frames, (1, 24, 32), 0.11, 'Is the path blocked?')
    assert keep.reshape(12, 16)[region(12, 16)].all() and not keep.all()


@pytest.mark.parametrize('name', sorted(set(BEFORE) - {'head', 'threshold'}))
def test_a_region_is_part_of_the_budget_under_every_selector(name):
    region = parse_region('corridor')
    still, clip = (frames_of(next(items(f, 'test', 1))) for f in ('path', 'change'))
    choose = make_selector(name, always=region)
    assert choose(still, (1, 24, 32), 0.33, 'Is it?').sum() == budget(192, 0.33) == 72
    keep = choose(clip, (2, 24, 32), 0.33, 'What moved?').reshape(2, 12, 16)
    assert keep.sum() == budget(384, 0.33) and keep[:, region(12, 16)].all()


def test_a_region_over_the_budget_is_kept_alone_and_said_once(caplog):
    region = parse_region('0,0 1,0 1,0.5 0,0.5 0,0.49')
    held = int(region(12, 16).sum())
    _told.clear()
    for _ in range(3):
        keep = make_selector('saliency', always=region)(
            frames_of(next(items('path', 'test', 1))), (1, 24, 32), 0.2, 'Is it?')
        assert (keep.reshape(12, 16) == region(12, 16)).all()
    said, = (r.getMessage() for r in caplog.records)
    assert said.startswith(f'the region that is always kept holds {held} of 192 units, more than '
                           'the budget of 48')


# Controller

def run(controller: LatencyController, cost_ms, answers: int) -> list[int]:
    rungs = []
    for _ in range(answers):
        rungs.append(LADDER.index(controller.level))
        controller.took(cost_ms(controller.level.cost))
    return rungs


def test_the_controller_settles_under_the_target_and_stays():
    rungs = run(LatencyController(100.0), lambda cost: 20 + 180 * cost, 80)
    assert rungs[0] == 0 and len(set(rungs[30:])) == 1
    assert 20 + 180 * LADDER[rungs[-1]].cost <= 100
    assert run(LatencyController(0.0), lambda cost: 500, 20) == [0] * 20


def test_the_controller_goes_back_up_when_there_is_room():
    controller = LatencyController(100.0)
    low = run(controller, lambda cost: 400 * cost, 60)[-1]
    high = run(controller, lambda cost: 60 * cost, 60)[-1]
    assert low >= 3 and high == 0
    # What no rung can hold ends on the lowest, without jumping about.
    assert run(LatencyController(1.0), lambda cost: 50, 60)[-20:] == [len(LADDER) - 1] * 20


def test_one_slow_answer_moves_nothing():
    controller = LatencyController(100.0)
    times = iter([50, 50, 900] * 20)
    assert set(run(controller, lambda cost: next(times), 60)) == {0}


# Crops

def test_a_point_in_the_crop_is_mapped_to_the_frame():
    window = Window(224, 112, 112, 56, 448, 336)
    assert window.to_frame('at (500,500), yes', (12, 16), (2, 4)) == 'at (625,417), yes'
    assert window.to_frame('(0,0),(1000,1000)', (12, 16), (2, 4)) == '(500,333),(750,500)'
    assert window.to_frame('<x0><y1>', (12, 16), (2, 4)) == '<x8><y5>'
    assert window.to_frame('in (2024,5) people', (12, 16), (2, 4)) == 'in (2024,5) people'
    assert window.units(12, 16)[4:6, 8:12].all() and window.units(12, 16).sum() == 8


@pytest.mark.parametrize(('width', 'height'), [(1, 1), (1, 5), (7, 2)])
def test_a_picture_smaller_than_the_grid_has_a_window(width, height):
    values = np.random.default_rng(3).random((12, 16))
    window = best_window(values, 0.3, width, height)
    assert 0 <= window.x < window.x + window.width <= width
    assert 0 <= window.y < window.y + window.height <= height
    frame = Frame.from_rgb(np.zeros((height, width, 3), np.uint8))
    assert overview_and_crop(frame, window, 24)[1].height == window.height


def test_the_window_holds_the_peak_and_both_pictures_show_it():
    values = np.zeros((12, 16), np.float32)
    values[8:10, 11:14] = 1
    window = best_window(values, 0.25, 896, 672)
    assert window.units(12, 16)[8:10, 11:14].all()
    assert (window.width, window.height) == (448, 336)
    rgb = np.zeros((672, 896, 3), np.uint8)
    rgb[window.y:window.y + 336, window.x:window.x + 448] = 200
    small, crop = overview_and_crop(Frame.from_rgb(rgb, camera='c'), window, 30)
    assert crop.rgb().min() == 200 and (crop.width, crop.height) == (448, 336)
    assert small.width % 28 == 0 and small.width * small.height <= 30 * 784
    assert small.camera == crop.camera == 'c'


def test_region_first_answers_about_two_pictures_and_maps_places_back(engine):
    item = next(items('pointing', 'test', 1))
    got = done(answer(engine, request_of(item), fewer=Fewer(region=0.3)))
    assert REGION in got.approximate and got.kept_units[0].shape == (12, 16)
    assert 0.2 < got.kept_units[0].mean() < 0.4
    assert got.vision_tokens_in < 130


def test_a_crop_has_the_region_where_the_frame_has_it():
    region = parse_region('0,0 0.5,0 0.5,1 0,1')
    # Of the window from a third of the width on, the frame's left half is the left third.
    crop = within(region, Window(160, 0, 240, 240, 480, 240))(12, 12)
    assert crop[:, :4].all() and not crop[:, 5:].any()
    assert not within(region, Window(260, 0, 220, 240, 480, 240))(12, 12).any()
    assert within(region, Window(0, 0, 120, 60, 480, 240))(2, 4).all()


@pytest.mark.parametrize('name', ['saliency', 'next_frame', 'uniform', 'random'])
def test_region_first_keeps_the_region_of_the_frame(name):
    """Both pictures keep what the region covers of the frame, and the crop's budget holds."""
    region = parse_region('corridor')
    regioned = Engine.load(str(TINY), device='cpu', selector=make_selector(name, always=region))
    item = next(items('path', 'test', 1, 3))
    asked, window, _ = _region_first(regioned, request_of(item, 0.5), Fewer(region=0.4),
                                     Timeline(''))
    small, part = (v for v in engine_plan(regioned, asked))
    for visual, own in ((small, region), (part, within(region, window))):
        _, h, w = visual.grid
        held = own(h // 2, w // 2)
        assert visual.unit_map.reshape(held.shape)[held].all()
        assert visual.kept == max(held.sum(), budget(held.size, 0.5))
    regioned.close()


def test_boxes_and_points_stay_right_after_dropping(engine):
    """Positions are those of the whole picture: the pointing answers do not move."""
    same = 0
    drawn = list(items('pointing', 'test', 10, 4))
    for item in drawn:
        mask = np.zeros(192, bool)
        mask[sorted(item.question.evidence)] = True
        mask[::3] = True
        request = Request(item.question.text, (Visual(frames_of(item), mask),), max_new_tokens=4)
        same += done(engine.answer(request)).text == item.question.answer
    assert same >= 9


# Droppers after the merger

@pytest.mark.parametrize('name', sorted(DROPPERS))
def test_the_decoder_gets_the_encoders_tokens_of_the_whole_picture(engine, name):
    item = next(items('relation', 'test', 1))
    request = request_of(item, 0.33)
    _, _, ((_, merged),) = engine.look(request_of(item))
    masked = drop_after_merger(engine, request, name)
    keep = masked.visuals[0].keep
    assert keep.sum() == 72 and masked.visuals[0].variant == name
    visual, = (v for v in engine_plan(engine, masked))
    held = engine.features.get(visual.key)
    assert torch.equal(held, merged[torch.from_numpy(np.flatnonzero(keep))])
    got = done(answer(engine, request, fewer=Fewer(dropper=name)))
    assert got.vision_tokens_kept == 72 and got.text in ('yes', 'no')
    # The same mask before the encoder is another picture to the caches.
    before, = engine_plan(engine, Request(item.question.text, (Visual(
        request.visuals[0].frames, keep),)))
    assert before.key != visual.key


@pytest.mark.parametrize('name', sorted(DROPPERS))
def test_a_dropper_keeps_the_region_first(engine, name):
    region = parse_region('corridor')
    regioned = Engine.load(str(TINY), device='cpu', selector=make_selector(name, always=region))
    for family, slices in (('relation', 1), ('change', 2)):
        request = request_of(next(items(family, 'test', 1)), 0.33)
        keep = drop_after_merger(regioned, request, name).visuals[0].keep
        assert keep.reshape(slices, 12, 16)[:, region(12, 16)].all()
        assert keep.sum() == budget(192 * slices, 0.33) != region(12, 16).sum() * slices
        plain = drop_after_merger(engine, request, name).visuals[0].keep
        assert not plain.reshape(slices, 12, 16)[:, region(12, 16)].all()
        got = done(answer(regioned, request, fewer=Fewer(dropper=name)))
        assert got.kept_units[0][region(12, 16)].all()
    regioned.close()


def engine_plan(engine, request):
    from qwen_vl_ros.engine.running import plan_visuals
    return plan_visuals(engine, request)


def test_a_dropper_without_a_name_is_refused(engine):
    item = next(items('relation', 'test', 1))
    with pytest.raises(ValueError, match="dropper 'magic' is not one of divprune"):
        drop_after_merger(engine, request_of(item, 0.5), 'magic')
    whole = request_of(item)
    assert drop_after_merger(engine, whole, 'dart') is whole


# Back to the full frame

def test_an_unsure_answer_is_given_up_for_the_full_frame(engine):
    item = next(items('number', 'test', 1, 6))
    few = request_of(item, 0.07)
    plain = done(engine.answer(few))
    sure = done(answer(engine, few, fewer=Fewer(least_margin=plain.margin - 0.01)))
    again = done(answer(engine, few, fewer=Fewer(least_margin=plain.margin + 0.01)))
    assert FULL_FRAME not in sure.approximate and sure.text == plain.text
    assert FULL_FRAME in again.approximate and again.vision_tokens_kept == 192
    assert again.text == done(engine.answer(request_of(item))).text
    # What the first try cost is counted: its encoding may come from the cache, its prefill not.
    assert len([s for s in again.timeline.spans if s.name == 'prefill']) == 2
    assert len([s for s in sure.timeline.spans if s.name == 'prefill']) == 1


def test_a_mask_of_ones_own_is_not_overruled(engine):
    item = next(items('number', 'test', 1, 6))
    mask = np.zeros(192, bool)
    mask[:20] = True
    request = Request(item.question.text, (Visual(frames_of(item), mask),), keep_ratio=0.1,
                      max_new_tokens=4)
    assert done(answer(engine, request, fewer=Fewer(least_margin=1e9))).vision_tokens_kept == 20


@pytest.mark.parametrize('name', sorted(DROPPERS))
def test_what_will_not_fit_is_refused_before_it_is_encoded(name, monkeypatch):
    """What fits once units are dropped is answered, though all of them would not fit."""
    engine = Engine.load(str(TINY), device='cpu', max_context=256)
    noise = np.random.default_rng(0).integers(0, 255, (336, 448, 3), np.uint8)
    visual = Visual((Frame.from_rgb(noise),))
    fits = Request('ball ' * 60, (visual,), keep_ratio=0.3, max_new_tokens=2)
    *_, done = answer(engine, fits, fewer=Fewer(name))
    assert done.answer.vision_tokens_kept == 60
    with pytest.raises(EngineError, match='the context holds 256'):
        list(engine.answer(replace(fits, keep_ratio=1.0)))
    monkeypatch.setattr(engine.model, 'encode', lambda *_: pytest.fail('encoded in vain'))
    with pytest.raises(EngineError, match=r'\(60 of them visual\), the context holds 256') as no:
        list(answer(engine, replace(fits, question='ball ' * 300), fewer=Fewer(name)))
    assert no.value.code == ErrorCode.PROMPT_TOO_LONG


# The picture

def test_the_explanation_dims_what_was_dropped():
    rgb = np.full((336, 448, 3), 160, np.uint8)
    kept = np.zeros((12, 16), bool)
    kept[3, 4] = True
    picture = explain(rgb, kept, np.arange(192, dtype=np.float32).reshape(12, 16))
    assert picture.shape == (336, 896, 3)
    assert (picture[84:112, 112:140] == 160).all() and (picture[0, 0] == 40).all()
    assert picture[-20, 880].sum() > picture[10, 460].sum()
    assert explain(rgb, kept).shape == (336, 448, 3)


def test_ask_writes_the_explanation(tmp_path):
    from qwen_vl_ros.cli.main import main
    item = next(items('attribute', 'test', 1))
    cv2.imwrite(str(tmp_path / 'scene.png'), frames_of(item)[0].rgb()[..., ::-1])
    out = tmp_path / 'why.png'
    words = ['ask', item.question.text, str(tmp_path / 'scene.png'), '--keep-ratio', '0.33',
             '--explain', str(out)]
    assert main(words) == 0
    shown = cv2.imread(str(out))
    assert shown.shape == (336, 896, 3)
    assert main([*words[:-1], str(tmp_path / 'no' / 'why.png')]) == 2


@pytest.fixture
def scene(tmp_path):
    item = next(items('attribute', 'test', 1))
    cv2.imwrite(str(tmp_path / 'scene.png'), frames_of(item)[0].rgb()[..., ::-1])
    return str(tmp_path / 'scene.png')


@pytest.mark.parametrize(('words', 'expected'), [
    (('--keep-region', 'path'), "ask: --keep-region: 'path' of the region"),
    (('--head', '/nowhere/head'), 'ask: --head: /nowhere/head is no file'),
    (('--head', __file__), f'ask: --head: {__file__} cannot be read as a saliency head'),
    (('--select', 'magic'), "ask: --select: selector 'magic' is not one of auto"),
    (('--explain', 'x.jpgg'), 'ask: --explain x.jpgg: expected a file name that ends in .png'),
    (('--roi', '0.3', '--clip'), 'ask: --roi is for a question about one still')])
def test_the_option_that_cannot_be_used_is_named(scene, words, expected, capsys):
    from qwen_vl_ros.cli.main import main
    assert main(['ask', 'What is it?', scene, '--keep-ratio', '0.3', *words]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count('\n') == 1


def test_a_head_of_another_checkpoint_is_one_line(scene, tmp_path, capsys):
    from qwen_vl_ros.cli.main import main
    from qwen_vl_ros.saliency.head import SaliencyHead
    head = tmp_path / 'other.safetensors'
    SaliencyHead(32, width=16, stem=8).save(head, {})
    assert main(['ask', 'What is it?', scene, '--head', str(head)]) == 2
    said = capsys.readouterr().err
    assert 'ask: --head: the saliency head reads embeddings of width 32' in said
    assert 'Traceback' not in said


def test_a_threshold_is_explained_with_its_map(scene, tmp_path):
    from qwen_vl_ros.cli.main import main
    out = tmp_path / 'why.png'
    for name, width in (('threshold', 896), ('uniform', 448)):
        assert main(['ask', 'What is it?', scene, '--keep-ratio', '0.3', '--select', name,
                     '--explain', str(out)]) == 0
        assert cv2.imread(str(out)).shape == (336, width, 3)


def test_a_clip_is_answered_without_the_region_of_interest_and_that_is_said(engine, caplog):
    _say_no_region.cache_clear()
    request = request_of(next(items('change', 'test', 1)))
    for _ in range(2):
        got = done(answer(engine, request, fewer=Fewer(region=0.3)))
        assert REGION not in got.approximate
    said, = caplog.records
    assert 'region of interest is shown of one still alone' in said.getMessage()
