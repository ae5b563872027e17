"""Parameters that save tokens: what reaches the engine, what is refused, what moves by itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.types import Answer
from qwen_vl_ros.node.diagnostics import approximate
from qwen_vl_ros.node.main import load_engine
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.perception import Perception
from qwen_vl_ros.node.requests import Job, Outcome, Question
from qwen_vl_ros.roboscene.evaluate import earlier, frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.answering import FULL_FRAME, REGION

NOW = 1_700_000_000 * 10**9


def message(rgb: np.ndarray) -> SimpleNamespace:
    """Return a sensor_msgs/Image by its field names."""
    height, width = rgb.shape[:2]
    stamp = SimpleNamespace(sec=NOW // 10**9, nanosec=0)
    return SimpleNamespace(
        header=SimpleNamespace(stamp=stamp, frame_id='lens'), encoding='rgb8', width=width,
        height=height, step=3 * width, is_bigendian=0, data=np.ascontiguousarray(rgb).reshape(-1))


def settings(**changed) -> Settings:
    return Settings(model_device='cpu', scheduler_max_sequences=1, pruning_enable=True,
                    **{'pruning_keep_ratio': 0.33, 'pruning_min_units': 1, **changed})


def perceive(**changed) -> Perception:
    wanted = settings(**changed)
    return Perception(load_engine(wanted), wanted, lambda: NOW)


def ask(perception: Perception, item) -> tuple[Outcome, Job]:
    perception.receive('camera', message(frames_of(item)[0].rgb()))
    job = Job(Question(item.question.text), lambda job, event: None)
    return perception.answer(job), job


def ask_on(perception: Perception, item, times: int) -> tuple[list[Answer], list[int]]:
    """Ask again and again; return the answers, and the limit of pixels after each."""
    answers, pixels = [], []
    for _ in range(times):
        outcome, job = ask(perception, item)
        perception.count(job, outcome)
        answers.append(outcome.answer)
        pixels.append(perception.engine.options.max_pixels)
    return answers, pixels


def test_the_node_takes_the_head_of_the_checkpoint_and_keeps_the_region():
    perception = perceive(pruning_keep_region='corridor')
    assert set(perception.engine.options.selector.weights) == {'head'}
    outcome, _ = ask(perception, next(items('path', 'test', 1)))
    kept = outcome.answer.kept_units[0]
    assert outcome.code == ErrorCode.NONE and kept.sum() == 72 and kept[11, 3:13].all()


def test_an_unsure_answer_is_asked_again():
    perception = perceive(pruning_least_margin=99.0)
    outcome, job = ask(perception, next(items('number', 'test', 1)))
    assert FULL_FRAME in outcome.answer.approximate
    assert outcome.answer.kept_units[0].all() and outcome.answer.timeline is job.timeline
    perception.start()
    assert perception.overlap is None  # what asks twice holds the engine for itself
    perception.stop()


def test_region_first_shows_what_it_looked_at():
    outcome, _ = ask(perceive(pruning_roi=0.3), next(items('pointing', 'test', 1)))
    assert REGION in outcome.answer.approximate
    assert 0 < outcome.answer.kept_units[0].sum() < outcome.answer.vision_tokens_kept < 0.2 * 192


def test_a_dropper_after_the_encoder_is_a_selector_like_the_others():
    outcome, _ = ask(perceive(pruning_selector='divprune'), next(items('attribute', 'test', 1)))
    assert outcome.answer.vision_tokens_kept == 72


def test_the_gradient_is_taken_while_nobody_waits():
    perception = perceive(pruning_selector='next_frame')
    selector = perception.engine.options.selector
    ask(perception, next(items('attribute', 'test', 1)))
    assert selector._said is not None
    perception._check_newest()
    assert selector._said is None and selector._cameras['camera'].cam.max() > 0


def test_weights_layers_and_types_reach_the_selector():
    perception = perceive(
        pruning_selector='next_frame', pruning_gradient_layers=2, pruning_generic_every=5,
        pruning_weights='gradient=1,motion=2,grad_cam=0.5,head=1', pruning_head_dtype='bfloat16')
    selector = perception.engine.options.selector
    assert selector.base.weights == {'gradient': 1.0, 'head': 1.0}
    assert selector.weights == {'motion': 2.0, 'grad_cam': 0.5}
    assert (selector.layers, selector.generic_every) == (2, 5)
    assert str(selector.base.signals['head'].head.score.weight.dtype) == 'torch.bfloat16'
    outcome, _ = ask(perception, next(items('attribute', 'test', 1)))
    assert outcome.answer.vision_tokens_kept == 72
    perception._check_newest()
    assert selector._cameras['camera'].usual.max() > 0


@pytest.mark.parametrize('name', ['motion', 'entropy', 'grad_cam'])
def test_a_remembered_signal_chooses_alone(name):
    perception = perceive(pruning_selector=name)
    item, kept = next(items('attribute', 'test', 1)), []
    for moment in (earlier(item), item):
        kept.append(ask(perception, moment)[0].answer.kept_units[0])
        perception._check_newest()
    assert [k.sum() for k in kept] == [72, 72] and (kept[0] != kept[1]).any()


def test_a_latency_target_lowers_shares_and_resolution():
    perception = perceive(target_latency_ms=0.01)
    item = next(items('attribute', 'test', 1))
    answers, pixels = ask_on(perception, item, 30)
    kept = [answer.vision_tokens_kept for answer in answers]
    assert kept[-1] < kept[0] == 72 and pixels[-1] < 0.5 * pixels[0]
    perception.settings = settings(target_latency_ms=0.0)
    assert ask(perception, item)[0].answer.vision_tokens_kept == 72
    assert perception.engine.options.max_pixels == pixels[0]


def test_the_floor_holds_for_smaller_pictures_of_a_latency_target():
    perception = perceive(target_latency_ms=0.01, pruning_min_units=70)
    item = next(items('attribute', 'test', 1))
    answers, _ = ask_on(perception, item, 32)
    assert min(answer.vision_tokens_in for answer in answers) < 70
    assert all(a.vision_tokens_kept >= min(70, a.vision_tokens_in) for a in answers)


@pytest.mark.parametrize('least', [1, 50, 70, 190])
def test_the_floor_is_of_what_a_region_first_shows(least):
    perception = perceive(pruning_roi=0.3, pruning_keep_ratio=0.1, pruning_min_units=least)
    got = ask(perception, next(items('pointing', 'test', 1)))[0].answer
    assert REGION in got.approximate and got.vision_tokens_in < 130
    assert got.vision_tokens_kept >= min(least, got.vision_tokens_in)


def test_the_floor_is_of_the_picture_that_the_checkpoint_takes():
    """Two million pixels are shown as the 192 units that models/tiny was made for."""
    perception = perceive(pruning_keep_ratio=0.1, pruning_min_units=100)
    rgb = np.random.default_rng(0).integers(0, 255, (1080, 1920, 3), np.uint8)
    perception.receive('camera', message(rgb))
    outcome = perception.answer(Job(Question('Is the path blocked?'), lambda job, event: None))
    assert 100 <= outcome.answer.vision_tokens_kept < outcome.answer.vision_tokens_in <= 192


def test_every_approximate_option_in_force_is_named():
    wanted = settings(target_latency_ms=0.01, model_quantization='int8')
    perception = Perception(load_engine(wanted), wanted, lambda: NOW)
    assert approximate(perception.engine.info, wanted, None) == (
        'quantization', 'keep_ratio', 'target_latency_ms')
    item = next(items('number', 'test', 1))
    outcome, job = ask(perception, item)
    assert outcome.answer.approximate == ('quantization', 'keep_ratio')
    for _ in range(5):  # then the controller goes one rung down
        perception.count(job, outcome)
    outcome, job = ask(perception, item)
    assert outcome.answer.approximate == ('quantization', 'keep_ratio', 'target_latency_ms')
    assert approximate(None, Settings(), None) == ()


@pytest.mark.parametrize(('name', 'value', 'expected'), [
    ('pruning.keep_region', 'path', "'path' of the region 'path' is not a corner"),
    ('pruning.selector', 'magic', 'pruning.selector must be one of auto, head'),
    ('pruning.weights', 'gradient=1', "pruning.weights: selector 'auto' combines nothing"),
    ('pruning.gradient_layers', -1, 'pruning.gradient_layers must be from 0'),
    ('pruning.generic_every', -1, 'pruning.generic_every must be from 0'),
    ('pruning.head_dtype', 'int4', 'pruning.head_dtype must be one of auto, float32'),
    ('pruning.min_units', 0, 'pruning.min_units must be from 1'),
    ('pruning.least_margin', -1.0, 'pruning.least_margin must be from 0.0'),
    ('pruning.roi', 1.0, 'pruning.roi must be from 0.0 to 0.9')])
def test_values_out_of_range_are_named(name, value, expected):
    with pytest.raises(ValueError, match=expected):
        Settings.of({name: value})


@pytest.mark.parametrize(('weights', 'expected'), [
    ('magic=1', "pruning.weights: signal 'magic' is not one of gradient, colour"),
    ('gradient=x', "pruning.weights: weight of gradient is 'x'; expected a number over 0"),
    ('motion=-1', 'pruning.weights: weight of motion is -1; expected a number over 0')])
def test_weights_that_cannot_be_used_are_named(weights, expected):
    with pytest.raises(ValueError, match=expected):
        Settings.of({'pruning.selector': 'next_frame', 'pruning.weights': weights})


def test_a_head_that_is_missing_is_named():
    with pytest.raises(ValueError, match='/nowhere/head is missing'):
        load_engine(settings(pruning_selector='saliency', pruning_weights='head=1',
                             pruning_head_file='/nowhere/head'))
    with pytest.raises(ValueError, match='/nowhere/head is missing'):
        load_engine(settings(pruning_selector='head', pruning_head_file='/nowhere/head'))
