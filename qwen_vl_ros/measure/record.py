"""One record for every number: what was measured, where, with which command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]


def record(
    stage: str, case: dict[str, Any], metric: str, value: float, unit: str, *,
    times: Sequence[float] = (), runs: int | None = None, kind: str = 'measured',
    baseline: tuple[str, float] | None = None, higher_is_better: bool = False, note: str = '',
    **more: Any,
) -> Record:
    """
    Return one record in the project's form (see ``benchmarks/README.md``).

    :param times: the single measurements that ``value`` is the median of, in ``unit``.
    :param runs: how many there were, where ``times`` are not given.
    :param kind: ``measured``, ``projected`` or ``computed``.
    :param baseline: name and value of what it is held against: same run, machine and input.
    :param note: what a reader must know to read the number.
    :param more: further fields, for example the bounds of an interval.
    """
    if kind not in ('measured', 'projected', 'computed'):
        raise ValueError(f"kind '{kind}' is not measured, projected or computed")
    made: Record = {
        'stage': stage, 'case': case, 'metric': metric, 'value': tidy(value), 'unit': unit,
        'p95': tidy(percentile(times, 95)) if times else None,
        'runs': runs if runs is not None else len(times) or 1,
        'kind': kind, 'baseline': None, 'ratio': None}
    if times:
        made['min'] = tidy(min(times))
    if baseline is not None:
        name, other = baseline
        made['baseline'] = {'name': name, 'value': tidy(other)}
        above, below = (value, other) if higher_is_better else (other, value)
        made['ratio'] = tidy(above / below) if below else None
    if note:
        made['note'] = note
    made.update(more)
    made.update(machine=machine(), commit=commit(), command=command(),
                date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'))
    return made


def tidy(value: float) -> float:
    """Return four significant digits."""
    return float(f'{value:.4g}')


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@cache
def machine() -> str:
    """Name GPU, or processor, and the versions that matter."""
    parts = []
    torch = sys.modules.get('torch')
    if torch is not None and torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name(0))
        done = _output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')
        parts.append(f'driver {done.splitlines()[0]}' if done else 'driver unknown')
    model = next((line.split(':', 1)[1].strip() for line in _cpuinfo()
                  if line.startswith('model name')), platform.machine())
    parts.append(f'{model}, {len(os.sched_getaffinity(0))} cores')
    parts += [f'{name} {sys.modules[module].__version__}' for name, module in (
        ('torch', 'torch'), ('transformers', 'transformers'), ('Pillow', 'PIL'),
        ('torchvision', 'torchvision')) if hasattr(sys.modules.get(module), '__version__')]
    return ', '.join(parts)


@cache
def commit() -> str:
    """Return the short commit, with ``+`` where files differ from it."""
    name = _output('git', '-C', str(ROOT), 'rev-parse', '--short', 'HEAD')
    if not name:
        return 'unknown'
    changed = _output('git', '-C', str(ROOT), 'status', '--porcelain', '--untracked-files=no',
                      '--', 'kernels', 'qwen_vl_ros', 'benchmarks/*.py', 'benchmarks/stages')
    return name + ('+' if changed else '')


def command() -> str:
    """Return the command line, with paths as seen from the repository, others by their names."""
    words = []
    for word in sys.argv:
        if word.startswith(str(ROOT)):
            word = os.path.relpath(word, ROOT)
        words.append(Path(word).name if os.path.isabs(word) else word)
    own = Path(sys.argv[0]).resolve()
    words[0] = os.path.relpath(own, ROOT) if own.is_relative_to(ROOT) else own.name
    return shlex.join(['python', *words])


def _cpuinfo() -> list[str]:
    try:
        return Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return []


def _output(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ''
    return done.stdout.strip() if done.returncode == 0 else ''
