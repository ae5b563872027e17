"""
Weights that others quantised: AWQ and GPTQ files as the Qwen team publishes them.

AWQ (``version`` gemm): qweight int32 [in, out / 8], the eight columns of a word in the order
0 2 4 6 1 3 5 7; qzeros int32 [groups, out / 8] alike; scales float16 [groups, out].
GPTQ: qweight int32 [in * bits / 32, out], inputs in order from the low bits up; qzeros int32
[groups, out * bits / 32] holding zero - 1 (format ``gptq``) or zero (``gptq_v2``); g_idx int32
[in], the group of each input. In both w = (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_vl_ros.engine.errors import CheckpointError
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8GroupLinear, pack_nibbles

#: Column that each nibble of an AWQ word holds, low nibble first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Ends of the names of :func:`is_gptq_bias`.
GPTQ_BIASES = tuple(f'{name}_proj.bias' for name in ('o', 'gate', 'up', 'down'))
#: Tensors of a quantised matrix that are integers.
INTEGERS = ('.qweight', '.qzeros', '.g_idx')


@dataclass(frozen=True)
class QuantFormat:
    """
    How the decoder's matrices are stored.

    :param method: awq or gptq.
    :param bits: 4 or 8.
    :param group: inputs that share a scale; 0 is all of a row.
    :param zero_offset: what is added to a stored zero point.
    """

    method: str
    bits: int
    group: int
    zero_offset: int

    @property
    def name(self) -> str:
        """Return for example 'awq-int4'."""
        return f'{self.method}-int{self.bits}'


def parse(raw: dict[str, Any] | None, path: Path) -> QuantFormat | None:
    """
    Read ``quantization_config``.

    :param raw: the object, or ``None`` for a checkpoint in floats.
    :param path: of the config, for messages.
    :raises CheckpointError: a method, width or layout that is not read here.
    """
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(
            f'{path}: quantization_config is {type(raw).__name__}; expected an object')
    method, bits, group = (raw.get(k) for k in ('quant_method', 'bits', 'group_size'))

    def refuse(what: str, expected: str) -> None:
        raise CheckpointError(
            f"{path}: quantised with '{method}' {what}; expected {expected}")

    if method not in ('awq', 'gptq'):
        refuse('is not read', 'awq, gptq, or float weights')
    if bits not in ((4,) if method == 'awq' else (4, 8)):
        refuse(f'to {bits} bits', '4 bits, or 8 with gptq')
    if not isinstance(group, int) or (group != -1 and group < 1):
        refuse(f'in groups of {group!r}', 'a positive number, or -1')
    if method == 'awq' and str(raw.get('version') or 'gemm').lower() != 'gemm':
        refuse(f"version '{raw['version']}'", "'gemm'")
    if method == 'awq' and raw.get('zero_point') is False:
        refuse('without zero points', 'zero_point true')
    layout = raw.get('checkpoint_format') or 'gptq'
    if method == 'gptq' and layout not in ('gptq', 'gptq_v2'):
        refuse(f"as checkpoint_format '{layout}'", 'gptq or gptq_v2')
    if raw.get('desc_act'):
        refuse('in the order of activations (desc_act)', 'inputs in their own order')
    offset = 1 if method == 'gptq' and layout == 'gptq' else 0
    return QuantFormat(str(method), int(bits), max(0, int(group)), offset)  # type: ignore[arg-type]


def is_gptq_bias(name: str) -> bool:
    """Tell whether AutoGPTQ may write a tensor although the model has none: zeros for a bias."""
    return name.startswith('language.layers.') and name.endswith(GPTQ_BIASES)


def shapes(base: str, rows: int, inputs: int, form: QuantFormat) -> dict[str, tuple[int, ...]]:
    """
    Return name and shape of the tensors that store one matrix [rows, inputs].

    :raises CheckpointError: groups or words do not divide the matrix.
    """
    group, per_word = form.group or inputs, 32 // form.bits
    if inputs % group or inputs % per_word or rows % per_word:
        raise CheckpointError(
            f'{base} is {rows}x{inputs}: groups of {group} and words of {per_word} codes do not '
            'divide it')
    out: dict[str, tuple[int, ...]] = {
        f'{base}.qzeros': (inputs // group, rows // per_word),
        f'{base}.scales': (inputs // group, rows)}
    if form.method == 'awq':
        out[f'{base}.qweight'] = (inputs, rows // per_word)
    else:
        out[f'{base}.qweight'] = (inputs // per_word, rows)
        out[f'{base}.g_idx'] = (inputs,)
    return out


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """
    Unpack the last axis: int32 [n, m] -> uint8 [n, m * 32 / bits].

    :param order: place within the word of each code, lowest bits first; ``None`` is in order.
    """
    count = 32 // bits
    shifts = torch.arange(count, device=words.device) * bits
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    if order is not None:
        codes = codes[..., torch.tensor(order, device=words.device).argsort()]
    return codes.flatten(-2).to(torch.uint8)


def convert(tensors: dict[str, Tensor], base: str, form: QuantFormat) -> Int4Linear:
    """
    Take one stored matrix out of ``tensors`` and lay it out as the kernels read it.

    :param base: canonical name without its last part.
    :raises CheckpointError: inputs that are not in the order of their groups.
    """
    words, zeros, scales = (tensors.pop(f'{base}.{k}') for k in ('qweight', 'qzeros', 'scales'))
    if form.method == 'awq':
        codes = unpack_words(words, 4, AWQ_ORDER).T.contiguous()
        zero = unpack_words(zeros, 4, AWQ_ORDER)
    else:
        codes = unpack_words(words.T.contiguous(), form.bits)
        zero = unpack_words(zeros, form.bits)
        index = tensors.pop(f'{base}.g_idx')
        group = form.group or codes.shape[1]
        if not torch.equal(index.cpu().long(), torch.arange(codes.shape[1]) // group):
            raise CheckpointError(
                f'{base}.g_idx is not in order (act-order); expected inputs in groups of {group} '
                'one after another')
    zero = zero.T.to(torch.int16) + form.zero_offset
    scale = scales.T.contiguous().half()
    if not bool(scale.isfinite().all()):
        raise CheckpointError(
            f'{base}.scales hold values beyond float16 (65504), in which they are kept; expected '
            'a sound checkpoint')
    if form.bits == 8:
        return Int8GroupLinear(codes, scale, zero.contiguous())
    return Int4Linear(pack_nibbles(codes), scale, zero.to(torch.uint8).contiguous())


def take_linear(tensors: dict[str, Tensor], bases: Sequence[str], form: QuantFormat | None,
                bias: bool = False) -> Linear:
    """
    Take matrices out of ``tensors`` and stack their rows into one.

    :param bases: canonical names without their last part; all read the same inputs.
    :param form: how they are stored; ``None`` is in floats.
    :param bias: they have one each.
    """
    stacked = torch.cat([tensors.pop(f'{b}.bias') for b in bases]) if bias else None
    if form is None:
        weights = [tensors.pop(f'{b}.weight') for b in bases]
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), stacked)
    parts = [convert(tensors, b, form) for b in bases]
    return type(parts[0])(
        torch.cat([p.packed for p in parts]), torch.cat([p.scales for p in parts]),
        torch.cat([p.zeros for p in parts]), stacked)
