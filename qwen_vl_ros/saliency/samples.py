"""Frames shrunk to a few samples a unit, the common input of the cheap signals."""

from __future__ import annotations

import cv2
import numpy as np

from qwen_vl_ros.frame import Frame

#: Samples along a side of a unit that the signals look at, unless they say otherwise.
SAMPLES = 7


def planes(frame: Frame) -> list[np.ndarray]:
    """
    Return a frame's colour as uint8 planes without converting it: views where the buffer allows.

    :return: [RGB [h, w, 3]] or [grey [h, w]] or [Y [h, w], chroma [h', w', 2]]; what matters to
        the signals is that things of different colour differ, in whatever coordinates.
    """
    h, w, step = frame.height, frame.width, frame.step
    strided = np.lib.stride_tricks.as_strided
    if frame.encoding == 'mono8':
        return [strided(frame.data, (h, w), (step, 1), writeable=False)]
    if frame.encoding in ('nv12', 'nv21') and w % 2 == 0 and h % 2 == 0:
        return [strided(frame.data, (h, w), (step, 1), writeable=False),
                strided(frame.data[step * h:], (h // 2, w // 2, 2), (step, 2, 1),
                        writeable=False)]
    if frame.encoding in ('yuyv', 'uyvy') and w % 2 == 0:
        first = 0 if frame.encoding == 'yuyv' else 1
        return [strided(frame.data[first:], (h, w), (step, 2), writeable=False),
                strided(frame.data[1 - first:], (h, w // 2, 2), (step, 4, 2), writeable=False)]
    return [frame.rgb()]


def unit_samples(frame: Frame, rows: int, columns: int, samples: int = SAMPLES) -> np.ndarray:
    """
    Shrink a frame to ``samples`` by ``samples`` values a unit, in colour.

    Averaging over four pixels a side (28 / 7) takes most of the sensor's noise away and keeps
    edges; it is not the encoder's resampling and need not be. Colour stays: a red thing may be as
    bright as the grey floor it stands on.

    :param rows: units of the grid, vertically.
    :param columns: units of the grid, horizontally.
    :return: float32 [rows * samples, columns * samples, channels], 0 to 255.
    """
    size = (columns * samples, rows * samples)
    small = [_shrunk(np.ascontiguousarray(p), size) for p in planes(frame)]
    return np.dstack(small).astype(np.float32)


def _shrunk(plane: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """
    Shrink a plane to (width, height) by averaging.

    A frame at its own resolution shrinks four times to seven samples a unit: twice twice is six
    times as fast as OpenCV's area filter and sees the same pixels.
    """
    half = (2 * size[0], 2 * size[1])
    if all(3.4 <= n / s <= 4.6 for n, s in zip(plane.shape[1::-1], size)):
        plane = cv2.resize(plane, half, interpolation=cv2.INTER_LINEAR)
    return cv2.resize(plane, size, interpolation=cv2.INTER_AREA)


def per_unit(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Average a map of several values a unit: [rows * s, columns * s] -> [rows, columns]."""
    s = values.shape[0] // rows
    return values.reshape(rows, s, columns, s).mean((1, 3))
