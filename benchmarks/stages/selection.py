"""
Accuracy against FLOPs, scoring included, of every way to choose vision tokens, on RoboScene-VQA.

    python benchmarks/run.py --stage selection --json benchmarks/results/h200.json
    python benchmarks/run.py --stage selection --items 2 --seeds 1 --models tiny   # on a CPU

All eight families, three seeds, both tiny checkpoints; docs/accuracy.md is made from the records
(tools/plot_accuracy.py). Batched: one GPU does the whole of it in a few minutes.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.records import CannotRun, Record, record
from qwen_vl_ros.roboscene.evaluate import wilson
from qwen_vl_ros.roboscene.geometry import UNITS
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.roboscene.questions import FAMILIES
from qwen_vl_ros.share import share

#: Share of the units kept, and how many of 192 that is.
BUDGETS = {0.75: 144, 0.5: 96, 0.33: 63, 0.22: 42, 0.11: 21}
#: Methods that score units before the encoder.
BEFORE = ('random', 'uniform', 'gradient', 'contrast', 'saliency', 'head', 'window', 'grad_cam',
          'oracle')
#: Methods that use the frame before; 'next_head' asks the head as well.
CLIP = ('motion', 'next_frame', 'next_head')
#: Methods that see all merged tokens, and those that show other pictures.
AFTER = ('divprune', 'dart', 'fastv', 'grad_cam_2')
OTHER = ('downsample', 'downsample_trained', 'roi')
METHODS = (*BEFORE, *CLIP, *AFTER, *OTHER)
#: More budgets for the methods that are held to a goal, in units.
FINE = {'head': (54, 66, 72), 'next_frame': (54, 66, 72), 'next_head': (54, 66, 72),
        'downsample': (54, 72), 'downsample_trained': (54, 72), 'oracle': (72,), 'saliency': (72,)}
CHUNK = 200

#: (model, method, kept) -> family -> [right of each item].
Hits = dict[tuple[str, str, int], dict[str, list[np.ndarray]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--items', type=int, default=400, help='of each family and seed')
    parser.add_argument('--seeds', type=int, default=3, help='sets of items and random draws')
    parser.add_argument('--models', nargs='+', default=['tiny', 'tiny-dense'],
                        choices=('tiny', 'tiny-dense'))
    parser.add_argument('--methods', nargs='+', default=list(METHODS), choices=METHODS)
    parser.add_argument('--head', type=Path, help='another head than the one beside models/tiny')
    parser.add_argument('--coarse-seconds', type=float, default=75.0,
                        help="train a copy of 'tiny' on smaller pictures for the baseline (0: no)")
    parser.add_argument('--wall', type=int, default=40,
                        help='answers timed for each method, one at a time (0: none)')
    parser.add_argument('--device', default='auto')


def run(args: argparse.Namespace) -> list[Record]:
    """Score everything and return the records."""
    import torch

    from benchmarks.stages._selection_methods import Bench, show
    from qwen_vl_ros.engine.device import pick_device
    from qwen_vl_ros.saliency.head import SaliencyHead
    from qwen_vl_ros.saliency.selectors import FILE
    from tools.distil_head.batched import TinyBatch
    from tools.distil_head.coarse import adapted

    device = pick_device(args.device)
    file = args.head or share('models', 'tiny') / FILE
    if not file.exists():
        raise CannotRun(f'{file} is missing; tools/distil_head makes it')
    head = SaliencyHead.load(file).to(device)
    models = {name: TinyBatch(share('models', name), device) for name in args.models}
    coarse = None
    if args.coarse_seconds > 0 and 'tiny' in models and 'downsample_trained' in args.methods:
        coarse = adapted(share('models', 'tiny'), device, args.coarse_seconds)
    hits: Hits = defaultdict(lambda: defaultdict(list))
    recall: dict[tuple[str, str, int], list[np.ndarray]] = defaultdict(list)
    kept_share: list[float] = []
    words: list[float] = []
    begun = time.monotonic()
    with torch.inference_mode(False), torch.no_grad():
        for seed in range(args.seeds):
            for family in FAMILIES:
                drawn = list(items(family, 'test', args.items, seed))
                for at in range(0, len(drawn), CHUNK):
                    shown = show(drawn[at:at + CHUNK], device, seed)
                    words.append(float((shown.group.labels >= 0).int().argmax(1).float().mean()))
                    kept_share.append(float(shown.threshold.float().mean()))
                    for name, model in models.items():
                        bench = Bench(model, head, shown, coarse if name == 'tiny' else None)
                        _score(name, bench, family, args.methods, hits, recall)
            print(f'seed {seed}: {time.monotonic() - begun:.0f} s', flush=True)
    text = len(next(iter(models.values())).prefix) + 2 + round(float(np.mean(words)))
    found = _records(args, hits, recall, head, text, float(np.mean(kept_share)))
    if args.wall:
        from benchmarks.stages._selection_wall import wall
        found += wall(args, file)
    return found


def _score(model: str, bench, family: str, methods: list[str], hits: Hits, recall) -> None:
    """Run every method and budget over one batch of items."""
    shown, slices = bench.shown, bench.group.slices
    has = shown.evidence.any(1)
    hits[model, 'full', UNITS][family].append(bench.full.cpu().numpy())
    if 'gradient' in methods:
        hits[model, 'threshold', 0][family].append(bench.threshold().cpu().numpy())
    for method in methods:
        for kept in sorted({*BUDGETS.values(), *FINE.get(method, ())}):
            if method in BEFORE or method in CLIP:
                scores = (bench.next_frame(kept, method == 'next_head')
                          if method.startswith('next') else bench.scores(method))
                keep = scores.topk(kept * slices, 1).indices.sort(1).values
                good = bench.right_with(keep)
                share_seen = shown.evidence.gather(1, keep).sum(1) / shown.evidence.sum(1).clamp(
                    min=1)
                recall[model, method, kept].append(share_seen[has].cpu().numpy())
            else:
                good = getattr(bench, method)(kept)
            if good is not None:
                hits[model, method, kept][family].append(good.cpu().numpy())


def _records(args, hits: Hits, recall, head, text: int, share_kept: float) -> list[Record]:
    from benchmarks.stages import _selection_cost as cost
    from qwen_vl_ros.engine.config import load_config

    config = load_config(share('models', 'tiny'))
    full = cost.encoder(config, [UNITS]) + cost.prefill(config, UNITS, text)
    found = []
    for (model, method, kept), families in hits.items():
        whole = {f: np.concatenate(hits[model, 'full', UNITS][f]) for f in families}
        coarse = hits.get((model, 'downsample_trained', kept)) or hits.get(
            (model, 'downsample', kept), {})
        own = {f: np.concatenate(rows) for f, rows in families.items()}
        missed = [own[f][~np.concatenate(coarse[f])] for f in own if f in coarse]
        below, spread = _paired(own, whole)
        lost = np.concatenate(missed) if missed else np.zeros(0)
        flops = cost.question(config, head, method, kept or round(share_kept * UNITS), text)
        seen = recall.get((model, method, kept))
        found.append(record(
            'selection',
            {'model': model, 'method': method, 'kept': kept or round(share_kept * UNITS),
             'items': args.items, 'seeds': args.seeds},
            'accuracy', float(np.mean([x.mean() for x in own.values()])), 'share',
            runs=sum(map(len, own.values())), higher_is_better=True,
            baseline=('all tokens', float(np.mean([x.mean() for x in whole.values()]))),
            flops_share=round(flops / full, 4), below_full=round(below, 5),
            below_full_95=round(1.96 * spread, 5),
            evidence_recall=None if seen is None else round(float(np.concatenate(seen).mean()), 4),
            where_downsampling_fails=None if not len(lost) else
            [round(float(lost.mean()), 4), *(round(x, 4) for x in wilson(int(lost.sum()),
                                                                         len(lost)))],
            families={f: [round(float(x.mean()), 4),
                          *(round(y, 4) for y in wilson(int(x.sum()), len(x)))]
                      for f, x in own.items()}))
    return found


def _paired(own: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return how far the mean of families lies below the full frame's, and its standard error."""
    gaps = [whole[f].astype(float) - own[f] for f in own]
    error = np.sqrt(sum(g.var() / len(g) for g in gaps)) / len(gaps)
    return float(np.mean([g.mean() for g in gaps])), float(error)
