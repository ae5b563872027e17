"""
The encoder on CUDA, from bytes of patches to merged tokens: one graph a bucket of patches.

A block is seven launches::

    norm -> QKV (bias, rotation) -> attention -> projection (bias, + x)
    norm -> fc1 (bias, quick-GELU) -> fc2 (bias, + x)

and one more for the rotation and for fc1's activation each, where no kernel has it in its
epilogue or where that is slower.

Rows are filled up to a multiple of 64 with finite numbers, which belong to no segment of
attention; what differs between two pictures of a bucket (patches, places, segments) lies in
buffers that the graph reads. A new camera resolution costs one capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.encoder_layouts import Layout, Layouts
from qwen_vl_ros.engine.graphs import Graphs, Runner, Turns
from qwen_vl_ros.engine.layers import Linear, inverse_frequencies
from qwen_vl_ros.engine.quant_linear import Int8Linear
from qwen_vl_ros.kernels import encoder as native
from qwen_vl_ros.kernels.encoder import EncoderKernels
from qwen_vl_ros.kernels.gemm import DTYPES, Products, queued_time
from qwen_vl_ros.kernels.loader import KernelError, optional

if TYPE_CHECKING:
    from qwen_vl_ros.engine.vision import VisionBlock, VisionEncoder
    from qwen_vl_ros.kernels.encoder_plain import PlainKernels, PlainProducts

LOG = logging.getLogger('qwen_vl_ros.engine')

#: Rows and columns of patches that the table of rotations covers: pictures of 28,672 pixels.
POSITIONS = 2048


class CudaEncoder:
    """
    Fused form of :class:`~qwen_vl_ros.engine.vision.VisionEncoder`; weights are the encoder's own.

    :param encoder: bfloat16 or float16, on a GPU, of a shape that :meth:`fault` accepts.
    :param kernels: and ``products``, ``runner``: the device's own, or the plain twins.
    :raises FileNotFoundError: without the library, see :meth:`make`.
    :raises KernelError: without cuBLASLt.
    """

    def __init__(
        self, encoder: VisionEncoder, kernels: EncoderKernels | PlainKernels | None = None,
        products: Products | PlainProducts | None = None, runner: Runner | None = None,
    ) -> None:
        cfg = encoder.config
        self.encoder = encoder
        self.kernels = kernels or EncoderKernels(encoder.device)
        self.products = products or Products(encoder.device)
        self.graphs: Runner = runner or Graphs(encoder.device, 'encoder')
        #: Form of attention by rows and tiles of a bucket, of
        #: :data:`~qwen_vl_ros.kernels.encoder.FORMS` the fastest that the device has.
        self.forms: dict[tuple[int, int], str] = {}
        #: By rows of a bucket: fc1 and its activation are one kernel, where that is faster.
        self.activated: dict[int, bool] = {}
        #: The same of QKV and the rotation.
        self.rotated: dict[int, bool] = {}
        self._taken = Turns(encoder.device)
        self._layouts = Layouts(encoder.device)
        #: What the buffers hold the places of: rows, tiles and a layout.
        self._filled: tuple[int, int, Layout] | None = None
        #: Weights of the embedding by bytes of a patch, filled up to what products take.
        self._embeddings = {
            weight.shape[1]: (F.pad(weight, (0, -weight.shape[1] % ALIGNED)), bias)
            for weight, bias in ((encoder.still_weight, encoder.still_bias),
                                 (encoder.pair_weight, encoder.pair_bias))}
        angles = torch.arange(POSITIONS)[:, None].float() * inverse_frequencies(
            cfg.head_dim // 2, cfg.theta)
        self._turns = torch.stack((angles.cos(), angles.sin()), -1).contiguous().to(encoder.device)
        self._rows = 0
        self._tiles = 0

    @classmethod
    def make(cls, encoder: VisionEncoder) -> CudaEncoder | None:
        """Return the fused form, or ``None`` with one line in the log that says why not."""
        if encoder.device.type != 'cuda':
            return None
        fault = cls.fault(encoder)
        if fault:
            LOG.warning('the encoder runs in plain torch: %s', fault)
            return None
        if optional('qwen_vl_encoder', 'an encoder in plain torch') is None:
            return None
        try:
            return cls(encoder)
        except KernelError as error:
            LOG.warning('the encoder runs in plain torch: %s', error)
            return None

    @staticmethod
    def fault(encoder: VisionEncoder) -> str:
        """Return what the kernels do not cover, '' when nothing."""
        cfg = encoder.config
        if encoder.dtype not in DTYPES:
            return f'{encoder.dtype} has no kernels'
        if cfg.head_dim not in native.HEAD_DIMS or cfg.heads % 4 or cfg.width % 8 or (
                cfg.mlp_width % 8 or cfg.width > native.NORM_WIDTH or cfg.out_width % 8):
            return (f'heads of {cfg.head_dim}, width {cfg.width} and {cfg.mlp_width} have no '
                    'kernels')
        if cfg.merge != 2:
            return f'units of {cfg.merge} have no kernels'
        if torch.cuda.get_device_capability(encoder.device) < (8, 0):
            return 'the GPU is older than Ampere'
        return ''

    def fits(self, grid: tuple[int, int, int]) -> bool:
        """Tell whether a grid's places are covered by the table of rotations."""
        return max(grid[1:]) <= POSITIONS

    def run(self, x: Tensor, grid: tuple[int, int, int], units: Tensor | None) -> Tensor:
        """
        Run blocks and merger.

        :param x: embeddings of the kept units [4 * kept, width], in the order of ``units``. Or
            bytes of all patches, uint8 [t * h * w, 588 or 1176]: the kept ones are embedded here.
        :param grid: (t, h, w) in patches.
        :param units: int64 [kept], ascending, on whatever device; ``None`` keeps all.
        :return: [kept, out_width].
        """
        with self._taken.take():
            layout = self._layouts.of(grid, units)
            rows, tiles = bucket(layout.count), _bucket_tiles(layout.tiles.shape[0])
            patch = x.shape[1] if x.dtype == torch.uint8 else 0
            try:
                self._reserve(rows, tiles)
                self.graphs.run(
                    (rows, tiles, patch), lambda: self._fill(x, layout, rows, tiles),
                    lambda: self._body(rows, tiles, patch), lambda: self.tune(rows, tiles, patch))
            except Exception:
                self.release()
                raise
            return self._merged[:layout.count // 4].clone()

    def release(self) -> None:
        """Give buffers and graphs back; the next pass makes them again, by the same choices."""
        self.graphs.clear()
        self._rows = self._tiles = 0
        self._filled = None
        for name in ('_bytes', '_x', '_y', '_wide', '_merged', '_spots', '_tile_list', '_codes',
                     '_scales'):
            self.__dict__.pop(name, None)

    def reweighted(self) -> None:
        """Forget what held for other weights; to be called when blocks were replaced."""
        self.release()
        self.activated.clear()
        self.rotated.clear()

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of buffers, cuBLASLt's workspace aside."""
        return sum(v.nbytes for v in self.__dict__.values() if isinstance(v, Tensor))

    def _reserve(self, rows: int, tiles: int) -> None:
        """Make room for a pass; larger buffers are other buffers, which no graph knows."""
        if rows <= self._rows and tiles <= self._tiles:
            return
        rows, tiles = max(rows, self._rows), max(tiles, self._tiles)
        self.release()
        enc, cfg = self.encoder, self.encoder.config

        def make(*shape: int, dtype: torch.dtype = enc.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=enc.device)

        self._bytes = make(rows * max(self._embeddings), dtype=torch.uint8)
        self._x, self._y = make(rows, cfg.width), make(rows, cfg.width)
        # Centred bytes, queries with keys and values, and the MLP's inside share a buffer: each is
        # done with when the next is written.
        self._wide = make(rows * max(3 * cfg.width, cfg.mlp_width, *(
            weight.shape[1] for weight, _ in self._embeddings.values())))
        self._merged = make(rows // 4, cfg.out_width)
        self._spots = make(rows, 2, dtype=torch.int32)
        self._tile_list = make(tiles, 4, dtype=torch.int32)
        if isinstance(enc.blocks[0].qkv, Int8Linear):
            self._codes = make(rows * max(cfg.width, cfg.mlp_width), dtype=torch.int8)
            self._scales = make(rows, dtype=torch.float32)
        self._rows, self._tiles = rows, tiles

    def _fill(self, x: Tensor, layout: Layout, rows: int, tiles: int) -> None:
        n, t = layout.count, layout.tiles.shape[0]
        if x.dtype == torch.uint8:
            kept = self._bytes[:n * x.shape[1]]
            if layout.units is None:
                kept.copy_(x.reshape(-1))
            else:
                torch.index_select(x.reshape(-1, 4 * x.shape[1]), 0, layout.units,
                                   out=kept.view(-1, 4 * x.shape[1]))
        else:
            self._x[:n].copy_(x)
            if rows > n:
                self._x[n:rows].zero_()
        if self._filled == (rows, tiles, layout):
            return
        self._spots[:n].copy_(layout.spots)
        self._tile_list[:t].copy_(layout.tiles)
        if rows > n:
            self._spots[n:rows].zero_()
        if tiles > t:
            self._tile_list[t:tiles].zero_()
        self._filled = rows, tiles, layout

    def _body(self, rows: int, tiles: int, patch: int) -> None:
        """Launch everything; ``patch`` is the bytes of one, 0 where embeddings are there."""
        enc, cfg, k = self.encoder, self.encoder.config, self.kernels
        x, y = self._x[:rows], self._y[:rows]
        if patch:
            weight, bias = self._embeddings[patch]
            centred = self._wide[:rows * weight.shape[1]].view(rows, -1)
            k.centre(self._bytes[:rows * patch].view(rows, patch), centred)
            self.products.multiply(centred, weight, bias, x)
        for block in enc.blocks:
            self._attention(block, x, y, rows, tiles)
            self._mlp(block, x, y, rows)
        k.norm(x, *enc.merge_norm, EPS, y)
        units = y.view(rows // 4, 4 * cfg.width)
        hidden = self._wide[:rows * cfg.width].view(rows // 4, 4 * cfg.width)
        self._multiply(units, enc.merge_fc1, hidden)
        k.activate(hidden, 'gelu', hidden)
        self._multiply(hidden, enc.merge_fc2, self._merged[:rows // 4])

    def _attention(self, block: VisionBlock, x: Tensor, y: Tensor, rows: int, tiles: int) -> None:
        cfg, k = self.encoder.config, self.kernels
        qkv = self._wide[:rows * 3 * cfg.width].view(rows, 3 * cfg.width)
        if self.rotated.get(rows):
            k.norm(x, *block.norm1, EPS, y)
            k.multiply_rotated(y, block.qkv.weight, block.qkv.bias, self._spots, self._turns, qkv)
        else:
            self._normed(x, block.norm1, block.qkv, y, qkv)
            k.rotate_grid(qkv, cfg.heads, self._spots, self._turns)
        k.attend_segments(qkv, cfg.heads, self._tile_list[:tiles], y,
                          self.forms.get((rows, tiles), 'mma'))
        self._multiply(y, block.proj, x, x)

    def _mlp(self, block: VisionBlock, x: Tensor, y: Tensor, rows: int) -> None:
        cfg, k = self.encoder.config, self.kernels
        hidden = self._wide[:rows * cfg.mlp_width].view(rows, cfg.mlp_width)
        if self.activated.get(rows):
            k.norm(x, *block.norm2, EPS, y)
            k.multiply_activated(y, block.fc1.weight, block.fc1.bias, cfg.activation, hidden)
            self._multiply(hidden, block.fc2, x, x)
            return
        self._normed(x, block.norm2, block.fc1, y, hidden)
        if isinstance(block.fc2, Int8Linear):
            codes = self._codes[:hidden.numel()].view(hidden.shape)
            scales = self._scales[:rows]
            k.activate_s8(hidden, cfg.activation, codes, scales)
            k.multiply_s8(codes, scales, block.fc2.codes, block.fc2.scales, block.fc2.bias, x, x)
        else:
            k.activate(hidden, cfg.activation, hidden)
            self._multiply(hidden, block.fc2, x, x)

    def _normed(self, x: Tensor, norm: tuple[Tensor, Tensor], linear: Linear, y: Tensor,
                out: Tensor) -> None:
        """Write linear(norm(x)); y is for what lies between."""
        if isinstance(linear, Int8Linear):
            codes = self._codes[:x.numel()].view(x.shape)
            scales = self._scales[:x.shape[0]]
            self.kernels.norm_s8(x, *norm, EPS, codes, scales)
            self.kernels.multiply_s8(codes, scales, linear.codes, linear.scales, linear.bias, out)
        else:
            self.kernels.norm(x, *norm, EPS, y)
            self._multiply(y, linear, out)

    def _multiply(self, x: Tensor, linear: Linear, out: Tensor, add: Tensor | None = None) -> None:
        self.products.multiply(x, linear.weight, linear.bias, out, add)

    def tune(self, rows: int, tiles: int, patch: int) -> None:
        """Choose kernels for a bucket by timing, where that has not been done before."""
        enc = self.encoder
        if (rows, tiles) not in self.forms:
            self.forms[rows, tiles] = self._fastest_form(rows, tiles)

        def each(name: str, add: bool) -> None:
            linears: Sequence[Linear] = [getattr(block, name) for block in enc.blocks]
            if not isinstance(linears[0], Int8Linear):
                self.products.tune(rows, [m.weight for m in linears], [m.bias for m in linears],
                                   add)

        for name, add in (('qkv', False), ('proj', True), ('fc1', False), ('fc2', True)):
            each(name, add)
        if patch:
            weight, bias = self._embeddings[patch]
            self.products.tune(rows, [weight], [bias])
        for linear in (enc.merge_fc1, enc.merge_fc2):
            self.products.tune(rows // 4, [linear.weight], [linear.bias])
        if rows not in self.activated:
            # Together: memory may run out in between, and half a choice would be kept.
            self.activated[rows], self.rotated[rows] = (
                self._activated_pays(rows), self._rotated_pays(rows))

    def _fastest_form(self, rows: int, tiles: int) -> str:
        """Return the form of attention that is fastest on the segments that were filled in."""
        cfg, k = self.encoder.config, self.kernels
        qkv = self._wide[:rows * 3 * cfg.width].normal_().view(rows, 3 * cfg.width)
        places, out = self._tile_list[:tiles], self._y[:rows]

        def attend(form: str) -> Tensor:
            out.zero_()  # rows of no segment are not written
            return k.attend_segments(qkv, cfg.heads, places, out, form)

        def took(form: str) -> float:
            return queued_time(lambda _: k.attend_segments(qkv, cfg.heads, places, out, form))

        forms = [form for form in native.FORMS
                 if form == 'mma' or (cfg.head_dim == 80 and k.has(form))]
        return min(trusted(attend, forms), key=took)

    def _activated_pays(self, rows: int) -> bool:
        """Tell whether fc1 with its activation is faster as one kernel than as two, by timing."""
        enc, cfg, k = self.encoder, self.encoder.config, self.kernels
        if not self._one_kernel(enc.blocks[0].fc1) or cfg.activation != 'quick_gelu':
            return False
        y = torch.randn(rows, cfg.width, dtype=enc.dtype, device=enc.device)
        hidden = torch.empty(rows, cfg.mlp_width, dtype=enc.dtype, device=enc.device)

        def apart(i: int) -> None:
            self._multiply(y, enc.blocks[i % cfg.depth].fc1, hidden)
            k.activate(hidden, cfg.activation, hidden)

        def together(i: int) -> None:
            fc1 = enc.blocks[i % cfg.depth].fc1
            k.multiply_activated(y, fc1.weight, fc1.bias, cfg.activation, hidden)

        return queued_time(together) < queued_time(apart)

    def _rotated_pays(self, rows: int) -> bool:
        """Tell whether QKV with the rotation is faster as one kernel than as two, by timing."""
        enc, cfg, k = self.encoder, self.encoder.config, self.kernels
        if not self._one_kernel(enc.blocks[0].qkv) or cfg.head_dim != native.ROTATED_HEAD_DIM:
            return False
        y = torch.randn(rows, cfg.width, dtype=enc.dtype, device=enc.device)
        qkv = torch.empty(rows, 3 * cfg.width, dtype=enc.dtype, device=enc.device)

        def apart(i: int) -> None:
            self._multiply(y, enc.blocks[i % cfg.depth].qkv, qkv)
            k.rotate_grid(qkv, cfg.heads, self._spots, self._turns)

        def together(i: int) -> None:
            linear = enc.blocks[i % cfg.depth].qkv
            k.multiply_rotated(y, linear.weight, linear.bias, self._spots, self._turns, qkv)

        return queued_time(together) < queued_time(apart)

    def _one_kernel(self, linear: Linear) -> bool:
        """Tell whether products with more than a bias in their epilogue exist for a layer."""
        return self.kernels.has('wgmma') and self.encoder.config.width % 64 == 0 and (
            not isinstance(linear, Int8Linear))


def trusted(attend: Callable[[str], Tensor], forms: Sequence[str]) -> list[str]:
    """
    Return the first form, and of the others those that give, time after time, what it gives.

    :param attend: runs a form on the same numbers every time; what it returns may be overwritten.
    """
    kept, expected = [forms[0]], attend(forms[0]).float()
    for form in forms[1:]:
        first = attend(form).clone()
        apart = (first.float() - expected).norm() / expected.norm()
        if apart <= FORM_ERROR and all(
                torch.equal(attend(form), first) for _ in range(FORM_RUNS)):
            kept.append(form)
        else:
            LOG.warning('attention %s is not used: it differs from %s, or from run to run', form,
                        forms[0])
    return kept


EPS = 1e-6

#: By what share forms of attention may differ (16-bit ones do by 0.003), and how often one is run.
FORM_ERROR, FORM_RUNS = 0.02, 8

#: Inputs of a product are a multiple of this.
ALIGNED = 8


def bucket(count: int) -> int:
    """Return the rows that ``count`` patches are filled up to; large products take 128 at once."""
    step = 64 if count <= 2048 else 128
    return -(-count // step) * step


def _bucket_tiles(count: int) -> int:
    return -(-count // 4) * 4
