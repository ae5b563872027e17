"""
Accuracy against FLOPs, scoring included, of every way to choose vision tokens, on RoboScene-VQA.

    python benchmarks/run.py --stage selection --json benchmarks/results/h200.json
    python benchmarks/run.py --stage selection --shape 2b         # what choosing costs there
    python benchmarks/run.py --stage selection --items 2 --seeds 1 --models tiny   # on a CPU

All eight families, three seeds, both tiny checkpoints (a small form without a GPU);
docs/accuracy.md is made from the records (tools/plot_accuracy.py). Batched: one GPU does the whole
of it in a few minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.records import CannotRun, Record, write
from benchmarks.stages._selection_maps import MapMakers, Maps
from benchmarks.stages._selection_tally import Tally
from qwen_vl_ros.roboscene.geometry import UNITS
from qwen_vl_ros.roboscene.items import Item, items
from qwen_vl_ros.roboscene.questions import FAMILIES
from qwen_vl_ros.saliency.selectors import FILE
from qwen_vl_ros.share import share

if TYPE_CHECKING:
    from benchmarks.stages._selection_methods import Bench

#: Share of the units kept, and how many of 192 that is.
BUDGETS = {0.75: 144, 0.5: 96, 0.33: 63, 0.22: 42, 0.11: 21}
#: Methods that score units before the encoder.
BEFORE = ('random', 'uniform', 'gradient', 'colour', 'contrast', 'saliency', 'head', 'window',
          'grad_cam', 'oracle')
#: Methods that use the frame before; 'next_head' asks the head as well.
CLIP = ('motion', 'entropy', 'next_frame', 'next_head')
#: Methods that see all merged tokens, and those that show other pictures.
AFTER = ('head_after', 'divprune', 'dart', 'fastv', 'grad_cam_2')
OTHER = ('downsample', 'downsample_trained', 'roi')
METHODS = (*BEFORE, *CLIP, *AFTER, *OTHER)
#: More budgets, in units: for the methods that are held to a goal, and 80 %, which is what
#: PatchDropout keeps at least.
FINE = {'head': (54, 66, 72), 'next_frame': (54, 66, 72), 'next_head': (54, 66, 72),
        'downsample': (54, 72), 'downsample_trained': (54, 72), 'oracle': (72,), 'saliency': (72,),
        'random': (154,), 'uniform': (154,)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--items', type=int, default=0,
                        help='of each family and seed (0: 125, or 4 without a GPU)')
    parser.add_argument('--seeds', type=int, default=0,
                        help='sets of items and random draws (0: 3, or 1 without a GPU)')
    parser.add_argument('--models', nargs='+', default=[], choices=('tiny', 'tiny-dense'),
                        help='both, or tiny without a GPU')
    parser.add_argument('--methods', nargs='+', default=list(METHODS), choices=METHODS)
    parser.add_argument('--head', type=Path, help='another head than the one beside models/tiny')
    parser.add_argument('--coarse-seconds', type=float, default=40.0,
                        help="train a copy of 'tiny' on smaller pictures for the baseline (0: no)")
    parser.add_argument('--wall', type=int, default=40,
                        help='answers timed for each method, one at a time (0: none)')
    parser.add_argument('--shape', choices=('2b', '7b', 'none'),
                        help='what choosing costs on this shape and a latency target, and nothing '
                             'else; by default 2b comes last on a GPU')
    parser.add_argument('--batch', type=int, default=1100, help='items that run at a time')
    parser.add_argument('--workers', type=int, default=min(10, os.cpu_count() or 1),
                        help='processes that compute the signals')
    parser.add_argument('--most-seconds', type=float, default=0.0,
                        help='begin no further seed after that long (0: all of them)')
    parser.add_argument('--partial', type=Path, metavar='FILE',
                        help='write the records after every seed')
    parser.add_argument('--device', default='auto')


def run(args: argparse.Namespace) -> list[Record]:
    """Score everything and return the records."""
    if args.shape in ('2b', '7b'):
        from benchmarks.stages._selection_shape import on_shape
        return on_shape(args.shape, args.partial)
    # No device is touched before the processes that make maps are there.
    full = args.device != 'cpu' and shutil.which('nvidia-smi') is not None
    args.items = args.items or (125 if full else 4)
    args.seeds = args.seeds or (3 if full else 1)
    args.models = args.models or (['tiny', 'tiny-dense'] if full else ['tiny'])
    args.coarse_seconds *= full
    args.shape = args.shape or ('2b' if full and args.wall else 'none')
    makers = MapMakers(args.workers)
    drawn = plan(args)
    # Made while the copy for smaller pictures is trained.
    made = {key: makers.start(rows) for key, rows in drawn.items()}
    try:
        return _run(args, drawn, made)
    finally:
        makers.close()


def plan(args: argparse.Namespace) -> dict[tuple[int, str], list[Item]]:
    """Return the items of every seed, stills and clips apart."""
    return {(seed, kind): [item for f in FAMILIES if (f == 'change') == (kind == 'clips')
                           for item in items(f, 'test', args.items, seed)]
            for seed in range(args.seeds) for kind in ('stills', 'clips')}


def _run(args: argparse.Namespace, drawn: dict[tuple[int, str], list[Item]],
         made: dict[tuple[int, str], Iterator[Maps]]) -> list[Record]:
    import torch

    from benchmarks.stages._selection_methods import Bench, show
    from qwen_vl_ros.engine.device import pick_device
    from qwen_vl_ros.saliency.head import SaliencyHead
    from tools.distil_head.batched import TinyBatch
    from tools.distil_head.coarse import adapted

    begun = time.monotonic()
    device = pick_device(args.device)
    file = args.head or share('models', 'tiny') / FILE
    if not file.exists():
        raise CannotRun(f'{file} is missing; tools/distil_head makes it')
    head = SaliencyHead.load(file).to(device)
    coarse = None
    if args.coarse_seconds > 0 and 'tiny' in args.models and 'downsample_trained' in args.methods:
        coarse = adapted(share('models', 'tiny'), device, args.coarse_seconds)
    models = {name: TinyBatch(share('models', name), device) for name in args.models}
    tally = Tally()
    found: list[Record] = []
    seeds = 0
    with torch.no_grad():
        for seed in range(args.seeds):
            if args.most_seconds and time.monotonic() - begun > args.most_seconds:
                break
            for kind in ('stills', 'clips'):
                rows, maps = drawn[seed, kind], list(made[seed, kind])
                for at in range(0, len(rows), args.batch):
                    part = slice(at, at + args.batch)
                    shown = show(rows[part], maps[part], device, seed)
                    tally.look(shown)
                    for name, model in models.items():
                        bench = Bench(model, head, shown, coarse if name == 'tiny' else None)
                        _score(name, bench, args.methods, tally)
            seeds += 1
            found = tally.records(args, head, len(next(iter(models.values())).prefix), seeds)
            if args.partial:
                write(args.partial, found)
            print(f'seed {seed}: {time.monotonic() - begun:.0f} s', flush=True)
    if args.wall:
        from benchmarks.stages._selection_wall import wall
        found += wall(args, file)
    if args.shape != 'none':
        from benchmarks.stages._selection_shape import on_shape
        found += on_shape(args.shape)
    return found


def _score(model: str, bench: Bench, methods: list[str], tally: Tally) -> None:
    """Run every method over one batch of items."""
    tally.count(model, 'full', UNITS, bench.shown, bench.full)
    if 'gradient' in methods:
        tally.count(model, 'threshold', 0, bench.shown, bench.threshold())
    for method in methods:
        _score_one(model, bench, method, tally)


def _score_one(model: str, bench: Bench, method: str, tally: Tally) -> None:
    """Run a method at all its budgets."""
    shown, slices = bench.shown, bench.group.slices
    for kept in sorted({*BUDGETS.values(), *FINE.get(method, ())}):
        if method not in BEFORE and method not in CLIP:
            good = getattr(bench, method)(kept)
            if good is not None:
                tally.count(model, method, kept, shown, good)
            continue
        scores = (bench.next_frame(kept, method == 'next_head')
                  if method.startswith('next') else bench.scores(method))
        keep = scores.topk(kept * slices, 1).indices.sort(1).values
        tally.count(model, method, kept, shown, bench.right_with(keep),
                    shown.evidence.gather(1, keep).sum(1))
