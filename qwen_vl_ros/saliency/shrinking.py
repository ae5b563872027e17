"""Shrinking a picture on a device: averages over windows by two products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def windows(size: int, wanted: int) -> Tensor:
    """
    Return which of ``size`` values each of ``wanted`` averages, float32 [wanted, size] of 0 and 1.

    As in adaptive pooling: from floor(i * size / wanted) to ceil((i + 1) * size / wanted).
    """
    index = torch.arange(wanted)[:, None]
    first, last = index * size // wanted, -((-(index + 1) * size) // wanted)
    at = torch.arange(size)
    return ((at >= first) & (at < last)).float()


class Shrinking:
    """
    Shrinks planes like ``F.adaptive_avg_pool2d``, its twin, whose kernel takes several times as
    long for few channels that lie side by side.

    Sums come first, so that float16 holds them exactly over up to eight rows and rounds the whole
    once. Windows of more than 256 values would overflow it and are summed in float32.

    :param shape: of a plane, [h, w] or [h, w, channels].
    :param wanted: rows and columns.
    """

    def __init__(self, shape: tuple[int, ...], wanted: tuple[int, int], dtype: torch.dtype,
                 device: torch.device | str) -> None:
        height, width, channels = (*shape, 1)[:3]
        self._shape, self._dtype, self._wanted = (height, width * channels), dtype, wanted
        self._channels = channels
        rows, columns = windows(height, wanted[0]), windows(width, wanted[1])
        scale = 1 / (rows.sum(1)[:, None] * columns.sum(1).repeat_interleave(channels))
        wide = torch.kron(columns.T.contiguous(), torch.eye(channels))
        # Tensor cores want rows of whole 16 bytes.
        wide = torch.nn.functional.pad(wide, (0, -wide.shape[1] % 8))
        if rows.sum(1).max() * columns.sum(1).max() > 256:
            self._dtype = dtype = torch.float32
        self._rows, self._columns = rows.to(device, dtype), wide.to(device, dtype)
        self._scale = scale.to(device)

    def __call__(self, plane: Tensor) -> Tensor:
        """
        Shrink.

        :param plane: uint8 [T, h * w * channels].
        :return: float32 [T, channels, rows, columns], channels last in memory.
        """
        x = plane.view(-1, *self._shape).to(self._dtype)
        sums = self._rows @ x @ self._columns
        small = sums[..., :self._scale.shape[1]] * self._scale
        return small.unflatten(2, (self._wanted[1], self._channels)).permute(0, 3, 1, 2)
