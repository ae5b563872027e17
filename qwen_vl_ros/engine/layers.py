"""Operations that encoder and decoder share; each is a place where a kernel can step in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """
    A matrix with an optional bias; quantised forms replace it with the same call.

    :param weight: [out, in].
    :param bias: [out] or ``None``.
    """

    __slots__ = ('bias', 'weight')
    #: Tensors that quantised forms have in place of ``weight``.
    parts: tuple[str, ...] = ()

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, in ``out`` if given; x [..., in] -> [..., out]."""
        made = F.linear(x, self.weight, self.bias)
        return made if out is None else out.copy_(made)

    def wide(self, x: Tensor, room: Tensor) -> Tensor | None:
        """
        Return the matrix [out, in] in the dtype of ``x``, for a product with many rows.

        :param x: what it is for, [..., in].
        :param room: flat, for the matrix of quantised forms; used until the next call.
        :return: ``None`` where calling is better: codes are read as they are.
        """
        return self.weight

    @property
    def nbytes(self) -> int:
        """Return the bytes that one call reads of the weight and bias."""
        bias = self.bias.nbytes if self.bias is not None else 0
        return self.weight.nbytes + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Root-mean-square norm (Zhang and Sennrich 2019) in float32, scaled in the dtype of ``x``.

    :param x: [..., C].
    :param weight: [C].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the activation that a config calls ``name``; quick_gelu is x * sigmoid(1.702 x)."""
    if name == 'quick_gelu':
        return x * torch.sigmoid(1.702 * x)
    if name == 'silu':
        return F.silu(x)
    return F.gelu(x, approximate='tanh' if name == 'gelu_pytorch_tanh' else 'none')


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Rotary embedding (Su et al. 2021) of half-split pairs: channel i turns with i + D/2.

    :param x: [heads, n, D].
    :param cos: [n, D], both halves alike.
    :param sin: [n, D].
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def inverse_frequencies(channels: int, theta: float) -> Tensor:
    """Return ``theta ** (-2i / channels)`` for i < channels / 2, float32."""
    return 1.0 / theta ** (torch.arange(0, channels, 2, dtype=torch.float) / channels)
