"""The overlay: what it shows, how long it takes, and that nobody pays for it unseen."""

import time

import numpy as np
from rclpy.serialization import serialize_message
from std_msgs.msg import Header

from qwen_vl_ros.node import overlay
from qwen_vl_ros.saliency.picture import kept_picture


def test_banner_and_dropped_units_are_drawn():
    rgb = np.full((120, 160, 3), 200, np.uint8)
    kept = np.ones((4, 6), bool)
    kept[0, 0] = False
    picture = overlay.draw(rgb, 'what is it?', 'a red cube', '12 ms', kept)
    assert picture.shape == rgb.shape and rgb.min() == 200
    assert (picture[2, 2] == 50).all() and (picture[2, 100] == 200).all()
    banner = picture[80:]
    assert (banner == 255).all(axis=2).any() and (banner <= 100).all(axis=2).any()
    saliency = kept_picture(kept, 160, 120)
    assert saliency[2, 2] == 64 and saliency[119, 159] == 255


def test_long_answers_and_other_scripts_do_not_break_it():
    rgb = np.zeros((48, 64, 3), np.uint8)
    overlay.draw(rgb, 'wo? ' * 100, '红色的立方体 ' * 100, '')


def test_a_full_hd_overlay_message_takes_less_than_30_ms():
    rgb = np.zeros((1080, 1920, 3), np.uint8)
    spent = []
    for _ in range(7):
        started = time.perf_counter()
        message = overlay.image_message(
            overlay.draw(rgb, 'what?', 'a long answer ' * 8, '12 ms'), Header())
        spent.append(time.perf_counter() - started)
    assert message.step == 5760 and len(message.data) == 1920 * 1080 * 3
    assert min(spent) < 0.030
    assert serialize_message(message)
