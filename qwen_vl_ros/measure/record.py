"""One record for every number: what was measured, where, with which command."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def machine() -> str:
    """Return the machine in one line: processor or GPU with driver, cores, torch."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        driver = _run('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')
        return f'{name}, driver {driver.splitlines()[0] if driver else "unknown"}, ' \
               f'torch {torch.__version__}'
    return f'{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}'


def cpu_name() -> str:
    """Return the processor's name as the kernel tells it."""
    try:
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith(('model name', 'Model')):
                return line.split(':', 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """Return the short commit of the source tree, with '+' for local changes; or 'unknown'."""
    found = _run('git', '-C', str(ROOT), 'rev-parse', '--short', 'HEAD')
    if not found:
        return 'unknown'
    changed = _run('git', '-C', str(ROOT), 'status', '--porcelain', '--untracked-files=no')
    return found + ('+' if changed else '')


def record(stage: str, case: dict[str, Any], metric: str, value: float, unit: str, *,
           runs: int, kind: str = 'measured', p95: float | None = None,
           baseline: tuple[str, float] | None = None, ratio: float | None = None,
           **more: Any) -> dict[str, Any]:
    """
    Make a record in the project's one form (see ``benchmarks/README.md``).

    :param kind: measured, projected or computed.
    :param baseline: name and value of the same input on the same machine in the same run.
    :param ratio: how many times better than the baseline.
    :param more: further fields, for example the bounds of an interval.
    """
    if kind not in ('measured', 'projected', 'computed'):
        raise ValueError(f"kind '{kind}' is not measured, projected or computed")
    return {
        'stage': stage, 'case': case, 'metric': metric, 'value': value, 'unit': unit, 'p95': p95,
        'runs': runs, 'kind': kind,
        'baseline': {'name': baseline[0], 'value': baseline[1]} if baseline else None,
        'ratio': ratio, **more, 'machine': machine(), 'commit': commit(),
        'command': shlex.join(['python', *sys.argv]) if sys.argv[0].endswith('.py')
        else shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        'date': datetime.date.today().isoformat()}


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10,
                              check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ''
