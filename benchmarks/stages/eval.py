"""Accuracy of the shipped model on RoboScene-VQA, all tokens and fewer, with what that costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.records import Record, median, record
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.roboscene.evaluate import evaluate
from qwen_vl_ros.roboscene.questions import FAMILIES
from qwen_vl_ros.saliency.selectors import make_selector
from qwen_vl_ros.share import share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--items', type=int, default=40, help='of each family')
    parser.add_argument('--keep', type=float, nargs='+', default=[1.0, 0.5])
    parser.add_argument('--device', default='auto')
    parser.add_argument('--model', type=Path, help='a checkpoint (models/tiny)')


def run(args: argparse.Namespace) -> list[Record]:
    """Score every family at every keep ratio."""
    folder = args.model or share('models', 'tiny')
    engine = Engine.load(str(folder), device=args.device,
                         selector=make_selector('auto', model=folder))
    found = []
    for keep in args.keep:
        for score in evaluate(engine, FAMILIES, count=args.items, keep_ratio=keep):
            low, high = score.interval
            found.append(record(
                'eval', {'model': folder.name, 'dtype': engine.info.dtype, 'keep': keep,
                         'family': score.family, 'split': 'test'},
                'accuracy', score.accuracy, '', baseline=('most frequent answer', score.chance),
                higher_is_better=True,
                note=f'{score.count} items, 95 % interval {low:.3f} to {high:.3f}')
                | {'runs': score.count, 'interval': [low, high],
                   'gflops': round(score.gflops, 4), 'gflops_scoring': round(score.scoring, 4),
                   'ms_median': round(median(score.ms), 3),
                   'ms_select_median': round(median(score.select_ms), 3)})
    engine.close()
    return found
