"""``qwen_vl bench``: time every stage that this machine can, and compare with the last time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from qwen_vl_ros.cli.common import CliError, check_writable

DESCRIPTION = '''\
Run the stages of benchmarks/ one after the other, each in a process of its own. Records (value,
unit, measured or projected, baseline of the same run, machine, commit, command) go into one file a
machine, benchmarks/results/NAME.json; what differs from the file's earlier figures is named, and
the tables and plots of benchmarks/README.md are made again. The same command on every machine: a
stage that needs what is not here says so and is left out.'''

EPILOG = '''\
examples:
  qwen_vl bench                       everything, minutes
  qwen_vl bench --quick answer eval   two stages, roughly
  qwen_vl bench --render              only make the README again
  qwen_vl bench --compare old.json new.json'''

ROOT = Path(__file__).resolve().parents[2]

#: Options of a stage that keep it short.
QUICK = {'patches': ['--seconds', '0.1', '--threads', '1', '--sizes', '640x480'],
         'answer': ['--seconds', '0.5', '--size', '640x480', '--keep', '1'],
         'projection': ['--calls', '10', '--replays', '5'],
         'eval': ['--items', '5', '--keep', '1'],
         'selection': ['--items', '1', '--seeds', '1', '--models', 'tiny', '--wall', '0',
                       '--coarse-seconds', '0', '--methods', 'head', 'uniform', 'downsample'],
         'observe': ['--answers', '10', '--windows', '6'],
         'overlap': ['--seconds', '1', '--cameras', '2', '--tokens', '8', '--questions', '2'],
         'encoder': ['--seconds', '0.2', '--size', '640x480', '--keep', '1', '--frames', '0',
                     '--grids', '2', '--no-compiled', '--no-int8'],
         'prefill': ['--seconds', '0.2', '--size', '640x480', '--keep', '1', '--no-compiled'],
         'first_token': ['--seconds', '0.3', '--size', '640x480', '--keep', '1', '--no-compiled'],
         'decode': ['--dtype', 'bf16', 'int4', '--context', '512', '--sequences', '4',
                    '--steps', '50', '--tokens', '100'],
         'prefill_weights': ['--tokens', '128', '1024', '--runs', '3'],
         'stream': ['--tokens', '300'], 'quantized': ['--items', '5'],
         'roofline': ['--most-rows', '64'], 'interconnect': ['--most-bytes', '16777216']}


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'bench', help='time every stage that this machine can', description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('stages', nargs='*', metavar='STAGE', help='only these (all)')
    parser.add_argument('--quick', action='store_true',
                        help='short runs: rough figures, in NAME-quick.json; tables stay')
    parser.add_argument('--results', type=Path, metavar='FILE',
                        help="records go there (this machine's file in benchmarks/results)")
    parser.add_argument('--against', type=Path, metavar='FILE',
                        help='compare with this file (the earlier content of --results)')
    parser.add_argument('--tolerance', type=float, default=0.1, metavar='SHARE',
                        help='smaller changes are noise (%(default)s)')
    parser.add_argument('--strict', action='store_true', help='exit code 1 when one regressed')
    parser.add_argument('--render', action='store_true',
                        help='only make benchmarks/README.md and the projection again')
    parser.add_argument('--compare', type=Path, nargs=2, metavar=('OLD', 'NEW'),
                        help='only compare two files')
    parser.add_argument('--list', action='store_true', help='name the stages')


def run(args: argparse.Namespace) -> int:
    """Run it; 1 when a stage failed, or with --strict when a figure regressed."""
    from qwen_vl_ros.measure.bench import QUICK_SUFFIX, results_name

    if not 0 <= args.tolerance < 10:
        raise CliError(f'--tolerance is {args.tolerance}; expected 0 to 10')
    if args.compare:
        return _compare(_load(args.compare[0]), _load(args.compare[1]), args)
    folder = ROOT / 'benchmarks'
    if not (folder / 'run.py').exists():
        raise CliError(f'{folder}/run.py is missing: benchmarks run from the source tree')
    known = sorted(p.stem for p in (folder / 'stages').glob('*.py') if p.stem[0] != '_')
    if args.list:
        print('\n'.join(known))
        return 0
    if args.render:
        _write_projection(folder / 'results')
        return _render(folder)
    for name in args.stages:
        if name not in known:
            raise CliError(f"stage '{name}' is not one of {', '.join(known)}")
    # Rough figures never take the place of a machine's careful ones.
    kept = args.results is None and not args.quick
    path = args.results or folder / 'results' / (
        results_name() + (QUICK_SUFFIX if args.quick else '') + '.json')
    check_writable(path.parent, folder=True)
    if path.parent.exists():
        check_writable(path)
    earlier = args.against or path
    before = _load(earlier) if args.against or earlier.exists() else []
    failed, left_out = [], []
    for name in args.stages or known:
        print(f'== {name}', flush=True)
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(folder / 'run.py'), '--stage', name, '--json', str(path),
             *(QUICK.get(name, []) if args.quick else []),
             *(['--plot', str(path.with_name(f'{path.stem}-saturation.png'))]
               if name == 'roofline' else [])],
            cwd=ROOT, stderr=subprocess.PIPE, text=True)
        last = (done.stderr.strip().splitlines() or [''])[-1]
        if done.returncode == 1 and last.startswith(f'{name}: '):
            left_out.append(last)
            print(f'left out: {last}')
        elif done.returncode:
            failed.append(name)
            print(done.stderr, file=sys.stderr)
        print(f'{name} took {time.monotonic() - begun:.0f} s', flush=True)
    if kept:
        _write_projection(folder / 'results')
    print(f'\nrecords in {path}')
    for line in left_out:
        print(f'left out: {line}')
    for name in failed:
        print(f'FAILED: {name}', file=sys.stderr)
    code = _compare(before, _load(path), args) if before and path.exists() else 0
    if kept:
        _render(folder)
    return 1 if failed else code


def _load(path: Path) -> list:
    from qwen_vl_ros.measure.bench import load_records

    try:
        return load_records(path)
    except ValueError as error:
        raise CliError(str(error)) from None


def _compare(before: list, after: list, args: argparse.Namespace) -> int:
    from qwen_vl_ros.measure.bench import compare_records, format_changes

    machines = {r['machine'].split(', torch')[0] for r in (*before, *after)
                if r['kind'] == 'measured'}
    if len(machines) > 1:
        print('figures of different machines: ' + '; '.join(sorted(machines)))
    changes = compare_records(before, after)
    print(format_changes(changes, args.tolerance))
    regressed = any(c.verdict(args.tolerance) == 'regressed' for c in changes)
    return 1 if regressed and args.strict else 0


def _write_projection(folder: Path) -> None:
    """Write what an Orin would need, by published efficiencies and by those of the records."""
    from qwen_vl_ros.measure.efficiency import load_efficiencies
    from qwen_vl_ros.measure.headline import headline_records

    rows = [json.dumps(record, ensure_ascii=False)
            for record in headline_records(own=load_efficiencies(folder))]
    (folder / 'orin-projected.json').write_text('[\n' + ',\n'.join(rows) + '\n]\n',
                                                encoding='utf-8')


def _render(folder: Path) -> int:
    from qwen_vl_ros.measure.bench import render

    try:
        for path in render(folder / 'results', folder / 'README.md'):
            print(f'wrote {path}')
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from None
    return 0
