"""``qwen_vl doctor``: is this machine ready, and if not, what is the next step."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from qwen_vl_ros.cli.common import default_model

MANUAL = '''\
Check this machine: Python, packages, ROS and its middleware, the Fast DDS profile that whole
pictures need, kernel buffers, GPU or Jetson, kernels, and the model. Each line is OK, WARN (works,
but not as well as it could, or an optional part is missing) or FAIL, with the next step. Nothing
is changed.

  qwen_vl doctor
  qwen_vl doctor --model ~/models/Qwen2-VL-2B-Instruct
  qwen_vl doctor --json

exit codes: 0 no FAIL, 1 at least one'''


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        'doctor', help='check this machine', description=MANUAL,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', metavar='PATH', help='also check this model folder '
                        '(default: the tiny checkpoint that comes with the package)')
    parser.add_argument('--json', action='store_true', help='print JSON')


def run(args: argparse.Namespace) -> int:
    """Check; 1 when something failed."""
    from qwen_vl_ros.cli.checks import FAIL, run_checks

    checks = run_checks(args.model or default_model())
    if args.json:
        rows: list[dict[str, Any]] = [asdict(c) for c in checks]
        print(json.dumps({'checks': rows, 'ready': all(c.status != FAIL for c in checks)},
                         ensure_ascii=False, indent=1))
    else:
        for check in checks:
            print(f'{check.status:<5} {check.name:<18} {check.found}')
            if check.next_step:
                print(f'{"":<24} → {check.next_step}')
        counts = {s: sum(c.status == s for c in checks) for s in ('OK', 'WARN', 'FAIL')}
        print(', '.join(f'{n} {s}' for s, n in counts.items()))
    return 1 if any(c.status == FAIL for c in checks) else 0
