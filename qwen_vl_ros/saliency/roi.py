"""
Region of interest first: a crop at full resolution beside a small overview, as two pictures.

Both are ordinary pictures with their own grids, so nothing in the encoder is untrained behaviour;
what lies outside the crop is seen in the overview alone. The crop comes last, and what the answer
says of places is about it: :meth:`Window.to_frame` maps points and boxes back to the whole frame.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import cv2
import numpy as np

from qwen_vl_ros.frame import Frame

_UNIT = 28
#: Bins of the tiny checkpoint, and Qwen2-VL's points and boxes in thousandths.
_BINS = re.compile(r'<x(\d+)><y(\d+)>')
_POINT = re.compile(r'\((\d{1,4}), ?(\d{1,4})\)')


@dataclass(frozen=True)
class Window:
    """
    A crop of a frame.

    :param x: left edge in pixels of the frame; ``y``: upper edge.
    :param width: in pixels; ``height`` alike.
    :param frame_width: of the whole frame; ``frame_height`` alike.
    """

    x: int
    y: int
    width: int
    height: int
    frame_width: int
    frame_height: int

    def to_frame(self, text: str, grid: tuple[int, int], crop: tuple[int, int]) -> str:
        """
        Map places in an answer about the crop to the whole frame.

        :param text: with points ``(x,y)`` in thousandths of the crop, or bins ``<x..><y..>`` of
            its units.
        :param grid: rows and columns in units that the whole frame would have.
        :param crop: rows and columns in units in which the model saw the crop, which is resized
            like any other picture.
        """
        rows, columns = grid
        down, across = crop

        def bins(found: re.Match[str]) -> str:
            # The middle of the crop's unit.
            u = self.x + (int(found[1]) + 0.5) / across * self.width
            v = self.y + (int(found[2]) + 0.5) / down * self.height
            return (f'<x{min(columns - 1, int(u / self.frame_width * columns))}>'
                    f'<y{min(rows - 1, int(v / self.frame_height * rows))}>')

        def point(found: re.Match[str]) -> str:
            if int(found[1]) > 1000 or int(found[2]) > 1000:
                return found[0]  # no coordinate in thousandths
            u = (self.x + int(found[1]) / 1000 * self.width) / self.frame_width
            v = (self.y + int(found[2]) / 1000 * self.height) / self.frame_height
            return f'({round(1000 * u)},{round(1000 * v)})'

        return _POINT.sub(point, _BINS.sub(bins, text))

    def units(self, rows: int, columns: int) -> np.ndarray:
        """Return bool [rows, columns]: the units whose middle lies in the window."""
        v = (np.arange(rows) + 0.5) * self.frame_height / rows
        u = (np.arange(columns) + 0.5) * self.frame_width / columns
        inside = (v >= self.y) & (v < self.y + self.height)
        return inside[:, None] & ((u >= self.x) & (u < self.x + self.width))[None]

    def kept_units(self, kept: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """
        Return the units of the whole frame of which the crop's kept units show something.

        :param kept: bool [rows, columns] of the crop's grid, finer or coarser than the frame's.
        :param rows: of the whole frame's grid; ``columns`` alike.
        :return: bool [rows, columns], none of them outside of :meth:`units`.
        """
        shown = np.zeros((rows, columns), np.bool_)
        down, across = kept.shape
        # Finer: the frame's units in which the middle of a kept one lies.
        r, c = np.nonzero(kept)
        v = (self.y + (r + 0.5) / down * self.height) / self.frame_height
        u = (self.x + (c + 0.5) / across * self.width) / self.frame_width
        shown[(v * rows).astype(int), (u * columns).astype(int)] = True
        # Coarser: the frame's units whose middle lies in a kept one.
        v = ((np.arange(rows) + 0.5) / rows * self.frame_height - self.y) / self.height
        u = ((np.arange(columns) + 0.5) / columns * self.frame_width - self.x) / self.width
        shown |= kept[np.ix_(np.clip((v * down).astype(int), 0, down - 1),
                             np.clip((u * across).astype(int), 0, across - 1))]
        return shown & self.units(rows, columns)


def best_window(values: np.ndarray, share: float, width: int, height: int) -> Window:
    """
    Return the window of the frame's own shape that holds most of a map.

    :param values: [rows, columns]; ranked and raised to the fourth power, so that a few strong
        units outweigh many middling ones.
    :param share: of the frame's area, over 0 to 1.
    :param width: of the frame in pixels; ``height`` alike.
    """
    rows, columns = values.shape
    side = share ** 0.5
    r, c = max(1, round(rows * side)), max(1, round(columns * side))
    ranks = values.reshape(-1).argsort().argsort().reshape(rows, columns) / max(1, values.size - 1)
    summed = np.pad(np.cumsum(np.cumsum(ranks ** 4, 0), 1), ((1, 0), (1, 0)))
    totals = (summed[r:, c:] - summed[:-r, c:] - summed[r:, :-c] + summed[:-r, :-c])
    top, left = np.unravel_index(int(totals.argmax()), totals.shape)
    x0, y0 = int(left) * width // columns, int(top) * height // rows
    x1, y1 = (int(left) + c) * width // columns, (int(top) + r) * height // rows
    # A picture with fewer pixels than the grid has cells still has one in the window.
    return Window(x0, y0, max(1, x1 - x0), max(1, y1 - y0), width, height)


def overview_and_crop(frame: Frame, window: Window, overview_units: int) -> tuple[Frame, Frame]:
    """
    Cut a frame into the two pictures to show.

    :param overview_units: units that the overview may have; its shape is the frame's.
    """
    rgb = frame.rgb()
    scale = (overview_units * _UNIT * _UNIT / (frame.width * frame.height)) ** 0.5
    size = (max(_UNIT, int(frame.width * scale) // _UNIT * _UNIT),
            max(_UNIT, int(frame.height * scale) // _UNIT * _UNIT))
    small = cv2.resize(np.ascontiguousarray(rgb), size, interpolation=cv2.INTER_AREA)
    part = rgb[window.y:window.y + window.height, window.x:window.x + window.width]
    origin = {'stamp_ns': frame.stamp_ns, 'frame_id': frame.frame_id, 'camera': frame.camera,
              'received_ns': frame.received_ns}
    return Frame.from_rgb(small, **origin), Frame.from_rgb(part, **origin)
