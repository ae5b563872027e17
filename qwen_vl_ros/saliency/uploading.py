"""Bytes of frames on their way to a device, in whichever way is fastest on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.cuda_direct import DirectStream
from qwen_vl_ros.saliency.samples import planes

#: Ways: the driver takes the frame's own memory (0), or it is copied into pinned memory and goes
#: up in so many pieces, one on its way while the next is copied.
WAYS = (1, 2, 3, 0)


class Upload:
    """
    Brings pictures of one shape to a device.

    :param shapes: of a picture's planes.
    :param slices: pictures at a time.
    :param device: that has a GPU.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], slices: int, device: torch.device
                 ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._pinned = torch.zeros((slices, sum(sizes)), dtype=torch.uint8, pin_memory=True)
        #: uint8 [slices, bytes of a picture] on the device.
        self.pixels = torch.zeros((slices, sum(sizes)), dtype=torch.uint8, device=device)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._planes = [[row[a:a + n].reshape(shape) for a, n, shape in zip(starts, sizes, shapes)]
                        for row in self._pinned.numpy()]
        self._pieces = {way: [piece for s in range(slices)
                              for piece in self._cut(s, starts, sizes, shapes, max(1, way))]
                        for way in WAYS}

    def _cut(self, picture: int, starts: Sequence[int], sizes: Sequence[int],
             shapes: Sequence[tuple[int, ...]], count: int
             ) -> list[tuple[int, int, slice, np.ndarray, int, int, int]]:
        """
        Return pieces of a picture: only its first plane, the largest, is cut.

        :return: picture, plane, rows, these in pinned memory, its address on the device and on the
            host, bytes.
        """
        found = []
        for index, (start, size, shape) in enumerate(zip(starts, sizes, shapes)):
            rows, parts = shape[0], 1 if index else min(count, shape[0])
            for part in range(parts):
                a, b = rows * part // parts, rows * (part + 1) // parts
                at = picture * self.pixels.shape[1] + start + a * (size // rows)
                found.append((picture, index, slice(a, b), self._planes[picture][index][a:b],
                              self.pixels.data_ptr() + at, self._pinned.data_ptr() + at,
                              (b - a) * (size // rows)))
        return found

    def stage(self, frames: Sequence[Frame]) -> None:
        """Copy pictures into pinned memory."""
        for staged, frame in zip(self._planes, frames):
            for place, plane in zip(staged, planes(frame)):
                np.copyto(place, plane)

    @torch.inference_mode()
    def send_staged(self) -> None:
        """Let what was staged go up in torch's current stream."""
        self.pixels.copy_(self._pinned, non_blocking=True)

    def send(self, frames: Sequence[Frame], stream: DirectStream, way: int) -> None:
        """
        Let pictures go up.

        :param way: one of :data:`WAYS`.
        """
        shown = [planes(frame) for frame in frames]
        for picture, index, rows, place, device, host, count in self._pieces[way]:
            plane = shown[picture][index]
            if way == 0 and plane.flags.c_contiguous:
                stream.upload(device, plane.__array_interface__['data'][0], count)
                continue
            np.copyto(place, plane[rows])
            stream.upload(device, host, count)
