"""Face of libqwen_vl_encoder: norms, activations, rotations, attention and INT8 products."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.kernels.gemm import DTYPES, NativeProduct, address, call, stream
from qwen_vl_ros.kernels.loader import library

#: In the order of ``qwen_vl_activation``, by the names of a config.
ACTIVATIONS = ('quick_gelu', 'gelu', 'gelu_pytorch_tanh', 'silu')

#: In the order of ``qwen_vl_attention_form``: any GPU; Hopper alone, and there for few rows.
FORMS = ('mma', 'wgmma', 'wgmma_fine')

#: ``QWEN_VL_TILE_ROWS``.
TILE_ROWS = 128

#: Channels of a head that attention is compiled for.
HEAD_DIMS = (64, 80)
CACHE_HEAD_DIMS = (64, 80, 128)

#: Channels of a head that a product with rotation is compiled for.
ROTATED_HEAD_DIM = 80

#: Inputs of an INT8 product are a multiple of this.
DEPTH = 128

#: Elements of a row that a norm, and an activation to INT8, can take.
NORM_WIDTH, ACTIVATION_WIDTH = 4096, 8192


class NativeRows(ctypes.Structure):
    """``qwen_vl_rows``."""

    _fields_ = (('rows', ctypes.c_int32), ('width', ctypes.c_int32), ('dtype', ctypes.c_int32))


class NativeHeads(ctypes.Structure):
    """``qwen_vl_heads``."""

    _fields_ = (('rows', ctypes.c_int32), ('heads', ctypes.c_int32),
                ('kv_heads', ctypes.c_int32), ('head_dim', ctypes.c_int32),
                ('dtype', ctypes.c_int32))


def tile_list(segments: list[int]) -> np.ndarray:
    """
    Return which queries and keys each tile of attention has.

    :param segments: lengths of runs of rows that attend to themselves.
    :return: int32 [tiles, 4]: first query, end, first key, end.
    """
    tiles, start = [], 0
    for count in segments:
        end = start + count
        tiles += [(first, min(first + TILE_ROWS, end), start, end)
                  for first in range(start, end, TILE_ROWS)]
        start = end
    return np.array(tiles, np.int32).reshape(-1, 4)


class EncoderKernels:
    """
    The kernels on one device; all run in torch's current stream and allocate nothing, but for a
    workspace of attention at its first use: one stream at a time may attend.

    Tensors are contiguous, bfloat16 or float16, of rows that are multiples of eight elements.

    :param native: the library; ``None`` loads libqwen_vl_encoder.
    :raises FileNotFoundError: when the library has not been built.
    :raises KernelError: when it was built for another version of the package.
    """

    def __init__(self, device: torch.device, native: ctypes.CDLL | None = None) -> None:
        self.device = device
        self._library = library('qwen_vl_encoder') if native is None else native
        self._library.qwen_vl_attention_workspace.restype = ctypes.c_uint64
        self._workspace: Tensor | None = None

    def has(self, form: str) -> bool:
        """Tell whether the device runs a form of attention, one of :data:`FORMS`."""
        with torch.cuda.device(self.device):
            return bool(self._library.qwen_vl_attention_has(FORMS.index(form)))

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
             ) -> Tensor:
        """Write the layer norm of rows, or without ``bias`` their root-mean-square norm."""
        self._run('norm', _rows(x), address(x), address(weight), address(bias),
                  ctypes.c_float(eps), address(out))
        return out

    def norm_s8(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor,
                scales: Tensor) -> None:
        """Write the norm as int8 ``out`` [rows, width] times float32 ``scales`` [rows]."""
        self._run('norm_s8', _rows(x), address(x), address(weight), address(bias),
                  ctypes.c_float(eps), address(out), address(scales))

    def activate(self, x: Tensor, name: str, out: Tensor) -> Tensor:
        """Write the activation that a config calls ``name``; ``out`` may be ``x``."""
        self._run('activate', _rows(x), ACTIVATIONS.index(name), address(x), address(out))
        return out

    def activate_s8(self, x: Tensor, name: str, out: Tensor, scales: Tensor) -> None:
        """Write the activation as int8 ``out`` [rows, width] times float32 ``scales`` [rows]."""
        self._run('activate_s8', _rows(x), ACTIVATIONS.index(name), address(x), address(out),
                  address(scales))

    def gate(self, x: Tensor, name: str, out: Tensor) -> Tensor:
        """Write activation(first half) * second half; x [rows, 2 * width]."""
        self._run('gate', _rows(out), ACTIVATIONS.index(name), address(x), address(out))
        return out

    def centre(self, x: Tensor, out: Tensor) -> Tensor:
        """
        Write bytes less 128, which every dtype holds exactly, and zeros behind them.

        :param x: uint8 [rows, bytes], a multiple of 4.
        :param out: [rows, width], no fewer, a multiple of 8.
        """
        self._run('centre', _rows(out), x.shape[1], address(x), address(out))
        return out

    def rotate_grid(self, qkv: Tensor, heads: int, spots: Tensor, turns: Tensor) -> None:
        """
        Rotate queries and keys of the encoder in place.

        :param qkv: [rows, 3, heads, head_dim].
        :param spots: int32 [rows, 2], row and column of each patch.
        :param turns: float32 [positions, head_dim / 4, 2], cosine and sine.
        """
        shape = _heads(qkv, heads, heads)
        self._run('rotate_grid', shape, address(qkv), address(spots), address(turns))

    def turns(self, positions: Tensor, axes: Tensor, frequencies: Tensor, out: Tensor) -> Tensor:
        """
        Write cosines and sines of M-RoPE.

        :param positions: int64 [3, rows].
        :param axes: int32 [half], which of the three each frequency turns with.
        :param frequencies: float32 [half].
        :param out: float32 [rows, half, 2].
        """
        self._run('turns', out.shape[0], out.shape[1], address(positions), address(axes),
                  address(frequencies), address(out))
        return out

    def rotate_text(self, qkv: Tensor, heads: int, kv_heads: int, turns: Tensor, span: Tensor,
                    layer: int) -> None:
        """
        Rotate queries in place; write rotated keys and the values into the cache.

        :param qkv: [rows, heads + 2 * kv_heads, head_dim].
        :param turns: of :meth:`turns`.
        :param span: int64 [6] on the device, ``qwen_vl_span``.
        """
        self._run('rotate_text', _heads(qkv, heads, kv_heads), address(qkv), address(turns),
                  address(span), layer)

    def attend_segments(self, qkv: Tensor, heads: int, tiles: Tensor, out: Tensor,
                        form: str = 'mma') -> Tensor:
        """
        Attend within segments, in all directions.

        :param qkv: [rows, 3, heads, head_dim].
        :param tiles: int32 [tiles, 4] of :func:`tile_list`; tiles of zeros do nothing.
        :param out: [rows, heads, head_dim].
        :param form: one of :data:`FORMS`.
        """
        shape = _heads(qkv, heads, heads)
        scale = shape.head_dim ** -0.5
        self._run('attend_segments', shape, FORMS.index(form), address(qkv), address(tiles),
                  tiles.shape[0], ctypes.c_float(scale), address(out),
                  address(self._workspace_of(form)))
        return out

    def _workspace_of(self, form: str) -> Tensor | None:
        """Return what a form of attention needs, made at first use; it starts as zeros."""
        if form == 'mma':
            return None
        if self._workspace is None:
            with torch.cuda.device(self.device):
                size = self._library.qwen_vl_attention_workspace(FORMS.index(form))
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._workspace

    def attend_cache(self, qkv: Tensor, heads: int, kv_heads: int, span: Tensor, layer: int,
                     out: Tensor) -> Tensor:
        """
        Attend from a chunk to the cache up to each position; see :meth:`rotate_text`.

        :param out: [rows, heads, head_dim]; rows after the chunk's are left alone.
        """
        shape = _heads(qkv, heads, kv_heads)
        self._run('attend_cache', shape, address(qkv), address(span), layer,
                  ctypes.c_float(shape.head_dim ** -0.5), address(out))
        return out

    def multiply_activated(self, x: Tensor, weight: Tensor, bias: Tensor | None, name: str,
                           out: Tensor) -> Tensor:
        """
        Write ``quick_gelu(x @ weight.T + bias)``, or ``silu(x @ gates.T) * (x @ others.T)``.

        Only where :meth:`has` says 'wgmma'.

        :param x: [rows, ins], ins a multiple of 64.
        :param weight: [outs, ins] for quick_gelu; for silu gates, then others, [2 * outs, ins].
        :param name: quick_gelu or silu.
        :param out: [rows, outs].
        """
        shape = NativeProduct(x.shape[0], out.shape[1], x.shape[1], DTYPES.index(x.dtype),
                              bias is not None, 0)
        self._run('multiply_activated', shape, ACTIVATIONS.index(name), address(x),
                  address(weight), address(bias), address(out))
        return out

    def multiply_rotated(self, x: Tensor, weight: Tensor, bias: Tensor | None, spots: Tensor,
                         turns: Tensor, out: Tensor) -> Tensor:
        """
        Write the encoder's ``x @ weight.T + bias``, queries and keys rotated.

        Only where :meth:`has` says 'wgmma', for heads of :data:`ROTATED_HEAD_DIM` channels.

        :param x: [rows, ins], ins a multiple of 64.
        :param weight: [3 * heads * head_dim, ins].
        :param bias: the kernel refuses to do without one.
        :param spots: and ``turns``, see :meth:`rotate_grid`.
        :param out: [rows, 3, heads, head_dim].
        """
        shape = NativeProduct(x.shape[0], *weight.shape, DTYPES.index(x.dtype), 1, 0)
        self._run('multiply_rotated', shape, address(x), address(weight), address(bias),
                  address(spots), address(turns), address(out))
        return out

    def multiply_s8(self, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor,
                    bias: Tensor | None, out: Tensor, add: Tensor | None = None) -> Tensor:
        """
        Write ``(x * x_scales) @ (weight * weight_scales).T + bias + add``.

        :param x: int8 [rows, ins], ins a multiple of :data:`DEPTH`.
        :param x_scales: float32 [rows].
        :param weight: int8 [outs, ins].
        :param weight_scales: float32 [outs].
        :param out: [rows, outs], bfloat16 or float16.
        """
        shape = NativeProduct(x.shape[0], *weight.shape, DTYPES.index(out.dtype),
                              bias is not None, add is not None)
        self._run('multiply_s8', shape, address(x), address(x_scales), address(weight),
                  address(weight_scales), address(bias), address(add), address(out))
        return out

    def _run(self, name: str, *arguments: object) -> None:
        passed = (ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        call(getattr(self._library, f'qwen_vl_{name}'), *passed, stream(self.device))


def _rows(x: Tensor) -> NativeRows:
    return NativeRows(x.shape[0], x.shape[1], DTYPES.index(x.dtype))


def _heads(qkv: Tensor, heads: int, kv_heads: int) -> NativeHeads:
    dim = qkv[0].numel() // (heads + 2 * kv_heads)
    return NativeHeads(qkv.shape[0], heads, kv_heads, dim, DTYPES.index(qkv.dtype))
