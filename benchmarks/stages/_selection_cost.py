"""FLOPs of one question about one picture under each way to choose units, scoring included."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_vl_ros.engine.config import ModelConfig
from qwen_vl_ros.engine.costs import decoder_cost, encode_cost
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS
from qwen_vl_ros.saliency import costs
from qwen_vl_ros.saliency.head import SaliencyHead

#: Signals on the host of the methods that have some.
SIGNALS = {'gradient': 1, 'colour': 1, 'contrast': 1, 'saliency': 2, 'threshold': 1, 'motion': 1,
           'next_frame': 3, 'next_head': 1}
#: Methods that ask the light head.
ASK_HEAD = ('head', 'window', 'roi', 'next_head', 'head_after')


def encoder(config: ModelConfig, kept: Sequence[int]) -> int:
    """Encoder over ``kept`` units of each slice."""
    return encode_cost(config.vision, _features(kept), [4 * n for n in kept], 0, 2)['flops']


def prefill(config: ModelConfig, visual: int, text: int, first: int = 0) -> int:
    """Decoder from layer ``first`` on over so many tokens, and the first answer's logits."""
    whole = decoder_cost(config.language, visual + text, 0, 1, 0, 2)['flops']
    head = 2 * config.language.vocab * config.language.width
    layers = config.language.layers
    return (whole - head) * (layers - first) // layers + head


def gradient(config: ModelConfig, visual: int, text: int, layers: int = 0) -> int:
    """Grad-CAM of the first answer position through ``layers`` of the decoder (0: all)."""
    return costs.gradient(config.language, visual + text,
                          layers or config.language.layers)['flops']


def question(config: ModelConfig, head: SaliencyHead, method: str, kept: int, text: int) -> int:
    """
    One still and one question, answered up to its first token.

    :param kept: units that the decoder sees.
    :param text: tokens around the picture, the question's included.
    """
    return scoring(config, head, method, kept, text) + answering(config, method, kept, text)


def scoring(config: ModelConfig, head: SaliencyHead, method: str, kept: int, text: int) -> int:
    """
    What a method spends on choosing; :func:`question` has the parameters.

    A gradient for the next frame is taken after every second answer, the encoder's pass for its
    attention after every one: that is how these rows are measured.
    """
    spent = costs.signal(UNITS * SIGNALS.get(method, 0))['flops']
    if method in ASK_HEAD:
        spent += costs.head(head, 1, GRID_H, GRID_W, text)['flops']
    if method == 'entropy':
        spent += costs.entropy(config.vision, _features([kept]), [4 * kept])['flops']
    if method in ('next_frame', 'next_head'):
        spent += gradient(config, kept, text) // 2
    if method == 'grad_cam':
        spent += encoder(config, [UNITS]) + gradient(config, UNITS, text)
    if method == 'grad_cam_2':
        spent += gradient(config, UNITS, text, 2)
    if method == 'divprune':
        spent += costs.divprune(UNITS, config.language.width, kept)['flops']
    if method == 'dart':
        spent += costs.dart(UNITS, config.language.width)['flops']
    return spent


def answering(config: ModelConfig, method: str, kept: int, text: int) -> int:
    """What encoder and decoder do besides; FastV drops within its pass through the decoder."""
    if method == 'fastv':
        early = prefill(config, UNITS, text) - prefill(config, UNITS, text, 2)
        return encoder(config, [UNITS]) + early + prefill(config, kept, text, 2)
    after = method in ('head_after', 'divprune', 'dart', 'grad_cam_2')
    return encoder(config, [UNITS if after else kept]) + prefill(config, kept, text)


def _features(kept: Sequence[int]) -> int:
    """Return the bytes of a patch: both frames of a still are the same and folded into one."""
    return 588 if len(kept) == 1 else 1176
