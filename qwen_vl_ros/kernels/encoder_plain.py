"""
Plain torch twins of :mod:`encoder` and :mod:`gemm`: the same methods on any device and dtype.

They allocate, and round where torch does; kernels are held against them, and the fused forms of
encoder and prefill run on them where there is no GPU to test on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.layers import activate, rotate
from qwen_vl_ros.kernels.gemm import multiply_plain


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [rows, width] and float32 scales [rows]: largest magnitude is 127."""
    wide = x.float()
    scales = wide.abs().amax(1).clamp(min=1e-12) / 127
    return (wide / scales[:, None]).round().to(torch.int8), scales


class PlainKernels:
    """Twin of :class:`~qwen_vl_ros.kernels.encoder.EncoderKernels`; see there."""

    def has(self, form: str) -> bool:
        """Tell whether there is a form of attention: here both are the same."""
        return form == 'mma'

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
             ) -> Tensor:
        """Write layer norm, or root-mean-square norm without bias."""
        return out.copy_(_norm(x.float(), weight, bias, eps))

    def norm_s8(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor,
                scales: Tensor) -> None:
        """Write the norm in INT8."""
        codes, own = quantize_rows(_norm(x.float(), weight, bias, eps))
        out.copy_(codes)
        scales.copy_(own)

    def activate(self, x: Tensor, name: str, out: Tensor) -> Tensor:
        """Write an activation."""
        return out.copy_(activate(x.float(), name))

    def activate_s8(self, x: Tensor, name: str, out: Tensor, scales: Tensor) -> None:
        """Write an activation in INT8."""
        codes, own = quantize_rows(activate(x.float(), name))
        out.copy_(codes)
        scales.copy_(own)

    def gate(self, x: Tensor, name: str, out: Tensor) -> Tensor:
        """Write activation(first half) * second half."""
        first, second = x.float().chunk(2, dim=-1)
        return out.copy_(activate(first, name) * second)

    def centre(self, x: Tensor, out: Tensor) -> Tensor:
        """Write bytes less 128, and zeros behind them."""
        out[:, :x.shape[1]] = x.to(out.dtype) - 128
        out[:, x.shape[1]:] = 0
        return out

    def rotate_grid(self, qkv: Tensor, heads: int, spots: Tensor, turns: Tensor) -> None:
        """Rotate queries and keys of the encoder in place."""
        rows = qkv.shape[0]
        angles = turns[spots[:rows].long()].flatten(1, 2)
        cos, sin = (angles[..., i].repeat(1, 2) for i in range(2))
        parts = qkv.view(rows, 3 * heads, -1)[:, :2 * heads]
        parts.copy_(rotate(parts.float().transpose(0, 1), cos, sin).transpose(0, 1))

    def turns(self, positions: Tensor, axes: Tensor, frequencies: Tensor, out: Tensor) -> Tensor:
        """Write cosines and sines of M-RoPE."""
        angles = positions[axes.long()].T.float() * frequencies
        return out.copy_(torch.stack((angles.cos(), angles.sin()), -1))

    def rotate_text(self, qkv: Tensor, heads: int, kv_heads: int, turns: Tensor, span: Tensor,
                    layer: int) -> None:
        """Rotate queries in place; write rotated keys and values into the cache."""
        keys, values, start, n = _cached(qkv, heads, kv_heads, span, layer)
        y = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)[:n].transpose(0, 1)
        cos, sin = (turns[:n, :, i].repeat(1, 2) for i in range(2))
        turned = rotate(y[:heads + kv_heads].float(), cos, sin)
        y[:heads] = turned[:heads].to(qkv.dtype)
        keys[:, start:start + n] = turned[heads:].to(qkv.dtype)
        values[:, start:start + n] = y[heads + kv_heads:]

    def attend_segments(self, qkv: Tensor, heads: int, tiles: Tensor, out: Tensor,
                        form: str = 'mma') -> Tensor:
        """Attend within segments, in all directions."""
        rows = qkv.shape[0]
        q, k, v = qkv.view(rows, 3, heads, -1).permute(1, 2, 0, 3)
        to = out.view(rows, heads, -1).transpose(0, 1)
        for first, end, first_key, end_key in tiles.tolist():
            if first < end:
                to[:, first:end] = F.scaled_dot_product_attention(
                    q[None, :, first:end], k[None, :, first_key:end_key],
                    v[None, :, first_key:end_key])[0]
        return out

    def attend_cache(self, qkv: Tensor, heads: int, kv_heads: int, span: Tensor, layer: int,
                     out: Tensor) -> Tensor:
        """Attend from a chunk to the cache up to each position."""
        keys, values, start, n = _cached(qkv, heads, kv_heads, span, layer)
        q = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)[:n, :heads].transpose(0, 1)
        k, v = (z[:, :start + n].repeat_interleave(heads // kv_heads, 0) for z in (keys, values))
        seen = torch.ones(n, start + n, dtype=torch.bool, device=q.device).tril(start)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen)[0]
        out.view(qkv.shape[0], heads, -1)[:n] = y.transpose(0, 1)
        return out

    def multiply_activated(self, x: Tensor, weight: Tensor, bias: Tensor | None, name: str,
                           out: Tensor) -> Tensor:
        """Write a product with quick_gelu, or a gated one with silu."""
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        if weight.shape[0] == out.shape[1]:
            return out.copy_(activate(y, name))
        return self.gate(y, name, out)

    def multiply_rotated(self, x: Tensor, weight: Tensor, bias: Tensor | None, spots: Tensor,
                         turns: Tensor, out: Tensor) -> Tensor:
        """Write queries, keys and values of the encoder, queries and keys rotated."""
        y = F.linear(x, weight, bias)
        self.rotate_grid(y, y.shape[1] // (3 * 4 * turns.shape[1]), spots, turns)
        return out.copy_(y)

    def multiply_s8(self, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor,
                    bias: Tensor | None, out: Tensor, add: Tensor | None = None) -> Tensor:
        """Write a product of INT8 matrices; float64 holds its sums exactly."""
        sums = (x.double() @ weight.double().T) * x_scales.double()[:, None]
        y = sums * weight_scales.double()
        for more in (bias, add):
            y = y if more is None else y + more
        return out.copy_(y)


class PlainProducts:
    """Twin of :class:`~qwen_vl_ros.kernels.gemm.Products`."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
                 add: Tensor | None = None) -> Tensor:
        """Write ``x @ weight.T + bias + add``."""
        return out.copy_(multiply_plain(x, weight, bias, add))

    def tune(self, rows: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
             add: bool = False) -> float | None:
        """Do nothing: there is one way."""
        return None


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is not None:
        return F.layer_norm(x, x.shape[1:], weight.float(), bias.float(), eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _cached(qkv: Tensor, heads: int, kv_heads: int, span: Tensor, layer: int,
            ) -> tuple[Tensor, Tensor, int, int]:
    """Return keys and values [kv_heads, capacity, D] of a layer, start and count; CPU alone."""
    address, layer_step, value_step, head_step, start, count = span.tolist()
    size = qkv.element_size()
    dim = qkv[0].numel() // (heads + 2 * kv_heads)
    parts = []
    for step in (0, value_step):
        at = address + (layer * layer_step + step) * size
        raw = (ctypes.c_uint8 * (kv_heads * head_step * size)).from_address(at)
        parts.append(torch.frombuffer(raw, dtype=qkv.dtype).view(kv_heads, -1, dim))
    return parts[0], parts[1], start, count
