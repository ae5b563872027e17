"""
Files of benchmark records: read, compare, and made into tables and plots.

A record is what :mod:`qwen_vl_ros.measure.record` describes. Measured, computed and projected
figures are never put into one table.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]

REQUIRED = {'stage', 'case', 'metric', 'value', 'unit', 'kind', 'machine', 'commit', 'command'}

#: Of the names of files that quick runs write: rough, and in no table.
QUICK_SUFFIX = '-quick'

#: Metrics of which more is better; of all others less is.
HIGHER = {'gb_s', 'tflop_s', 'tokens_per_s', 'answers_per_s', 'share_of_limit', 'accuracy',
          'contribution', 'frames_per_s', 'ratio', 'share_of_read'}

#: A change smaller than this is noise on a machine that others use.
TOLERANCE = 0.1

BEGIN, END = '<!-- tables: begin -->', '<!-- tables: end -->'

STAGES = ('answer', 'first_token', 'patches', 'projection', 'encoder', 'selection', 'prefill',
          'decode', 'overlap', 'reuse', 'eval', 'node', 'interconnect', 'roofline')


def kept_files(folder: Path) -> list[Path]:
    """Return the files of records in a folder, without those of quick runs."""
    return sorted(p for p in folder.glob('*.json') if not p.stem.endswith(QUICK_SUFFIX))


def results_name() -> str:
    """Return the name of this machine's file: h200, x86-2core, orin ..."""
    import torch

    if torch.cuda.is_available():
        words = torch.cuda.get_device_name(0).lower().replace('nvidia', '').split()
        return '-'.join(words[-1:] if words[-1:] != ['nvgpu'] else ['orin'])
    machine = {'x86_64': 'x86', 'AMD64': 'x86'}.get(platform.machine(), platform.machine())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return f'{machine}-{cores}core'


def load_records(path: Path) -> list[Record]:
    """
    Read a file of records.

    :raises ValueError: names the file, the record and what it lacks.
    """
    try:
        rows = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ValueError(f'{path} cannot be read: {error.strerror}') from None
    except ValueError:
        raise ValueError(f'{path} does not hold JSON') from None
    if not isinstance(rows, list):
        raise ValueError(f'{path} does not hold a list of records')
    for number, row in enumerate(rows, 1):
        lacking = REQUIRED - row.keys() if isinstance(row, dict) else REQUIRED
        if lacking:
            raise ValueError(f'{path}, record {number} lacks {", ".join(sorted(lacking))}')
        if row['kind'] not in ('measured', 'projected', 'computed'):
            raise ValueError(f"{path}, record {number}: kind '{row['kind']}' is not measured, "
                             'projected or computed')
    return rows


def key_of(record: Record) -> str:
    """Return what makes two records the same measurement."""
    return json.dumps([record['stage'], record['case'], record['metric'], record['kind'],
                       (record.get('baseline') or {}).get('name')], sort_keys=True)


def name_of(record: Record) -> str:
    """Return what a person calls a record."""
    case = ' '.join(f'{k}={v}' for k, v in record['case'].items())
    return f"{record['stage']} {record['metric']} ({case})"


@dataclass(frozen=True)
class Change:
    """
    One measurement, before and after.

    :param gain: how many times better it became; under 1 is worse.
    """

    name: str
    before: float
    after: float
    unit: str
    gain: float

    def verdict(self, tolerance: float = TOLERANCE) -> str:
        """Return regressed, improved or same."""
        if self.gain < 1 / (1 + tolerance):
            return 'regressed'
        return 'improved' if self.gain > 1 + tolerance else 'same'


def compare_records(before: Iterable[Record], after: Iterable[Record]) -> list[Change]:
    """Return the changes of the measurements that both have, the worst first."""
    old = {key_of(r): r for r in before}
    out = []
    for record in after:
        other = old.get(key_of(record))
        if other is None or record['kind'] != 'measured':
            continue
        a, b = other['value'], record['value']
        if a <= 0 or b <= 0:
            gain = 1.0 if a == b else (0.0 if (b < a) == (record['metric'] in HIGHER) else 2.0)
        else:
            gain = b / a if record['metric'] in HIGHER else a / b
        out.append(Change(name_of(record), a, b, record['unit'], gain))
    return sorted(out, key=lambda change: change.gain)


def format_changes(changes: Sequence[Change], tolerance: float = TOLERANCE) -> str:
    """Return regressions and improvements by name, and how many stayed."""
    lines = []
    for verdict in ('regressed', 'improved'):
        for change in changes:
            if change.verdict(tolerance) == verdict:
                lines.append(f'{verdict:<10}{change.before:>10.4g} -> {change.after:<10.4g} '
                             f'{change.unit:<6} x{change.gain:<6.3g} {change.name}')
    same = sum(change.verdict(tolerance) == 'same' for change in changes)
    return '\n'.join([*lines, f'{same} of {len(changes)} within {tolerance:.0%}'])


def tables(records: Sequence[Record]) -> str:
    """Return records as Markdown, one table for each stage and kind."""
    parts = []
    rank = {name: number for number, name in enumerate(STAGES)}
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record['stage'], record['kind']), []).append(record)
    for stage, kind in sorted(groups, key=lambda g: (rank.get(g[0], 99), g)):
        rows = groups[stage, kind]
        against = any(row.get('baseline') for row in rows)
        columns = [k for k in dict.fromkeys(k for row in rows for k in row['case'])
                   if len({json.dumps(row['case'].get(k)) for row in rows}) > 1]
        shared = {k: v for k, v in rows[0]['case'].items() if k not in columns}
        said = ', '.join(f'{k} {v}' for k, v in shared.items())
        parts += [f'**{stage}**, {kind}' + (f' ({said})' if said else ''), '',
                  '| ' + ' | '.join([*columns, 'metric', 'value', 'p95'] + (
                      ['baseline', 'its value', 'times better'] if against else [])) + ' |',
                  '|' + '---|' * (len(columns) + 3 + 3 * against)]
        for row in rows:
            base = row.get('baseline') or {}
            cells = [str(row['case'].get(k, '')) for k in columns] + [
                row['metric'], f"{row['value']:.4g} {row['unit']}".strip(),
                '' if row.get('p95') is None else f"{row['p95']:.4g}"]
            if against:
                cells += [base.get('name', ''), f"{base['value']:.4g}" if base else '',
                          '' if row.get('ratio') is None else f"{row['ratio']:.3g}"]
            parts.append('| ' + ' | '.join(cells) + ' |')
        parts.append('')
    return '\n'.join(parts)


def headline_table(records: Sequence[Record]) -> str:
    """Return projected answers/s as Markdown: one line a case, one column a power mode."""
    from qwen_vl_ros.measure.headline import format_headline

    return format_headline([{
        'size': r['case']['size'], 'keep': r['case']['keep'], 'format': r['case']['dtype'],
        'answer': r['case']['answer_tokens'], 'mode': r['case']['mode'],
        'answers_per_s': r['value']} for r in records])


def by_kernels(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return projections by whose efficiencies they have."""
    out: dict[str, list[Record]] = {}
    for record in records:
        out.setdefault(record['case'].get('kernels', 'published stacks'), []).append(record)
    return out


def render(folder: Path, readme: Path) -> list[Path]:
    """
    Put the tables of all results into a README between its marks, and draw a plot a machine.

    :param folder: of the ``*.json`` files.
    :return: what was written.
    :raises ValueError: for a file that holds no records, or a README without the two marks.
    """
    text = readme.read_text(encoding='utf-8')
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme} must hold '{BEGIN}' and '{END}' once each")
    parts, written = [], [readme]
    for path in kept_files(folder):
        records = load_records(path)
        if not records:
            continue
        parts += [f'### {path.stem}', '', _origin(records), '']
        image = folder / f'{path.stem}.png'
        if plot(records, image, path.stem):
            written.append(image)
            parts += [f'![{path.stem}: ours beside the baseline]({folder.name}/{image.name})', '']
        curve = folder / f'{path.stem}-saturation.png'
        if curve.exists():
            parts += [f'![{path.stem}: saturation]({folder.name}/{curve.name})', '']
        modes = [r for r in records if 'mode' in r['case'] and r['kind'] == 'projected']
        if modes:
            usual = [r for r in modes if r['case']['size'] == '640x480']
            for whose, rows in by_kernels(usual).items():
                parts += [f'Projected answers/s, 640x480, efficiencies of {whose}:', '',
                          headline_table(rows), '',
                          *(f'* {line}' for line in rows[0].get('assumptions', ())), '']
        rest = [r for r in records if r not in modes]
        body = [tables(rest)] if rest else []
        for whose, rows in by_kernels(modes).items():
            body += [f'Efficiencies of {whose}:', '', headline_table(rows), '']
        parts += ['<details><summary>all figures</summary>', '', *body, '', '</details>', '']
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f'{before}{BEGIN}\n\n' + '\n'.join(parts) + f'\n{END}{after}',
                      encoding='utf-8')
    return written


def _origin(records: Sequence[Record]) -> str:
    """Return machines, commits and commands that the records came from."""
    lines = []
    for label in ('machine', 'commit', 'command'):
        values = list(dict.fromkeys(str(r[label]) for r in records))
        shown = '; '.join(f'`{v}`' for v in values[:6])
        lines.append(f'{label}: {shown}' + (f' and {len(values) - 6} more' if len(values) > 6
                                            else ''))
    return '  \n'.join(lines)


def plot(records: Sequence[Record], path: Path, title: str) -> bool:
    """
    Draw measured times beside their baselines.

    :return: whether there was anything to draw, and matplotlib to draw it.
    """
    rows = [r for r in records if r['kind'] == 'measured' and r.get('baseline')
            and r['unit'] == 'ms' and r['stage'] in ('answer', 'first_token', 'encoder', 'prefill',
                                                     'decode', 'patches', 'projection')
            and r['case'].get('form') is None]
    if not rows:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    rows = sorted(rows, key=lambda r: STAGES.index(r['stage']))[:40]
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.34 * len(rows)), constrained_layout=True)
    places = range(len(rows))
    axes.barh([p - 0.18 for p in places], [r['value'] for r in rows], 0.34, label='ours',
              color='#2f7d6b')
    axes.barh([p + 0.18 for p in places], [r['baseline']['value'] for r in rows], 0.34,
              label='baseline', color='#b9b9b9')
    axes.set_yticks(list(places), [
        f"{r['stage']} {r['case'].get('size', '')} "
        + (f"keep {r['case']['keep']:g} " if 'keep' in r['case'] else '')
        + (f"{r['case']['threads']} threads" if 'threads' in r['case'] else '')
        + f" vs {r['baseline']['name'].removeprefix('transformers ')}" for r in rows], fontsize=7)
    axes.set(xscale='log', xlabel='ms', title=title)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
