"""Face of what libqwen_vl_encoder has for prompts alone (qwen_vl_prompt.h), and its twin."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.kernels.encoder import FORMS, NativeHeads, NativeRows
from qwen_vl_ros.kernels.encoder_plain import PlainKernels
from qwen_vl_ros.kernels.gemm import DTYPES, NativeProduct, address, call, stream
from qwen_vl_ros.kernels.loader import KernelError, library

#: Channels of a head that :meth:`PromptKernels.attend` is compiled for.
HEAD_DIM = 128

#: Elements of a span with its map, and the bytes before the map (``QWEN_VL_CACHE_MAP`` follow).
SPAN, MAP_BYTES = 24, 64

#: Widths that :meth:`PromptKernels.first_token` takes are a multiple of this, and at most.
LANE_WIDTH, MOST_WIDTH = 256, 8192


class PromptKernels:
    """
    The kernels on one device; all run in torch's current stream and allocate nothing.

    :param native: the library; ``None`` loads libqwen_vl_encoder.
    :raises FileNotFoundError: when the library has not been built.
    :raises KernelError: when it was built from older sources.
    """

    def __init__(self, device: torch.device, native: ctypes.CDLL | None = None) -> None:
        self.device = device
        self._library = library('qwen_vl_encoder') if native is None else native
        if not hasattr(self._library, 'qwen_vl_multiply_gated'):
            raise KernelError("libqwen_vl_encoder.so lacks a prompt's kernels: build it again "
                              "with 'make kernels'")
        size = self._library.qwen_vl_first_token_workspace
        size.restype = ctypes.c_uint64
        self._workspace = torch.zeros(size(), dtype=torch.uint8, device=device)

    @property
    def mapped(self) -> bool:
        """Tell whether the device has :meth:`multiply_gated` and attention by wgmma."""
        with torch.cuda.device(self.device):
            return bool(self._library.qwen_vl_attention_has(FORMS.index('wgmma')))

    def map_cache(self, span: Tensor, rows: Tensor) -> None:
        """
        Write into a span what the wgmma form of :meth:`attend` reads of it.

        :param span: int64 [:data:`SPAN`], on the host; ``qwen_vl_span`` is filled in.
        :param rows: of the cache, [layers, 2, kv_heads, capacity, head_dim], contiguous.
        """
        layers, _, kv_heads, capacity, dim = rows.shape
        shape = NativeHeads(1, kv_heads, kv_heads, dim, DTYPES.index(rows.dtype))
        call(self._library.qwen_vl_cache_map, ctypes.byref(shape), address(span), layers,
             capacity, ctypes.c_void_p(span.data_ptr() + MAP_BYTES))

    def attend(self, qkv: Tensor, heads: int, kv_heads: int, span: Tensor, layer: int,
               out: Tensor, tail: bool = False, form: str = 'mma') -> Tensor:
        """
        Do what :meth:`EncoderKernels.attend_cache` does, for heads of :data:`HEAD_DIM` channels.

        :param span: int64 [:data:`SPAN`], on the device; ``qwen_vl_span``, then the map.
        :param tail: the chunk's last row has to be there, no other one.
        :param form: mma, or wgmma where :attr:`mapped` and :meth:`map_cache` has been called.
        """
        shape = NativeHeads(qkv.shape[0], heads, kv_heads, HEAD_DIM, DTYPES.index(qkv.dtype))
        where = ctypes.c_void_p(span.data_ptr() + MAP_BYTES if form == 'wgmma' else None)
        self._run('attend_prompt', shape, address(qkv), address(span), where, layer,
                  ctypes.c_float(HEAD_DIM ** -0.5), int(tail), address(out))
        return out

    def multiply_gated(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """
        Write ``silu(x @ gates.T) * (x @ others.T)``; only where :attr:`mapped`.

        :param x: [rows, ins], ins a multiple of 64.
        :param weight: [2 * outs, ins], gates first.
        :param out: [rows, outs].
        """
        shape = NativeProduct(x.shape[0], out.shape[1], x.shape[1], DTYPES.index(x.dtype), 0, 0)
        self._run('multiply_gated', shape, address(x), address(weight), address(out))
        return out

    def last_rows(self, a: Tensor, b: Tensor, span: Tensor, out: Tensor) -> Tensor:
        """
        Copy the chunk's last row of two activations.

        :param a: [rows, width]; ``b`` as well.
        :param out: [2, width].
        """
        shape = NativeRows(a.shape[0], a.shape[1], DTYPES.index(a.dtype))
        self._run('last_rows', shape, address(a), address(b), address(span), address(out))
        return out

    def first_token(self, x: Tensor, norm: Tensor, eps: float, head: Tensor, out: Tensor,
                    ) -> Tensor:
        """
        Choose the likeliest token after a hidden state.

        :param x: [1, width], bfloat16 or float16, of a width that :meth:`takes` accepts.
        :param norm: [width], of the last norm.
        :param head: [vocab, width].
        :param out: float64 [4]: the fields of a :class:`~qwen_vl_ros.engine.generate.Choice`.
        """
        shape = NativeRows(head.shape[0], head.shape[1], DTYPES.index(x.dtype))
        self._run('first_token', shape, address(x), address(norm), ctypes.c_float(eps),
                  address(head), address(self._workspace), address(out))
        return out

    @staticmethod
    def takes(head: Tensor) -> bool:
        """Tell whether :meth:`first_token` takes a matrix."""
        return (head.dtype in DTYPES and head.dim() == 2 and head.is_contiguous()
                and head.shape[1] % LANE_WIDTH == 0 and head.shape[1] <= MOST_WIDTH)

    def _run(self, name: str, *arguments: object) -> None:
        passed = (ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        with torch.cuda.device(self.device):  # whose default stream is meant, if it is that
            call(getattr(self._library, f'qwen_vl_{name}'), *passed, stream(self.device))


class PlainPrompt:
    """Twin of :class:`PromptKernels`; see there."""

    mapped = False

    def map_cache(self, span: Tensor, rows: Tensor) -> None:
        """Do nothing: there is no other form."""

    def attend(self, qkv: Tensor, heads: int, kv_heads: int, span: Tensor, layer: int,
               out: Tensor, tail: bool = False, form: str = 'mma') -> Tensor:
        """Attend from a chunk to the cache up to each position."""
        return PlainKernels().attend_cache(qkv, heads, kv_heads, span[:6], layer, out)

    def multiply_gated(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Write a gated product."""
        return PlainKernels().multiply_activated(x, weight, None, 'silu', out)

    def last_rows(self, a: Tensor, b: Tensor, span: Tensor, out: Tensor) -> Tensor:
        """Copy the chunk's last row of two activations."""
        row = int(span[5]) - 1
        return out.copy_(torch.stack((a[row], b[row])))

    @staticmethod
    def takes(head: Tensor) -> bool:
        """Tell whether :meth:`first_token` takes a matrix: any."""
        return True

    def first_token(self, x: Tensor, norm: Tensor, eps: float, head: Tensor, out: Tensor,
                    ) -> Tensor:
        """Choose the likeliest token after a hidden state."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
        logits = F.linear(wide.to(x.dtype).float(), head.float())[0].double()
        best = logits.topk(2)
        probability = (best.values[0] - logits.logsumexp(0)).exp()
        return out.copy_(torch.stack((
            best.indices[0].double(), probability, best.values[0] - best.values[1],
            torch.isfinite(logits).all().double())))
