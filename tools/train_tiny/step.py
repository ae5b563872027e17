"""One training or evaluation step: pictures, block-masked questions, losses, exact match."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNIT, UNITS
from qwen_vl_ros.roboscene.render import render_cuda, render_packed
from tools.train_tiny.data import Batch, encode, prefix_ids
from tools.train_tiny.model import TinyQwen2VL


def render_batch(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return pictures uint8 [N, 336, 448, 3] and packed objects [N, 12, 24] on the device."""
    objects = torch.from_numpy(batch.objects)
    if device.type == 'cuda':
        objects = objects.to(device, non_blocking=True)
        env = torch.from_numpy(batch.env).to(device, non_blocking=True)
        return render_cuda(env, objects), objects
    return torch.from_numpy(render_packed(batch.env, batch.objects, threads=2)[0]), objects


def covered_units(objects: Tensor) -> Tensor:
    """Return bool [N, 192]: units that the bounding box of any thing touches."""
    u0, v0, u1, v1 = (objects[..., k, None] for k in range(19, 23))
    real = (objects[..., 4, None] > 0)  # a thing has height
    unit = torch.arange(UNITS, device=objects.device)
    left, top = (unit % GRID_W) * UNIT, (unit // GRID_W) * UNIT
    return (real & (u0 < left + UNIT) & (u1 > left) & (v0 < top + UNIT) & (v1 > top)).any(1)


def draw_keep(objects: Tensor, kept: int, generator: torch.Generator) -> Tensor:
    """
    Draw which units stay: at random, with a random pull towards the things.

    A third of the pictures is dropped uniformly; in the others units with a thing come first
    (weakly or surely), as a saliency selector would have it.

    :return: int64 [N, kept], ascending.
    """
    n, device = objects.shape[0], objects.device
    noise = torch.rand((n, UNITS), generator=generator, device=device)
    pull = torch.randint(0, 3, (n, 1), generator=generator, device=device) * 0.5
    score = noise + pull * covered_units(objects)
    return score.topk(kept, dim=1).indices.sort(dim=1).values


@dataclass
class Layout:
    """
    Positions and mask of one sequence form: prefix, picture, vision end, question blocks.

    :param mask: additive bf16/f32 [1, 1, S, S].
    :param text: positions of the prefix [P] and of what follows the picture [S - P - V].
    """

    mask: Tensor
    before: Tensor
    after: Tensor


def block_mask(prefix: int, blocks: int, length: int, total: int, device: torch.device) -> Tensor:
    """
    Build the mask in which every block sees the prefix and, causally, itself.

    ::

        prefix  x . . . .        :param prefix: tokens before the blocks (causal)
                x x . . .        :param total: sequence length; the rest after the
        block 0 x x x . .            blocks is padding that sees the prefix and itself
        block 1 x x . x .
                x x . x x

    :return: bool [total, total].
    """
    index = torch.arange(total, device=device)
    which = torch.where(index < prefix, -1, (index - prefix) // length)
    causal = index[:, None] >= index[None, :]
    return causal & ((which[None, :] == -1) | (which[:, None] == which[None, :]))


class Stepper:
    """Runs batches through a model; caches the sequence layouts."""

    def __init__(self, model: TinyQwen2VL, device: torch.device) -> None:
        self.model, self.device = model, device
        self.prefix = torch.tensor(prefix_ids(), device=device)
        self.close = torch.tensor(encode('<|vision_end|>'), device=device)
        self._layouts: dict[tuple[int, int, int], Layout] = {}

    def _layout(self, vision: int, blocks: int, length: int) -> Layout:
        key = (vision, blocks, length)
        if key not in self._layouts:
            p = len(self.prefix)
            head = p + vision + 1
            total = -(-(head + blocks * length) // 8) * 8
            mask = block_mask(head, blocks, length, total, self.device)
            dtype = torch.bfloat16 if self.device.type == 'cuda' else torch.float32
            additive = torch.zeros((total, total), dtype=dtype, device=self.device)
            additive.masked_fill_(~mask, -30000.0)
            # Text after a picture starts at its largest position + 1, whatever was dropped.
            start = p + (max(GRID_H, GRID_W) if vision else 0)
            inside = torch.arange(total - head, device=self.device)
            inside = inside % length + 1 + start
            after = torch.cat((torch.tensor([start], device=self.device), inside))
            self._layouts[key] = Layout(additive[None, None],
                                        torch.arange(p, device=self.device), after)
        return self._layouts[key]

    def _positions(self, layout: Layout, keep: Tensor) -> Tensor:
        """keep int64 [B, V] unit indices over all slices -> positions [3, B, S]."""
        b, start = keep.shape[0], len(self.prefix)
        unit = keep % UNITS
        vision = torch.stack((keep // UNITS, unit // GRID_W, unit % GRID_W)) + start
        before = layout.before.expand(3, b, -1)
        after = layout.after.expand(3, b, -1)
        return torch.cat((before, vision, after), dim=2)

    def answer(self, merged: Tensor, keep: Tensor, tokens: Tensor) -> Tensor:
        """
        Return logits of all question blocks.

        :param merged: [B, V, dim] vision tokens (V may be 0: a blind model).
        :param keep: int64 [B, V] their unit indices.
        :param tokens: int64 [B, Q, L].
        :return: [B, Q, L, vocab].
        """
        b, blocks, length = tokens.shape
        layout = self._layout(merged.shape[1], blocks, length)
        head = len(self.prefix) + merged.shape[1] + 1
        total = layout.mask.shape[-1]
        text = F.pad(tokens.flatten(1), (0, total - head - blocks * length))
        embed = self.model.embed
        x = torch.cat((embed(self.prefix).expand(b, -1, -1), merged,
                       embed(self.close).expand(b, -1, -1), embed(text)), dim=1)
        hidden = self.model.decode(x, self._positions(layout, keep), layout.mask)
        hidden = hidden[:, head:head + blocks * length]
        return F.linear(hidden, embed.weight).view(b, blocks, length, -1)

    def logits(self, batch: Batch, rgb: Tensor, keep: Tensor | None = None, *,
               blind: bool = False) -> tuple[list[Tensor], Tensor]:
        """
        Run a batch.

        :param keep: int64 [N, K] units kept in every picture; ``None`` is all.
        :param blind: leave the pictures out.
        :return: ([logits of stills, logits of clips] where present, merged tokens [N, K, dim]).
        """
        n = rgb.shape[0]
        if blind:
            merged = torch.zeros((n, 0, self.model.shape.dim), device=self.device)
            keep = torch.zeros((n, 0), dtype=torch.int64, device=self.device)
        else:
            merged = self.model.encode(rgb, keep)
            if keep is None:
                keep = torch.arange(UNITS, device=self.device).expand(n, -1)
        out = []
        stills, clips = batch.tokens[0].shape[0], batch.tokens[1].shape[0]
        if stills:
            out.append(self.answer(merged[:stills], keep[:stills],
                                   torch.from_numpy(batch.tokens[0]).to(self.device)))
        if clips:
            two = [x[stills:].view(2, clips, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
                   for x in (merged, keep)]
            two[1][:, keep.shape[1]:] += UNITS
            out.append(self.answer(two[0], two[1],
                                   torch.from_numpy(batch.tokens[1]).to(self.device)))
        return out, merged

    def labels(self, batch: Batch) -> list[Tensor]:
        """Return the labels of stills and clips where present, as :meth:`logits` orders them."""
        return [torch.from_numpy(x).to(self.device) for x in batch.labels if x.shape[0]]

    def aux_loss(self, batch: Batch, merged: Tensor, keep: Tensor | None,
                 centres: bool = False) -> Tensor:
        """
        Return the loss of colour, shape and digits at the units where a thing's centre is.

        :param centres: adds the number of centres (0 to 3) in every unit, so that things which
            overlap are told apart; its sum, like the others, is a mean over things.
        """
        aux = torch.from_numpy(batch.aux).to(self.device).long()
        where, valid = aux[..., 0], aux[..., 0] >= 0
        if keep is not None:
            slot = torch.full((aux.shape[0], UNITS), -1, device=self.device)
            slot.scatter_(1, keep, torch.arange(keep.shape[1], device=self.device).expand_as(keep))
            where = slot.gather(1, where.clamp(min=0))
            valid = valid & (where >= 0)
        index = where.clamp(min=0)[..., None].expand(-1, -1, merged.shape[-1])
        out = self.model.aux(merged.gather(1, index)).float()
        loss = out.new_zeros(())
        at = 0
        for column, classes in ((1, 8), (2, 6), (3, 11), (4, 11), (5, 11)):
            target = torch.where(valid, aux[..., column], -1)
            part = F.cross_entropy(out[..., at:at + classes].flatten(0, 1), target.flatten(),
                                   ignore_index=-1, reduction='sum')
            loss = loss + part / valid.sum().clamp(min=1)
            at += classes
        if centres:
            number = torch.zeros((aux.shape[0], UNITS), device=self.device, dtype=torch.int64)
            number.scatter_add_(1, aux[..., 0].clamp(min=0), (aux[..., 0] >= 0).long())
            if keep is not None:
                number = number.gather(1, keep)
            out = self.model.centres(merged).float()
            part = F.cross_entropy(out.flatten(0, 1), number.clamp(max=3).flatten(),
                                   reduction='sum')
            loss = loss + part / valid.sum().clamp(min=1)
        return loss


def answer_loss(logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Return the mean cross-entropy over all answer tokens."""
    flat = torch.cat([x.float().flatten(0, 2) for x in logits])
    return F.cross_entropy(flat, torch.cat([y.flatten() for y in labels]), ignore_index=-1)


def exact(logits: list[Tensor], labels: list[Tensor]) -> list[Tensor]:
    """Return bool [B, Q]: every token of the answer, the end included, is the best one."""
    return [((x.argmax(-1) == y) | (y < 0)).all(-1) for x, y in zip(logits, labels)]


def family_hits(batch: Batch, right: list[Tensor]) -> dict[int, np.ndarray]:
    """Return right answers by family index."""
    families = [f for f in batch.family if f.shape[0]]
    hits: dict[int, list[np.ndarray]] = {}
    for family, ok in zip(families, right):
        values = ok.cpu().numpy()
        for index in np.unique(family):
            hits.setdefault(int(index), []).append(values[family == index])
    return {k: np.concatenate(v) for k, v in hits.items()}
