"""Frames of every encoding, and Pillow in both orders of its passes."""

from __future__ import annotations

import numpy as np
from PIL import Image

from qwen_vl_ros.engine.patches import BICUBIC
from qwen_vl_ros.frame import ENCODINGS, Frame


def frame_of(
    encoding: str, width: int, height: int, padding: int = 0, seed: int = 0,
) -> Frame:
    """Return noise: every byte value next to every other, so that clipping happens everywhere."""
    bpp = ENCODINGS[encoding]
    row = width * bpp
    if bpp == 2:
        row = (width + 1) // 2 * 4
    rows = height
    if encoding in ('nv12', 'nv21'):
        row = (width + 1) // 2 * 2
        rows += (height + 1) // 2
    rng = np.random.default_rng((seed, width, height))
    step = row + padding
    # Not a byte more than needed.
    data = rng.integers(0, 256, step * (rows - 1) + row, dtype=np.uint8)
    return Frame(data, encoding, width, height, step)


def pillow_bytes(frame: Frame, height: int, width: int, resampler: str) -> np.ndarray:
    """
    Return the patches of two one-dimensional resizes, in the order that the version takes.

    Pillow skips a pass that changes nothing, so that two calls are what one call does inside.
    """
    lost_rows, lost_columns = frame.height - height, frame.width - width
    columns_first = resampler == 'pillow13' and lost_rows > max(0, 2 * lost_columns)
    middle = (frame.width, height) if columns_first else (width, frame.height)
    picture = Image.fromarray(np.ascontiguousarray(frame.rgb()))
    rgb = np.asarray(picture.resize(middle, BICUBIC).resize((width, height), BICUBIC))
    cut = rgb.reshape(height // 28, 2, 14, width // 28, 2, 14, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 588)
