"""
Distil the light head of a tiny checkpoint on rendered training scenes, on one GPU.

    python -m tools.distil_head.roboscene --model models/tiny --out models/tiny \\
        --cam-seconds 45 --answer-seconds 75

Two stages, both with the frozen checkpoint as the only teacher; where the evidence lies is never
looked at:

1. Grad-CAM: the head learns to rank units as the map of the model's own right answers does
   (listwise: cross-entropy between the map, as a distribution, and the softmax of the scores).
2. Answers: the head's scores become gates (see batched.py), so many of them open as are to be
   kept, and the head learns to keep the answer's log-probability high.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_vl_ros.measure.record import commit, machine
from qwen_vl_ros.roboscene import questions as q
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNIT, UNITS
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.head import SAMPLES, SaliencyHead, channels
from qwen_vl_ros.saliency.selectors import FILE
from tools.distil_head.batched import Picture, TinyBatch, grad_cam, right
from tools.train_tiny.data import Batch, Mix, batches, encode, item_batch
from tools.train_tiny.step import render_batch

#: Kept units a slice and how often, in the second stage.
BUDGETS = ((21, .12), (42, .2), (63, .43), (84, .25))
#: Units under the border that the second stage still computes.
NEAR = 40
_SUFFIX = len(encode('<|im_end|>\n<|im_start|>assistant\n'))


@dataclass
class Group:
    """
    Items of one kind: stills or clips, one question each.

    :param rgb: uint8 [B * T, 336, 448, 3], all first slices before all second ones.
    :param samples: the head's input [B * T, 6, 84, 112].
    :param which: int64 [N], the picture (or clip) of each item.
    :param tokens: int64 [N, L]; ``labels`` alike.
    """

    slices: int
    rgb: Tensor
    samples: Tensor
    which: Tensor
    tokens: Tensor
    labels: Tensor

    def rows(self) -> Tensor:
        """Return [N, T], the rows of ``rgb`` of each item."""
        count = self.rgb.shape[0] // self.slices
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
    scores = head(group.samples[rows.flatten()], words.repeat_interleave(t, 0))
    return scores.reshape(n, t * UNITS)


def encoded(model: TinyBatch, group: Group) -> tuple[Tensor, Tensor]:
    """Return merged tokens [N, T * 192, dim] and their unit indices of whole pictures."""
    merged = model.encode(group.rgb)[group.rows()].flatten(1, 2)
    units = torch.arange(merged.shape[1], device=model.device).expand(merged.shape[0], -1)
    return merged, units


def teacher(model: TinyBatch, group: Group, power: float = 0.5) -> tuple[Tensor, Tensor]:
    """
    Return Grad-CAM as a distribution over units [N, T * 192], and which answers are right [N].

    The map is widened by a unit (a thing's border says what it is) and flattened by ``power``.
    """
    with torch.no_grad():
        merged, units = encoded(model, group)
        picture = Picture(merged, units)
    values = grad_cam(model, [picture], group.tokens, group.labels)[0]
    with torch.no_grad():
        good = right(model.answer([picture], group.tokens), group.labels)
    wide = F.max_pool2d(values.view(-1, group.slices, GRID_H, GRID_W), 3, 1, 1).flatten(1)
    mixed = (0.7 * values + 0.3 * wide + 1e-9) ** power
    return mixed / mixed.sum(1, keepdim=True), good


def listwise(scores: Tensor, target: Tensor, good: Tensor) -> Tensor:
    """Return the mean cross-entropy of the right items."""
    each = -(target * scores.log_softmax(-1)).sum(-1)
    return (each * good).sum() / good.sum().clamp(min=1)


def gates(scores: Tensor, kept: int, heat: float) -> Tensor:
    """
    Turn scores into logarithms of weights of which about ``kept`` are 1 and the others 0.

    :param heat: how soft the border is.
    """
    best = scores.topk(kept + 1, dim=1).values
    border = (best[:, kept - 1] + best[:, kept]) / 2
    return F.logsigmoid((scores - border[:, None]) / heat).clamp(min=-30)


def gated_loss(model: TinyBatch, group: Group, scores: Tensor, kept: int, heat: float,
               noise: float) -> Tensor:
    """
    Return the cross-entropy of the answers when units are gated by their scores.

    Units far under the border are left out altogether: their gates are shut anyway.

    :param kept: units a slice.
    :param noise: scale of the logistic noise that lets other units be tried.
    """
    if noise > 0:
        u = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
        scores = scores + noise * torch.log(u / (1 - u))
    rows = group.rows()
    n, t = rows.shape
    near = scores.view(n, t, UNITS).topk(min(UNITS, kept + NEAR), 2).indices.sort(2).values
    units = (near + torch.arange(t, device=near.device)[:, None] * UNITS).flatten(1)
    gate = gates(scores.gather(1, units), kept * t, heat)
    merged = model.encode(group.rgb[rows.flatten()], near.flatten(0, 1),
                          gate.view(n * t, near.shape[2]))
    picture = Picture(merged.reshape(n, units.shape[1], -1), units, gate=gate)
    logits = model.answer([picture], group.tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), group.labels.flatten(), ignore_index=-1)


@cache
def _test_batch(family: str, count: int, seed: int) -> Batch:
    return item_batch(list(items(family, 'test', count, seed)))


@torch.no_grad()
def accuracy(model: TinyBatch, score, count: int, budgets=(63, 22), seed: int = 0
             ) -> dict[str, dict[str, float]]:
    """
    Return exact match by budget and family on test items.

    :param score: from a group to scores [N, T * 192]; ``None`` keeps all.
    """
    table: dict[str, dict[str, float]] = {}
    for family in q.FAMILIES:
        group, = groups(_test_batch(family, count, seed), model.device)
        values = score(group)
        for budget in budgets:
            keep = values.topk(budget * group.slices, 1).indices.sort(1).values
            good = right(answer_kept(model, group, keep), group.labels)
            table.setdefault(str(budget), {})[family] = round(good.float().mean().item(), 4)
    for row in table.values():
        row['mean'] = round(sum(row.values()) / len(row), 4)
    return table


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
        gate = torch.where(real, 0.0, -1e4)
        parts.append(model.encode(group.rgb[rows[:, s]], local, gate))
        units.append(local + s * UNITS)
        closed.append(gate)
    picture = Picture(torch.cat(parts, 1), torch.cat(units, 1), gate=torch.cat(closed, 1))
    return model.answer([picture], group.tokens)


class Distiller:
    """Model, head and optimiser."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        # Workers take seconds to start: that is no time of training.
        mixed = Mix(args.stills, args.clips, args.focus, args.cameras)
        self.feed = batches(args.seed + 100, 0, mixed, args.workers)
        next(self.feed)
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision('high')
        self.model = TinyBatch(args.model, self.device)
        self.embedding = self.model.model.embed.weight.float()
        file = args.out / FILE
        self.head = (SaliencyHead.load(file).requires_grad_(True) if args.resume
                     else SaliencyHead(self.embedding.shape[1])).to(self.device)
        self.log: list[dict[str, float | str]] = []

    def run(self, stage: str, seconds: float, lr: float, asked: int) -> int:
        """Train one stage for so many seconds; returns the steps taken."""
        args = self.args
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, weight_decay=0.01,
                                      betas=(0.9, 0.98))
        begin, step, done = time.monotonic(), 0, 0.0
        generator = torch.Generator().manual_seed(args.seed)
        recent: list[Tensor] = []
        for batch in self.feed:
            for group_of in optimizer.param_groups:
                warm = min(1.0, (step + 1) / 30)
                group_of['lr'] = lr * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
            roll = float(torch.rand((), generator=generator))
            kept = next((k for i, (k, _) in enumerate(BUDGETS)
                         if roll < sum(w for _, w in BUDGETS[:i + 1])), BUDGETS[-1][0])
            losses = []
            for group in groups(batch, self.device, asked):
                scores = head_scores(self.head, self.embedding, group)
                if stage == 'cam':
                    losses.append(listwise(scores, *teacher(self.model, group)))
                else:
                    heat = 0.6 * (1 - done) + 0.2
                    losses.append(gated_loss(self.model, group, scores, kept, heat,
                                             0.5 * (1 - done)))
            loss = losses[0] + 0.2 * losses[1] if len(losses) > 1 else losses[0]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recent.append(loss.detach())
            step += 1
            spent = time.monotonic() - begin
            done = min(1.0, spent / seconds) if not args.steps else step / args.steps
            if step in (1, 10) or step % 50 == 0 or done >= 1:
                mean = float(torch.stack(recent).mean())
                recent.clear()
                self.log.append({'stage': stage, 'step': step, 'loss': round(mean, 4),
                                 'seconds': round(spent, 1)})
                print(self.log[-1], flush=True)
                if not math.isfinite(mean):
                    raise RuntimeError(f'the loss is not finite at step {step}')
            if done >= 1:
                break
        return step

    def score(self, group: Group) -> Tensor:
        """Return the head's scores of a group."""
        return head_scores(self.head, self.embedding, group)

    def show(self, name: str) -> dict[str, dict[str, float]]:
        """Score the head on test items and print it."""
        table = accuracy(self.model, self.score, self.args.eval_items)
        for budget, row in table.items():
            print(name, 'keep', budget, ' '.join(f'{k} {v:.3f}' for k, v in row.items()),
                  flush=True)
        return table


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--help`` is the manual."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--model', type=Path, default=Path('models/tiny'), help='(%(default)s)')
    p.add_argument('--out', type=Path, required=True, help=f'folder that gets {FILE}')
    p.add_argument('--resume', action='store_true', help='go on from the head in --out')
    p.add_argument('--cam-seconds', type=float, default=45.0, help='of the first stage')
    p.add_argument('--answer-seconds', type=float, default=75.0, help='of the second stage')
    p.add_argument('--steps', type=int, default=0, help='steps of each stage, whatever they take')
    p.add_argument('--stills', type=int, default=128, help='pictures a step')
    p.add_argument('--clips', type=int, default=12, help='two-slice clips a step')
    p.add_argument('--focus', choices=('', 'count'), default='')
    p.add_argument('--cameras', choices=('train', 'wide'), default='train')
    p.add_argument('--asked', type=int, default=2, help='questions a picture in the second stage')
    p.add_argument('--workers', type=int, default=12)
    p.add_argument('--eval-items', type=int, default=200, help='items a family; 0 scores nothing')
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    distiller = Distiller(args)
    tables, steps = {}, []
    plan = (('cam', args.cam_seconds, 2e-3, 0), ('answer', args.answer_seconds, 1e-3, args.asked))
    for stage, seconds, lr, asked in plan:
        if seconds <= 0:
            continue
        steps.append(distiller.run(stage, seconds, lr, asked))
        distiller.head.save(args.out / FILE, {
            'checkpoint': args.model.name, 'commit': commit(), 'machine': machine(),
            'steps': ' + '.join(map(str, steps)), 'licence': 'Apache-2.0'})
        if args.eval_items:
            tables[stage] = distiller.show(stage)
    distiller.feed.close()
    (args.out / 'saliency_head.json').write_text(json.dumps(
        {'log': distiller.log, 'accuracy': tables}))


if __name__ == '__main__':
    main()
