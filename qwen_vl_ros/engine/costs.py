"""
Bytes and FLOPs of each stage, computed from shapes (a multiply-add counts two).

The engine writes them into timelines and :mod:`qwen_vl_ros.measure.roofline` holds them against a
device: both count with these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from qwen_vl_ros.engine.config import LanguageConfig, VisionConfig


class Cost(TypedDict):
    """Keywords of :meth:`qwen_vl_ros.measure.timeline.Timeline.stage`."""

    bytes_read: int
    bytes_written: int
    flops: int


def linear_flops(rows: int, *matrices: tuple[int, int]) -> int:
    """FLOPs of ``rows`` vectors times matrices of (inputs, outputs)."""
    return 2 * rows * sum(inputs * outputs for inputs, outputs in matrices)


def attention_flops(pairs: int, width: int) -> int:
    """FLOPs of scores and weighted sum for so many (query, key) pairs, all heads together."""
    return 4 * pairs * width


def causal_pairs(new: int, past: int) -> int:
    """Return the (query, key) pairs of ``new`` positions after ``past`` cached ones."""
    return new * past + new * (new + 1) // 2


def encode_cost(
    config: VisionConfig, features: int, segments: Sequence[int], weight_bytes: int, size: int,
) -> Cost:
    """
    Cost of the encoder.

    :param features: bytes of a patch, 588 or 1176.
    :param segments: kept patches of each temporal slice.
    :param weight_bytes: read once.
    :param size: bytes of an element.
    """
    n = sum(segments)
    c, m = config.width, config.mlp_width
    unit = config.merge ** 2
    merged = unit * c
    block = linear_flops(n, *[(c, c)] * 4, (c, m), (m, c)) + sum(
        attention_flops(s * s, c) for s in segments)
    merge = linear_flops(n // unit, (merged, merged), (merged, config.out_width))
    flops = linear_flops(n, (features, c)) + config.depth * block + merge
    return Cost(bytes_read=weight_bytes + n * features, flops=flops,
                bytes_written=n // unit * config.out_width * size)


def projection_cost(config: VisionConfig, features: int, patches: int, size: int,
                    feature_size: int = 1) -> Cost:
    """
    Cost of the patch embedding alone, which :func:`encode_cost` counts too.

    :param features: values of a patch, 588 (both frames folded) or 1176.
    :param size: bytes of a weight and of an output.
    :param feature_size: bytes of an input value: 1 for uint8, 4 for float32.
    """
    c = config.width
    return Cost(flops=linear_flops(patches, (features, c)), bytes_written=patches * c * size,
                bytes_read=patches * features * feature_size + features * c * size)


def decoder_cost(
    config: LanguageConfig, new: int, past: int, heads_rows: int, weight_bytes: int, size: int,
    head_bytes: int | None = None,
) -> Cost:
    """
    Cost of a pass of the decoder: a prefill chunk, or with ``new`` 1 a decode step.

    :param new: positions computed.
    :param past: positions read from the cache.
    :param heads_rows: positions whose logits are computed.
    :param weight_bytes: of all layers and the output matrix.
    :param size: bytes of an element.
    :param head_bytes: of the output matrix where its elements have another size.
    """
    c, m, kv = config.width, config.mlp_width, config.kv_heads * config.head_dim
    layer = linear_flops(new, (c, c), (c, c), (c, kv), (c, kv), *[(c, m)] * 3) + attention_flops(
        causal_pairs(new, past), c)
    head = linear_flops(heads_rows, (c, config.vocab))
    row = 2 * config.layers * kv * size
    read = weight_bytes + new * c * size + past * row
    if not heads_rows:
        read -= c * config.vocab * size if head_bytes is None else head_bytes
    return Cost(bytes_read=read, bytes_written=new * row, flops=config.layers * layer + head)


def vision_weights(config: VisionConfig, features: int) -> int:
    """Return the weights of the encoder: patch embedding, blocks, merger, norms and biases."""
    c, m, merged = config.width, config.mlp_width, config.merge ** 2 * config.width
    block = 4 * c * c + 4 * c + 2 * c * m + m + c + 4 * c
    merger = merged * merged + merged + merged * config.out_width + config.out_width + 2 * c
    return features * c + config.depth * block + merger


def language_weights(config: LanguageConfig) -> tuple[int, int]:
    """Return the weights of the layers (norms and biases included) and of the output matrix."""
    c, m, kv = config.width, config.mlp_width, config.kv_heads * config.head_dim
    layer = 2 * c * c + c + 2 * (c * kv + kv) + 3 * c * m + 2 * c
    return config.layers * layer + c, c * config.vocab
