"""
The patch embedding as the kernels take it: normalisation folded in, weights in 16 bits, scaled.

Weights of 8 bits of fraction (bfloat16) err as much as the rounding of the embeddings; float16 has
11, and as all are divided by one power of two before they are rounded, its small range costs
nothing. The bias is taken from the rounded weights and kept in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qwen_vl_ros.engine.patches import IMAGE_MEAN
from qwen_vl_ros.engine.vision import fold_pair, fold_still
from qwen_vl_ros.kernels.cuda import Projection

#: Bits before the point of the largest float16 weight.
TOP_BITS = 4


def still_projection(kernel: Tensor, dtype: torch.dtype) -> Projection:
    """
    Fold for one frame that is shown twice.

    :param kernel: [width, 3, 2, patch, patch] as the checkpoint has it.
    :param dtype: of the weights; float32 is not scaled.
    """
    weight, _ = fold_still(kernel.double())
    return _lay_out([weight], dtype)[0]


def pair_projections(kernel: Tensor, dtype: torch.dtype) -> tuple[Projection, Projection]:
    """
    Fold for the older and the newer frame of a pair, each over its own patches.

    :return: W0 without a bias, and W1 with the bias of both.
    """
    weight, _ = fold_pair(kernel.double())
    halves = weight.reshape(weight.shape[0], 3, 2, -1)
    older, newer = _lay_out([halves[:, :, i].flatten(1) for i in (0, 1)], dtype)
    return older, newer


def _lay_out(weights: list[Tensor], dtype: torch.dtype) -> list[Projection]:
    """Round float64 weights [width, features] of several frames; the last gets the bias of all."""
    largest = max(float(w.abs().max()) for w in weights)
    scale = 1.0
    if dtype != torch.float32 and largest > 0 and math.isfinite(largest):
        scale = 2.0 ** (math.frexp(largest)[1] - TOP_BITS)
    rounded = [(w / scale).to(dtype) for w in weights]
    mean = torch.tensor(IMAGE_MEAN, dtype=torch.double, device=weights[0].device)
    offset = (128.0 - 255.0 * mean).repeat_interleave(weights[0].shape[1] // 3)
    bias = torch.stack([r.double() @ offset for r in rounded]).sum(0) * scale
    made = [Projection.make(r, None, scale) for r in rounded[:-1]]
    return [*made, Projection.make(rounded[-1], bias, scale)]
