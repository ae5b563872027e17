"""Many rows of activations through quantised weights: face of ``qwen_vl_quant_gemm``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.kernels.decode import DTYPES
from qwen_vl_ros.kernels.decode_layout import INT4
from qwen_vl_ros.kernels.loader import KernelError, optional

#: Rows from which on a Hopper GPU multiplies a dequantised copy with its own library's kernels.
FEW_ROWS = 32

_MESSAGE = 256


class NativeProduct(ctypes.Structure):
    """``qwen_vl_quant_product``."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ('x', 'weight', 'scales', 'zeros', 'bias',
                                                       'out')),
                *((name, ctypes.c_int32) for name in ('dtype', 'form', 'rows', 'inputs', 'outputs',
                                                      'group')))


def serves(x: Tensor, outputs: int, group: int = 0) -> bool:
    """Tell whether :func:`quant_product` takes activations [..., in] of this kind and place."""
    return (x.device.type == 'cuda' and x.dtype in DTYPES and x.shape[-1] % 32 == 0
            and outputs % 2 == 0 and group % 32 == 0 and x.numel() > 0
            and optional('qwen_vl_decode', 'a dequantised copy of each matrix') is not None)


def copies(x: Tensor) -> bool:
    """
    Tell whether activations [..., in] are multiplied with a dequantised copy of the matrix.

    Many rows on a Hopper GPU are: its fastest products take both matrices from memory.
    """
    rows = x.numel() // max(1, x.shape[-1])
    return (x.device.type == 'cuda' and rows > FEW_ROWS
            and torch.cuda.get_device_capability(x.device)[0] >= 9)


def quant_product(
    x: Tensor, form: int, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:
    """
    Return ``x @ w.T + bias`` for quantised w, which is dequantised tile by tile on the way.

    Where :func:`copies` says so, a dequantised copy is made instead; it lives as long as the call.

    :param x: bfloat16 or float16 [..., in] on a GPU.
    :param form: of :mod:`~qwen_vl_ros.kernels.decode_layout`: INT8, INT4 or INT8_GROUP.
    :param weight: codes [out, in], or [out, in / 2] of INT4.
    :param scales: float32 [out] of INT8, else float16 [out, groups].
    :param zeros: uint8 (INT4) or int16 [out, groups].
    :param out: [..., out], where the result goes; ``None`` takes memory for it.
    :return: [..., out].
    :raises KernelError: for sizes that the kernel does not take (see :func:`serves`).
    """
    inputs, outputs = x.shape[-1], weight.shape[0]
    if copies(x):
        room = torch.empty(outputs * inputs, dtype=x.dtype, device=x.device)
        made = F.linear(x, dequantised(form, weight, scales, zeros, room), bias)
        return made if out is None else out.copy_(made)
    flat = x.reshape(-1, inputs).contiguous()
    if out is None:
        out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    _call(flat, form, weight, scales, zeros, bias, inputs, out.view(-1, outputs))
    return out


def dequantised(form: int, weight: Tensor, scales: Tensor, zeros: Tensor | None, room: Tensor,
                ) -> Tensor:
    """
    Return the matrix [out, in] that codes on a GPU stand for; parameters as above.

    :param room: bfloat16 or float16, flat; its beginning is where the matrix is written.
    """
    inputs = weight.shape[1] * (2 if form == INT4 else 1)
    out = room[:weight.shape[0] * inputs].view(weight.shape[0], inputs)
    _call(None, form, weight, scales, zeros, None, inputs, out)
    return out


def _call(x: Tensor | None, form: int, weight: Tensor, scales: Tensor, zeros: Tensor | None,
          bias: Tensor | None, inputs: int, out: Tensor) -> None:
    native = optional('qwen_vl_decode', 'a dequantised copy of each matrix')
    if native is None:
        raise KernelError('libqwen_vl_decode is not there')
    codes = inputs // 2 if form == INT4 else inputs
    parts = [t for t in (weight, scales, zeros, bias) if t is not None]
    if weight.shape[1] != codes or any(
            t.device != out.device or not t.is_contiguous() for t in parts):
        raise KernelError(f'codes {list(weight.shape)} for {inputs} inputs, or not all tensors '
                          f'contiguous on {out.device}')
    product = NativeProduct(
        None if x is None else x.data_ptr(), weight.data_ptr(), scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), DTYPES.index(out.dtype), form, 1 if x is None else x.shape[0], inputs,
        weight.shape[0], 0 if zeros is None else inputs // scales.shape[1])
    message = ctypes.create_string_buffer(_MESSAGE)
    with torch.cuda.device(out.device):
        stream = torch.cuda.current_stream(out.device).cuda_stream
        code = native.qwen_vl_quant_gemm(ctypes.byref(product), ctypes.c_void_p(stream), message,
                                         ctypes.c_size_t(_MESSAGE))
    if code:
        raise KernelError(message.value.decode(errors='replace'), code)
