"""Records of measurements: how they are taken, written and shown."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qwen_vl_ros.measure.record import ROOT, Record, machine, percentile, record, tidy

__all__ = ['ROOT', 'CannotRun', 'Record', 'alternate', 'machine', 'median', 'percentile', 'record',
           'table', 'tidy', 'write']


class CannotRun(Exception):
    """Something that the stage needs is missing here."""


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
            against = (f"  {_against(one)} {one['baseline']['name']} "
                       f"({one['baseline']['value']:g})")
        number = f"{one['value']:>9g} {one['unit']:<5}"
        if one['kind'] != 'measured':
            number += f" ({one['kind']})"
        lines.append(f"{case:<44} {one['metric']:<18} {number}{against}")
    return '\n'.join(lines)


def _against(one: Record) -> str:
    """Return how a record stands to its baseline, in words that precede the baseline's name."""
    ratio, share = one['ratio'], one['value'] / (one['baseline']['value'] or 1.0)
    if not ratio:
        return 'against'
    if ratio >= 1:
        return f'{ratio:g}x better than'
    # Where more is better the ratio is the share of the baseline itself.
    if abs(share - ratio) < 0.01 * ratio:
        return f'{ratio * 100:.3g} % of'
    return f'{1 / ratio:.3g}x worse than'
