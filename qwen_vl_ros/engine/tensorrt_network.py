"""
The encoder as a TensorRT network, by what TensorRT 10, 11 and TensorRT-RTX have in common.

Inputs of one temporal slice (slices never attend to each other)::

    embeddings  float16 [n, width]      of the kept units, in unit order; n is dynamic
    cos, sin    float32 [n, head_dim]   2-D rotation of each patch, see vision.rotary_tables
    merged      float16 [n / 4, out_width]

Networks are strongly typed: every tensor's type is written here. In INT8 the inputs of QKV, fc1
and fc2 are quantised with one scale a tensor (calibrated), weights with one an output channel.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.vision import EPS, VisionBlock, VisionEncoder

#: Counted up when the network changes: engines of another version are built again.
NETWORK_VERSION = 1

INPUTS = ('embeddings', 'cos', 'sin')
OUTPUT = 'merged'

#: Products that INT8 quantises; the attention's projection and the merger stay in float16.
QUANTISED = ('qkv', 'fc1', 'fc2')


@dataclass(frozen=True)
class Profile:
    """Patches of a slice that an engine is built for: least, usual and most; multiples of 4."""

    least: int
    usual: int
    most: int


@dataclass
class Builder:
    """
    Adds layers to a network.

    :param trt: the module ``tensorrt`` or ``tensorrt_rtx``.
    :param network: empty.
    :param scales: of activations by (block, name) for INT8; ``None`` is float16 throughout.
    """

    trt: Any
    network: Any
    scales: dict[tuple[int, str], float] | None = None
    #: What constants are made of must outlive the build.
    kept: list[np.ndarray] = field(default_factory=list)

    def constant(self, values: np.ndarray) -> Any:
        """Return a tensor of fixed values."""
        values = np.ascontiguousarray(values)
        self.kept.append(values)
        return self.network.add_constant(values.shape, self.trt.Weights(values)).get_output(0)

    def half(self, tensor: Tensor) -> Any:
        """Return a torch tensor's values in float16."""
        return self.constant(tensor.detach().half().cpu().numpy())

    def apply(self, a: Any, b: Any, operation: str) -> Any:
        """Return an element-wise operation of two tensors of one rank."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.network.add_elementwise(a, b, kind).get_output(0)

    def cast(self, x: Any, kind: str) -> Any:
        """Return a tensor in another type."""
        return self.network.add_cast(x, getattr(self.trt.DataType, kind)).get_output(0)

    def activate(self, x: Any, kind: str) -> Any:
        """Return an activation function of a tensor."""
        return self.network.add_activation(
            x, getattr(self.trt.ActivationType, kind)).get_output(0)

    def shuffle(self, x: Any, shape: Sequence[int], order: Sequence[int] = ()) -> Any:
        """Return a tensor reshaped, then transposed; -1 is inferred."""
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(shape)
        if order:
            layer.second_transpose = self.trt.Permutation(order)
        return layer.get_output(0)

    def columns(self, x: Any, first: int, count: int) -> Any:
        """Return columns of a [rows, columns] tensor whose rows are dynamic."""
        layer = self.network.add_gather(
            x, self.constant(np.arange(first, first + count, dtype=np.int32)), 1)
        return layer.get_output(0)

    def multiply(self, a: Any, b: Any, transposed: bool = False) -> Any:
        """Return a matrix product, the second matrix transposed or not."""
        op = self.trt.MatrixOperation
        return self.network.add_matrix_multiply(
            a, op.NONE, b, op.TRANSPOSE if transposed else op.NONE).get_output(0)

    def norm(self, x: Any, norm: tuple[Tensor, Tensor]) -> Any:
        """Return a layer norm over the columns."""
        weight, bias = (self.half(t.reshape(1, -1)) for t in norm)
        add = getattr(self.network, 'add_normalization_v2', None) or (
            self.network.add_normalization)
        layer = add(x, weight, bias, 1 << 1)
        layer.epsilon = EPS
        return layer.get_output(0)

    def linear(self, x: Any, linear: Linear, name: tuple[int, str] = (-1, '')) -> Any:
        """Return ``x @ weight.T + bias``, in INT8 where the activation has a scale."""
        scale = (self.scales or {}).get(name)
        if scale is None:
            y = self.multiply(x, self.half(linear.weight), True)
        else:
            y = self.multiply(self._quantised(x, scale), self._codes(linear.weight), True)
        return y if linear.bias is None else self.apply(
            y, self.half(linear.bias.reshape(1, -1)), 'SUM')

    def _quantised(self, x: Any, scale: float) -> Any:
        trt = self.trt
        by = self.constant(np.array(scale, np.float16))
        codes = self.network.add_quantize(x, by, trt.DataType.INT8).get_output(0)
        return self.network.add_dequantize(codes, by, trt.DataType.HALF).get_output(0)

    def _codes(self, weight: Tensor) -> Any:
        wide = weight.detach().float().cpu()
        scale = (wide.abs().amax(1) / 127).clamp_min(2.0 ** -20).half()
        codes = (wide / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        layer = self.network.add_dequantize(
            self.constant(codes.numpy()), self.constant(scale.numpy()), self.trt.DataType.HALF)
        layer.axis = 0
        return layer.get_output(0)

    def rotated(self, x: Any, cos: Any, sin: Any, heads: int, dim: int) -> Any:
        """
        Return rotated queries or keys.

        :param x: float16 [n, heads * dim].
        :param cos: float32 [1, n, dim]; sin alike.
        :return: float16 [heads, n, dim].
        """
        wide = self.cast(self.shuffle(x, (-1, heads, dim), (1, 0, 2)), 'FLOAT')
        # The other half of each pair, the lower one negative: a fixed permutation with signs.
        turn = np.zeros((1, dim, dim), np.float32)
        half = dim // 2
        turn[0, range(half, dim), range(half)] = -1
        turn[0, range(half), range(half, dim)] = 1
        other = self.multiply(wide, self.constant(turn))
        return self.cast(self.apply(self.apply(wide, cos, 'PROD'),
                                    self.apply(other, sin, 'PROD'), 'SUM'), 'HALF')


def fault(encoder: VisionEncoder) -> str:
    """Return why an encoder cannot be made into a network, '' when it can."""
    linears = [getattr(encoder.blocks[0], f.name) for f in fields(VisionBlock)]
    if any(isinstance(x, Linear) and type(x) is not Linear for x in linears):
        return 'its weights are quantised already'
    if encoder.config.activation != 'quick_gelu':
        return f"activation '{encoder.config.activation}' has no layer here"
    return ''


def add_encoder(builder: Builder, encoder: VisionEncoder) -> None:
    """Add inputs, blocks, merger and output of an encoder to the builder's network."""
    trt, network, cfg = builder.trt, builder.network, encoder.config
    x = network.add_input(INPUTS[0], trt.DataType.HALF, (-1, cfg.width))
    cos, sin = (builder.shuffle(
        network.add_input(name, trt.DataType.FLOAT, (-1, cfg.head_dim)), (1, -1, cfg.head_dim))
        for name in INPUTS[1:])
    for index, block in enumerate(encoder.blocks):
        x = _block(builder, encoder, index, block, x, cos, sin)
    unit = cfg.merge ** 2 * cfg.width
    y = builder.shuffle(builder.norm(x, encoder.merge_norm), (-1, unit))
    y = builder.activate(builder.linear(y, encoder.merge_fc1), 'GELU_ERF')
    y = builder.linear(y, encoder.merge_fc2)
    y.name = OUTPUT
    network.mark_output(y)


def _block(builder: Builder, encoder: VisionEncoder, index: int, block: VisionBlock, x: Any,
           cos: Any, sin: Any) -> Any:
    cfg = encoder.config
    heads, dim, width = cfg.heads, cfg.head_dim, cfg.width
    qkv = builder.linear(builder.norm(x, block.norm1), block.qkv, (index, 'qkv'))
    q = builder.rotated(builder.columns(qkv, 0, width), cos, sin, heads, dim)
    k = builder.rotated(builder.columns(qkv, width, width), cos, sin, heads, dim)
    v = builder.shuffle(builder.columns(qkv, 2 * width, width), (-1, heads, dim), (1, 0, 2))
    scale = builder.constant(np.full((1, 1, 1), dim ** -0.5, np.float16))
    # Scaled before the product: float16 scores stay in range.
    soft = builder.network.add_softmax(
        builder.multiply(builder.apply(q, scale, 'PROD'), k, True))
    soft.axes = 1 << 2
    mixed = builder.multiply(soft.get_output(0), v)
    flat = builder.network.add_shuffle(mixed)
    flat.first_transpose = builder.trt.Permutation((1, 0, 2))
    flat.reshape_dims = (-1, width)
    x = builder.apply(x, builder.linear(flat.get_output(0), block.proj), 'SUM')
    y = builder.linear(builder.norm(x, block.norm2), block.fc1, (index, 'fc1'))
    steep = builder.constant(np.full((1, 1), 1.702, np.float16))
    gate = builder.activate(builder.apply(y, steep, 'PROD'), 'SIGMOID')
    y = builder.linear(builder.apply(y, gate, 'PROD'), block.fc2, (index, 'fc2'))
    return builder.apply(x, y, 'SUM')


class _Watched(Linear):
    """A matrix that notes the largest input it has seen."""

    __slots__ = ('largest', 'name')

    def __init__(self, linear: Linear, name: tuple[int, str],
                 largest: dict[tuple[int, str], float]) -> None:
        super().__init__(linear.weight, linear.bias)
        self.name, self.largest = name, largest

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`Linear`."""
        seen = float(x.abs().amax())
        self.largest[self.name] = max(seen, self.largest.get(self.name, 0.0))
        return super().__call__(x, out)


@torch.inference_mode()
def calibrate(encoder: VisionEncoder, pictures: Sequence[tuple[Tensor, tuple[int, int, int]]],
              ) -> dict[tuple[int, str], float]:
    """
    Return the scales of INT8 activations: the largest input of each product over 127.

    :param pictures: uint8 patches with their grids, as for :meth:`VisionEncoder.encode`.
    """
    largest: dict[tuple[int, str], float] = {}
    watched = copy.copy(encoder)

    def watch(block: VisionBlock, index: int) -> VisionBlock:
        own: dict[str, Any] = {name: _Watched(getattr(block, name), (index, name), largest)
                               for name in QUANTISED}
        return replace(block, **own)

    watched.blocks = [watch(block, index) for index, block in enumerate(encoder.blocks)]
    for patches, grid in pictures:
        watched.encode_plain(encoder.embed(patches.to(encoder.device)), grid)
    return {name: max(value / 127, 2.0 ** -14) for name, value in largest.items()}


def calibration_pictures(patch_values: int = 588) -> list[tuple[Tensor, tuple[int, int, int]]]:
    """Return patches that are flat, smooth, coarse and noisy: what cameras show, in extremes."""
    rng = np.random.default_rng(0)
    grid = (1, 16, 16)
    count = grid[1] * grid[2]
    slope = np.linspace(0, 255, count * patch_values).reshape(count, patch_values)
    made = [np.zeros((count, patch_values)), np.full((count, patch_values), 255), slope,
            np.repeat(rng.integers(0, 256, (count, 3)), patch_values // 3, 1),
            rng.integers(0, 256, (count, patch_values)),
            rng.normal(110, 60, (count, patch_values)).clip(0, 255)]
    return [(torch.from_numpy(values.astype(np.uint8)), grid) for values in made]
