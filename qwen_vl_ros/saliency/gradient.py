"""Local gradient magnitude: where there are edges. Question-free and nearly free of cost."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import spend
from qwen_vl_ros.saliency import costs
from qwen_vl_ros.saliency.samples import per_unit, unit_samples


def gradient_magnitude(frames: Sequence[Frame], rows: int, columns: int) -> np.ndarray:
    """
    Return the mean Sobel magnitude of each unit.

    It prefers texture: gravel scores above a plain wall that blocks the way. Use it with an
    always-keep region or with a signal that knows the question.

    :param frames: one for each temporal slice (the newest of the slice's pair).
    :return: float32 [T, rows, columns], levels a sample; of the channel with the strongest edge.
    """
    spend(**costs.signal_of(frames, rows, columns))
    maps = []
    for frame in frames:
        small = unit_samples(frame, rows, columns)
        gx, gy = (cv2.Sobel(small, cv2.CV_32F, *axis, ksize=3, scale=0.25,
                            borderType=cv2.BORDER_REPLICATE) for axis in ((1, 0), (0, 1)))
        edges = cv2.magnitude(gx, gy).reshape(*small.shape[:2], -1)
        maps.append(per_unit(edges.max(-1), rows, columns))
    return np.stack(maps)


def contrast(frames: Sequence[Frame], rows: int, columns: int) -> np.ndarray:
    """
    Return how far each unit's colour is from the rows' usual colour.

    A floor or a wall has one colour along a row of the picture, whatever its texture; a thing that
    stands on it has another. The distance of each unit's mean colour to the median of its row and
    the two rows beside it is large on things and small on texture.

    :param frames: one for each temporal slice.
    :return: float32 [T, rows, columns], colour levels.
    """
    spend(**costs.signal_of(frames, rows, columns))
    maps = []
    for frame in frames:
        small = unit_samples(frame, rows, columns, 4)
        cells = small.reshape(rows, 4, columns, 4, -1).transpose(0, 2, 1, 3, 4)
        cells = cells.reshape(rows, columns, 16, -1)
        means = cells.mean(2)
        padded = np.pad(means, ((1, 1), (0, 0), (0, 0)), mode='edge')
        around = np.concatenate([padded[k:k + rows] for k in range(3)], axis=1)
        usual = np.median(around, axis=1)[:, None, None]
        # The strongest quarter of a unit counts: a small thing fills only a part of it.
        distance = np.sort(np.linalg.norm(cells - usual, axis=-1), axis=-1)
        maps.append(distance[..., 12:].mean(-1))
    return np.stack(maps).astype(np.float32)
