"""Records of measurements: how they are taken, written and shown."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]


class CannotRun(Exception):
    """Something that the stage needs is missing here."""


def record(
    stage: str, case: dict[str, Any], metric: str, value: float, unit: str, *,
    times: Sequence[float] = (), kind: str = 'measured', baseline: tuple[str, float] | None = None,
    higher_is_better: bool = False, note: str = '',
) -> Record:
    """
    Return one record.

    :param times: the single measurements that ``value`` is the median of, in ``unit``.
    :param kind: ``measured``, ``projected`` or ``computed``.
    :param baseline: name and value of what it is held against: same run, machine and input.
    :param note: what a reader must know to read the number.
    """
    made: Record = {
        'stage': stage, 'case': case, 'metric': metric, 'value': tidy(value), 'unit': unit,
        'p95': tidy(percentile(times, 95)) if times else None, 'runs': len(times) or 1,
        'kind': kind, 'baseline': None, 'ratio': None}
    if times:
        made['min'] = tidy(min(times))
    if baseline is not None:
        name, other = baseline
        made['baseline'] = {'name': name, 'value': tidy(other)}
        made['ratio'] = tidy(value / other if higher_is_better else other / value)
    if note:
        made['note'] = note
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


def alternate(
    work: dict[str, Callable[[int], object]], seconds: float, rounds: int = 12,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """
    Time several things in turns, so that what disturbs the machine disturbs all of them.

    :param work: name to function of a running number (for rotating buffers).
    :param seconds: for each of them.
    :param rounds: turns.
    :param clock: ``time.process_time`` does not count what other programs took of the core; right
        for work of one thread on a machine that is not quiet.
    :return: name to milliseconds of every call, the first round left out.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    count = dict.fromkeys(work, 0)
    for turn in range(rounds + 1):
        for name, function in work.items():
            until = clock() + (seconds / rounds if turn else 0.0)
            while True:
                start = clock()
                function(count[name])
                end = clock()
                count[name] += 1
                if turn:
                    times[name].append((end - start) * 1e3)
                if end >= until:
                    break
    return times


def median(times: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(times)


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
    """Return the command line, with paths as seen from the repository."""
    words = [os.path.relpath(word, ROOT) if word.startswith(str(ROOT)) else word
             for word in sys.argv]
    words[0] = os.path.relpath(Path(sys.argv[0]).resolve(), ROOT)
    return shlex.join(['python', *words])


def write(path: Path, found: list[Record]) -> None:
    """Add records to a file; those of the same stage, case and metric are replaced."""
    def key(one: Record) -> str:
        return json.dumps([one['stage'], one['case'], one['metric'],
                           (one['baseline'] or {}).get('name')], sort_keys=True)

    old = json.loads(path.read_text()) if path.exists() else []
    new = {key(one) for one in found}
    kept = [one for one in old if key(one) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ',\n'.join(json.dumps(one, ensure_ascii=False) for one in kept + found)
    path.write_text(f'[\n{rows}\n]\n')


def table(found: list[Record]) -> str:
    """Return records as lines for a terminal."""
    lines = []
    for one in found:
        case = ' '.join(str(value) for value in one['case'].values())
        against = ''
        if one['baseline']:
            against = (f"  {one['ratio']:g}x better than {one['baseline']['name']} "
                       f"({one['baseline']['value']:g})")
        number = f"{one['value']:>9g} {one['unit']:<5}"
        lines.append(f"{case:<44} {one['metric']:<18} {number}{against}")
    return '\n'.join(lines)


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
