"""``qwen_vl eval``: accuracy on RoboScene-VQA."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from qwen_vl_ros.cli.common import (
    CliError,
    add_model_arguments,
    check_writable,
    fewer_tokens,
    load_engine,
    model_dict,
)

if TYPE_CHECKING:
    from qwen_vl_ros.roboscene.evaluate import Score

DESCRIPTION = '''\
Score a model on RoboScene-VQA: rendered robot scenes, eight families of questions, exact match.

Families: attribute (colour or shape), count, relation (left, right, nearer, behind), pointing
(<x><y> bins), number (one to three digits), path (is it blocked), far (small and far), change
(what moved between two slices). Splits: test (new scenes), heldout (pairs of colour and shape
that training never showed), shift (other cameras and textures). The same seed gives the same
items on every machine.

GFLOP is the mean of a question: encoder, decoder and what choosing the units took ("scoring": the
head's net, signals, a dropper's work; of selectors that use the last frame also the gradient or
the encoder's pass behind every second answer). ms is the median of a question on the wall clock,
one at a time, from the request to the end of its answer, and "select" what of it went into
choosing; a gradient that a robot takes while nobody waits is not in it and stands at the end of
the line. The first questions of a shape, which capture graphs on a GPU, are counted like others.

The answers are those of the shipped tiny model's vocabulary: another checkpoint is scored fairly
only when it was trained to answer in these words. Answers are greedy, of at most 32 tokens. The
scenes are drawn by the native renderer ('make kernels').'''

EPILOG = '''\
examples:
  qwen_vl eval --items 200 --json out.json
  qwen_vl eval --items 50 --split shift --family path number
  qwen_vl eval --items 100 --floor blind
  qwen_vl eval --items 100 --keep-ratio 0.33
  qwen_vl eval --items 100 --keep-ratio 0.33 --select divprune
  qwen_vl eval --items 100 --keep-ratio 0.33 --least-margin 1

All methods at all budgets, with plots: docs/accuracy.md.'''


#: Options that make another case of a record where they are given.
CHOICES = ('weights', 'gradient_layers', 'generic_every', 'least_margin', 'roi')


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'eval', help='score a model on rendered scenes', description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--items', type=int, default=100, metavar='N',
                        help='items a family (%(default)s)')
    parser.add_argument('--family', nargs='+', default=None, metavar='NAME',
                        help='only these families (all)')
    parser.add_argument('--split', default='test', choices=('test', 'heldout', 'shift'),
                        help='which scenes (%(default)s)')
    parser.add_argument('--floor', default='none', choices=('none', 'blind', 'shuffled'),
                        help='show a grey picture, or that of another item (%(default)s)')
    parser.add_argument('--scene-seed', type=int, default=0, metavar='SEED',
                        help='another seed, other items (%(default)s)')
    parser.add_argument('--json', metavar='FILE', help="write records as JSON; '-' is stdout")
    parser.add_argument('--wrong', action='store_true', help='list answers that were wrong')
    add_model_arguments(parser, ', or oracle, which knows where the evidence is', free=False)


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when all items were asked."""
    from tqdm import tqdm

    from qwen_vl_ros.measure.record import record
    from qwen_vl_ros.roboscene.evaluate import evaluate
    from qwen_vl_ros.roboscene.items import HELD_OUT_FAMILIES
    from qwen_vl_ros.roboscene.questions import FAMILIES

    if args.items < 1:
        raise CliError(f'--items is {args.items}; expected at least 1')
    known = HELD_OUT_FAMILIES if args.split == 'heldout' else FAMILIES
    families = args.family or known
    for name in families:
        if name not in known:
            raise CliError(f"--family '{name}' is not one of {', '.join(known)} "
                           f"(split {args.split})")
    if not 0 < args.keep_ratio <= 1:
        raise CliError(f'--keep-ratio is {args.keep_ratio}; expected over 0 to 1')
    fewer = fewer_tokens(args)
    check_writable(args.json)
    _check_renderer()
    engine = load_engine(args)
    out = sys.stderr if args.json == '-' else sys.stdout
    info = model_dict(engine)
    print(f"{info['name']} ({info['dtype']}, {info['device']}), split {args.split}, "
          f'{args.items} items a family, floor {args.floor}, keep {args.keep_ratio:g}'
          + (f' by {args.select} {args.weights}'.rstrip() if args.keep_ratio < 1 else ''),
          file=out)
    print(f"{'family':<10} {'accuracy':>8}  {'95 % interval':<15} {'chance':>6} {'tokens':>6} "
          f"{'recall':>6} {'GFLOP':>6} {'scoring':>7} {'ms':>7} {'select':>7}",
          file=out)
    records, scores = [], []
    with tqdm(total=args.items * len(families), unit='item', leave=False, file=sys.stderr,
              disable=not sys.stderr.isatty()) as bar:
        for score in evaluate(
                engine, families, split=args.split, count=args.items, seed=args.scene_seed,
                floor=args.floor, keep_ratio=args.keep_ratio, fewer=fewer,
                select='oracle' if args.select == 'oracle' else '',
                on_item=lambda: bar.update() and None):
            low, high = score.interval
            bar.clear()
            print(f'{score.family:<10} {score.accuracy:>8.3f}  {low:.3f} to {high:.3f}  '
                  f'{score.chance:>6.3f} {score.kept:>6.0f} {score.recall:>6.2f} '
                  f'{_spent([score])}'
                  + (f'  {score.again} asked again' if score.again else ''),
                  file=out, flush=True)
            if args.wrong:
                for question, expected, said in score.wrong:
                    print(f'    {question} {expected} -- said {said}', file=out)
            scores.append(score)
            records.append(record(
                'eval', {'model': info['name'], 'dtype': info['dtype'], 'keep': args.keep_ratio,
                         'family': score.family, 'split': args.split, 'floor': args.floor,
                         'seed': args.scene_seed,
                         'select': args.select if args.keep_ratio < 1 else 'all',
                         **{name: getattr(args, name) for name in CHOICES if getattr(args, name)}},
                'accuracy', score.accuracy, 'share', runs=score.count, interval=[low, high],
                chance=score.chance, kept_tokens=score.kept, evidence_recall=score.recall,
                gflops=score.gflops, gflops_scoring=score.scoring, asked_again=score.again,
                ms_median=median(score.ms), ms_select_median=median(score.select_ms),
                ms_reflect_median=median(score.reflect_ms) if score.reflect_ms else None))
    whole = mean(r['value'] for r in records)
    print(f"{'mean':<10} {whole:>8.3f}{'':39} {_spent(scores)}", file=out)
    if args.json == '-':
        print(json.dumps(records, indent=2))
    elif args.json:
        try:
            Path(args.json).write_text(json.dumps(records, indent=2) + '\n')
        except OSError as error:
            raise CliError(f'cannot write {args.json}: {error.strerror}') from error
    return 0


def _spent(scores: list[Score]) -> str:
    """Return mean GFLOP and what of it is scoring, median ms and what of it is choosing."""
    aside = [ms for score in scores for ms in score.reflect_ms]
    return (f'{mean(score.gflops for score in scores):>6.1f} '
            f'{mean(score.scoring for score in scores):>7.3f} '
            f'{median(ms for score in scores for ms in score.ms):>7.1f} '
            f'{median(ms for score in scores for ms in score.select_ms):>7.2f}'
            + (f'  {median(aside):.1f} ms after the answer before' if aside else ''))


def _check_renderer() -> None:
    """:raises CliError: where scenes cannot be rendered."""
    from qwen_vl_ros.kernels.loader import KernelError, library

    try:
        library('qwen_vl_roboscene')
    except FileNotFoundError:
        raise CliError("rendered scenes need the renderer, build it with 'make kernels'") from None
    except KernelError as error:
        raise CliError(f'rendered scenes need the renderer: {error}') from None
