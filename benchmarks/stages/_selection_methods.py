"""
Every way to choose units, over a batch of items at once.

A method that decides before the encoder gives scores [N, T * 192], of which the largest are kept;
the others (downsampling, dropping after the merger, two pictures) run the model themselves. None
of them sees an answer or an evidence mask, but 'oracle', which is named so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stages._selection_maps import Maps, key_of, uniform_ranks
from qwen_vl_ros.roboscene.evaluate import earlier
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNIT, UNITS
from qwen_vl_ros.roboscene.items import Item
from qwen_vl_ros.saliency import next_frame
from qwen_vl_ros.saliency.droppers import dart, divprune, fastv
from qwen_vl_ros.saliency.head import SaliencyHead
from tools.distil_head.batched import (
    CLOSED,
    Picture,
    TinyBatch,
    grad_cam,
    log_probability,
    right,
)
from tools.distil_head.coarse import shrink
from tools.distil_head.group import Group, answer_kept, encoded, groups, head_scores
from tools.distil_head.roboscene import widened
from tools.train_tiny.data import item_batch
from tools.train_tiny.model import mrope


def first_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return best minus second-best logit where the answer begins, [N]; no label is read."""
    at = (labels >= 0).int().argmax(1)
    best = logits[torch.arange(len(at), device=at.device), at].float().topk(2).values
    return best[:, 0] - best[:, 1]


@dataclass
class Shown:
    """
    Items of one kind (stills or clips) with all that does not depend on a checkpoint.

    :param evidence: bool [N, T * 192].
    :param maps: signal to float32 [N, T * 192].
    :param before: the group one moment earlier.
    :param shifts: [N, 2], how the picture moved since, in units.
    :param key: the group at the last answer that was reflected on; ``key_shifts`` alike.
    """

    items: list[Item]
    group: Group
    evidence: Tensor
    maps: dict[str, Tensor]
    before: Group
    shifts: Tensor
    key: Group
    key_shifts: Tensor


def show(drawn: list[Item], made: Sequence[Maps], device: torch.device, seed: int) -> Shown:
    """Render items and what was there a moment before, and upload their signals."""
    group, = groups(item_batch(drawn), device)
    before, = groups(item_batch([earlier(item) for item in drawn]), device)
    key, = groups(item_batch([key_of(item) for item in drawn]), device)
    n, units = len(drawn), group.slices * UNITS
    maps = {name: torch.from_numpy(np.stack([m[name] for m in made])).to(device)
            for name in made[0]}
    evidence = np.zeros((n, units), bool)
    for i, item in enumerate(drawn):
        evidence[i, sorted(item.question.evidence)] = True
    seen = torch.from_numpy(evidence).to(device)
    noise = np.random.default_rng((seed, 5)).random((2, n, units), np.float32)
    random, fill = torch.from_numpy(noise).to(device)
    ranks = torch.from_numpy(np.tile(uniform_ranks(), group.slices)).to(device)
    maps |= {'random': random, 'oracle': seen + 0.5 * fill, 'uniform': ranks.expand(n, -1)}
    return Shown(drawn, group, seen, maps, before, maps.pop('shift'), key, maps.pop('key_shift'))


class Bench:
    """
    One checkpoint on a :class:`Shown`; what several methods need is computed once.

    :param head: distilled for this checkpoint, or for its sibling.
    :param coarse: a copy trained on smaller pictures.
    """

    def __init__(self, model: TinyBatch, head: SaliencyHead, shown: Shown,
                 coarse: TinyBatch | None = None) -> None:
        self.model, self.head, self.shown, self.coarse = model, head, shown, coarse
        self.group = shown.group
        self.embedding = model.model.embed.weight.float()
        self._scores: dict[str, Tensor] = {}

    @cached_property
    def whole(self) -> Picture:
        """Return the items' merged tokens, nothing dropped."""
        return Picture(*encoded(self.model, self.group))

    @cached_property
    def full(self) -> Tensor:
        """Return which items are right with everything shown."""
        return right(self.model.answer([self.whole], self.group.tokens), self.group.labels)

    def right_with(self, keep: Tensor) -> Tensor:
        """Return which items are right when only ``keep`` [N, K] is shown."""
        return right(answer_kept(self.model, self.group, keep), self.group.labels)

    def scores(self, name: str) -> Tensor:
        """Return the scores of a method that decides before the encoder."""
        if name not in self._scores:
            maker = getattr(self, f'_{name}', None)
            self._scores[name] = self.shown.maps[name] if maker is None else maker()
        return self._scores[name]

    def _head(self) -> Tensor:
        return head_scores(self.head, self.embedding, self.group)

    def _grad_cam(self) -> Tensor:
        """Score by the whole picture's own Grad-CAM: costs more than it saves."""
        (values,), _ = grad_cam(self.model, [self.whole], self.group.tokens, self.group.labels,
                                first_margin)
        return widened(values, self.group.slices)

    def _window(self) -> Tensor:
        """Score by whether a unit lies in the best window of the head's map; filled up by it."""
        ranks = _ranks(self.scores('head')).view(-1, self.group.slices, GRID_H, GRID_W)
        row, column = (x[:, None, None, None] for x in best_window(ranks.sum(1), WINDOW))
        r = torch.arange(GRID_H, device=ranks.device)[:, None]
        c = torch.arange(GRID_W, device=ranks.device)
        inside = ((r >= row) & (r < row + WINDOW[0]) & (c >= column) & (c < column + WINDOW[1]))
        return (inside * 2 + ranks).flatten(1)

    def _motion(self) -> Tensor:
        """Score by what changed since the frame before, evenly where nothing did."""
        shown = self.shown
        cam = shown.shifts.new_zeros((len(shown.items), GRID_H, GRID_W))
        even = next_frame.TIE * self.scores('uniform') / UNITS
        return join(cam, shown.shifts, shown.maps['motion'], even, shown.shifts, 0.0)

    def _entropy(self) -> Tensor:
        """Score by the focus of attention in the middle of the encoder, a frame earlier."""
        past = self.shown.before
        focus = self.model.encode(past.rgb, entropy_of=len(self.model.model.blocks) // 2)[1]
        newest = focus[past.rows()[:, -1]].view(-1, GRID_H, GRID_W)
        moved = shifted(newest, self.shown.shifts, float(newest.max()))
        return moved.flatten(1).repeat(1, self.group.slices)

    def next_frame(self, kept: int, head: bool) -> Tensor:
        """
        Score by what the answer about an earlier frame leaned on, moved and joined with motion.

        :param kept: units a slice that the earlier frame kept (by its own map).
        :param head: also ask the head.
        """
        shown, t = self.shown, self.group.slices
        past = shown.key
        ranked = head_scores(self.head, self.embedding, past) if head else shown.maps['key']
        keep = ranked.topk(kept * t, 1).indices.sort(1).values
        picture = self._kept_tokens(past, keep, past.rows())
        tokens, said = self._said(picture, past)
        (values,), _ = grad_cam(self.model, [picture], tokens, said, log_probability)
        whole = torch.zeros(keep.shape[0], t * UNITS, device=values.device)
        real = values if picture.gate is None else values * (picture.gate == 0)
        whole.scatter_add_(1, picture.units, real)
        cam = whole.view(-1, t, GRID_H, GRID_W).amax(1)
        base = _ranks(self.scores('head' if head else 'saliency'))
        return join(cam, shown.key_shifts, shown.maps['motion'], base, shown.shifts,
                    next_frame.KNOWN_BESIDE_QUESTION if head else next_frame.KNOWN)

    def _said(self, picture: Picture, group: Group) -> tuple[Tensor, Tensor]:
        """Return tokens and labels of the answers that the model gives itself, right or not."""
        tokens, longest = group.tokens.clone(), int((group.labels >= 0).sum(1).max())
        answered = group.labels >= 0
        for _ in range(longest):
            best = self.model.answer([picture], tokens).argmax(-1)
            tokens[:, 1:] = torch.where(answered[:, :-1], best[:, :-1], tokens[:, 1:])
        return tokens, torch.where(answered, best, group.labels)

    def _kept_tokens(self, group: Group, keep: Tensor, rows: Tensor) -> Picture:
        if group.slices == 1:
            return Picture(self.model.encode(group.rgb[rows[:, 0]], keep), keep)
        gate = torch.full((keep.shape[0], group.slices * UNITS), CLOSED, device=keep.device)
        gate.scatter_(1, keep, 0.0)
        n, t = rows.shape
        merged = self.model.encode(group.rgb[rows.flatten()], gate=gate.view(n * t, UNITS))
        units = torch.arange(t * UNITS, device=keep.device).expand(n, -1)
        return Picture(merged.reshape(n, t * UNITS, -1), units, gate=gate)

    # Methods that run the model themselves: units a slice -> which items are right.

    def after_merger(self, keep: Tensor) -> Tensor:
        """Show only ``keep`` [N, K] of the whole picture's merged tokens to the decoder."""
        index = keep[..., None].expand(-1, -1, self.whole.merged.shape[-1])
        picture = Picture(self.whole.merged.gather(1, index), self.whole.units.gather(1, keep))
        return right(self.model.answer([picture], self.group.tokens), self.group.labels)

    def head_after(self, kept: int) -> Tensor:
        """Keep the merged tokens that the head would have kept before the encoder."""
        scores = self.scores('head')
        return self.after_merger(scores.topk(kept * self.group.slices, 1).indices.sort(1).values)

    def divprune(self, kept: int) -> Tensor:
        """Keep merged tokens that are unlike one another."""
        return self.after_merger(_index(divprune(self.whole.merged, kept * self.group.slices)))

    def dart(self, kept: int) -> Tensor:
        """Keep merged tokens that resemble no pivot."""
        return self.after_merger(_index(dart(self.whole.merged, kept * self.group.slices)))

    def grad_cam_2(self, kept: int) -> Tensor:
        """Keep merged tokens by Grad-CAM through the first two decoder layers."""
        if 'grad_cam_2' not in self._scores:
            (values,), _ = grad_cam(self.model, [self.whole], self.group.tokens,
                                    self.group.labels, first_margin, 2)
            self._scores['grad_cam_2'] = widened(values, self.group.slices)
        scores = self._scores['grad_cam_2']
        return self.after_merger(scores.topk(kept * self.group.slices, 1).indices.sort(1).values)

    def fastv(self, kept: int) -> Tensor:
        """Drop inside the decoder after two layers, by the attention of the last prompt token."""
        model, tokens, labels = self.model, self.group.tokens, self.group.labels
        x, positions, _ = model.prompt([self.whole], tokens)
        x = model.layers(x, positions, None, 2)
        start, visual = len(model.prefix), self.whole.units.shape[1]
        rows = torch.arange(len(tokens), device=x.device)
        ask = start + visual + 1 + (labels >= 0).int().argmax(1)
        shape = model.model.shape
        q, k, _ = model.qkv(model.model.layers[1], x, *mrope(
            positions, shape.rope_theta, shape.sections))
        row = (q[rows, :, ask, None].float() @ k.float().transpose(2, 3))[:, :, 0] / 8
        past = torch.arange(x.shape[1], device=x.device) > ask[:, None]
        row = row.masked_fill(past[:, None], -torch.inf).softmax(-1).mean(1)
        keep = _index(fastv(row[:, start:start + visual], kept * self.group.slices))
        others = torch.cat((torch.arange(start, device=x.device),
                            torch.arange(start + visual, x.shape[1], device=x.device)))
        order = torch.cat((others.expand(len(rows), -1), keep + start), 1).sort(1).values
        x = x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))
        positions = positions.gather(2, order.expand(3, -1, -1))
        x = model.layers(x, positions, None, None, 2)
        return right(model.logits(x, tokens.shape[1]), labels)

    def threshold(self) -> Tensor:
        """Keep what is above 0.3 of the normalised gradient map, however much that is."""
        shown, t = self.shown, self.group.slices
        gate = torch.where(shown.maps['threshold'] > 0, 0.0, CLOSED)
        rows = self.group.rows()
        n = rows.shape[0]
        merged = self.model.encode(self.group.rgb[rows.flatten()], gate=gate.view(n * t, UNITS))
        units = torch.arange(t * UNITS, device=gate.device).expand(n, -1)
        picture = Picture(merged.reshape(n, t * UNITS, -1), units, gate=gate)
        return right(self.model.answer([picture], self.group.tokens), self.group.labels)

    def downsample_trained(self, kept: int) -> Tensor | None:
        """Show a smaller picture to the copy that was trained on smaller pictures."""
        return None if self.coarse is None else self.downsample(kept, self.coarse)

    def downsample(self, kept: int, model: TinyBatch | None = None) -> Tensor:
        """Show a smaller picture with at most so many units."""
        model = model or self.model
        grid = smaller_grid(kept)
        tokens, labels = self._coarse(grid)
        small = shrink(self.group.rgb, grid)
        merged = model.encode(small)[self.group.rows()].flatten(1, 2)
        units = torch.arange(merged.shape[1], device=merged.device).expand(len(merged), -1)
        logits = model.answer([Picture(merged, units, grid)], tokens)
        return right(logits, labels)

    def roi(self, kept: int) -> Tensor | None:
        """
        Show a small overview, then the best window at full resolution; stills only.

        A third of the tokens is the overview's. A place is right where it is named in the
        window's own bins, or in the overview's where the window does not hold it.
        """
        if self.group.slices != 1:
            return None
        over = smaller_grid(max(4, kept // 3))
        window = window_of(kept - over[0] * over[1])
        ranks = _ranks(self.scores('head')).view(-1, GRID_H, GRID_W)
        row, column = best_window(ranks, window)
        rgb = self.group.rgb
        crop = torch.stack([
            rgb[i, r * UNIT:(r + window[0]) * UNIT, c * UNIT:(c + window[1]) * UNIT]
            for i, (r, c) in enumerate(zip(row.tolist(), column.tolist()))])
        pictures = []
        for shown, grid in ((shrink(rgb, over), over), (crop, window)):
            merged = self.model.encode(shown)
            units = torch.arange(merged.shape[1], device=rgb.device).expand(len(rgb), -1)
            pictures.append(Picture(merged, units, grid))
        good = torch.zeros(len(rgb), dtype=torch.bool, device=rgb.device)
        for tokens, labels in (self._coarse(over), self._coarse(window, row, column)):
            good |= right(self.model.answer(pictures, tokens), labels)
        return good

    def _coarse(self, grid: tuple[int, int], row: Tensor | None = None,
                column: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Return tokens and labels with places named in the bins of another picture.

        :param grid: of a smaller picture, or of a window at (``row``, ``column``).
        """
        if self.group.slices != 1:
            return self.group.tokens, self.group.labels
        changed = []
        for i, item in enumerate(self.shown.items):
            if item.question.family != 'pointing':
                changed.append(item)
                continue
            thing = next(t for t in item.scenes[0].things if t.name in item.question.text)
            u, v = (c / UNIT for c in thing.centre)
            if row is None or column is None:
                x, y = int(u * grid[1] / GRID_W), int(v * grid[0] / GRID_H)
            else:
                x, y = int(u) - int(column[i]), int(v) - int(row[i])
                if not (0 <= x < grid[1] and 0 <= y < grid[0]):
                    x, y = GRID_W - 1, GRID_H - 1
            question = replace(item.question, answer=f'<x{x}><y{y}>')
            changed.append(replace(item, question=question))
        batch = item_batch(changed)
        return tuple(torch.from_numpy(x[0][:, 0]).to(self.model.device)  # type: ignore
                     for x in (batch.tokens, batch.labels))


#: Window of the method 'window', rows and columns.
WINDOW = (6, 7)


def smaller_grid(kept: int) -> tuple[int, int]:
    """Return rows and columns of the largest picture of about 3:4 with at most ``kept`` units."""
    fits = [(r, c) for r in range(1, GRID_H + 1) for c in range(1, GRID_W + 1)
            if r * c <= kept and 1.0 <= c / r <= 1.8]
    return max(fits, key=lambda g: (g[0] * g[1] - 4 * abs(g[1] / g[0] - 4 / 3) * g[0]))


def window_of(kept: int) -> tuple[int, int]:
    """Return rows and columns of a window with at most ``kept`` units."""
    return smaller_grid(kept)


def best_window(ranks: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return row and column [N] of the window that holds most of the map's square."""
    sums = F.avg_pool2d(ranks[:, None] ** 4, window, 1)[:, 0]
    at = sums.flatten(1).argmax(1)
    return at // sums.shape[2], at % sums.shape[2]


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(1).argsort(1).float() / (values.shape[1] - 1)


def shifted(maps: Tensor, shifts: Tensor, border: float) -> Tensor:
    """Move maps [N, rows, columns] by (down, right) [N, 2] in units, bilinearly."""
    n, rows, columns = maps.shape
    theta = maps.new_zeros((n, 2, 3))
    theta[:, 0, 0] = theta[:, 1, 1] = 1
    theta[:, 0, 2] = -2 * shifts[:, 1] / (columns - 1)
    theta[:, 1, 2] = -2 * shifts[:, 0] / (rows - 1)
    where = F.affine_grid(theta, [n, 1, rows, columns], align_corners=True)
    return F.grid_sample(maps[:, None] - border, where, align_corners=True)[:, 0] + border


def join(cam: Tensor, shifts: Tensor, motion: Tensor, base: Tensor, last: Tensor,
         weight: float = next_frame.KNOWN) -> Tensor:
    """
    Do :func:`saliency.next_frame.join` for a batch.

    :param cam: [N, rows, columns]; the others [N, T * 192], ``base`` as ranks.
    :param shifts: [N, 2] since the map was taken, and ``last``: since the frame before.
    """
    t = motion.shape[1] // UNITS
    peak = cam.flatten(1).amax(1).clamp(min=1e-20)[:, None]
    known = (widened(cam.flatten(1), 1) / peak).sqrt().view(-1, GRID_H, GRID_W)
    known = shifted(known, shifts, 0.0).flatten(1).repeat(1, t)
    unseen = motion >= next_frame.UNSEEN
    usual = motion.masked_fill(unseen, torch.nan).nanquantile(0.5, dim=1, keepdim=True)
    stands_out = (motion - 2 * usual.nan_to_num(0.0)).clamp(min=0).masked_fill(unseen, 0.0)
    turns = (last != 0).any(1, keepdim=True)
    level = torch.where(turns, next_frame.MOVED_TURNING, next_frame.MOVED)
    new = (widened(stands_out, t) / level).clamp(max=1.0)
    return base + weight * known + new + 0.25 * unseen


def _index(mask: Tensor) -> Tensor:
    """Return the indices [N, K] of a mask [N, V] with K true in every row."""
    count = int(mask[0].sum())
    return mask.int().argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values
