"""Temporal difference: what is not as it was when the unit was last looked at."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import spend
from qwen_vl_ros.saliency import costs
from qwen_vl_ros.saliency.samples import SAMPLES, per_unit, unit_samples

#: A shift under this many units is noise of the estimate.
STILL = 0.06


class MotionSignal:
    """
    Compares frames of one camera with the content of each unit when it was last kept.

    Comparing with the last *kept* content, not with the last frame, catches slow changes: what
    creeps a level a frame is seen once it has added up.

    :param threshold: levels of mean absolute difference that noise does not reach.
    """

    def __init__(self, threshold: float = 4.0) -> None:
        self.threshold = threshold
        self._seen: np.ndarray | None = None

    def reset(self) -> None:
        """Forget what was seen (another camera, another resolution, a jump of the clock)."""
        self._seen = None

    def difference(self, frames: Sequence[Frame], rows: int, columns: int) -> np.ndarray:
        """
        Return the mean absolute difference of each unit to what was last kept there.

        The first frame differs everywhere (255): all of it is new. Differences under the
        threshold are noise and count 0.

        :param frames: one for each temporal slice, oldest first.
        :return: float32 [T, rows, columns].
        """
        spend(**costs.signal_of(frames, rows, columns))
        maps, reference = [], self._seen
        for frame in frames:
            small = unit_samples(frame, rows, columns)
            if reference is None or reference.shape != small.shape:
                maps.append(np.full((rows, columns), 255.0, np.float32))
            else:
                apart = np.abs(small - reference).max(-1)
                unknown = np.isnan(apart)
                apart[unknown] = 0.0
                # A thing smaller than a unit changes few samples: the strongest ninth counts too.
                value = np.maximum(per_unit(apart, rows, columns),
                                   0.5 * _strongest(apart, rows, columns))
                value = np.where(value < self.threshold, 0.0, value)
                # What the camera has just turned to was never seen.
                unseen = per_unit(unknown, rows, columns) > 0.5
                maps.append(np.where(unseen, 255.0, value).astype(np.float32))
            reference = small
        return np.stack(maps)

    def move(self, shift: tuple[float, float]) -> None:
        """
        Follow the camera: move what was seen by a shift in units (down, right).

        What comes in at the border is unknown and differs from everything.
        """
        if self._seen is None:
            return
        height, width = self._seen.shape[:2]
        matrix = np.array([[1, 0, shift[1] * SAMPLES], [0, 1, shift[0] * SAMPLES]], np.float32)
        self._seen = cv2.warpAffine(
            self._seen, matrix, (width, height), flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_CONSTANT, borderValue=(np.nan,) * 4).reshape(
                height, width, -1)

    def kept(self, frame: Frame, keep: np.ndarray, rows: int, columns: int) -> None:
        """
        Take the kept units of a frame as what was last seen there.

        :param keep: bool [rows * columns] of the newest slice.
        """
        small = unit_samples(frame, rows, columns)
        if self._seen is None or self._seen.shape != small.shape:
            self._seen = small
            return
        s = small.shape[0] // rows
        mask = np.kron(keep.reshape(rows, columns), np.ones((s, s), bool))[..., None]
        self._seen = np.where(mask, small, self._seen)


def _strongest(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the mean of the largest ninth of each unit's values."""
    s = values.shape[0] // rows
    cells = values.reshape(rows, s, columns, s).transpose(0, 2, 1, 3).reshape(rows, columns, -1)
    count = max(1, cells.shape[-1] // 9)
    return np.partition(cells, -count, axis=-1)[..., -count:].mean(-1)


def shift_of(before: Frame, after: Frame, rows: int, columns: int) -> tuple[float, float]:
    """
    Estimate how far the picture moved as a whole, in units (down, right).

    Phase correlation (Kuglin and Hines 1975) on the first channel, shrunk; ego-motion of a robot
    that turns is close to a shift. Used to move a saliency map of the last frame onto this one.

    :return: (0, 0) when the correlation has no clear peak.
    """
    a, b = (np.ascontiguousarray(unit_samples(f, rows, columns)[..., 0])
            for f in (before, after))
    window = cv2.createHanningWindow((a.shape[1], a.shape[0]), cv2.CV_32F)
    (dx, dy), response = cv2.phaseCorrelate(a, b, window)
    if response < 0.1:
        return 0.0, 0.0
    samples = a.shape[0] / rows
    return dy / samples, dx / samples


def turned(before: Frame, now: Frame, rows: int, columns: int) -> tuple[float, float]:
    """Return the shift of the picture in units (down, right), 0 where it is noise."""
    down, right = shift_of(before, now, rows, columns)
    return down * (abs(down) >= STILL), right * (abs(right) >= STILL)


def shifted(values: np.ndarray, shift: tuple[float, float], border: float = 0.0) -> np.ndarray:
    """
    Move a map by a shift in units.

    :param values: [rows, columns].
    :param shift: (down, right).
    :param border: what comes in.
    :return: float32 [rows, columns].
    """
    matrix = np.array([[1, 0, shift[1]], [0, 1, shift[0]]], np.float32)
    return cv2.warpAffine(values.astype(np.float32), matrix, values.shape[::-1],
                          flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT,
                          borderValue=border)


def move_map(values: np.ndarray, shift: tuple[float, float]) -> np.ndarray:
    """
    Move a map by a shift in units; what enters at the border gets the map's largest value.

    Nothing is known about it, so it must not be dropped.

    :param values: float32 [rows, columns].
    :param shift: (down, right) of :func:`shift_of`.
    """
    return shifted(values, shift, float(values.max()))
