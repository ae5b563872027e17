"""FLOPs of one question about one picture under each way to choose units, scoring included."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_vl_ros.engine.config import ModelConfig
from qwen_vl_ros.engine.costs import attention_flops, causal_pairs, decoder_cost, encode_cost
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS
from qwen_vl_ros.saliency.head import SaliencyHead

#: Operations a sample (seven by seven a unit, three channels) of the signals on the CPU: shrinking
#: sixteen pixels, two 3x3 Sobel filters, magnitude, medians.
SIGNAL_OPS = 80


def encoder(config: ModelConfig, kept: Sequence[int]) -> int:
    """Encoder over ``kept`` units of each slice."""
    features = 588 if len(kept) == 1 else 1176
    return encode_cost(config.vision, features, [4 * n for n in kept], 0, 2)['flops']


def prefill(config: ModelConfig, visual: int, text: int, first: int = 0) -> int:
    """Decoder from layer ``first`` on over so many tokens, and the first answer's logits."""
    whole = decoder_cost(config.language, visual + text, 0, 1, 0, 2)['flops']
    head = 2 * config.language.vocab * config.language.width
    layers = config.language.layers
    return (whole - head) * (layers - first) // layers + head


def backward(config: ModelConfig, visual: int, text: int, layers: int) -> int:
    """
    Gradient through the first ``layers`` decoder layers with respect to their input.

    Without gradients of weights a matrix product costs once more what it cost forward; attention
    with recomputed scores costs two and a half times as much.
    """
    n = visual + text
    forward = prefill(config, visual, text) - 2 * config.language.vocab * config.language.width
    attention = config.language.layers * attention_flops(
        causal_pairs(n, 0), config.language.width)
    return round((forward + 1.5 * attention) * layers / config.language.layers)


def signals(units: int) -> int:
    """Edges and contrast of one picture on the CPU."""
    return units * 49 * 3 * SIGNAL_OPS


def question(config: ModelConfig, head: SaliencyHead, method: str, kept: int, text: int) -> int:
    """
    One still and one question, answered up to its first token.

    :param kept: units that the decoder sees.
    :param text: tokens around the picture, the question's included.
    """
    layers = config.language.layers
    pruned = encoder(config, [kept]) + prefill(config, kept, text)
    whole = encoder(config, [UNITS])
    scoring = {
        'head': head.flops(GRID_H, GRID_W, text), 'window': head.flops(GRID_H, GRID_W, text),
        'roi': head.flops(GRID_H, GRID_W, text), 'gradient': signals(UNITS),
        'colour': signals(UNITS),
        'contrast': signals(UNITS), 'saliency': signals(UNITS), 'threshold': signals(UNITS),
        'motion': signals(UNITS),
        # One row of attention a unit, in one block.
        'entropy': 4 * UNITS * 4 * kept * config.vision.width,
        # Every second answer is reflected on.
        'next_frame': signals(UNITS) + backward(config, kept, text, layers) // 2,
        'next_head': (signals(UNITS) + head.flops(GRID_H, GRID_W, text)
                      + backward(config, kept, text, layers) // 2),
        'grad_cam': (whole + prefill(config, UNITS, text)
                     + backward(config, UNITS, text, layers))}
    if method == 'head_after':
        return whole + head.flops(GRID_H, GRID_W, text) + prefill(config, kept, text)
    if method in ('divprune', 'dart'):
        width = config.language.width
        pairs = UNITS * UNITS if method == 'divprune' else UNITS * 8
        return whole + 2 * pairs * width + prefill(config, kept, text)
    if method == 'fastv':
        early = prefill(config, UNITS, text) - prefill(config, UNITS, text, 2)
        return whole + early + prefill(config, kept, text, 2)
    if method == 'grad_cam_2':
        early = prefill(config, UNITS, text) - prefill(config, UNITS, text, 2)
        return (whole + early + backward(config, UNITS, text, 2) + prefill(config, kept, text))
    return pruned + scoring.get(method, 0)
