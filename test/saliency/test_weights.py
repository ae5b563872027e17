"""Signals alone and combined by weights: what is read, what is refused, what chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from qwen_vl_ros.cli.main import main
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.roboscene.evaluate import earlier, frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.grad_cam import divided
from qwen_vl_ros.saliency.head_signal import HeadSignal
from qwen_vl_ros.saliency.next_frame import KNOWN, NextFrameSelector
from qwen_vl_ros.saliency.select import SIGNALS, UnitSelector, normalised
from qwen_vl_ros.saliency.selectors import UniformWithRegion, make_selector
from qwen_vl_ros.saliency.weights import REMEMBERED, parse_weights

TINY = Path(__file__).parents[2] / 'models' / 'tiny'
GRID = (1, 24, 32)


def shot(item) -> Frame:
    """Return an item's picture as a camera sends it."""
    return Frame.from_rgb(frames_of(item)[0].rgb(), camera='front')


def ask(engine: Engine, frame: Frame, question: str, ratio: float = 0.33):
    request = Request(question, (Visual((frame,)),), keep_ratio=ratio, max_new_tokens=4)
    return next(e.answer for e in engine.answer(request) if isinstance(e, Done))


@pytest.fixture
def choosing(choosing_engine):
    """Return the engine with a selector in place of its own."""
    own = choosing_engine.options

    def use(selector):
        choosing_engine.options = replace(own, selector=selector)
        selector.bind(choosing_engine)
        choosing_engine.forget()
        return choosing_engine

    yield use
    choosing_engine.options = own


# Weights as text

def test_weights_are_read():
    text = ' gradient=1, contrast = 0.3,motion=1,entropy=.2,grad_cam=1.1,head=2e0 '
    assert parse_weights(text, 'next_frame') == {
        'gradient': 1, 'contrast': 0.3, 'motion': 1, 'entropy': 0.2, 'grad_cam': 1.1, 'head': 2}
    assert parse_weights(' ', 'uniform') == {} and parse_weights('', 'auto') == {}


@pytest.mark.parametrize(('text', 'selector', 'expected'), [
    ('gradient', 'saliency', "'gradient' of the weights 'gradient' is not NAME=NUMBER"),
    ('gradient=1,', 'saliency', "'' of the weights 'gradient=1,' is not NAME=NUMBER"),
    ('=1', 'saliency', "'=1' of the weights"),
    ('gradient=a', 'saliency', "weight of gradient is 'a'; expected a number over 0"),
    ('gradient=', 'saliency', "weight of gradient is ''"),
    ('gradient=0', 'saliency', 'weight of gradient is 0; expected a number over 0'),
    ('gradient=-2', 'saliency', 'weight of gradient is -2'),
    ('gradient=nan', 'saliency', 'weight of gradient is nan'),
    ('gradient=inf', 'next_frame', 'weight of gradient is inf'),
    ('gradient=1,gradient=2', 'saliency', 'name gradient twice'),
    ('magic=1', 'next_frame', "signal 'magic' is not one of gradient, colour, contrast, head, m"),
    ('motion=1', 'saliency', "signal 'motion' is not one of gradient, colour, contrast, head$"),
    ('gradient=1', 'gradient', "selector 'gradient' combines nothing by weights; expected one of"),
    ('gradient=1', 'auto', "selector 'auto' combines nothing"),
    ('head=1', 'divprune', "selector 'divprune' combines nothing")])
def test_weights_that_cannot_be_used_are_one_sentence(text, selector, expected):
    with pytest.raises(ValueError, match=expected):
        parse_weights(text, selector)


def test_the_head_by_weight_needs_its_file(tmp_path):
    for name in ('saliency', 'next_frame'):
        with pytest.raises(ValueError, match='has no saliency head'):
            make_selector(name, model=tmp_path, weights={'head': 1.0})


def test_signals_that_are_not_remembered_are_refused():
    with pytest.raises(ValueError, match="signal 'gradient' is not one of motion, entropy, gra"):
        NextFrameSelector(None, {'gradient': 1.0})
    with pytest.raises(ValueError, match='weight of motion is 0'):
        NextFrameSelector(None, {'motion': 0.0})


# What is combined

def test_names_stand_for_weights():
    for name in SIGNALS:
        assert make_selector(name).weights == {name: 1.0}
    for name in REMEMBERED:
        alone = make_selector(name)
        assert alone.base is None and alone.weights == {name: 1.0}
    fitted = make_selector('next_frame')
    assert fitted.base.weights == {'gradient': 1.0, 'contrast': 0.3}
    assert fitted.weights == {'motion': 1.0, 'grad_cam': KNOWN}
    own = make_selector('next_frame', model=TINY, gradient_layers=2, generic_every=3, weights={
        'head': 1.0, 'colour': 0.5, 'entropy': 0.2})
    assert own.base.weights == {'head': 1.0, 'colour': 0.5} and own.weights == {'entropy': 0.2}
    assert (own.layers, own.generic_every) == (2, 3)
    # Nothing is remembered where no weight asks for it.
    assert isinstance(make_selector('next_frame', weights={'colour': 2.0}), UnitSelector)


def test_weights_weigh():
    frame = shot(next(items('path', 'test', 1)))
    maps = {n: normalised(SIGNALS[n]([frame], 12, 16, '')) for n in ('gradient', 'colour')}
    mixed = make_selector('saliency', weights={'gradient': 3.0, 'colour': 1.0})
    mixed.spread = 0.0
    expected = (3 * maps['gradient'] + maps['colour']) / 4
    assert np.allclose(mixed.saliency([frame], 12, 16), expected, atol=1e-6)
    nearly = make_selector('saliency', weights={'gradient': 1e6, 'colour': 1.0})
    assert (nearly([frame], GRID, 0.25) == make_selector('gradient')([frame], GRID, 0.25)).all()


def test_weights_of_what_is_remembered_weigh(choosing):
    item = next(i for i in items('attribute', 'test', 20) if earlier(i).scenes[0] != i.scenes[0])
    question = item.question.text
    selector = make_selector('next_frame', weights={
        'gradient': 1.0, 'motion': 1.0, 'entropy': 0.5, 'grad_cam': 1.0})
    engine = choosing(selector)
    ask(engine, shot(earlier(item)), question)
    selector.reflect()
    now, found = shot(item), {}
    for name, weight in (('', 1.0), ('motion', 3.0), ('entropy', 5.0), ('grad_cam', 3.0)):
        selector.weights = {'motion': 1.0, 'entropy': 0.5, 'grad_cam': 1.0} | (
            {name: weight} if name else {})
        found[name] = selector.saliency([now], 12, 16, question)
    assert all((found[name] != found['']).any() for name in REMEMBERED)
    best = selector._cameras['front'].cam.argmax()
    assert (found['grad_cam'] - found['']).reshape(-1)[best] > 1.0


# Each alone

@pytest.mark.parametrize('name', [*SIGNALS, *REMEMBERED, 'head'])
def test_each_signal_alone_chooses_through_the_engine(choosing, name):
    selector = make_selector(name, model=TINY)
    engine = choosing(selector)
    item = next(i for i in items('change', 'test', 9, 3))
    frames, right = frames_of(item), 0
    for frame in (frames[0], frames[-1]):
        got = ask(engine, Frame.from_rgb(frame.rgb(), camera='front'), 'Is the path blocked?')
        right += got.text in ('yes', 'no')
        assert got.vision_tokens_kept == got.kept_units[0].sum() == 72
    assert right == 2
    clip = Request(item.question.text, (Visual(frames),), keep_ratio=0.33, max_new_tokens=4)
    told = next(e.answer for e in engine.answer(clip) if isinstance(e, Done))
    assert told.vision_tokens_kept == 144 and told.vision_tokens_in == 384


@pytest.mark.parametrize('name', [*SIGNALS, *REMEMBERED, 'head'])
def test_each_signal_alone_chooses_for_qwen_vl_ask(name, tmp_path, capsys):
    item = next(items('path', 'test', 1))
    cv2.imwrite(str(tmp_path / 'scene.png'), frames_of(item)[0].rgb()[..., ::-1])
    assert main(['ask', item.question.text, str(tmp_path / 'scene.png'), '--keep-ratio', '0.33',
                 '--select', name]) == 0
    out, err = capsys.readouterr()
    assert out.strip() in ('yes', 'no') and '72/192 vision tokens' in err


@pytest.mark.parametrize('name', REMEMBERED)
def test_a_camera_of_which_nothing_is_known_is_covered_evenly(name):
    frame = shot(next(items('path', 'test', 1)))
    even = UniformWithRegion(lambda rows, columns: np.zeros((rows, columns), bool))
    assert (make_selector(name)([frame], GRID, 0.25) == even([frame], GRID, 0.25)).all()


def test_motion_alone_keeps_what_changed():
    recall = []
    for item in items('change', 'test', 8):
        selector = make_selector('motion')
        first, second = (Frame.from_rgb(f.rgb(), camera='front') for f in frames_of(item)[1::2])
        selector([first], GRID, 0.33, '')
        keep = selector([second], GRID, 0.33, '')
        recall.append(keep[[u - 192 for u in item.question.evidence if u >= 192]].mean())
    assert np.mean(recall) > 0.7


def test_motion_alone_holds_the_slices_of_a_first_clip_against_each_other():
    kept, even = [], []
    for item in items('change', 'test', 8):
        keep = make_selector('motion')(frames_of(item), (2, 24, 32), 0.2, '')
        assert keep[:192].sum() > 10
        came = [u for u in item.question.evidence if u >= 192]
        kept.append(keep[came].mean())
        even.append(make_selector('uniform')(frames_of(item), (2, 24, 32), 0.2, '')[came].mean())
    assert np.mean(kept) > 0.75 > 2 * np.mean(even)


def test_grad_cam_alone_keeps_what_the_last_answer_leaned_on(choosing):
    selector, recall = make_selector('grad_cam'), []
    engine = choosing(selector)
    for item in items('number', 'test', 4, 5):
        selector.forget()
        ask(engine, shot(earlier(item)), item.question.text, 1.0)
        keep = ask(engine, shot(item), item.question.text, 0.25).kept_units[0].reshape(-1)
        recall.append(keep[sorted(item.question.evidence)].mean())
        # Another question leans on other units: nothing is known of it.
        other = ask(engine, shot(item), 'Is the path blocked?', 0.25).kept_units[0].reshape(-1)
        assert (other == make_selector('grad_cam')([shot(item)], GRID, 0.25, '')).all()
    assert np.mean(recall) > 0.7


def test_entropy_alone_asks_for_no_gradient(choosing, monkeypatch):
    def refuse(*args):
        raise AssertionError('a gradient was taken')

    monkeypatch.setattr('qwen_vl_ros.saliency.grad_cam.token_maps', refuse)
    selector = make_selector('entropy')
    engine = choosing(selector)
    frame = shot(next(items('relation', 'test', 1)))
    first = ask(engine, frame, 'what?').kept_units[0]
    selector.reflect()
    focus = selector._cameras['front'].focus
    assert focus.shape == (12, 16) and focus.std() > 0
    again = ask(engine, frame, 'what?').kept_units[0]
    assert (again != first).any()
    assert again.reshape(-1)[focus.argmax()]


def test_motion_alone_reflects_on_nothing(choosing):
    selector = make_selector('motion')
    engine = choosing(selector)
    ask(engine, shot(next(items('relation', 'test', 1))), 'what?')
    assert selector._said is None and 'front' in selector._cameras


def test_cameras_are_remembered_apart():
    selector = make_selector('motion')
    first, second = (frames_of(i)[0].rgb() for i in items('path', 'test', 2))
    for camera, rgb in (('a', first), ('b', second)):
        selector([Frame.from_rgb(rgb, camera=camera)], GRID, 0.25, '')
    still = selector.saliency([Frame.from_rgb(first, camera='a')], 12, 16, '')
    assert still.max() < 0.01  # nothing moved in front of camera a


# The gradient's layers, and the map of a generic prompt

def test_the_first_layers_give_another_map(choosing):
    item, maps = next(items('attribute', 'test', 1)), []
    for layers in (0, 2, 6):
        selector = make_selector('grad_cam', gradient_layers=layers)
        ask(choosing(selector), shot(item), item.question.text, 0.5)
        selector.reflect()
        maps.append(selector._cameras['front'].cam)
    assert (maps[0] != maps[1]).any() and np.array_equal(maps[0], maps[2])
    assert all(m.max() > 0 for m in maps)


def test_the_generic_map_is_divided_out_and_taken_anew_in_turn(choosing, monkeypatch):
    from qwen_vl_ros.saliency import reflecting

    taken = []
    plain = reflecting.usual_of
    monkeypatch.setattr(reflecting, 'usual_of',
                        lambda *args: taken.append(plain(*args)) or taken[-1])
    item = next(items('attribute', 'test', 1))
    with_it = make_selector('grad_cam', generic_every=2)
    without = make_selector('grad_cam')
    cams = []
    for selector in (without, with_it):
        ask(choosing(selector), shot(item), item.question.text, 0.5)
        selector.reflect()
        cams.append(selector._cameras['front'].cam)
    (usual,), = taken
    assert usual.shape == (12, 16) and usual.min() >= 0 and usual.std() > 0
    assert np.allclose(cams[1], divided(cams[0], usual))
    # Another question each time, so that each answer is reflected on: two share a map.
    for count, question in ((1, 'Is the path blocked?'), (2, 'How many boxes are there?')):
        ask(choosing(with_it), shot(item), question, 0.5)
        with_it.reflect()
        assert len(taken) == count
    # A camera that turned is looked at anew.
    with_it._cameras['front'].usual_moved = 99.0
    ask(choosing(with_it), shot(item), item.question.text, 0.5)
    with_it.reflect()
    assert len(taken) == 3 and with_it._cameras['front'].usual_moved == 0.0


def test_the_generic_map_follows_the_camera(choosing):
    selector = make_selector('grad_cam', generic_every=9)
    item = next(i for i in items('attribute', 'test', 20)
                if abs(earlier(i).scenes[0].camera.cx - i.scenes[0].camera.cx) > 28)
    engine = choosing(selector)
    ask(engine, shot(earlier(item)), item.question.text, 0.5)
    selector.reflect()
    before = selector._cameras['front'].usual
    ask(engine, shot(item), item.question.text, 0.5)
    state = selector._cameras['front']
    assert state.usual_moved > 0.5 and (state.usual != before).any()
    assert state.usual.mean() == pytest.approx(before.mean(), rel=0.3)


# The head's type

@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16', 'int8'])
def test_the_head_computes_in_every_type(choosing, dtype):
    item = next(items('attribute', 'test', 1))
    found = []
    for kind in ('auto', dtype):
        selector = make_selector('head', model=TINY, head_dtype=kind)
        choosing(selector)
        found.append(selector.saliency([shot(item)], 12, 16, item.question.text))
        if dtype != 'int8':
            want = torch.float32 if kind == 'auto' else getattr(torch, dtype)
            assert selector.signals['head'].head.score.weight.dtype == want
    assert np.corrcoef(found[0].reshape(-1), found[1].reshape(-1))[0, 1] > 0.98


def test_a_type_that_is_none_is_named():
    with pytest.raises(ValueError, match="dtype 'int4' is not one of auto, float32"):
        HeadSignal.load(TINY, dtype='int4')


# Options that cannot be used

@pytest.mark.parametrize(('words', 'expected'), [
    (('--weights', 'gradient=1'), "--weights: selector 'auto' combines nothing by weights"),
    (('--select', 'saliency', '--weights', 'x'), "--weights: 'x' of the weights 'x' is not"),
    (('--select', 'saliency', '--weights', 'head=1', '--model', str(TINY.parent / 'tiny-dense')),
     'ask: --weights: '),
    (('--gradient-layers', '-1'), '--gradient-layers is -1; expected 0'),
    (('--select', 'next_frame', '--gradient-layers', '7'),
     'to pass 7 layers; expected 0 (all) to 6'),
    (('--generic-every', '-3'), '--generic-every is -3; expected 0')])
def test_the_option_that_cannot_be_used_is_named(tmp_path, words, expected, capsys):
    cv2.imwrite(str(tmp_path / 'scene.png'), np.zeros((84, 112, 3), np.uint8))
    assert main(['ask', 'What is it?', str(tmp_path / 'scene.png'), '--keep-ratio', '0.3',
                 *words]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count('\n') == 1
