"""The picture that an answer is about, with the answer written on it and dropped parts dimmed."""

from __future__ import annotations

import textwrap
from array import array
from collections.abc import Sequence

import cv2
import numpy as np
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from qwen_vl_ros.saliency.picture import FONT, dim_dropped, latin

WHITE, YELLOW = (255, 255, 255), (0, 220, 255)


def draw(rgb: np.ndarray, question: str, answer: str, notes: Sequence[str] = (),
         kept: np.ndarray | None = None) -> np.ndarray:
    """
    Return the picture with a banner of question, answer and notes; what is too long ends in dots.

    :param rgb: uint8 [H, W, 3].
    :param notes: a line each.
    :param kept: bool [rows, columns] of the picture's units; units that were dropped are dimmed.
    :return: uint8 [H, W, 3] BGR, a picture of its own.
    """
    bgr: np.ndarray = cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR)
    height, width = bgr.shape[:2]
    if kept is not None and not kept.all():
        dim_dropped(bgr, kept)
    scale = max(0.4, height / 900)
    letter = cv2.getTextSize('n', FONT, scale, 1)[0][0]
    columns = max(10, width // max(1, letter) - 2)
    lines = [(line, YELLOW) for line in _wrapped(question, columns, 2)]
    lines += [(line, WHITE) for line in _wrapped(answer, columns, 6)]
    lines += [(line, YELLOW) for note in notes for line in _wrapped(note, columns, 1)]
    pitch = round(30 * scale) + 4
    top = max(0, height - pitch * len(lines) - pitch // 2)
    bgr[top:] >>= 1
    for number, (line, colour) in enumerate(lines):
        cv2.putText(bgr, line, (pitch // 2, top + pitch * (number + 1)), FONT, scale, colour,
                    1 + round(scale), cv2.LINE_AA)
    return bgr


def _wrapped(text: str, columns: int, most: int) -> list[str]:
    """Return a text as at most so many lines of what OpenCV's fonts know."""
    # Longer ones are cut anyway, and wrapping all of them would take its time.
    text = latin(text[:2 * columns * most])
    return textwrap.wrap(text, columns, max_lines=most, placeholder='...')


def image_message(pixels: np.ndarray, header: Header) -> Image:
    """
    Wrap a picture; the bytes are copied once.

    :param pixels: uint8 [H, W, 3] BGR or [H, W] grey.
    """
    height, width = pixels.shape[:2]
    data = array('B')
    data.frombytes(pixels.tobytes())
    return Image(header=header, height=height, width=width, is_bigendian=0,
                 encoding='bgr8' if pixels.ndim == 3 else 'mono8',
                 step=pixels.size // height, data=data)


def jpeg_message(bgr: np.ndarray, header: Header) -> CompressedImage:
    """Return uint8 [H, W, 3] BGR as a JPEG, in the words of compressed_image_transport."""
    good, encoded = cv2.imencode('.jpg', bgr, [cv2.IMWRITE_JPEG_QUALITY, 85])
    if not good:
        raise ValueError('the overlay could not be encoded as JPEG')
    data = array('B')
    data.frombytes(encoded.tobytes())
    return CompressedImage(header=header, format='bgr8; jpeg compressed bgr8', data=data)
