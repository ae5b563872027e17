"""The pictures that an answer is about, and which parts of them the model saw."""

from __future__ import annotations

import numpy as np
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image

from qwen_vl_ros.engine.types import Answer
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.node import overlay
from qwen_vl_ros.node.messages import frame_header
from qwen_vl_ros.node.requests import Job
from qwen_vl_ros.saliency.picture import kept_picture

#: Messages that wait for a slow reader: an answer about several cameras sends one for each.
DEPTH = 8


class Pictures:
    """
    The topics ``~/overlay``, ``~/overlay/compressed`` and ``~/saliency``.

    :param node: owns the publishers.
    """

    def __init__(self, node: Node) -> None:
        self._overlay = node.create_publisher(Image, '~/overlay', DEPTH)
        self._jpeg = node.create_publisher(CompressedImage, '~/overlay/compressed', DEPTH)
        self._saliency = node.create_publisher(Image, '~/saliency', DEPTH)

    def show(self, job: Job, answer: Answer) -> None:
        """
        Publish the pictures of an answer, whole or cut off: one message for each, in their order.

        Of a clip it is the newest frame, with what was kept of the newest slice. Nothing is drawn
        that nobody listens to, and a picture that cannot be drawn costs none of the others.

        :raises Exception: of the first picture that failed, when the others are published.
        """
        wanted = [publisher for publisher in (self._saliency, self._overlay, self._jpeg)
                  if publisher.get_subscription_count() > 0]
        failed: Exception | None = None
        for number, frame in enumerate(job.frames if wanted else ()):
            try:
                self._show(job, answer, number, frame, wanted)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _show(self, job: Job, answer: Answer, number: int, frame: Frame, wanted: list) -> None:
        header, kept = frame_header(frame), kept_of(answer, number)
        if self._saliency in wanted:
            self._saliency.publish(overlay.image_message(
                kept_picture(kept[-1], frame.width, frame.height), header))
        if wanted == [self._saliency]:
            return
        drawn = overlay.draw(frame.rgb(), job.question.text, answer.text,
                             notes_of(answer, frame, number, len(job.frames)), kept[-1])
        if self._overlay in wanted:
            self._overlay.publish(overlay.image_message(drawn, header))
        if self._jpeg in wanted:
            self._jpeg.publish(overlay.jpeg_message(drawn, header))


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
