"""
Edges of colour: where something of another colour begins. Question-free and nearly free of cost.

Shadows, gravel and noise change how bright a surface is, not which colour it has, so the gradient
of opponent colours is large on things and small on texture (van de Weijer, Gevers and Geusebroek
2005 on photometric quasi-invariants). Brightness counts a little: a grey thing has no other edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import spend
from qwen_vl_ros.saliency import costs
from qwen_vl_ros.saliency.samples import SAMPLES, rgb_samples

#: Weight of brightness beside the two opponent colours.
LUMA = 0.25


def colour_edges(frames: Sequence[Frame], rows: int, columns: int) -> np.ndarray:
    """
    Return the strength of each unit's colour edges: the mean of its strongest quarter.

    A mean over the whole unit would favour texture all over it above one border through it.

    :param frames: one for each temporal slice (the newest of the slice's pair).
    :return: float32 [T, rows, columns], levels a sample; of the channel with the strongest edge.
    """
    spend(**costs.signal_of(frames, rows, columns))
    maps = []
    for frame in frames:
        rgb = rgb_samples(frame, rows, columns).astype(np.float32)
        red, green, blue = cv2.split(rgb)
        bright = (red + green + blue) * (LUMA / 3)
        opponent = np.dstack((bright, red - green, (red + green) / 2 - blue))
        gx, gy = (cv2.Sobel(opponent, cv2.CV_32F, *axis, ksize=3, scale=0.25,
                            borderType=cv2.BORDER_REPLICATE) for axis in ((1, 0), (0, 1)))
        edges = cv2.magnitude(gx, gy).reshape(opponent.shape).max(-1)
        cells = edges.reshape(rows, SAMPLES, columns, SAMPLES).transpose(0, 2, 1, 3)
        cells = cells.reshape(rows, columns, -1)
        count = cells.shape[-1] // 4
        maps.append(np.partition(cells, -count, axis=-1)[..., -count:].mean(-1))
    return np.stack(maps)
