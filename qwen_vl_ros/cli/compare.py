"""``qwen_vl compare``: two reports side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qwen_vl_ros.cli.common import CliError
from qwen_vl_ros.measure.report import load_report, normalised

MANUAL = '''\
Set two reports of 'qwen_vl replay --report' (or of the demo) side by side: the time of each stage,
and which answers differ. Answers are matched by bag time and question.

  qwen_vl compare build/before build/after
  qwen_vl compare before/report.json after/report.json --json'''

#: Figures of the summary that are compared.
FIGURES = ('total_ms_new_picture_p50', 'total_ms_same_picture_p50', 'total_ms_p95',
           'time_to_first_token_ms_p50', 'answers_per_s', 'decode_tokens_per_s',
           'vision_tokens_kept')


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        'compare', help='two reports side by side', description=MANUAL,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('before', type=Path, help='report.json or its folder')
    parser.add_argument('after', type=Path, help='report.json or its folder')
    parser.add_argument('--json', action='store_true', help='print JSON')


def run(args: argparse.Namespace) -> int:
    """Compare; always 0 when both could be read."""
    try:
        result = compare(load_report(args.before), load_report(args.after))
    except ValueError as error:
        raise CliError(str(error)) from None
    print(json.dumps(result, ensure_ascii=False, indent=1) if args.json
          else format_comparison(result))
    return 0


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """
    Set two reports side by side.

    :return: ``figures`` and ``stages`` (rows with ``name``, ``before``, ``after``, ``ratio`` =
        after / before), ``matched`` and ``same`` answers, ``different`` ones, ``unmatched``
        questions that only one run has, and ``remarks`` on what makes the runs unlike.
    """
    stages = [{r['stage']: r['mean_ms'] for r in report['stages']} for report in (before, after)]
    names = list(dict.fromkeys([*stages[0], *stages[1]]))
    answers = [{(e['time_ns'], e['question']): e for e in r['exchanges']} for r in (before, after)]
    both = [key for key in answers[0] if key in answers[1]]
    different = []
    for key in both:
        texts = [a[key]['text'] or a[key]['error_code'] for a in answers]
        if normalised(texts[0]) != normalised(texts[1]):
            different.append({'time_ns': key[0], 'question': key[1], 'before': texts[0],
                              'after': texts[1]})
    remarks = [
        f'{part} {key} differs: {before[part].get(key)} and {after[part].get(key)}'
        for part, key in (
            ('model', 'name'), ('model', 'revision'), ('model', 'dtype'), ('model', 'device'),
            ('model', 'quantization'), ('machine', 'cpu'), ('machine', 'gpu'),
            ('machine', 'torch_threads'), ('source', 'bag'), ('options', 'keep_ratio'))
        if before[part].get(key) != after[part].get(key)]
    return {
        'figures': [_row(n, before['summary'].get(n), after['summary'].get(n)) for n in FIGURES],
        'stages': [_row(n, stages[0].get(n), stages[1].get(n)) for n in names],
        'matched': len(both),
        'same': len(both) - len(different),
        'different': different,
        'unmatched': len(answers[0]) + len(answers[1]) - 2 * len(both),
        'remarks': remarks,
    }


def _row(name: str, before: float | None, after: float | None) -> dict[str, Any]:
    ratio = round(after / before, 4) if before and after is not None else None
    return {'name': name, 'before': before, 'after': after, 'ratio': ratio}


def format_comparison(result: dict[str, Any]) -> str:
    """Return the comparison for a terminal."""
    lines = [f'{"":<28}{"before":>12}{"after":>12}{"ratio":>8}']
    for row in result['figures']:
        lines.append(_line(row['name'], row))
    lines.append('stages, mean ms an answer')
    for row in result['stages']:
        lines.append(_line('  ' + row['name'], row))
    lines.append(f'{result["same"]} of {result["matched"]} answers are the same'
                 + (f', {result["unmatched"]} questions are in one run only'
                    if result['unmatched'] else ''))
    for item in result['different']:
        lines.append(f'  [{item["time_ns"]}] {item["question"]}\n'
                     f'    before: {item["before"]}\n    after:  {item["after"]}')
    lines += [f'note: {remark}' for remark in result['remarks']]
    return '\n'.join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    cells = ''.join(f'{"-" if row[k] is None else format(row[k], ".2f"):>12}'
                    for k in ('before', 'after'))
    ratio = '-' if row['ratio'] is None else f'{row["ratio"]:.2f}'
    return f'{name:<28}{cells}{ratio:>8}'
