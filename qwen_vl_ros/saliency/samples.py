"""Frames shrunk to a few samples a unit, the common input of the cheap signals."""

from __future__ import annotations

import cv2
import numpy as np

from qwen_vl_ros.frame import ENCODINGS, Frame, yuv_to_rgb

#: Samples along a side of a unit that the signals look at, unless they say otherwise.
SAMPLES = 7

#: Encodings of one plane, and which of its channels are red, green and blue.
PACKED = {'rgb8': (0, 1, 2), 'bgr8': (2, 1, 0), 'rgba8': (0, 1, 2), 'bgra8': (2, 1, 0)}


def odd(frame: Frame) -> bool:
    """Tell whether a frame's chroma lies beside no even grid, so that it has to be converted."""
    if frame.encoding in ('nv12', 'nv21'):
        return bool(frame.width % 2 or frame.height % 2)
    return frame.encoding in ('yuyv', 'uyvy') and frame.width % 2 == 1


def planes(frame: Frame) -> list[np.ndarray]:
    """
    Return a frame's colour as uint8 planes without converting it: views where the buffer allows.

    :return: [packed [h, w, 3 or 4]] or [grey [h, w, 1]] or [Y [h, w], chroma [h / 2, w / 2, 2]]
        or, of YUV 4:2:2, [two pixels [h, w / 2, 4]], bytes in the camera's order; of :func:`odd`
        frames [RGB [h, w, 3]].
    """
    if odd(frame):
        return [frame.rgb()]
    h, w, step = frame.height, frame.width, frame.step

    def view(shape: tuple[int, ...], pixel: int, start: int = 0) -> np.ndarray:
        # A tenth of what as_strided takes, and it is checked against the buffer's length.
        return np.ndarray(shape, np.uint8, frame.data, start, (step, pixel, 1)[:len(shape)])

    if frame.encoding in PACKED or frame.encoding == 'mono8':
        size = ENCODINGS[frame.encoding]
        return [view((h, w, size), size)]
    if frame.encoding in ('yuyv', 'uyvy'):
        return [view((h, w // 2, 4), 4)]
    return [view((h, w), 1), view((h // 2, w // 2, 2), 2, step * h)]


def unit_samples(frame: Frame, rows: int, columns: int, samples: int = SAMPLES) -> np.ndarray:
    """
    Return :func:`shrunk` in float32, for signals that compute on the host.

    :return: float32 [rows * samples, columns * samples, channels], 0 to 255.
    """
    return shrunk(frame, rows, columns, samples).astype(np.float32)


def shrunk(frame: Frame, rows: int, columns: int, samples: int = SAMPLES) -> np.ndarray:
    """
    Shrink a frame to ``samples`` by ``samples`` values a unit, in colour.

    Averaging over four pixels a side (28 / 7) takes most of the sensor's noise away and keeps
    edges; it is not the encoder's resampling and need not be. Colour stays: a red thing may be as
    bright as the grey floor it stands on.

    :param rows: units of the grid, vertically.
    :param columns: units of the grid, horizontally.
    :return: uint8 [rows * samples, columns * samples, channels]: RGB, or grey, or Y and the chroma
        as the camera sends it; what matters to most signals is that things of different colour
        differ, in whatever coordinates.
    """
    size = (columns * samples, rows * samples)
    small = [_shrunk(p, size) for p in planes(frame)]
    if frame.encoding in PACKED:
        return np.ascontiguousarray(small[0][..., PACKED[frame.encoding]])
    if frame.encoding in ('yuyv', 'uyvy') and not odd(frame):
        # Two pixels lie side by side: their luma is averaged, their chroma is one.
        y0, u, y1, v = (0, 1, 2, 3) if frame.encoding == 'yuyv' else (1, 0, 3, 2)
        luma = cv2.addWeighted(small[0][..., y0], 0.5, small[0][..., y1], 0.5, 0)
        return np.dstack((luma, small[0][..., u], small[0][..., v]))
    return np.dstack(small)


def rgb_samples(frame: Frame, rows: int, columns: int, samples: int = SAMPLES) -> np.ndarray:
    """
    Return :func:`shrunk` in RGB, whatever the frame's encoding.

    The picture is shrunk first, so that the conversion touches few pixels.

    :return: uint8 [rows * samples, columns * samples, 3].
    """
    small = shrunk(frame, rows, columns, samples)
    if small.shape[-1] == 1:
        return np.repeat(small, 3, axis=2)
    if frame.encoding in PACKED or odd(frame):
        return small
    # Y, then U and V; NV21 has its chroma the other way round.
    u, v = (2, 1) if frame.encoding == 'nv21' else (1, 2)
    return yuv_to_rgb(small[..., 0], small[..., u], small[..., v])


def _shrunk(plane: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """
    Shrink a plane to (width, height) by averaging.

    Halving exactly, as often as it goes, is several times as fast as OpenCV's area filter for any
    other ratio; what is left to do is little and touches few pixels.
    """
    h, w = plane.shape[:2]
    while w >= 1.8 * size[0] and h >= 1.8 * size[1]:
        h, w = h // 2, w // 2
        plane = cv2.resize(plane[:2 * h, :2 * w], (w, h), interpolation=cv2.INTER_AREA)
    if (w, h) != size:
        much = w > 1.2 * size[0] or h > 1.2 * size[1]
        plane = cv2.resize(plane, size,
                           interpolation=cv2.INTER_AREA if much else cv2.INTER_LINEAR)
    return plane


def per_unit(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Average a map of several values a unit: [rows * s, columns * s] -> [rows, columns]."""
    s = values.shape[0] // rows
    return values.reshape(rows, s, columns, s).mean((1, 3))
