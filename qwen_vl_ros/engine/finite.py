"""Weights that are not finite, found when a model is loaded and not at its first answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qwen_vl_ros.engine.errors import CheckpointError


def check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """
    Look for NaN and infinity in the float weights, where they lie.

    A sum is not finite where an element is not, and reads each weight once without memory of its
    own; elements are looked at only where the sum is not finite, which may also be an overflow
    (largest float16: 65504). The sums come back from the device together.

    :param folder: named in the error.
    :param tensors: name to weight, all on one device; integers are passed over.
    :raises CheckpointError: names the first weight that is not finite, and its dtype.
    """
    floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
    if not floats:
        return
    sums = torch.stack([t.sum().float() for t in floats.values()]).isfinite().tolist()
    for (name, tensor), good in zip(floats.items(), sums):
        if not good and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            hint = 'copy the file again' + (
                ', or choose bfloat16 or float32, which hold larger values'
                if tensor.dtype == torch.float16 else '')
            raise CheckpointError(
                f'{name} in {folder} holds {count} of {tensor.numel()} values that are not finite '
                f'in {str(tensor.dtype).removeprefix("torch.")}: {hint}')
