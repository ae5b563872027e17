"""
INT8 and INT4 weights of the decoder, made at load from a checkpoint in floats.

The encoder stays in the model's dtype. INT8 is symmetric per output channel; INT4 has groups of
128 inputs (64 or 32 where 128 does not divide) with a scale and an integer zero point each.
Approximate: answers can change; ``qwen_vl eval --quantization`` says how much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8Linear

#: Quantisations that can be asked for at load; the output matrix is INT8 in both.
KINDS = ('none', 'int8', 'int4')


@dataclass(frozen=True)
class Sizes:
    """Bytes of the decoder's matrices before and after."""

    before: int
    after: int


def quantize_language(language: LanguageModel, kind: str) -> Sizes:
    """
    Replace the decoder's matrices in place.

    The embedding stays as it is (one row a token is read of it); a tied output matrix gets a
    quantised copy of its own.

    :param kind: one of :data:`KINDS`.
    :raises EngineError: BAD_REQUEST for another kind, non-finite weights, or sizes that no group
        divides; the model is unchanged then.
    """
    if kind not in KINDS:
        raise EngineError(
            ErrorCode.BAD_REQUEST, f"quantization '{kind}' is not one of {', '.join(KINDS)}")
    before = language.weight_bytes
    if kind == 'none':
        return Sizes(before, before)
    if isinstance(language.layers[0].qkv, Int4Linear):
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f"the checkpoint's weights are quantised already; expected quantization 'none', "
            f"not '{kind}'")
    form = Int8Linear if kind == 'int8' else Int4Linear
    layers = []
    for index, layer in enumerate(language.layers):
        for name in ('qkv', 'out', 'gate_up', 'down'):
            if not torch.isfinite(getattr(layer, name).weight).all():
                raise EngineError(
                    ErrorCode.BAD_REQUEST,
                    f'layer {index} {name} holds values that are not finite; expected a sound '
                    f'checkpoint to quantise to {kind}')
        layers.append(replace(
            layer, qkv=form.of(layer.qkv), out=form.of(layer.out),
            gate_up=form.of(layer.gate_up), down=form.of(layer.down)))
    head = Int8Linear.of(language.head)
    language.layers, language.head = layers, head
    return Sizes(before, language.weight_bytes)
