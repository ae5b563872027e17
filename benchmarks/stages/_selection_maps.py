"""The cheap signals of items, computed by the shipped functions on several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import cv2
import numpy as np

from qwen_vl_ros.engine.patches import uniform_keep
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.roboscene.evaluate import earlier
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS
from qwen_vl_ros.roboscene.items import Item
from qwen_vl_ros.roboscene.render import render
from qwen_vl_ros.saliency.colour_edges import colour_edges
from qwen_vl_ros.saliency.gradient import contrast, gradient_magnitude
from qwen_vl_ros.saliency.motion import MotionSignal
from qwen_vl_ros.saliency.next_frame import moved_since, turned
from qwen_vl_ros.saliency.select import UnitSelector, threshold_keep

Maps = dict[str, np.ndarray]


def key_of(item: Item) -> Item:
    """
    Return an item as its camera saw it when an answer was last reflected on.

    Every second answer is (:class:`saliency.next_frame.NextFrameSelector`), so for half of the
    items that was one frame earlier, for the others two.
    """
    past = earlier(item)
    return earlier(past) if item.seed % 2 else past


def maps_of(item: Item) -> Maps:
    """
    Return an item's signals, each flat over all slices [T * 192].

    'key' is the saliency map of the frame that was last reflected on, 'motion' the difference to
    what was seen a moment earlier, 'shift' [2] how the picture moved since, 'key_shift' [2] how it
    moved since the key frame.
    """
    cv2.setNumThreads(1)
    now = [Frame.from_rgb(p) for p in render(item.scenes)]
    then = [Frame.from_rgb(p) for p in render(earlier(item).scenes)]
    selector = UnitSelector()
    edges = gradient_magnitude(now, GRID_H, GRID_W)
    signal = MotionSignal()
    signal.kept(then[-1], np.ones(UNITS, bool), GRID_H, GRID_W)
    changes, shift = [], (0.0, 0.0)
    for frame in now:
        shift, moved = moved_since(signal, then[-1], frame, GRID_H, GRID_W)
        changes.append(moved)
    key, since = then, np.array(shift)
    if item.seed % 2:
        key = [Frame.from_rgb(p) for p in render(key_of(item).scenes)]
        since = since + turned(key[-1], then[-1], GRID_H, GRID_W)
    found = {'gradient': edges, 'contrast': contrast(now, GRID_H, GRID_W),
             'colour': colour_edges(now, GRID_H, GRID_W),
             'saliency': selector.saliency(now, GRID_H, GRID_W),
             'key': selector.saliency(key, GRID_H, GRID_W),
             'threshold': threshold_keep(edges), 'motion': np.stack(changes),
             'shift': np.array(shift), 'key_shift': since}
    return {name: values.astype(np.float32).reshape(-1) for name, values in found.items()}


def uniform_ranks() -> np.ndarray:
    """Return float32 [192]: how early the uniform grid takes each unit, larger is earlier."""
    ranks = np.zeros(UNITS, np.float32)
    for count in range(1, UNITS + 1):
        ranks += uniform_keep((), (1, 2 * GRID_H, 2 * GRID_W), count / UNITS)
    return ranks


class MapMakers:
    """
    Processes that make maps while the device is at something else.

    Made before CUDA is first used: they are forked.

    :param workers: 0 makes the maps where they are asked for.
    """

    def __init__(self, workers: int) -> None:
        self._pool = None
        if workers:
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context('fork'))
            list(self._pool.map(abs, range(workers)))

    def start(self, items: Sequence[Item]) -> Iterator[Maps]:
        """Begin with the items; what comes back yields their maps in order."""
        if self._pool is None:
            return map(maps_of, items)
        return self._pool.map(maps_of, items, chunksize=20)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
