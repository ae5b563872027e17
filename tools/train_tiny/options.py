"""Command line of the training program, held against what can be trained."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch


class TrainError(RuntimeError):
    """Training cannot start or go on; the message is one line for the user."""


def parser(manual: str | None) -> argparse.ArgumentParser:
    """Return the parser; ``manual`` is what ``--help`` begins with."""
    p = argparse.ArgumentParser(description=manual,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', type=Path, required=True, help='folder of checkpoint and state')
    p.add_argument('--minutes', type=float, default=18.0,
                   help='training time that the number of steps is chosen for')
    p.add_argument('--steps', type=int, default=0, help='number of steps; 0: from --minutes')
    p.add_argument('--stop-after', type=float, default=0.0, metavar='SECONDS',
                   help='save and stop after that long; 0: train to the end')
    p.add_argument('--keep', action='store_true', help='train with random keep ratios')
    p.add_argument('--init', type=Path, help='start from the weights of this folder')
    p.add_argument('--focus', choices=('', 'count'), default='',
                   help='give half of the training to one family')
    p.add_argument('--cameras', choices=('train', 'wide'), default='train',
                   help="'wide' draws cameras beyond those of the test scenes")
    p.add_argument('--centres', action='store_true',
                   help='auxiliary loss also on how many things have their centre in a unit')
    p.add_argument('--lr', type=float, default=1e-3)
    p.add_argument('--aux', type=float, default=1.0, help='initial weight of the auxiliary loss')
    p.add_argument('--aux-until', type=float, default=0.3, metavar='SHARE',
                   help='share of the steps over which it falls to 0')
    p.add_argument('--stills', type=int, default=192, help='pictures a step')
    p.add_argument('--clips', type=int, default=32, help='two-slice clips a step')
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--workers', type=int, default=12, help='processes that draw scenes')
    p.add_argument('--eval-items', type=int, default=0,
                   help='items a family to score at the end (test, heldout, shift, floors)')
    p.add_argument('--shard-mib', type=int, default=0, help='split the weights into files')
    p.add_argument('--no-compile', action='store_true', help='run the blocks uncompiled')
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    return p


#: Lowest and highest value of each number; of those in _POSITIVE the lowest itself is out.
_LIMITS = {
    'minutes': (0, 10 ** 6), 'steps': (0, 10 ** 9), 'stop_after': (0, 10 ** 9), 'lr': (0, 1),
    'aux': (0, 10 ** 6), 'aux_until': (0, 1), 'stills': (0, 65536), 'clips': (0, 65536),
    'seed': (0, 2 ** 32 - 1), 'workers': (0, 1024), 'eval_items': (0, 10 ** 7),
    'shard_mib': (0, 10 ** 6)}
_POSITIVE = ('minutes', 'lr', 'aux_until')


def complaint(args: argparse.Namespace) -> str | None:
    """Return in one sentence what of a command line cannot be, or ``None``."""
    for name, (low, high) in _LIMITS.items():
        value = getattr(args, name)
        over = name in _POSITIVE
        if not (math.isfinite(value) and low <= value <= high and not (over and value == low)):
            return (f'--{name.replace("_", "-")} {value}: expected a number '
                    f'{"over" if over else "from"} {low} {"and at most" if over else "to"} '
                    f'{high}')
    if args.stills + args.clips == 0:
        return '--stills 0 --clips 0: a step needs a picture or a clip'
    if args.out.exists() and not args.out.is_dir():
        return f'--out {args.out} is a file; expected a folder'
    try:
        kind = torch.device(args.device).type
    except RuntimeError:
        return f"--device {args.device}: expected 'cpu' or 'cuda'"
    if kind not in ('cpu', 'cuda'):
        return f"--device {args.device}: expected 'cpu' or 'cuda'"
    if kind == 'cuda' and not torch.cuda.is_available():
        return f'--device {args.device}: torch {torch.__version__} finds no CUDA device'
    resumes = (args.out / 'state.pt').exists()
    if args.init and not resumes and not any(args.init.glob('*.safetensors')):
        return f'--init {args.init} holds no *.safetensors'
    return None
