"""Pictures of what was chosen: dropped parts dimmed, kept units framed, a map as colours."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

FONT = cv2.FONT_HERSHEY_SIMPLEX

#: Of a sheet: most pixels that a picture is wide, and those of the line above it.
TILE, LINE = 960, 24


def latin(text: str) -> str:
    """
    Return a text in ASCII, which is all that OpenCV's own fonts know.

    Letters lose their marks; what is no Latin letter then, or no letter at all, becomes '?'.
    """
    def plain(letter: str) -> str:
        bare = ''.join(part for part in unicodedata.normalize('NFKD', letter)
                       if unicodedata.category(part) != 'Mn')
        good = bare.isascii() and (bare.isprintable() or bare in '\t\n\r')
        return bare if good else '?'

    return ''.join(map(plain, text))


def grown(units: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return bool [height, width] from units [rows, columns]."""
    small = np.ascontiguousarray(units, dtype=np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_NEAREST).astype(bool)


def dim_dropped(bgr: np.ndarray, kept: np.ndarray) -> None:
    """Darken the units [rows, columns] that were dropped, in place; uint8 [H, W, 3]."""
    height, width = bgr.shape[:2]
    dropped = grown(~kept, width, height).view(np.uint8)
    cv2.copyTo(bgr >> 2, dropped, bgr)


def kept_picture(kept: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return uint8 [height, width]: 255 where the units [rows, columns] were kept, else 64."""
    small = np.where(kept, 255, 64).astype(np.uint8)
    return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_NEAREST))


def explain(rgb: np.ndarray, kept: np.ndarray, values: np.ndarray | None = None,
            scale: tuple[float, float] | None = None) -> np.ndarray:
    """
    Return the picture with its dropped units dimmed, beside it the map they were chosen by.

    :param rgb: uint8 [H, W, 3].
    :param kept: bool [rows, columns].
    :param values: [rows, columns], larger matters more; ``None`` shows the first picture alone.
    :param scale: values that are drawn darkest and brightest; ``None`` are the map's own.
    :return: uint8 [H, W or 2 W, 3] BGR.
    """
    bgr = np.ascontiguousarray(rgb[:, :, ::-1])
    height, width = bgr.shape[:2]
    left = bgr.copy()
    dim_dropped(left, kept)
    if values is None:
        return left
    low, high = scale or (float(values.min()), float(values.max()))
    scaled = ((values - low) / (high - low or 1.0) * 255).astype(np.uint8)
    warm = cv2.applyColorMap(cv2.resize(scaled, (width, height),
                                        interpolation=cv2.INTER_NEAREST), cv2.COLORMAP_INFERNO)
    right = cv2.addWeighted(warm, 0.65, bgr, 0.35, 0)
    edges = cv2.morphologyEx(grown(kept, width, height).astype(np.uint8), cv2.MORPH_GRADIENT,
                             np.ones((2, 2), np.uint8))
    right[edges > 0] = 255
    return np.hstack((left, right))


def sheet(rows: Sequence[tuple[str, np.ndarray]]) -> np.ndarray:
    """
    Put pictures below each other, each under a line of text; one alone stays as it is.

    :param rows: text and uint8 [H, W, 3] of each; pictures over :data:`TILE` wide shrink to that.
    :return: uint8 [H, W, 3].
    """
    if len(rows) == 1:
        return rows[0][1]
    shown = []
    for text, picture in rows:
        height, width = picture.shape[:2]
        share = min(1.0, TILE / width)
        small = cv2.resize(picture, (max(1, round(width * share)), max(1, round(height * share))),
                           interpolation=cv2.INTER_AREA)
        shown.append((latin(text), small))
    width = max(max(cv2.getTextSize(text, FONT, 0.45, 1)[0][0] + 8, small.shape[1])
                for text, small in shown)
    strips = []
    for text, small in shown:
        strip = np.zeros((LINE + small.shape[0], width, 3), np.uint8)
        cv2.putText(strip, text, (4, LINE - 8), FONT, 0.45, (255, 255, 255), 1, cv2.LINE_AA)
        strip[LINE:, :small.shape[1]] = small
        strips.append(strip)
    return np.vstack(strips)


def write_png(path: Path, bgr: np.ndarray) -> None:
    """
    Write a picture.

    :raises OSError: when that is not possible.
    """
    good, encoded = cv2.imencode('.png', bgr)
    if not good:
        raise OSError(f'{path}: the picture could not be encoded as PNG')
    path.write_bytes(encoded.tobytes())
