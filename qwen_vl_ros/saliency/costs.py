"""
FLOPs and bytes of choosing units, computed from shapes (a multiply-add counts two).

The one place of these formulas: whoever chooses adds its work to the stage ``select``
(:func:`qwen_vl_ros.measure.timeline.spend`), and benchmarks count with them what they do in
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qwen_vl_ros.engine.config import LanguageConfig, VisionConfig
from qwen_vl_ros.engine.costs import (
    Cost,
    attention_flops,
    causal_pairs,
    decoder_cost,
    encode_cost,
    linear_flops,
)
from qwen_vl_ros.frame import Frame

if TYPE_CHECKING:
    from qwen_vl_ros.saliency.head import SaliencyHead

#: Samples of a unit that a signal on the host looks at: seven by seven, of three channels.
SAMPLES = 7 * 7 * 3
#: Operations a sample: shrinking sixteen pixels, two 3x3 filters or differences, magnitude,
#: medians. An upper bound: these signals are a ten-thousandth of a frame.
SIGNAL_OPS = 80


def signal(units: int, frame_bytes: int = 0) -> Cost:
    """
    Cost of one signal on the host: edges, contrast, or a difference to what was seen.

    :param units: of all slices.
    :param frame_bytes: of the frames that it looks at.
    """
    return Cost(flops=units * SAMPLES * SIGNAL_OPS, bytes_read=frame_bytes,
                bytes_written=4 * units)


def signal_of(frames: Sequence[Frame], rows: int, columns: int) -> Cost:
    """Return :func:`signal` of frames, one for each slice."""
    return signal(len(frames) * rows * columns, frame_bytes(frames))


def frame_bytes(frames: Iterable[Frame]) -> int:
    """Return the bytes of frames as their camera sent them."""
    return sum(frame.data.nbytes for frame in frames)


def head(net: SaliencyHead, slices: int, rows: int, columns: int, words: int,
         frame_bytes: int = 0) -> Cost:
    """
    Cost of the light head; its weights are read once.

    :param words: of the question; 0 where it is known.
    """
    flops = net.flops(rows, columns, words) + (slices - 1) * net.flops(rows, columns, 0)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    return Cost(flops=flops, bytes_read=frame_bytes + weights,
                bytes_written=4 * slices * rows * columns)


def gradient(config: LanguageConfig, tokens: int, layers: int, targets: int = 1,
             weight_bytes: int = 0, size: int = 2) -> Cost:
    """
    Cost of Grad-CAM on merged tokens: a pass of its own forward, and the way back to its input.

    Without gradients of weights a matrix product costs once more what it cost forward; attention
    with recomputed scores costs two and a half times as much.

    :param tokens: of the prompt as it was shown, with those of the answer.
    :param layers: decoder layers passed.
    :param targets: positions whose logits are in the target.
    :param weight_bytes: of the decoder; read forward and back.
    :param size: bytes of an element.
    """
    forward = decoder_cost(config, tokens, 0, 0, 0, size)['flops'] * layers // config.layers
    attention = layers * attention_flops(causal_pairs(tokens, 0), config.width)
    out = 2 * linear_flops(targets, (config.width, config.vocab))
    return Cost(flops=2 * forward + attention * 3 // 2 + out, bytes_read=2 * weight_bytes,
                bytes_written=2 * layers * tokens * config.width * size)


def entropy(config: VisionConfig, features: int, segments: Sequence[int], weight_bytes: int = 0,
            size: int = 2) -> Cost:
    """
    Cost of the encoder's focus: a pass of its own, and one row of attention a unit in one block.

    :param features: bytes of a patch, 588 or 1176.
    :param segments: kept patches of each temporal slice.
    """
    found = encode_cost(config, features, segments, weight_bytes, size)
    # Scores alone, no weighted sum.
    rows = sum(attention_flops(n // config.merge ** 2 * n, config.width) // 2 for n in segments)
    found['flops'] += rows
    return found


def divprune(tokens: int, width: int, count: int, size: int = 2) -> Cost:
    """Cost of all pairs' likeness, and a pass over their row for each token that is kept."""
    return Cost(flops=2 * tokens * tokens * width + 3 * count * tokens,
                bytes_read=tokens * width * size, bytes_written=4 * tokens * tokens)


def dart(tokens: int, width: int, pivots: int = 8, size: int = 2) -> Cost:
    """Cost of every token's norm and of its likeness to the pivots."""
    return Cost(flops=2 * tokens * (pivots + 1) * width, bytes_read=tokens * width * size,
                bytes_written=4 * tokens * pivots)


def fastv(config: LanguageConfig, tokens: int, layer: int, weight_bytes: int = 0,
          size: int = 2) -> Cost:
    """
    Cost of the last token's attention in a layer, reached by running those before it once more.

    :param tokens: of the whole prompt.
    :param layer: whose attention is read, from 0.
    :param weight_bytes: of the decoder.
    """
    c, kv = config.width, config.kv_heads * config.head_dim
    before = decoder_cost(config, tokens, 0, 0, 0, size)['flops'] * layer // config.layers
    queries = linear_flops(tokens, (c, c), (c, kv), (c, kv))
    return Cost(flops=before + queries + attention_flops(tokens, c) // 2,
                bytes_read=weight_bytes * (layer + 1) // config.layers,
                bytes_written=tokens * (c + 2 * kv) * size)
