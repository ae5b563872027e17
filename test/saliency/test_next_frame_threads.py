"""Answers are told of, and cameras forgotten, by other threads than the one that chooses."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency import next_frame
from qwen_vl_ros.saliency.next_frame import NextFrameSelector
from qwen_vl_ros.saliency.select import UnitSelector

GRID = (1, 6, 8)


def shot(seed: int) -> Frame:
    rgb = np.random.default_rng(seed).integers(0, 255, (84, 112, 3), np.uint8)
    return Frame.from_rgb(rgb, camera='front')


@pytest.fixture
def selector():
    made = NextFrameSelector(UnitSelector())
    made._engine = SimpleNamespace(features=SimpleNamespace(get=lambda key: 1))
    return made


def observe(selector: NextFrameSelector, frame: Frame) -> None:
    """Tell of an answer about a frame that was shown whole."""
    visual = SimpleNamespace(key=1, frames=(frame,), unit_map=np.ones((3, 4), bool), grid=GRID)
    selector.observe(SimpleNamespace(question='what?', system_prompt=None), [visual],
                     SimpleNamespace(spans=[(0, 12)]), (1,))


def known(selector: NextFrameSelector) -> list[int]:
    """Return which frames are remembered."""
    return [id(frame) for state in selector._cameras.values()
            for frame in (state.frame, state.chosen)]


@pytest.mark.parametrize('change', [
    lambda selector: observe(selector, shot(2)), NextFrameSelector.forget,
    lambda selector: selector.saliency([shot(2)], 3, 4, 'what?')],
    ids=['observe', 'forget', 'saliency'])
def test_nothing_changes_while_a_choice_is_made(selector, change):
    observe(selector, shot(1))
    before = known(selector)
    other = threading.Thread(target=change, args=(selector,))
    with selector._lock:  # as a choice, or a gradient, holds it
        other.start()
        other.join(0.3)
        assert other.is_alive() and known(selector) == before
    other.join(10)
    assert not other.is_alive() and known(selector) != before


def test_a_camera_that_is_gone_when_its_scene_is_cut_is_no_error(selector, monkeypatch):
    observe(selector, shot(1))

    def cut(*args):
        selector.forget()
        return (0.0, 0.0), np.full((3, 4), 200.0, np.float32)

    monkeypatch.setattr(next_frame, 'moved_since', cut)
    assert selector.saliency([shot(2)], 3, 4, 'what?').shape == (1, 3, 4)
