"""
Other ways to drop tokens, after the merger: for comparison, and where the encoder is cheap.

They see what the encoder made of all units, so the encoder's work is not saved; on a 2B model that
is two thirds of the arithmetic, on a 7B a third.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def divprune(merged: Tensor, count: int, always: Tensor | None = None
             ) -> np.ndarray | Tensor:
    """
    Keep tokens that are as unlike one another as possible (DivPrune, arXiv 2503.02175).

    Greedy max-min: the next token is the one whose nearest kept token is farthest by cosine.

    :param merged: merged tokens [n, width], or a batch [B, n, width].
    :param count: tokens to keep, 1 to n.
    :param always: bool [n] on the same device: kept first, at most ``count``; the others are then
        as unlike these.
    :return: bool [n] in numpy, or of a batch [B, n] on its device.
    """
    tokens = merged if merged.dim() == 3 else merged[None]
    distance = 1 - _cosine(tokens, tokens)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    # The first token is the one farthest from its own nearest.
    index = distance.min(2).values.argmax(1)
    distance.diagonal(dim1=1, dim2=2).fill_(0)
    rows = torch.arange(len(tokens), device=merged.device)
    keep = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=merged.device)
    nearest = torch.full_like(distance[:, 0], torch.inf)
    first = 0 if always is None else int(always.sum())
    if always is not None and first:
        keep |= always
        nearest = distance[:, always].amin(1)
    for number in range(first, count):
        if number:
            index = nearest.masked_fill(keep, -1).argmax(1)
        keep[rows, index] = True
        nearest = torch.minimum(nearest, distance[rows, index])
    return keep if merged.dim() == 3 else keep[0].cpu().numpy()


def dart(merged: Tensor, count: int, pivots: int = 8, always: Tensor | None = None
         ) -> np.ndarray | Tensor:
    """
    Drop duplicates of a few pivots (DART, arXiv 2502.11494).

    Pivots are the tokens of largest norm; of the others those are kept that resemble no pivot.

    :param merged: tokens at the input of the layer where they are dropped, [n, width] or a batch
        [B, n, width].
    :param count: tokens to keep, 1 to n.
    :param always: as for :func:`divprune`.
    :return: as :func:`divprune`.
    """
    tokens = merged if merged.dim() == 3 else merged[None]
    chosen = tokens.float().norm(dim=-1).topk(min(pivots, count)).indices
    width = tokens.shape[-1]
    alike = _cosine(tokens, tokens.gather(1, chosen[..., None].expand(-1, -1, width))).amax(2)
    alike.scatter_(1, chosen, -torch.inf)
    keep = _best(_first(-alike, always), count)
    return keep if merged.dim() == 3 else keep[0].cpu().numpy()


def fastv(scores: Tensor, count: int, always: Tensor | None = None) -> np.ndarray | Tensor:
    """
    Keep the tokens that the last prompt token attends to most (FastV, arXiv 2403.06764).

    :param scores: attention from the last token to each visual token, mean of heads, [n] or
        [B, n]; computed on the side for that one row (:func:`last_row_attention`).
    :param count: tokens to keep.
    :param always: as for :func:`divprune`.
    :return: as :func:`divprune`.
    """
    scores = _first(scores, always)
    if scores.dim() == 2:
        return _best(scores, count)
    return _best(scores[None], count)[0].cpu().numpy()


def _first(scores: Tensor, always: Tensor | None) -> Tensor:
    """Raise the tokens of ``always`` above all others; a pivot of DART stays below them."""
    if always is None:
        return scores
    largest = torch.finfo(scores.dtype).max
    return scores.clamp(max=largest).masked_fill(always, torch.inf)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` largest of each row; [B, n]."""
    keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return keep.scatter_(1, scores.topk(count, dim=1).indices, True)


def last_row_attention(q: Tensor, k: Tensor) -> Tensor:
    """
    Return the attention of one query to all keys, mean of heads, without any other row.

    :param q: rotated query of the last token [heads, head_dim].
    :param k: rotated keys [kv_heads, n, head_dim].
    :return: float32 [n].
    """
    group = q.shape[0] // k.shape[0]
    scores = torch.einsum('gjd,gnd->gjn', q.float().unflatten(0, (k.shape[0], group)), k.float())
    return (scores / q.shape[-1] ** 0.5).softmax(-1).flatten(0, 1).mean(0)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x.float() / x.float().norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in (a, b))
    return a @ b.transpose(-1, -2)
