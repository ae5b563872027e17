"""
Attention entropy of the encoder: which units look at little, and so carry something of their own.

It is an output of the encoder, so it can only serve the *next* frame: taken from the previous one,
moved by the shift that was seen (:func:`saliency.motion.shift_of`). One row a unit is computed on
the side from the block's own queries and keys; the encoder's fused attention stays as it is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def row_entropy(q: Tensor, k: Tensor) -> Tensor:
    """
    Return the entropy of attention rows, in nats, mean of heads.

    :param q: rotated queries of the rows [heads, r, head_dim].
    :param k: rotated keys of the segment [heads, n, head_dim].
    :return: float32 [r], 0 (one key) to log n (all alike).
    """
    scores = (q.float() @ k.float().transpose(1, 2)) / q.shape[-1] ** 0.5
    logp = scores.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).mean(0)


class EntropyProbe:
    """
    Collects a focus map while a picture is encoded; pass it as ``probe`` to the encoder.

    Focus is log n minus the entropy: 0 where a unit looks at everything alike. Units that were
    dropped from the frame get the mean focus: nothing is known about them.

    :param block: whose attention is read; the middle of the encoder by default.
    :param depth: blocks of the encoder.
    """

    def __init__(self, depth: int, block: int | None = None) -> None:
        self.block = depth // 2 if block is None else block
        if not 0 <= self.block < depth:
            raise ValueError(f'block {self.block} is not one of the encoder\'s {depth}')
        self._focus: Tensor | None = None

    def __call__(self, index: int, segments: list[int], q: Tensor, k: Tensor) -> None:
        """Read one row a unit (its first patch) of the chosen block; the encoder calls this."""
        if index != self.block:
            return
        parts, start = [], 0
        for length in segments:
            rows = q[:, start:start + length:4]
            keys = k[:, start:start + length]
            parts.append(np.log(length) - row_entropy(rows, keys))
            start += length
        self._focus = torch.cat(parts)

    def map(self, grid: tuple[int, int, int], units: np.ndarray | None = None) -> np.ndarray:
        """
        Return the focus of the picture that was encoded last.

        :param grid: (t, h, w) in patches.
        :param units: indices of the units that were kept; ``None`` is all.
        :return: float32 [t, h/2, w/2].
        :raises ValueError: nothing was encoded, or another number of units.
        """
        t, h, w = grid
        total = t * h * w // 4
        kept = np.arange(total) if units is None else np.sort(units)
        if self._focus is None or len(self._focus) != len(kept):
            found = None if self._focus is None else len(self._focus)
            raise ValueError(f'the probe holds {found} units; expected {len(kept)}')
        focus = self._focus.cpu().numpy()
        out = np.full(total, focus.mean(), np.float32)
        out[kept] = focus
        return out.reshape(t, h // 2, w // 2)
