"""The pictures that an answer is about, and which parts of them the model saw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rclpy.node import Node
from rclpy.publisher import Publisher
from sensor_msgs.msg import CompressedImage, Image

from qwen_vl_ros.engine.types import Answer
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.node import overlay
from qwen_vl_ros.node.messages import frame_header
from qwen_vl_ros.node.requests import Job
from qwen_vl_ros.saliency.picture import kept_picture

#: Messages that wait for a slow reader: an answer about several cameras sends one for each.
DEPTH = 8


class Views(NamedTuple):
    """The publishers of the pictures below one name."""

    saliency: Publisher
    overlay: Publisher
    jpeg: Publisher

    @classmethod
    def below(cls, node: Node, name: str) -> Views:
        """Create them."""
        return cls(node.create_publisher(Image, f'{name}/saliency', DEPTH),
                   node.create_publisher(Image, f'{name}/overlay', DEPTH),
                   node.create_publisher(CompressedImage, f'{name}/overlay/compressed', DEPTH))


class Pictures:
    """
    The topics ``~/overlay``, ``~/overlay/compressed`` and ``~/saliency``, of all cameras together;
    where there are several, also below each camera's name: viewers show one topic at a time.

    :param node: owns the publishers.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._all = Views.below(node, '~')
        self._each: dict[str, Views] = {}

    def serve(self, cameras: Sequence[str]) -> None:
        """
        Publish for these cameras, by name, from now on.

        :param cameras: of the node; one alone has no topics of its own.
        """
        before, wanted = self._each, cameras if len(cameras) > 1 else ()
        self._each = {name: before.get(name) or Views.below(self._node, f'~/{topic_of(name)}')
                      for name in wanted}
        for name in before.keys() - self._each.keys():
            for publisher in before[name]:
                self._node.destroy_publisher(publisher)

    def show(self, job: Job, answer: Answer) -> None:
        """
        Publish the pictures of an answer, whole or cut off: one message for each, in their order.

        Of a clip it is the newest frame, with what was kept of the newest slice. Nothing is drawn
        that nobody listens to, and a picture that cannot be drawn costs none of the others.

        :raises Exception: of the first picture that failed, when the others are published.
        """
        failed: Exception | None = None
        for number, frame in enumerate(job.frames):
            try:
                self._show(job, answer, number, frame)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _show(self, job: Job, answer: Answer, number: int, frame: Frame) -> None:
        own = self._each.get(frame.camera)
        saliency, raw, jpeg = (
            [publisher for publisher in kind if publisher.get_subscription_count() > 0]
            for kind in zip(self._all, *([own] if own else [])))
        if not (saliency or raw or jpeg):
            return
        header, kept = frame_header(frame), kept_of(answer, number)
        if saliency:
            _publish(saliency, overlay.image_message(
                kept_picture(kept[-1], frame.width, frame.height), header))
        if not (raw or jpeg):
            return
        drawn = overlay.draw(frame.rgb(), job.question.text, answer.text,
                             notes_of(answer, frame, number, len(job.frames)), kept[-1])
        if raw:
            _publish(raw, overlay.image_message(drawn, header))
        if jpeg:
            _publish(jpeg, overlay.jpeg_message(drawn, header))


def _publish(publishers: Sequence[Publisher], message: Image | CompressedImage) -> None:
    for publisher in publishers:
        publisher.publish(message)


def topic_of(camera: str) -> str:
    """Return a camera's name as a part of a topic's: letters, digits, _ and / only."""
    parts = (re.sub(r'\W', '_', part, flags=re.ASCII) for part in camera.split('/') if part)
    return '/'.join(f'camera_{part}' if part[0].isdigit() else part for part in parts)


def kept_of(answer: Answer, number: int) -> np.ndarray:
    """
    Return what was kept of a picture, bool [slices, rows, columns].

    :param number: of the picture within the question; one unit, kept, where nothing is said of it.
    """
    kept = answer.kept_slices
    return kept[number] if number < len(kept) else np.ones((1, 1, 1), np.bool_)


def notes_of(answer: Answer, frame: Frame, number: int, count: int) -> list[str]:
    """
    Return the lines below an answer: what it cost, and where it saw more, what was kept of this.

    :param frame: the one shown; ``number`` among the ``count`` pictures of the question.
    """
    line = answer.timeline
    notes = [f'{line.total_ms():.0f} ms, first token {line.time_to_first_token_ms():.0f} ms, '
             f'{answer.vision_tokens_kept} of {answer.vision_tokens_in} vision tokens']
    kept = kept_of(answer, number)
    if count > 1 or len(kept) > 1:
        units = ' + '.join(str(int(part.sum())) for part in kept)
        name = (frame.camera or 'picture') + f' ({number + 1} of {count})' * (count > 1)
        slices = ' of each slice' * (len(kept) > 1)
        notes.append(f'{name}: {units} of {kept[0].size} units{slices}')
    return notes
