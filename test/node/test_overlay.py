"""The overlay: what it shows, how long it takes, and that nobody pays for it unseen."""

import time

import numpy as np
import pytest
from rclpy.serialization import serialize_message
from std_msgs.msg import Header

from qwen_vl_ros.node import overlay
from qwen_vl_ros.saliency.picture import kept_picture, latin


def test_banner_and_dropped_units_are_drawn():
    rgb = np.full((120, 160, 3), 200, np.uint8)
    kept = np.ones((4, 6), bool)
    kept[0, 0] = False
    picture = overlay.draw(rgb, 'what is it?', 'a red cube', ['12 ms'], kept)
    assert picture.shape == rgb.shape and rgb.min() == 200
    assert (picture[2, 2] == 50).all() and (picture[2, 100] == 200).all()
    banner = picture[80:]
    assert (banner == 255).all(axis=2).any() and (banner <= 100).all(axis=2).any()
    saliency = kept_picture(kept, 160, 120)
    assert saliency[2, 2] == 64 and saliency[119, 159] == 255


def test_long_answers_and_other_scripts_do_not_break_it():
    rgb = np.zeros((48, 64, 3), np.uint8)
    drawn = overlay.draw(rgb, 'wo? ' * 100, '红色的立方体 ' * 100, [''])
    assert drawn.max() > 200 and rgb.max() == 0


@pytest.mark.parametrize(('text', 'shown'), [
    ('Où est-ce, Zoë?', 'Ou est-ce, Zoe?'), ('e\u0301', 'e'), ('红 box', '? box'),
    ('한국', '??'), ('\ud800', '?'), ('a\0b\x1b[31m', 'a?b?[31m'), ('\u202eabc', '?abc'),
    ('wait…', 'wait...'), ('line\nline', 'line\nline'), ('🤖', '?')])
def test_what_the_font_does_not_know_is_written_plainly(text, shown):
    assert latin(text) == shown
    overlay.draw(np.zeros((40, 300, 3), np.uint8), text, text, [text])


def test_what_is_too_long_ends_in_dots():
    for words in (10, 10**6):
        assert overlay._wrapped('word ' * words, 14, 2) == ['word word word', 'word word...']


@pytest.mark.parametrize('size', [(1, 1), (1, 300), (300, 1), (8, 8)])
def test_tiny_pictures_are_drawn(size):
    kept = np.zeros((12, 16), bool)
    kept[6:] = True
    drawn = overlay.draw(np.full((*size, 3), 200, np.uint8), 'what?', 'that', ['1 ms'], kept)
    assert drawn.shape == (*size, 3)
    assert set(np.unique(kept_picture(kept, size[1], size[0]))) <= {64, 255}
    assert overlay.image_message(drawn, Header()).step == 3 * size[1]
    assert bytes(overlay.jpeg_message(drawn, Header()).data[:2]) == b'\xff\xd8'


def test_a_full_hd_overlay_message_takes_less_than_30_ms():
    rgb = np.zeros((1080, 1920, 3), np.uint8)
    spent = []
    for _ in range(7):
        started = time.perf_counter()
        message = overlay.image_message(
            overlay.draw(rgb, 'what?', 'a long answer ' * 8, ['12 ms']), Header())
        spent.append(time.perf_counter() - started)
    assert message.step == 5760 and len(message.data) == 1920 * 1080 * 3
    assert min(spent) < 0.030
    assert serialize_message(message)
