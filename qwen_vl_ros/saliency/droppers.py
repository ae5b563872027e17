"""
Other ways to drop tokens, after the merger: for comparison, and where the encoder is cheap.

They see what the encoder made of all units, so the encoder's work is not saved; on a 2B model that
is two thirds of the arithmetic, on a 7B a third.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def divprune(merged: Tensor, count: int) -> np.ndarray:
    """
    Keep tokens that are as unlike one another as possible (DivPrune, arXiv 2503.02175).

    Greedy max-min: the next token is the one whose nearest kept token is farthest by cosine.

    :param merged: merged tokens [n, width].
    :param count: tokens to keep, 1 to n.
    :return: bool [n].
    """
    distance = 1 - _cosine(merged, merged)
    distance.fill_diagonal_(torch.inf)
    # The first token is the one farthest from its own nearest.
    first = int(distance.min(1).values.argmax())
    distance.fill_diagonal_(0)
    keep = np.zeros(len(merged), bool)
    keep[first] = True
    nearest = distance[first].clone()
    for _ in range(count - 1):
        nearest[torch.from_numpy(keep)] = -1
        index = int(nearest.argmax())
        keep[index] = True
        nearest = torch.minimum(nearest, distance[index])
    return keep


def dart(merged: Tensor, count: int, pivots: int = 8) -> np.ndarray:
    """
    Drop duplicates of a few pivots (DART, arXiv 2502.11494).

    Pivots are the tokens of largest norm; of the others those are kept that resemble no pivot.

    :param merged: tokens at the input of the layer where they are dropped [n, width].
    :param count: tokens to keep, 1 to n.
    :return: bool [n].
    """
    pivots = min(pivots, count)
    chosen = merged.float().norm(dim=-1).topk(pivots).indices
    alike = _cosine(merged, merged[chosen]).max(1).values
    alike[chosen] = -torch.inf
    keep = np.zeros(len(merged), bool)
    keep[alike.topk(count, largest=False).indices.cpu().numpy()] = True
    return keep


def fastv(scores: Tensor, count: int) -> np.ndarray:
    """
    Keep the tokens that the last prompt token attends to most (FastV, arXiv 2403.06764).

    :param scores: attention from the last token to each visual token, mean of heads, [n]; computed
        on the side for that one row (:func:`last_row_attention`).
    :param count: tokens to keep.
    :return: bool [n].
    """
    keep = np.zeros(len(scores), bool)
    keep[scores.topk(count).indices.cpu().numpy()] = True
    return keep


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
    return a @ b.T
