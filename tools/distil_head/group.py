"""Items of one kind rendered together, as the head and the tiny checkpoint take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_vl_ros.roboscene.geometry import UNIT, UNITS
from qwen_vl_ros.saliency.head import SAMPLES, SaliencyHead, channels
from tools.distil_head.batched import CLOSED, Picture, TinyBatch
from tools.train_tiny.data import Batch, encode
from tools.train_tiny.step import render_batch

_SUFFIX = len(encode('<|im_end|>\n<|im_start|>assistant\n'))


@dataclass
class Group:
    """
    Items of one kind: stills or clips, one question each.

    :param rgb: uint8 [B * T, 336, 448, 3], all first slices before all second ones.
    :param samples: the head's input [B * T, 6, 84, 112].
    :param which: int64 [N], the picture (or clip) of each item.
    :param tokens: int64 [N, L]; ``labels`` alike.
    :param pictures: how many there were, where ``rgb`` has been let go.
    """

    slices: int
    rgb: Tensor
    samples: Tensor
    which: Tensor
    tokens: Tensor
    labels: Tensor
    pictures: int = 0

    def rows(self) -> Tensor:
        """Return [N, T], the rows of ``rgb`` of each item."""
        count = (self.pictures or self.rgb.shape[0]) // self.slices
        return self.which[:, None] + torch.arange(
            self.slices, device=self.which.device) * count


def samples_of(rgb: Tensor) -> Tensor:
    """Return RGB at seven samples a unit: uint8 [B, 28 r, 28 c, 3] -> [B, 3, 7 r, 7 c]."""
    return F.avg_pool2d(rgb.permute(0, 3, 1, 2).float(), UNIT // SAMPLES)


def groups(batch: Batch, device: torch.device, asked: int = 0) -> Iterator[Group]:
    """
    Render a batch and split it into stills and clips.

    :param asked: questions a picture, from the first on; 0 takes all.
    """
    rgb, _ = render_batch(batch, device)
    small = samples_of(rgb)
    stills = batch.tokens[0].shape[0]
    for kind in range(2):
        count = batch.tokens[kind].shape[0]
        if not count:
            continue
        part = slice(0, stills) if kind == 0 else slice(stills, None)
        if kind == 0:
            other = None
        else:
            first, second = small[part].chunk(2)
            other = torch.cat((second, first))
        most = asked or batch.tokens[kind].shape[1]
        tokens, labels = (torch.from_numpy(x[kind][:, :most]).to(device)
                          for x in (batch.tokens, batch.labels))
        which = torch.arange(count, device=device).repeat_interleave(tokens.shape[1])
        yield Group(kind + 1, rgb[part], channels(small[part], other), which,
                    tokens.flatten(0, 1), labels.flatten(0, 1))


def question_mask(labels: Tensor) -> Tensor:
    """Return bool [N, L]: the words of the question alone."""
    first = (labels >= 0).int().argmax(1, keepdim=True)
    return torch.arange(labels.shape[1], device=labels.device) <= first - _SUFFIX


def head_scores(head: SaliencyHead, embedding: Tensor, group: Group) -> Tensor:
    """Return the head's scores [N, T * 192] of all items."""
    words = head.words(F.embedding(group.tokens, embedding), question_mask(group.labels))
    rows = group.rows()
    n, t = rows.shape
    # One item's slices lie side by side.
    scores = head(group.samples[rows.flatten()].float(), words.repeat_interleave(t, 0))
    return scores.reshape(n, t * UNITS)


def encoded(model: TinyBatch, group: Group) -> tuple[Tensor, Tensor]:
    """Return merged tokens [N, T * 192, dim] and their unit indices of whole pictures."""
    merged = model.encode(group.rgb)[group.rows()].flatten(1, 2)
    units = torch.arange(merged.shape[1], device=model.device).expand(merged.shape[0], -1)
    return merged, units


def answer_kept(model: TinyBatch, group: Group, keep: Tensor) -> Tensor:
    """
    Return logits when only ``keep`` (int64 [N, K], ascending, over all slices) is shown.

    Slices of a clip may keep different counts: they are padded with closed gates.
    """
    rows = group.rows()
    if group.slices == 1:
        merged = model.encode(group.rgb[rows[:, 0]], keep)
        return model.answer([Picture(merged, keep)], group.tokens)
    parts, units, closed = [], [], []
    for s in range(group.slices):
        inside = keep // UNITS == s
        most = int(inside.sum(1).max())
        order = (~inside).int().sort(dim=1, stable=True).indices[:, :most]
        own = keep.gather(1, order)
        real = inside.gather(1, order)
        local = torch.where(real, own - s * UNITS, 0)
        gate = torch.where(real, 0.0, CLOSED)
        parts.append(model.encode(group.rgb[rows[:, s]], local, gate))
        units.append(local + s * UNITS)
        closed.append(gate)
    picture = Picture(torch.cat(parts, 1), torch.cat(units, 1), gate=torch.cat(closed, 1))
    return model.answer([picture], group.tokens)
