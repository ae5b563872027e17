"""
INT8 encoder: weights with a scale an output channel, activations with a scale a patch.

QKV, fc1 and fc2 of every block multiply in INT8; the norm and the activation before them write
INT8 themselves. The attention's projection (a tenth of the arithmetic) and the merger stay as they
are. Approximate. Patches with single large channels suffer most, which depends on the checkpoint:
a gate holds the quantised encoder against the other one at load and keeps the better.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.quant_linear import Int8Linear
from qwen_vl_ros.kernels.encoder import ACTIVATION_WIDTH, DEPTH

if TYPE_CHECKING:
    from qwen_vl_ros.engine.vision import VisionEncoder

LOG = logging.getLogger('qwen_vl_ros.engine')

#: What can be asked for.
KINDS = ('none', 'int8')

#: Least cosine between merged tokens with and without: of their mean, and of the worst token.
MEAN_COSINE, WORST_COSINE = 0.999, 0.98

#: Patches of the gate's picture: 448 x 448 pixels.
GATE_GRID = (1, 32, 32)


@dataclass(frozen=True)
class Outcome:
    """
    What became of a wish.

    :param name: 'int8' or 'none'.
    :param mean_cosine: of merged tokens with and without; NaN where nothing was compared.
    :param worst_cosine: of the token that suffered most.
    :param note: one sentence.
    """

    name: str
    mean_cosine: float = float('nan')
    worst_cosine: float = float('nan')
    note: str = ''


@torch.inference_mode()
def quantize_vision(encoder: VisionEncoder, kind: str, gate: bool = True) -> Outcome:
    """
    Quantise an encoder in place, if that is possible and good enough; the log says what happened.

    :param kind: one of :data:`KINDS`.
    :param gate: refuse where merged tokens change too much; ``False`` measures only.
    :raises EngineError: BAD_REQUEST for another kind.
    """
    if kind not in KINDS:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f"quantization '{kind}' of the encoder is not one of {', '.join(KINDS)}")
    if kind == 'none':
        return Outcome('none')
    fused, cfg = encoder.fused, encoder.config
    if fused is None or cfg.width % DEPTH or cfg.mlp_width % DEPTH or (
            cfg.mlp_width > ACTIVATION_WIDTH):
        return _stay('no INT8 kernels for this device or shape')
    picture = gate_picture().to(encoder.device)
    before = encoder.encode(picture, GATE_GRID)
    plain = encoder.blocks
    encoder.blocks = [
        replace(b, qkv=Int8Linear.of(b.qkv), fc1=Int8Linear.of(b.fc1), fc2=Int8Linear.of(b.fc2))
        for b in plain]
    fused.reweighted()
    cosines = F.cosine_similarity(encoder.encode(picture, GATE_GRID).float(), before.float())
    mean, worst = cosines.mean().item(), cosines.min().item()
    note = f'cosine of merged tokens {mean:.5f} in the mean, {worst:.5f} at worst'
    # NaN fails as well.
    if gate and not (mean >= MEAN_COSINE and worst >= WORST_COSINE):
        encoder.blocks = plain
        fused.reweighted()
        return _stay(f'{note}; {MEAN_COSINE} and {WORST_COSINE} are needed')
    LOG.info('the encoder runs in INT8: %s', note)
    return Outcome('int8', mean, worst, note)


def gate_picture() -> Tensor:
    """Return patches of a picture with edges, areas and noise, uint8 [1024, 588]."""
    rng = np.random.default_rng(0)
    _, h, w = GATE_GRID
    coarse = rng.integers(0, 236, (h // 4, w // 4, 3))
    rgb = np.kron(coarse, np.ones((56, 56, 1), np.int64))
    rgb += rng.integers(0, 20, rgb.shape)
    parts = rgb.astype(np.uint8).reshape(h // 2, 2, 14, w // 2, 2, 14, 3)
    return torch.from_numpy(np.ascontiguousarray(
        parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 588)))


def _stay(why: str) -> Outcome:
    LOG.warning('the encoder stays in floats: %s', why)
    return Outcome('none', note=why)
