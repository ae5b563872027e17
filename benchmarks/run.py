"""
Time one stage and write what came out as records.

    python benchmarks/run.py --stage patches --json benchmarks/results/x86-2core.json

A stage is a module in benchmarks/stages with ``add_arguments(parser)`` and ``run(args)``, which
returns records (benchmarks/records.py). Runs from the source tree with torch, numpy, transformers
and built kernels; nothing is installed and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault('HF_HUB_OFFLINE', '1')

from benchmarks import records  # noqa: E402


def stages() -> list[str]:
    """Return the names of the stages that can be run."""
    return sorted(p.stem for p in (ROOT / 'benchmarks' / 'stages').glob('*.py')
                  if not p.stem.startswith('_'))


def main() -> int:
    """Run a stage; 1 when it could not be run here, 130 when it was interrupted."""
    try:
        return run_stage()
    except KeyboardInterrupt:
        print('interrupted: no record of this run was written', file=sys.stderr)
        return 130


def run_stage() -> int:
    """Do what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False)
    parser.add_argument('--stage', choices=stages())
    known, _ = parser.parse_known_args()
    if known.stage is None:
        parser.print_help()
        return 0 if {'-h', '--help'} & set(sys.argv) else 2
    stage = importlib.import_module(f'benchmarks.stages.{known.stage}')
    parser.add_argument('-h', '--help', action='help')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help='add the records to this file; newer ones replace older ones')
    stage.add_arguments(parser)
    args = parser.parse_args()
    try:
        found = stage.run(args)
    except records.CannotRun as error:
        print(f'{known.stage}: {error}', file=sys.stderr)
        return 1
    print(records.table(found))
    if args.json:
        records.write(args.json, found)
    return 0


if __name__ == '__main__':
    sys.exit(main())
