"""
Distil the light head of a tiny checkpoint on rendered training scenes, on one GPU.

    python -m tools.distil_head.roboscene --model models/tiny --out models/tiny \\
        --teach-seconds 25 --cam-seconds 16 --answer-seconds 26

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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_vl_ros.measure.record import commit, machine
from qwen_vl_ros.roboscene import questions as q
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.head import SaliencyHead
from qwen_vl_ros.saliency.selectors import FILE
from tools.distil_head.batched import Picture, TinyBatch, grad_cam, right
from tools.distil_head.group import (
    Group,
    answer_kept,
    encoded,
    groups,
    head_scores,
)
from tools.train_tiny.data import Batch, Mix, batches, item_batch

#: Kept units a slice and how often, in the second stage.
BUDGETS = ((21, .12), (42, .2), (63, .43), (84, .25))
#: Units under the border that the second stage still computes.
NEAR = 40


def teacher(model: TinyBatch, group: Group, power: float = 0.5) -> tuple[Tensor, Tensor]:
    """
    Return Grad-CAM as a distribution over units [N, T * 192], and which answers are right [N].

    The map is widened by a unit (a thing's border says what it is) and flattened by ``power``.
    """
    with torch.no_grad():
        merged, units = encoded(model, group)
        picture = Picture(merged, units)
    (values,), logits = grad_cam(model, [picture], group.tokens, group.labels)
    mixed = (widened(values, group.slices) + 1e-9) ** power
    return mixed / mixed.sum(1, keepdim=True), right(logits, group.labels)


def widened(values: Tensor, slices: int) -> Tensor:
    """Do :func:`saliency.next_frame.widen` for a batch [N, T * 192]."""
    wide = F.max_pool2d(values.view(-1, slices, GRID_H, GRID_W), 3, 1, 1).flatten(1)
    return 0.7 * values + 0.3 * wide


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

    def learn_maps(self, teach_seconds: float, seconds: float, lr: float = 2e-3) -> None:
        """
        Learn the teacher's maps: let it make some, then go over them again and again.

        A map costs the teacher ten times what the head's step on it costs.

        :param teach_seconds: of making maps; with ``--steps``, one batch.
        :param seconds: of learning; with ``--steps``, so many steps.
        """
        begin, taught = time.monotonic(), []
        for batch in self.feed:
            for group in groups(batch, self.device):
                target, good = teacher(self.model, group)
                group.samples = group.samples.half()
                group.pictures, group.rgb = group.rgb.shape[0], group.rgb.new_empty(0)
                taught.append((group, target.half(), good))
            if self.args.steps or time.monotonic() - begin > teach_seconds:
                break
        print(f'{sum(len(t) for _, t, _ in taught)} maps in {time.monotonic() - begin:.0f} s',
              flush=True)
        order = torch.Generator().manual_seed(self.args.seed)
        for step in self._steps('cam', seconds, lr):
            group, target, good = taught[int(torch.randint(len(taught), (), generator=order))]
            with self._autocast():
                scores = head_scores(self.head, self.embedding, group)
            # Clips are few and would weigh as much as stills.
            share = 1.0 if group.slices == 1 else 0.3
            step(share * listwise(scores.float(), target.float(), good))

    def learn_answers(self, seconds: float, lr: float = 1e-3) -> None:
        """Learn to keep the answers' log-probability high; see :func:`gated_loss`."""
        generator = torch.Generator().manual_seed(self.args.seed)
        steps = self._steps('answer', seconds, lr)
        for step, batch in zip(steps, self.feed):
            roll = float(torch.rand((), generator=generator))
            kept = next((k for i, (k, _) in enumerate(BUDGETS)
                         if roll < sum(w for _, w in BUDGETS[:i + 1])), BUDGETS[-1][0])
            heat, noise = 0.6 * (1 - self.done) + 0.2, 0.5 * (1 - self.done)
            losses = [gated_loss(self.model, group, head_scores(self.head, self.embedding, group),
                                 kept, heat, noise)
                      for group in groups(batch, self.device, self.args.asked)]
            step(losses[0] + 0.2 * losses[-1] if len(losses) > 1 else losses[0])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16,
                              enabled=self.device.type == 'cuda')

    def _steps(self, stage: str, seconds: float, lr: float
               ) -> Iterator[Callable[[Tensor], None]]:
        """Yield a function that takes one step down a loss, until the time or the steps are up."""
        args = self.args
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, weight_decay=0.01,
                                      betas=(0.9, 0.98))
        begin, recent, count = time.monotonic(), [], 0
        self.done = 0.0

        def take(loss: Tensor) -> None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recent.append(loss.detach())

        while self.done < 1:
            for part in optimizer.param_groups:
                warm = min(1.0, (count + 1) / 40)
                part['lr'] = lr * warm * 0.5 * (1 + math.cos(math.pi * self.done))
            yield take
            count += 1
            spent = time.monotonic() - begin
            self.done = min(1.0, count / args.steps if args.steps else spent / seconds)
            if count in (1, 50) or count % 200 == 0 or self.done >= 1:
                mean = float(torch.stack(recent).mean())
                recent.clear()
                self.log.append({'stage': stage, 'step': count, 'loss': round(mean, 4),
                                 'seconds': round(spent, 1)})
                print(self.log[-1], flush=True)
                if not math.isfinite(mean):
                    raise RuntimeError(f'the loss is not finite at step {count}')

    def save(self) -> None:
        """Write the head with a note of how it was made."""
        last = {str(x['stage']): x['step'] for x in self.log}
        self.head.save(self.args.out / FILE, {
            'checkpoint': self.args.model.name, 'commit': commit(), 'machine': machine(),
            'steps': ', '.join(f'{v} {k}' for k, v in last.items()), 'licence': 'Apache-2.0'})

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
    p.add_argument('--teach-seconds', type=float, default=25.0, help='of making maps')
    p.add_argument('--cam-seconds', type=float, default=16.0, help='of learning them')
    p.add_argument('--answer-seconds', type=float, default=26.0, help='of the second stage')
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
    tables = {}
    for stage in ('cam', 'answer'):
        if stage == 'cam' and args.cam_seconds > 0:
            distiller.learn_maps(args.teach_seconds, args.cam_seconds)
        elif stage == 'answer' and args.answer_seconds > 0:
            distiller.learn_answers(args.answer_seconds)
        else:
            continue
        distiller.save()
        if args.eval_items:
            tables[stage] = distiller.show(stage)
    distiller.feed.close()
    (args.out / 'saliency_head.json').write_text(json.dumps(
        {'log': distiller.log, 'accuracy': tables}))


if __name__ == '__main__':
    main()
