"""
Quantised matrices: how their codes are packed, and how they multiply.

On a GPU a product dequantises into the tiles of a tensor-core kernel
(:mod:`qwen_vl_ros.kernels.decode_gemm`); elsewhere, and in float32, its plain twin dequantises the
whole matrix. The decode step reads the codes itself (:mod:`qwen_vl_ros.engine.cuda_decoder`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.kernels import decode_layout as layout
from qwen_vl_ros.kernels.decode_gemm import copies, dequantised, quant_product, serves

GROUPS = (128, 64, 32)
#: Shares of a group's range that INT4 tries; cutting off outliers can cost less than their steps.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)


class Int8Linear(Linear):
    """
    A matrix in INT8, one scale an output channel.

    :param codes: int8 [out, in].
    :param scales: float32 [out].
    :param bias: [out] or ``None``.
    """

    __slots__ = parts = ('codes', 'scales')

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        self.codes, self.scales, self.bias = codes, scales, bias

    @classmethod
    def of(cls, linear: Linear) -> Int8Linear:
        """Quantise: scale = max |w| / 127 of each row, codes rounded to nearest."""
        wide = linear.weight.float()
        scales = wide.abs().amax(1).clamp(min=1e-12) / 127
        codes = (wide / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(codes, scales, linear.bias)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] that the codes stand for."""
        return (self.codes.float() * self.scales[:, None]).to(dtype)

    def wide(self, x: Tensor, room: Tensor) -> Tensor | None:
        """See :meth:`Linear.wide`."""
        if not (serves(x, self.codes.shape[0]) and copies(x)):
            return None
        return dequantised(layout.INT8, self.codes, self.scales, None, room)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, in ``out`` where that is given."""
        if serves(x, self.codes.shape[0]):
            return quant_product(x, layout.INT8, self.codes, self.scales, None, self.bias, out)
        made = F.linear(x, self.dequantised(x.dtype), self.bias)
        return made if out is None else out.copy_(made)

    @property
    def nbytes(self) -> int:
        """Return the bytes that one call must read."""
        bias = self.bias.nbytes if self.bias is not None else 0
        return self.codes.nbytes + self.scales.nbytes + bias


class Int4Linear(Linear):
    """
    A matrix in INT4 with groups along the inputs: w = (code - zero) * scale.

    :param packed: uint8 [out, in / 2]; the even input is the low nibble.
    :param scales: float16 [out, in / group].
    :param zeros: uint8 [out, in / group], 0 to 16 (16: a GPTQ file's stored 15 plus one).
    :param bias: [out] or ``None``.
    """

    __slots__ = parts = ('packed', 'scales', 'zeros')
    #: As the kernels number it.
    form = layout.INT4

    def __init__(self, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None
                 ) -> None:
        self.packed, self.scales, self.zeros, self.bias = packed, scales, zeros, bias

    @classmethod
    def of(cls, linear: Linear) -> Int4Linear:
        """
        Quantise each group to 16 levels; of several ranges the one with the least squared error.

        :raises EngineError: BAD_REQUEST when no group size divides the inputs.
        """
        rows, inputs = linear.weight.shape
        group = group_size(inputs)
        wide = linear.weight.float().view(rows, inputs // group, group)
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        best = torch.full_like(low, torch.inf)
        scales, zeros = torch.ones_like(low), torch.zeros_like(low)
        for clip in CLIPS:
            # The scale as it is stored: codes are chosen for the rounded value.
            scale = ((high - low) * clip / 15).clamp(min=6e-8).half().float()
            zero = (-low * clip / scale).round().clamp(0, 15)
            code = (wide / scale[..., None] + zero[..., None]).round().clamp(0, 15)
            error = ((code - zero[..., None]) * scale[..., None] - wide).square().sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
        codes = (wide / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
        return cls(pack_nibbles(codes.view(rows, inputs).to(torch.uint8)), scales.half(),
                   zeros.to(torch.uint8), linear.bias)

    def codes(self) -> Tensor:
        """Return the codes one by one, uint8 [out, in]."""
        return unpack_nibbles(self.packed)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] that the codes stand for."""
        codes = self.codes().float()
        rows, inputs = codes.shape
        grouped = codes.view(rows, self.scales.shape[1], -1)
        wide = (grouped - self.zeros[..., None].float()) * self.scales[..., None].float()
        return wide.view(rows, inputs).to(dtype)

    def wide(self, x: Tensor, room: Tensor) -> Tensor | None:
        """See :meth:`Linear.wide`."""
        outputs, groups = self.scales.shape
        if not (serves(x, outputs, x.shape[-1] // groups) and copies(x)):
            return None
        return dequantised(self.form, self.packed, self.scales, self.zeros, room)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, in ``out`` where that is given."""
        outputs, groups = self.scales.shape
        if serves(x, outputs, x.shape[-1] // groups):
            return quant_product(x, self.form, self.packed, self.scales, self.zeros, self.bias,
                                 out)
        made = F.linear(x, self.dequantised(x.dtype), self.bias)
        return made if out is None else out.copy_(made)

    @property
    def nbytes(self) -> int:
        """Return the bytes that one call must read."""
        bias = self.bias.nbytes if self.bias is not None else 0
        return self.packed.nbytes + self.scales.nbytes + self.zeros.nbytes + bias


class Int8GroupLinear(Int4Linear):
    """
    A matrix in INT8 with groups along the inputs, the form of GPTQ's 8-bit files.

    :param packed: uint8 [out, in].
    :param scales: float16 [out, in / group].
    :param zeros: int16 [out, in / group], 0 to 256.
    :param bias: [out] or ``None``.
    """

    __slots__ = ()
    form = layout.INT8_GROUP

    def codes(self) -> Tensor:
        """Return the codes, uint8 [out, in]."""
        return self.packed


def group_size(inputs: int) -> int:
    """
    Return the largest group that divides ``inputs``.

    :raises EngineError: BAD_REQUEST when none of :data:`GROUPS` does.
    """
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise EngineError(
        ErrorCode.BAD_REQUEST,
        f'int4 needs a matrix whose inputs are a multiple of {GROUPS[-1]}; found {inputs}')


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes 0 to 15 [out, in] into [out, in / 2], even inputs in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo :func:`pack_nibbles`: uint8 [out, in / 2] -> uint8 [out, in]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
