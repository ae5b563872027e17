"""Where the patches of an encoder's pass stand: places and segments, kept on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.kernels.encoder import tile_list

#: Layouts of whole pictures and clips, and of kept units, that stay on the device.
LAYOUTS = 16

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """
    Where the patches of a pass stand.

    :param count: patches.
    :param spots: int32 [count, 2], row and column.
    :param tiles: int32 [tiles, 4], see :func:`~qwen_vl_ros.kernels.encoder.tile_list`.
    :param units: int64 [count / 4], which units are kept; ``None``: all.
    """

    count: int
    spots: Tensor
    tiles: Tensor
    units: Tensor | None = None


class Layouts:
    """
    Layouts by grid and kept units; those used least are given up.

    :param device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[tuple[Grid, bytes], Layout] = OrderedDict()

    def of(self, grid: Grid, units: Tensor | None) -> Layout:
        """
        Return the layout of a picture or clip.

        :param grid: (t, h, w) in patches.
        :param units: int64 [kept], ascending, on whatever device; ``None`` keeps all.
        """
        from qwen_vl_ros.engine.vision import patch_positions

        t, h, w = grid
        whole = self._find(grid, b'', lambda: Layout(
            t * h * w, patch_positions(h, w).int().repeat(t, 1).to(self._device),
            self._upload(tile_list([h * w] * t))))
        if units is None:
            return whole
        # Units that are on the host already are counted there, without waiting for the device.
        chosen = units.cpu().numpy()

        def part() -> Layout:
            counts = np.bincount(chosen // (h * w // 4), minlength=t)
            on_device = units if units.is_cuda else self._upload(chosen)
            return Layout(
                4 * chosen.size, whole.spots.view(-1, 8)[on_device].view(-1, 2),
                self._upload(tile_list([4 * int(n) for n in counts if n])), on_device)

        # Some selectors keep the same units of every picture.
        return self._find(grid, chosen.tobytes(), part)

    def _find(self, grid: Grid, units: bytes, make: Callable[[], Layout]) -> Layout:
        key = grid, units
        if key not in self._kept:
            made = make()
            while len(self._kept) >= LAYOUTS:
                self._kept.popitem(last=False)
            self._kept[key] = made
        self._kept.move_to_end(key)
        return self._kept[key]

    def _upload(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == 'cuda':
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)
