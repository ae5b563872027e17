"""
Train the tiny checkpoint: from nothing to a Hugging Face folder, on one GPU, resumable.

    python -m tools.train_tiny.train --out build/tiny --minutes 14
    python -m tools.train_tiny.train --out build/tiny --minutes 14            # resumes
    python -m tools.train_tiny.train --out build/tiny-keep --minutes 5 --keep \\
        --init build/tiny                                # random keep ratios 20-100 %

The number of steps is fixed once the speed of the machine is known (or by --steps), and the
learning rate follows a cosine over these steps; both are stored with the state. --stop-after
or Ctrl-C ends a run early; the next one goes on where it stopped, with the steps and the start
that were stored, whatever --steps and --init say then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from tqdm import tqdm

from qwen_vl_ros.roboscene import questions as q
from qwen_vl_ros.roboscene.items import HELD_OUT_FAMILIES, items
from tools.train_tiny import tokenizer as tok
from tools.train_tiny.data import FAMILY_NAMES, DataError, Mix, batches, item_batch
from tools.train_tiny.model import Shape, TinyQwen2VL, load_published
from tools.train_tiny.options import TrainError, complaint, parser
from tools.train_tiny.step import Stepper, answer_loss, draw_keep, exact, family_hits, render_batch

#: Kept units a picture and how often (1, 3/4, 1/2, 1/3, 1/5 of 192).
KEEP_BUCKETS = ((192, .2), (144, .15), (96, .2), (64, .25), (40, .2))
PROBE_FROM, PROBE_TO = 40, 90


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--help`` is the manual."""
    p = parser(__doc__)
    args = p.parse_args(argv)
    wrong = complaint(args)
    if wrong:
        p.error(wrong)
    return args


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: 300 steps of warm-up (or a tenth), then a cosine to zero."""
    warm = min(300, max(1, steps // 10))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Trainer:
    """Model, optimiser, and the loop that feeds them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision('high')
        tokenizer = tok.save(args.out)
        self.ids = {t: tokenizer.token_to_id(t) for t in tok.SPECIAL}
        vocab = -(-tokenizer.get_vocab_size() // 64) * 64
        self.model = TinyQwen2VL(Shape(vocab=vocab)).to(self.device)
        self.stepper = Stepper(self.model, self.device)
        self.optimizer = torch.optim.AdamW(
            [{'params': [p for p in self.model.parameters() if p.dim() > 1]},
             {'params': [p for p in self.model.parameters() if p.dim() < 2],
              'weight_decay': 0.0}],
            lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05,
            fused=self.device.type == 'cuda')
        self.step, self.steps, self.seconds = 0, args.steps, 0.0
        self.curve: list[dict[str, float]] = []
        self.init = str(args.init) if args.init else ''
        self.interrupted = threading.Event()
        self._restore()
        if self.device.type == 'cuda' and not args.no_compile:
            # One compilation serves all blocks: their code is the same.
            for block in (*self.model.blocks, *self.model.layers):
                block.compile()
        self.generator = torch.Generator(self.device).manual_seed(args.seed + self.step)

    @property
    def state_file(self) -> Path:
        """Return where optimiser and progress are kept between runs."""
        return self.args.out / 'state.pt'

    def _restore(self) -> None:
        if self.state_file.exists():
            self._resume()
        elif self.args.init:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
            tensors = {}
            try:
                for file in sorted(self.args.init.glob('*.safetensors')):
                    tensors.update(load_file(file))
                load_published(self.model, tensors)
            except KeyError as error:
                raise TrainError(f'--init {self.args.init} holds no weight {error}') from error
            except (SafetensorError, RuntimeError) as error:
                raise TrainError(f'--init {self.args.init}: {first_line(error)}') from error

    def _resume(self) -> None:
        args = self.args
        try:
            state = torch.load(self.state_file, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state['model'])
            self.optimizer.load_state_dict(state['optimizer'])
            self.step, self.steps = state['step'], state['steps']
            self.seconds, self.curve = state['seconds'], state['curve']
            # What was stored before there was this entry began as the command line says.
            self.init = state.get('init', self.init)
        except (UnpicklingError, EOFError, RuntimeError, KeyError, ValueError, TypeError,
                AttributeError) as error:
            raise TrainError(f'{self.state_file} is no state that can be resumed '
                             f'({type(error).__name__}); remove it to begin anew') from error
        said = f'resumed at step {self.step} of {self.steps or "a number not yet chosen"}'
        ignored = [f'--steps {args.steps}'] if args.steps not in (0, self.steps) else []
        if args.init and str(args.init) != self.init:
            ignored.append(f'--init {args.init}')
        if ignored:
            said += (f'; {" and ".join(ignored)} ignored: what {self.state_file} began with '
                     'stays (another --out begins anew)')
        print(said)

    def save(self) -> None:
        """Write the checkpoint folder, the state and the curve."""
        # In two moves: whatever ends the program meanwhile, one whole state is there.
        fresh = self.state_file.with_suffix('.new')
        torch.save({'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
                    'step': self.step, 'steps': self.steps, 'seconds': self.seconds,
                    'curve': self.curve, 'init': self.init}, fresh)
        fresh.replace(self.state_file)
        self.model.save(self.args.out, self.ids, self.args.shard_mib)
        (self.args.out / 'curve.json').write_text(json.dumps(self.curve))

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16,
                              enabled=self.device.type == 'cuda')

    def one(self, batch) -> tuple[torch.Tensor, dict]:
        """Take one optimiser step; returns the answer loss and what it was made of."""
        lr = rate(self.step, self.steps or 100_000, self.args.lr)
        for group in self.optimizer.param_groups:
            group['lr'] = lr
        rgb, objects = render_batch(batch, self.device)
        keep = None
        if self.args.keep:
            roll = np.random.default_rng((self.args.seed, self.step)).random()
            kept = next(k for i, (k, _) in enumerate(KEEP_BUCKETS)
                        if roll < sum(w for _, w in KEEP_BUCKETS[:i + 1]) or k == 40)
            if kept < 192:
                keep = draw_keep(objects, kept, self.generator)
        progress = self.step / (self.steps or 100_000)
        args = self.args
        # A trained model knows its units; what it may lack is where one thing ends.
        weight = 0.0 if self.init and not args.centres else args.aux * max(
            0.0, 1 - progress / args.aux_until)
        with self._autocast():
            logits, merged = self.stepper.logits(batch, rgb, keep)
            labels = self.stepper.labels(batch)
            loss = answer_loss(logits, labels)
            total = loss
            if weight > 0:
                total = total + weight * 0.2 * self.stepper.aux_loss(
                    batch, merged, keep, args.centres)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), {'batch': batch, 'logits': logits, 'labels': labels}

    def run(self) -> bool:
        """
        Train; returns whether the last step was reached.

        On Ctrl-C the present step is finished, so that what is saved is whole.
        """
        if self.steps and self.step >= self.steps:
            return True
        with _noticing(self.interrupted):
            self._loop()
            self._sync()
            self.save()
        return bool(self.steps) and self.step >= self.steps

    def _loop(self) -> None:
        args, begin = self.args, time.monotonic()
        base, mark, probe = self.seconds, begin, None
        mixed = Mix(args.stills, args.clips, args.focus, args.cameras)
        feed = batches(args.seed, self.step, mixed, args.workers)
        bar = tqdm(total=self.steps or None, initial=self.step, unit='step', mininterval=5,
                   file=sys.stdout, ncols=100)
        started = self.step
        recent: list[torch.Tensor] = []
        for batch in feed:
            if self.interrupted.is_set():
                break
            loss, shown = self.one(batch)
            recent.append(loss)
            self.step += 1
            bar.update()
            ran = self.step - started
            if self.steps == 0 and ran in (PROBE_FROM, PROBE_TO):
                self._sync()
                now = time.monotonic()
                if ran == PROBE_TO:
                    each = (now - mark) / (PROBE_TO - PROBE_FROM)
                    left = args.minutes * 60 - (now - begin)
                    self.steps = self.step + int(left / each)
                    bar.total = self.steps
                    bar.write(f'{each * 1e3:.1f} ms a step: {self.steps} steps')
                mark = now
            if self.step % 200 == 0 or ran in (1, 2, 5, 10, 20, 50, 100):
                mean = float(torch.stack(recent).mean())
                recent.clear()
                probe = {'step': self.step, 'loss': round(mean, 4),
                         'seconds': round(base + time.monotonic() - begin, 1)}
                right = exact(shown['logits'], shown['labels'])
                for index, ok in family_hits(shown['batch'], right).items():
                    probe[FAMILY_NAMES[index]] = round(float(ok.mean()), 3)
                self.curve.append(probe)
                bar.write(' '.join(f'{k} {v}' for k, v in probe.items()))
                if not math.isfinite(mean):
                    raise TrainError(f'the loss is not finite at step {self.step}')
            self.seconds = base + time.monotonic() - begin
            if self.steps and self.step >= self.steps:
                break
            if self.interrupted.is_set():
                break
            if args.stop_after and time.monotonic() - begin > args.stop_after:
                break
        bar.close()
        feed.close()

    def _sync(self) -> None:
        if self.device.type == 'cuda':
            torch.cuda.synchronize()

    @torch.no_grad()
    def evaluate(self, count: int) -> dict[str, dict[str, float]]:
        """
        Score the weights as saved (bf16) on items of all splits, with floors.

        :param count: items a family.
        :return: accuracy by 'split' or 'split/floor' and family.
        """
        from safetensors.torch import load_file
        tensors = {}
        for file in sorted(self.args.out.glob('*.safetensors')):
            tensors.update(load_file(file))
        load_published(self.model, tensors)
        table: dict[str, dict[str, float]] = {}
        for split in ('test', 'heldout', 'shift'):
            for family in q.FAMILIES:
                if split == 'heldout' and family not in HELD_OUT_FAMILIES:
                    continue
                drawn = list(items(family, split, count))
                hits: dict[str, list[float]] = {}
                for at in range(0, count, 200):
                    batch = item_batch(drawn[at:at + 200])
                    rgb, _ = render_batch(batch, self.device)
                    runs = {split: (rgb, False)}
                    if split == 'test':
                        n = rgb.shape[0] // (2 if family == 'change' else 1)
                        other = torch.roll(torch.arange(n), 1)
                        if family == 'change':
                            other = torch.cat((other, other + n))
                        runs['test/blind'] = (rgb, True)
                        runs['test/shuffled'] = (rgb[other], False)
                    for name, (pictures, blind) in runs.items():
                        with self._autocast():
                            logits, _ = self.stepper.logits(batch, pictures, blind=blind)
                        right = exact(logits, self.stepper.labels(batch))
                        hits.setdefault(name, []).extend(right[0].flatten().tolist())
                for name, values in hits.items():
                    table.setdefault(name, {})[family] = sum(values) / len(values)
        return table


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _noticing(interrupted: threading.Event) -> Iterator[None]:
    """Let Ctrl-C set an event instead of raising in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def notice(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            # Not print: the signal may come while that holds the stream.
            os.write(2, b'\ninterrupted: the present step is finished and saved\n')

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    """Run the program; 1 when it cannot train, 130 when it was interrupted."""
    args = parse()
    try:
        return _train(args)
    except (TrainError, DataError, OSError) as error:
        print(f'train: {first_line(error)}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 130


def _train(args: argparse.Namespace) -> int:
    trainer = Trainer(args)
    done = trainer.run()
    print(f'step {trainer.step} of {trainer.steps}, {trainer.seconds:.0f} s')
    if trainer.interrupted.is_set() and not done:
        print(f'the same command goes on from {trainer.state_file}', file=sys.stderr)
        return 130
    if done and args.eval_items:
        table = trainer.evaluate(args.eval_items)
        (args.out / 'accuracy.json').write_text(json.dumps(table, indent=2))
        for name, row in table.items():
            print(name.ljust(14), ' '.join(f'{k} {v:.3f}' for k, v in row.items()))
    return 130 if trainer.interrupted.is_set() else 0


if __name__ == '__main__':
    sys.exit(main())
