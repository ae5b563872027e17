"""
The two phases of models/tiny-dense in one command, resumable, and the picture of its curve.

    python -m tools.train_tiny.recipe --out build/tiny-dense
    python -m tools.train_tiny.recipe --out build/tiny-dense            # goes on where it stopped

The first phase trains from nothing, the second from its weights with wider cameras, half of
everything about counting, and an auxiliary loss on where things have their centres. On one H200
they take 19 minutes; without a GPU --device cpu has to be given, and --steps or --stills and
--clips make it short enough to be seen working. Options that are not listed go to
tools.train_tiny.train as they are.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import torch

#: Options of tools.train_tiny.train, a row a phase; the steps are those of the shipped weights.
PHASES = (
    ('--steps', '9081'),
    ('--steps', '4646', '--stills', '216', '--clips', '12', '--seed', '2', '--centres',
     '--aux-until', '0.8', '--cameras', 'wide', '--focus', 'count'),
)


def joined(curves: list[list[dict[str, float]]], steps: list[int]) -> list[dict[str, float]]:
    """Return the curves of all phases as one: steps and seconds count on."""
    out: list[dict[str, float]] = []
    step, seconds = 0, 0.0
    for count, curve in zip(steps, curves):
        out += [{**row, 'step': row['step'] + step, 'seconds': round(row['seconds'] + seconds, 1)}
                for row in curve]
        step, seconds = step + count, out[-1]['seconds']
    return out


def draw(curve: list[dict[str, float]], file: Path) -> None:
    """Draw loss and accuracy of the training batches over the steps."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout='constrained')
    left.semilogy([r['step'] for r in curve], [r['loss'] for r in curve])
    left.set(xlabel='step', ylabel='loss of the answers')
    for name in (k for k in curve[-1] if k not in ('step', 'loss', 'seconds')):
        rows = [r for r in curve if name in r]
        right.plot([r['step'] for r in rows], [r[name] for r in rows], label=name, linewidth=1)
    right.set(xlabel='step', ylabel='exact match in the training batch', ylim=(0, 1.01))
    right.legend(fontsize='x-small', ncol=2)
    figure.savefig(file, dpi=80)
    plt.close(figure)


def run(command: list[str]) -> int:
    """Run a phase; Ctrl-C reaches it too, and it is waited for while it saves."""
    with subprocess.Popen(command) as phase:
        while True:
            try:
                return phase.wait()
            except KeyboardInterrupt:
                phase.send_signal(signal.SIGINT)  # once more does no harm


def main() -> int:
    """Run the program."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', type=Path, required=True, help='folder of the final checkpoint')
    p.add_argument('--eval-items', type=int, default=2000, help='items a family to score')
    p.add_argument('--steps', type=int, help="steps of each phase instead of the recipe's")
    p.add_argument('--device', default='cuda', help="'cpu' takes days for the whole recipe")
    args, rest = p.parse_known_args()
    if args.steps is not None and args.steps < 1:
        p.error(f'--steps {args.steps}: expected a number from 1')
    steps = [args.steps or int(options[1]) for options in PHASES]
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        p.error(f'no CUDA device: {sum(steps)} steps take days on a CPU. --device cpu does them '
                'nevertheless; --steps 2 --stills 8 --clips 2 shows that it works')
    folders = [args.out.with_name(f'{args.out.name}-phase{i}')
               for i in range(1, len(PHASES))] + [args.out]
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        p.error(f'--out {args.out}: {error}')
    for i, (options, folder) in enumerate(zip(PHASES, folders)):
        command = [sys.executable, '-m', 'tools.train_tiny.train', '--out', str(folder),
                   *options, *rest, '--steps', str(steps[i]), '--device', args.device]
        if i:
            command += ['--init', str(folders[i - 1])]
        if folder == args.out:
            command += ['--eval-items', str(args.eval_items)]
        code = run(command)
        if code:
            return code
    curve = joined([json.loads((f / 'curve.json').read_text()) for f in folders], steps)
    (args.out / 'curve.json').write_text(json.dumps(curve))
    draw(curve, args.out / 'curve.png')
    return 0


if __name__ == '__main__':
    sys.exit(main())
