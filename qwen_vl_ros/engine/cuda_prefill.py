"""
Prefill on CUDA: one graph a bucket of tokens, for any cache and any start.

A layer is eight launches::

    norm -> QKV (bias) -> rotation, keys and values into the cache -> attention -> out (+ x)
    norm -> SiLU(gate) * up -> down (+ x)

and nine where no kernel has the activation in its epilogue, or where that is slower.

Where a chunk stands (cache, start, length) is read from device memory, so that a graph serves
every request. Quantised matrices are written out into one room for all of them, or read as codes
where that is faster; nothing in a graph takes memory of its own. Of the last layer, what follows
the keys and values is computed for those rows alone that somebody wants: the last one, or none
where another chunk follows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qwen_vl_ros.engine.graphs import Graphs, Runner, Turns
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.kernels import encoder as native
from qwen_vl_ros.kernels.decode_gemm import copies
from qwen_vl_ros.kernels.encoder import EncoderKernels
from qwen_vl_ros.kernels.gemm import DTYPES, Products, queued_time
from qwen_vl_ros.kernels.loader import KernelError, optional
from qwen_vl_ros.kernels.prompt import HEAD_DIM, SPAN, PlainPrompt, PromptKernels

if TYPE_CHECKING:
    from qwen_vl_ros.engine.language import LanguageModel
    from qwen_vl_ros.kernels.encoder_plain import PlainKernels, PlainProducts

LOG = logging.getLogger('qwen_vl_ros.engine')

#: Tokens of a bucket at most; more are run in pieces. A picture of 1280x720 and words fit.
MOST = 1536

#: Milliseconds that a chunk may keep a cancel waiting.
CANCEL_MS = 20.0

#: Rows that large products take at once.
STEP = 64


#: Gate and up as one product and the activation after it, in the epilogue, or in that of a product
#: made for few rows.
WAYS = ('apart', 'activated', 'gated')


class CudaPrefill:
    """
    Fused form of :meth:`LanguageModel.prefill`; weights are the model's own.

    :param language: bfloat16 or float16, on a GPU, of a shape that :meth:`fault` accepts.
    :param kernels: and ``products``, ``runner``, ``prompt``: the device's own, or the plain twins.
    :raises FileNotFoundError: without the library, see :meth:`make`.
    :raises KernelError: without cuBLASLt.
    """

    def __init__(
        self, language: LanguageModel, kernels: EncoderKernels | PlainKernels | None = None,
        products: Products | PlainProducts | None = None, runner: Runner | None = None,
        prompt: PromptKernels | PlainPrompt | None = None,
    ) -> None:
        cfg = language.config
        self.language = language
        self.kernels = kernels or EncoderKernels(language.device)
        self.prompt = prompt or PromptKernels(language.device)
        self.products = products or Products(language.device)
        self.graphs: Runner = runner or Graphs(language.device, 'prefill')
        #: By rows of a bucket, how gate, up and activation are computed: one of :data:`WAYS`,
        #: the fastest.
        self.ways: dict[int, str] = {}
        #: Form of attention by rows of a bucket, the fastest: plain, or one of those of
        #: :meth:`PromptKernels.attend`, where two groups of warps share a query's keys.
        self.forms: dict[int, str] = {}
        self._taken = Turns(language.device)
        self._axes = language.axes.int()
        self._frequencies = language.frequencies.float()
        self._qkv_width = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
        self._mapped = cfg.head_dim == HEAD_DIM and self.prompt.mapped
        self._rows = 0

    @classmethod
    def make(cls, language: LanguageModel) -> CudaPrefill | None:
        """Return the fused form, or ``None`` with one line in the log that says why not."""
        if language.device.type != 'cuda':
            return None
        fault = cls.fault(language)
        if fault:
            LOG.warning('prefill runs in plain torch: %s', fault)
            return None
        if optional('qwen_vl_encoder', 'prefill in plain torch') is None:
            return None
        try:
            return cls(language)
        except KernelError as error:
            LOG.warning('prefill runs in plain torch: %s', error)
            return None

    @staticmethod
    def fault(language: LanguageModel) -> str:
        """Return what the kernels do not cover, '' when nothing."""
        cfg = language.config
        if language.dtype not in DTYPES:
            return f'{language.dtype} has no kernels'
        if cfg.head_dim not in native.CACHE_HEAD_DIMS or cfg.mlp_width % 8 or cfg.width % 8 or (
                cfg.width > native.NORM_WIDTH or cfg.activation not in native.ACTIVATIONS):
            return (f'heads of {cfg.head_dim}, width {cfg.width} and {cfg.mlp_width}, activation '
                    f'{cfg.activation} have no kernels')
        if torch.cuda.get_device_capability(language.device) < (8, 0):
            return 'the GPU is older than Ampere'
        return ''

    def fits(self, cache: KVCache) -> bool:
        """Tell whether a cache's rows lie as the kernels expect them."""
        rows = cache.rows
        return (rows.dim() == 5 and rows.dtype == self.language.dtype and rows.is_contiguous()
                and rows.device == self.language.device)

    def run(self, x: Tensor, positions: Tensor, cache: KVCache, start: int,
            wanted: int | None = None) -> Tensor:
        """
        Run a chunk; parameters and result as for :meth:`LanguageModel.prefill`.

        :param x: [n, width]; more than :data:`MOST` rows are run in pieces.
        """
        n = x.shape[0]
        out = torch.empty(n if wanted is None else wanted, x.shape[1], dtype=x.dtype,
                          device=x.device)
        with self._taken.take():
            try:
                for first in range(0, n, MOST):
                    end = min(first + MOST, n)
                    here = 0 if wanted is not None and end < n else wanted
                    self._piece(x[first:end], positions[:, first:end], cache, start + first, here)
                    if wanted is None:
                        out[first:end] = self._x[:end - first]
                    elif here:
                        out.copy_(self._ends[1:])
            except Exception:
                self.release()
                raise
        return out

    def chunk(self, most: int) -> int:
        """
        Return how many tokens to run at once so that it takes about :data:`CANCEL_MS`.

        Taken from the largest bucket that has run so far; ``most`` before the first one.
        """
        if not self.graphs.captured:
            return most
        largest, took = max((int(str(one.key[0])), one.run_ms) for one in self.graphs.captured
                            if isinstance(one.key, tuple))
        rows = largest * CANCEL_MS / max(took, 1e-3)
        return max(1, min(most, max(STEP, int(rows) // STEP * STEP)))

    def release(self) -> None:
        """Give buffers and graphs back; the next chunk makes them again, by the same choices."""
        self.graphs.clear()
        self._rows = 0
        for name in ('_x', '_y', '_qkv', '_wide', '_hidden', '_turns', '_positions', '_chart',
                     '_span', '_ends', '_matrix'):
            self.__dict__.pop(name, None)

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of buffers, cuBLASLt's workspace aside."""
        return sum(v.nbytes for v in self.__dict__.values() if isinstance(v, Tensor))

    def _piece(self, x: Tensor, positions: Tensor, cache: KVCache, start: int,
               wanted: int | None) -> None:
        n = x.shape[0]
        rows = bucket(n)
        self._reserve(rows)
        where = cache.rows
        chart = torch.zeros(SPAN, dtype=torch.int64, pin_memory=x.is_cuda)
        chart[:6] = torch.tensor(
            [where.data_ptr(), where.stride(0), where.stride(1), where.stride(2), start, n])
        if self._mapped:
            self.prompt.map_cache(chart, where)

        def fill() -> None:
            self._chart.copy_(chart, non_blocking=True)
            self._x[:n].copy_(x)
            places = self._positions[:3 * rows].view(3, rows)
            places[:, :n].copy_(positions)
            if rows > n:
                self._x[n:rows].zero_()
                places[:, n:].zero_()

        self.graphs.run((rows, wanted), fill, lambda: self._body(rows, wanted),
                        lambda: self.tune(rows))

    def _reserve(self, rows: int) -> None:
        """Make room for a bucket; larger buffers are other buffers, which no graph knows."""
        if rows <= self._rows:
            return
        # At once for the usual chunk: the graphs of smaller buckets outlive the first long prompt.
        rows = max(rows, MOST // 2)
        self.release()
        cfg, language = self.language.config, self.language

        def make(*shape: int, dtype: torch.dtype = language.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=language.device)

        self._x, self._y = make(rows, cfg.width), make(rows, cfg.width)
        self._qkv = make(rows, self._qkv_width)
        self._wide = make(rows, 2 * cfg.mlp_width)
        self._hidden = make(rows, cfg.mlp_width)
        self._turns = make(rows, cfg.head_dim // 2, 2, dtype=torch.float32)
        self._positions = make(3 * rows, dtype=torch.int64)
        self._chart = make(SPAN, dtype=torch.int64)
        self._span = self._chart[:6]
        self._ends = make(2, cfg.width)
        quantised = any(type(matrix) is not Linear for layer in language.layers
                        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down))
        self._matrix = make(max(2 * cfg.mlp_width, self._qkv_width) * cfg.width
                            if quantised and copies(self._x) else 0)
        self._rows = rows

    def _body(self, rows: int, wanted: int | None) -> None:
        """Launch all layers on the first ``rows`` rows of the buffers."""
        cfg, k = self.language.config, self.kernels
        x, y = self._x[:rows], self._y[:rows]
        turns = self._turns[:rows]
        k.turns(self._positions[:3 * rows].view(3, rows), self._axes, self._frequencies, turns)
        for index, layer in enumerate(self.language.layers):
            ends = wanted is not None and index == cfg.layers - 1
            k.norm(x, layer.norm1, None, cfg.eps, y)
            qkv = self._call(layer.qkv, y, self._qkv[:rows])
            k.rotate_text(qkv, cfg.heads, cfg.kv_heads, turns, self._span, index)
            if ends and not wanted:
                return
            self._attend(qkv, index, y, ends)
            if ends:
                self.prompt.last_rows(y, x, self._span, self._ends)
                y, x, rows = self._ends[:1], self._ends[1:], 1
            self._call(layer.out, y, x, x)
            y = self._y[:rows]
            k.norm(x, layer.norm2, None, cfg.eps, y)
            hidden = self._hidden[:rows]
            self._gate(self.ways.get(rows, 'apart'), y, layer.gate_up, hidden)
            self._call(layer.down, hidden, x, x)

    def _gate(self, way: str, y: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Write activation(gate) * up."""
        activation = self.language.config.activation
        weight = None if way == 'apart' else linear.wide(y, self._matrix)
        if weight is None:
            wide = self._call(linear, y, self._wide[:y.shape[0]])
            self.kernels.gate(wide, activation, hidden)
        elif way == 'gated':
            self.prompt.multiply_gated(y, weight, hidden)
        else:
            self.kernels.multiply_activated(y, weight, None, activation, hidden)

    def _attend(self, qkv: Tensor, index: int, y: Tensor, tail: bool) -> None:
        self._attend_as(self.forms.get(qkv.shape[0], 'plain'), qkv, index, y, tail)

    def _attend_as(self, form: str, qkv: Tensor, index: int, y: Tensor, tail: bool = False
                   ) -> None:
        cfg = self.language.config
        if form == 'plain':
            self.kernels.attend_cache(qkv, cfg.heads, cfg.kv_heads, self._span, index, y)
        else:
            self.prompt.attend(
                qkv, cfg.heads, cfg.kv_heads, self._chart, index, y, tail, form)

    def _call(self, linear: Linear, x: Tensor, out: Tensor, add: Tensor | None = None) -> Tensor:
        """Write linear(x) + add."""
        weight = linear.wide(x, self._matrix)
        if weight is not None:
            return self.products.multiply(x, weight, linear.bias, out, add)
        if add is None:
            return linear(x, out)
        # Gate and up are not in there now.
        made = linear(x, self._wide.view(-1)[:out.numel()].view(out.shape))
        return torch.add(add, made, out=out)

    def tune(self, rows: int) -> None:
        """Choose kernels for a bucket by timing, where that has not been done before."""
        for name, add in (('qkv', False), ('out', True), ('gate_up', False), ('down', True)):
            linears: Sequence[Linear] = [getattr(z, name) for z in self.language.layers]
            # The last layer has one row, but for its keys and values.
            for count in {rows, 1 if name != 'qkv' else rows}:
                x = (self._hidden if name == 'down' else self._y)[:count]
                weights = [wide for m in linears if (wide := m.wide(x, self._matrix)) is not None]
                if weights:
                    self.products.tune(count, weights, [m.bias for m in linears], add)
        if rows not in self.ways:
            self.ways[rows] = self._fastest_way(rows)
        if rows not in self.forms:
            self.forms[rows] = self._fastest_form(rows)

    def _fastest_form(self, rows: int) -> str:
        """Return the form of attention that is fastest on the chunk that was filled in."""
        cfg = self.language.config
        if cfg.head_dim != HEAD_DIM or self.language.device.type != 'cuda':
            return 'plain'
        qkv, y = self._qkv[:rows].normal_(), self._y[:rows]
        return min(('plain', 'mma', 'wgmma') if self._mapped else ('plain', 'mma'),
                   key=lambda form: queued_time(
                       lambda i: self._attend_as(form, qkv, i % cfg.layers, y)))

    def _fastest_way(self, rows: int) -> str:
        """Return the way of gate and up that is fastest."""
        language, cfg = self.language, self.language.config
        matrices = [layer.gate_up for layer in language.layers]
        y = torch.randn(rows, cfg.width, dtype=language.dtype, device=language.device)
        if not self.kernels.has('wgmma') or cfg.activation != 'silu' or cfg.width % 64 or any(
                m.bias is not None or m.wide(y, self._matrix) is None for m in matrices):
            return 'apart'
        hidden = self._hidden[:rows]
        return min(WAYS, key=lambda way: queued_time(
            lambda i: self._gate(way, y, matrices[i % cfg.layers], hidden)))


def bucket(count: int) -> int:
    """Return the rows that ``count`` tokens are filled up to."""
    return -(-count // STEP) * STEP
