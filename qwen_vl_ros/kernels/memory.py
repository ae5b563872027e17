"""One allocation for many tensors, so that what their making took can be given back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Bytes at which tensors begin.
ALIGNED = 256


def together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """
    Copy tensors into one allocation.

    An allocator that hands out blocks of many megabytes keeps a block for the smallest tensor in
    it; tensors that stay should not be scattered among those that do not.

    :param parts: of any dtype and shape, best on the host: there they take none of the room.
    :return: as many, contiguous, each at a multiple of :data:`ALIGNED` bytes.
    """
    sizes = [-(-part.nbytes // ALIGNED) * ALIGNED for part in parts]
    room = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    return [piece[:part.nbytes].view(part.dtype).view(part.shape).copy_(part)
            for part, piece in zip(parts, room.split(sizes))]
