"""Bytes and FLOPs of each stage, computed from shapes (a multiply-add counts two)."""

from __future__ import annotations

from typing import TypedDict

from qwen_vl_ros.engine.config import LanguageConfig, VisionConfig


class Cost(TypedDict):
    """Keywords of :meth:`qwen_vl_ros.measure.timeline.Timeline.stage`."""

    bytes_read: int
    bytes_written: int
    flops: int


def encode_cost(
    config: VisionConfig, features: int, segments: list[int], weight_bytes: int, size: int,
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
    block = 2 * n * (4 * c * c + 2 * c * m) + sum(4 * s * s * c for s in segments)
    merged = 4 * c
    merge = 2 * (n // 4) * (merged * merged + merged * config.out_width)
    flops = 2 * n * features * c + config.depth * block + merge
    return Cost(bytes_read=weight_bytes + n * features, flops=flops,
                bytes_written=n // 4 * config.out_width * size)


def decoder_cost(
    config: LanguageConfig, new: int, past: int, heads_rows: int, weight_bytes: int, size: int,
) -> Cost:
    """
    Cost of a pass of the decoder: a prefill chunk, or with ``new`` 1 a decode step.

    :param new: positions computed.
    :param past: positions read from the cache.
    :param heads_rows: positions whose logits are computed.
    :param weight_bytes: of all layers and the output matrix.
    :param size: bytes of an element.
    """
    c, m, kv = config.width, config.mlp_width, config.kv_heads * config.head_dim
    pairs = new * past + new * (new + 1) // 2
    layer = 2 * new * (2 * c * c + 2 * c * kv + 3 * c * m) + 4 * pairs * c
    head = 2 * heads_rows * c * config.vocab
    row = 2 * config.layers * kv * size
    read = weight_bytes + new * c * size + past * row
    if not heads_rows:
        read -= c * config.vocab * size
    return Cost(bytes_read=read, bytes_written=new * row, flops=config.layers * layer + head)
