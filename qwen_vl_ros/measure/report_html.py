"""A report as one HTML page without any other file: pictures, answers, where the time went."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

#: Stage colours; neighbours in time differ in hue and in lightness.
COLOURS = {
    'image_age': '#c3c8d1',
    'queue': '#98a2b3',
    'decode_message': '#64748b',
    'patches': '#38bdf8',
    'upload': '#0e7490',
    'select': '#a3e635',
    'encode': '#4f46e5',
    'prefill': '#d946ef',
    'first_token': '#e11d48',
    'admit': '#9a3412',
    'token': '#f59e0b',
    'publish': '#15803d',
}
OTHER = '#475569'

#: Stages that lie before the request or are no work of this program: not drawn as bars.
NOT_DRAWN = ('image_age',)

CSS = '''
:root{--bg:#f6f7f9;--card:#fff;--ink:#16202e;--soft:#5b6878;--line:#e3e7ec;--good:#15803d;
--bad:#b91c1c;--accent:#4f46e5;--chip:#eef1f6}
@media(prefers-color-scheme:dark){:root{--bg:#0f141b;--card:#182029;--ink:#e7ecf2;--soft:#98a5b5;
--line:#2a3541;--good:#4ade80;--bad:#f87171;--accent:#a5b4fc;--chip:#232e3a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px}
h2{font-size:17px;margin:36px 0 12px}
.sub{color:var(--soft);margin:0}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin-top:22px}
.tile,.card,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:14px 16px}
.tile b{display:block;font-size:24px;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.panel{padding:16px;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:13px}
tr:last-child td{border-bottom:0}
th:first-child,td:first-child{text-align:left}
td.bar{width:34%;padding-right:0}
td.bar i{display:block;height:12px;border-radius:3px;min-width:1px}
.dot{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 10px;color:var(--soft);font-size:13px}
svg[role]{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}
svg .grid{stroke:var(--line)}
.card{display:grid;grid-template-columns:minmax(0,340px) minmax(0,1fr);gap:20px;padding:16px;
margin-bottom:14px}
.card img{width:100%;border-radius:8px;display:block;margin-bottom:6px}
.where{color:var(--soft);font-size:12.5px;margin:0;overflow-wrap:anywhere}
.qa{padding:8px 0;border-bottom:1px solid var(--line)}
.qa:first-child{padding-top:0}
.qa:last-child{border-bottom:0}
.q{color:var(--soft)}
.a{font-size:17px;font-weight:600;overflow-wrap:anywhere;white-space:pre-wrap}
.chip{display:inline-block;background:var(--chip);border-radius:99px;padding:1px 9px;
font-size:12.5px;color:var(--soft);margin:4px 6px 0 0;font-variant-numeric:tabular-nums}
.good{color:var(--good)}.bad{color:var(--bad)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:700px){.card{grid-template-columns:1fr}.tiles{grid-template-columns:1fr 1fr}}
'''


def render(report: dict[str, Any], pictures: Sequence[Sequence[bytes]]) -> str:
    """
    Return the page.

    :param report: of :func:`qwen_vl_ros.measure.report.build_report`.
    :param pictures: JPEG files of each exchange's frames, in the order of the exchanges.
    """
    model = report['model']
    line = ' · '.join(str(x) for x in (
        model.get('name'), model.get('dtype'), model.get('device'),
        report['machine']['gpu'] or report['machine']['cpu']) if x)
    body = ''.join((
        f'<h1>{escape(report["title"])}</h1><p class="sub">{escape(line)}</p>',
        _tiles(report['summary']),
        '<h2>Stages of an answer</h2>', _stages(report['stages']),
        '<h2>Latency waterfall</h2>', _waterfall(report['exchanges']),
        '<h2>Answers</h2>', *_cards(report['exchanges'], pictures),
        '<h2>Run</h2>', _facts(report),
    ))
    return ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<title>{escape(report["title"])}</title><style>{CSS}</style></head>'
            f'<body><main>{body}</main></body></html>\n')


def _tiles(summary: dict[str, Any]) -> str:
    tiles = [(f'{summary["answered"]} / {summary["questions"]}', 'questions answered')]
    if 'correct' in summary:
        tiles.append((f'{summary["correct"]} / {summary["with_known_answer"]}',
                      'answers right'))
    for key, unit, label in (
            ('time_to_first_token_ms_p50', 'ms', 'to the first token, median'),
            ('total_ms_new_picture_p50', 'ms', 'answer about a new picture, median'),
            ('total_ms_same_picture_p50', 'ms', 'about the same picture again, median'),
            ('answers_per_s', '/s', 'answers, both kinds together'),
            ('decode_tokens_per_s', '/s', 'tokens while decoding')):
        if summary.get(key) is not None:
            tiles.append((f'{_short(summary[key])} {unit}', label))
    if summary['vision_tokens_in']:
        kept = summary['vision_tokens_kept'] / summary['vision_tokens_in']
        tiles.append((f'{kept:.0%}', 'vision tokens kept'))
    return '<div class="tiles">' + ''.join(
        f'<div class="tile"><b>{escape(v)}</b><span>{escape(t)}</span></div>'
        for v, t in tiles) + '</div>'


def _short(value: float) -> str:
    """Return three significant digits, no exponent."""
    if value == 0 or not math.isfinite(value):
        return '0' if value == 0 else '–'
    return f'{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}'


def _stages(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return '<p class="sub">No answer, no stages.</p>'
    longest = max((r['mean_ms'] for r in rows if r['stage'] not in NOT_DRAWN), default=0) or 1
    out = ['<div class="panel"><table><tr><th>stage</th><th></th><th>mean ms</th><th>p50</th>'
           '<th>p95</th><th>max</th><th>calls</th><th>GB/s</th><th>GFLOP/s</th></tr>']
    for row in rows:
        colour = COLOURS.get(row['stage'], OTHER)
        share = 0 if row['stage'] in NOT_DRAWN else min(100, 100 * row['mean_ms'] / longest)
        rates = ''.join(
            f'<td>{"–" if row[k] is None else _short(row[k])}</td>'
            for k in ('gb_per_s', 'gflop_per_s'))
        numbers = ''.join(
            f'<td>{row[k]:.2f}</td>' for k in ('mean_ms', 'p50_ms', 'p95_ms', 'max_ms'))
        out.append(
            f'<tr><td><span class="dot" style="background:{colour}"></span>'
            f'{escape(row["stage"])}</td><td class="bar">'
            f'<i style="width:{share:.1f}%;background:{colour}"></i></td>'
            f'{numbers}<td>{row["calls"]}</td>{rates}</tr>')
    out.append('</table></div>')
    return ''.join(out)


def _waterfall(exchanges: Sequence[dict[str, Any]]) -> str:
    """Draw one row an answer, all on one time axis; every bar names itself when pointed at."""
    rows = [(i, e, _bars(e)) for i, e in enumerate(exchanges, 1)]
    end = max((b[1] for _, _, bars in rows for b in bars), default=0)
    if end <= 0:
        return '<p class="sub">No answer, no time.</p>'
    left, right, row_height, top = 150, 1060, 22, 26
    scale = (right - left) / end
    height = top + row_height * len(rows) + 8
    names = {s['name'] for e in exchanges for s in e['timeline'].get('spans', ())}
    legend = ''.join(
        f'<span><span class="dot" style="background:{c}"></span>{n}</span>'
        for n, c in COLOURS.items() if n in names and n not in NOT_DRAWN)
    out = [f'<div class="panel"><div class="legend">{legend}</div>'
           f'<svg viewBox="0 0 1080 {height}" role="img" aria-label="latency waterfall">']
    for tick in _ticks(end):
        x = left + tick * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" '
                   f'y2="{height - 8}"/><text x="{x:.1f}" y="14" text-anchor="middle">'
                   f'{tick:g} ms</text>')
    for line, (number, exchange, bars) in enumerate(rows):
        y = top + line * row_height
        text = exchange['text'] or exchange['error_code'] or '(no text)'
        out.append(f'<svg y="{y}" width="{left - 10}" height="{row_height}"><text y="13">{number}'
                   f'  {escape(_cut(text, 24))}</text></svg>')
        for start, stop, name in bars:
            x, width = left + start * scale, max(0.75, (stop - start) * scale - 0.4)
            out.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{row_height - 8}" '
                f'fill="{COLOURS.get(name, OTHER)}"><title>{escape(name)} {stop - start:.2f} ms'
                f'</title></rect>')
    out.append('</svg></div>')
    return ''.join(out)


def _bars(exchange: dict[str, Any]) -> list[tuple[float, float, str]]:
    """Return start, end (ms) and stage of what is drawn of an exchange."""
    return [(s['start_ms'], s['start_ms'] + s['ms'], s['name'])
            for s in exchange['timeline'].get('spans', ()) if s['name'] not in NOT_DRAWN]


def _ticks(end: float) -> list[float]:
    """Return four to nine round numbers from 0 to ``end``."""
    power = 10 ** math.floor(math.log10(end))
    step = next(s * power for s in (0.1, 0.2, 0.5, 1, 2) if end / (s * power) <= 9)
    return [i * step for i in range(int(end / step) + 1)]


def _cut(text: str, length: int) -> str:
    text = ' '.join(text.split())
    return text if len(text) <= length else text[:length - 1] + '…'


def _cards(
    exchanges: Sequence[dict[str, Any]], pictures: Sequence[Sequence[bytes]],
) -> Iterator[str]:
    """Yield a card for each picture (or set of them), with all that was asked about it."""
    numbered = list(zip(range(1, len(exchanges) + 1), exchanges, pictures))
    for _, group in groupby(numbered, key=lambda item: (item[1]['time_ns'], item[1]['frames'])):
        items = list(group)
        first, files = items[0][1], items[0][2]
        left = []
        for frame, jpeg in zip(first['frames'], files):
            data = base64.b64encode(jpeg).decode()
            left.append(
                f'<img alt="what the camera saw" src="data:image/jpeg;base64,{data}">'
                f'<p class="where">{escape(frame["camera"])} · {frame["width"]}×'
                f'{frame["height"]} {escape(frame["encoding"])} · '
                f'stamp {frame["stamp_ns"] / 1e9:.3f}</p>')
        if not left:
            left.append('<p class="where">no picture</p>')
        right = ''.join(_question(number, exchange) for number, exchange, _ in items)
        yield f'<div class="card"><div>{"".join(left)}</div><div>{right}</div></div>'


def _question(number: int, exchange: dict[str, Any]) -> str:
    verdict, mark = '', ''
    if 'correct' in exchange:
        mark = 'good' if exchange['correct'] else 'bad'
        verdict = (' <span class="good">✓</span>' if exchange['correct'] else
                   f' <span class="bad">✗ expected {escape(exchange["expected"])}</span>')
    if exchange['error']:
        text = (f'<div class="a bad">{escape(exchange["error_code"])}: '
                f'{escape(exchange["error"])}</div>')
        chips: list[str] = []
    else:
        text = f'<div class="a {mark}">{escape(exchange["text"]) or "(nothing)"}{verdict}</div>'
        chips = [
            f'{exchange["total_ms"]:.0f} ms',
            f'{exchange["output_tokens"]} token{"s"[exchange["output_tokens"] == 1:]}, '
            f'{exchange["finish_reason"]}',
            f'{exchange["vision_tokens_kept"]} of {exchange["vision_tokens_in"]} vision tokens',
        ]
        if exchange.get('confidence') is not None:
            chips.append(f'confidence {exchange["confidence"]:.2f}')
    return (f'<div class="qa"><div class="q">{number} · {escape(exchange["question"])}</div>'
            f'{text}' + ''.join(f'<span class="chip">{escape(c)}</span>' for c in chips)
            + '</div>')


def _facts(report: dict[str, Any]) -> str:
    facts = {
        'figures': report['kind'],
        'command': ' '.join(report['command']),
        'version': f'{report["product_version"]} {report["commit"]}'.strip(),
    }
    for part in ('source', 'model', 'machine', 'options'):
        for key, value in report[part].items():
            if value not in ('', None, [], {}):
                facts[f'{part}: {key}'] = (
                    ', '.join(map(str, value)) if isinstance(value, list) else str(value))
    return '<div class="panel"><dl>' + ''.join(
        f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts.items()) + '</dl></div>'
