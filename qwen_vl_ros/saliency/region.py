"""Regions of the picture that are always kept: the robot's path, or a polygon of one's own."""

from __future__ import annotations

import logging
from collections.abc import Callable

import cv2
import numpy as np

from qwen_vl_ros.saliency.roi import Window

LOG = logging.getLogger(__name__)

#: The floor ahead in the picture of a camera that looks forward from a robot, in shares of width
#: and height: as wide as the lower half's middle, up to where the floor ends for most mountings.
CORRIDOR = ((0.18, 1.0), (0.43, 0.45), (0.57, 0.45), (0.82, 1.0))

Region = Callable[[int, int], np.ndarray]

#: Units of regions and pictures that exceeded a budget and were told of.
_told: set[tuple[int, int]] = set()


def with_region(budget: int, always: np.ndarray, slices: int) -> int:
    """
    Return how many units are kept of a picture with a region: the budget, or the region alone.

    A region over the budget is logged, once for each size of region and picture.

    :param budget: units that the ratio allows.
    :param always: bool [rows, columns] kept in each of ``slices``.
    """
    held, units = int(always.sum()) * slices, always.size * slices
    if held > budget and (held, units) not in _told:
        _told.add((held, units))
        LOG.warning('the region that is always kept holds %d of %d units, more than the budget '
                    'of %d: it alone is kept', held, units, budget)
    return max(budget, held)


def within(region: Region, window: Window) -> Region:
    """
    Return a region of the whole frame as a crop of it has it.

    :param region: in shares of the whole frame.
    :param window: what the crop shows.
    :return: for grids of the crop: the units in which the region lies.
    """
    def mask(rows: int, columns: int) -> np.ndarray:
        fine = 4  # samples along a side of a unit
        down, across = (round(fine * n * whole / part) for n, whole, part in (
            (rows, window.frame_height, window.height),
            (columns, window.frame_width, window.width)))
        v = window.y + (np.arange(fine * rows) + 0.5) / (fine * rows) * window.height
        u = window.x + (np.arange(fine * columns) + 0.5) / (fine * columns) * window.width
        at = np.ix_((v / window.frame_height * down).astype(int),
                    (u / window.frame_width * across).astype(int))
        seen = region(down, across)[at].reshape(rows, fine, columns, fine)
        return np.asarray(seen.any((1, 3)))
    return mask


def parse_region(text: str) -> Region | None:
    """
    Read a region.

    :param text: '' for none, 'corridor' for :data:`CORRIDOR`, or the corners of a polygon as
        ``x,y x,y x,y`` in shares of the picture's width and height.
    :return: (rows, columns) -> bool [rows, columns], units that the region touches.
    :raises ValueError: one sentence: what was found and what was expected.
    """
    text = text.strip()
    if not text:
        return None
    if text == 'corridor':
        return polygon(CORRIDOR)
    corners = []
    for word in text.split():
        try:
            x, y = (float(part) for part in word.split(','))
        except ValueError:
            raise ValueError(f"'{word}' of the region '{text}' is not a corner x,y; expected "
                             "'corridor' or at least three corners such as 0.2,1 0.5,0.4 0.8,1"
                             ) from None
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise ValueError(f"the corner '{word}' of the region lies outside 0 to 1")
        corners.append((x, y))
    if len(corners) < 3:
        raise ValueError(f"the region '{text}' has {len(corners)} corners; expected 'corridor' or "
                         'at least three')
    return polygon(corners)


def polygon(corners) -> Region:
    """
    Return the units that a polygon touches.

    :param corners: (x, y) in shares of width and height.
    """
    points = np.array(corners, np.float64)

    def mask(rows: int, columns: int) -> np.ndarray:
        fine = 8  # samples along a side of a unit
        drawn = np.zeros((rows * fine, columns * fine), np.uint8)
        scaled = points * (drawn.shape[1], drawn.shape[0]) - 0.5
        cv2.fillPoly(drawn, [np.round(scaled).astype(np.int32)], 1)
        return np.asarray(drawn.reshape(rows, fine, columns, fine).any((1, 3)))
    return mask
