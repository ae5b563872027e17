"""Pictures of what was chosen: dropped parts dimmed, kept units framed, a map as colours."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np


def grown(units: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return bool [height, width] from units [rows, columns]."""
    small = np.ascontiguousarray(units, dtype=np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_NEAREST).astype(bool)


def dim_dropped(bgr: np.ndarray, kept: np.ndarray) -> None:
    """Darken the units [rows, columns] that were dropped, in place; uint8 [H, W, 3]."""
    height, width = bgr.shape[:2]
    bgr[~grown(kept, width, height)] >>= 2


def kept_picture(kept: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return uint8 [height, width]: 255 where the units [rows, columns] were kept, else 64."""
    return np.where(grown(kept, width, height), 255, 64).astype(np.uint8)


def explain(rgb: np.ndarray, kept: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
    """
    Return the picture with its dropped units dimmed, beside it the map they were chosen by.

    :param rgb: uint8 [H, W, 3].
    :param kept: bool [rows, columns].
    :param values: [rows, columns], larger matters more; ``None`` shows the first picture alone.
    :return: uint8 [H, W or 2 W, 3] BGR.
    """
    bgr = np.ascontiguousarray(rgb[:, :, ::-1])
    height, width = bgr.shape[:2]
    left = bgr.copy()
    dim_dropped(left, kept)
    if values is None:
        return left
    low, high = float(values.min()), float(values.max())
    scaled = ((values - low) / (high - low or 1.0) * 255).astype(np.uint8)
    warm = cv2.applyColorMap(cv2.resize(scaled, (width, height),
                                        interpolation=cv2.INTER_NEAREST), cv2.COLORMAP_INFERNO)
    right = cv2.addWeighted(warm, 0.65, bgr, 0.35, 0)
    edges = cv2.morphologyEx(grown(kept, width, height).astype(np.uint8), cv2.MORPH_GRADIENT,
                             np.ones((2, 2), np.uint8))
    right[edges > 0] = 255
    return np.hstack((left, right))


def write_png(path: Path, bgr: np.ndarray) -> None:
    """
    Write a picture.

    :raises OSError: when that is not possible.
    """
    good, encoded = cv2.imencode('.png', bgr)
    if not good:
        raise OSError(f'{path}: the picture could not be encoded as PNG')
    path.write_bytes(encoded.tobytes())
