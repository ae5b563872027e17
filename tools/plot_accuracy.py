"""
Draw docs/images/accuracy-*.png and fill in the tables of docs/accuracy.md from the records.

    python tools/plot_accuracy.py --results benchmarks/results/h200.json

Needs matplotlib. Nothing is computed here that the records (stage 'selection') do not hold.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'accuracy.md'
IMAGES = ROOT / 'docs' / 'images'

#: Method to (name in plots and tables, when it decides).
NAMES = {
    'head': ('light head', 'before'), 'next_frame': ('next frame (no head)', 'before'),
    'next_head': ('next frame and head', 'before'),
    'saliency': ('gradient + contrast', 'before'),
    'colour': ('colour edges', 'before'),
    'gradient': ('gradient magnitude', 'before'), 'contrast': ('contrast', 'before'),
    'motion': ('temporal difference', 'before'),
    'entropy': ('attention entropy, last frame', 'before'),
    'uniform': ('uniform grid', 'before'), 'random': ('random (PatchDropout)', 'before'),
    'threshold': ('gradient over 0.3', 'before'), 'window': ('best window in place', 'before'),
    'roi': ('overview + crop (stills)', 'two pictures'),
    'downsample': ('downsampling', 'smaller picture'),
    'downsample_trained': ('downsampling, trained for it', 'smaller picture'),
    'head_after': ('light head, after the merger', 'after merger'),
    'divprune': ('DivPrune', 'after merger'), 'dart': ('DART', 'after merger'),
    'fastv': ('FastV', 'in decoder'), 'grad_cam_2': ('gradient, 2 layers', 'after merger'),
    'grad_cam': ('Grad-CAM, same frame', 'teacher'), 'oracle': ('evidence mask', 'oracle')}
BUDGETS = (144, 96, 63, 42, 21)
DRAWN = ('head', 'next_frame', 'saliency', 'gradient', 'random', 'downsample_trained',
         'divprune', 'dart', 'fastv', 'grad_cam', 'oracle')

Rows = dict[tuple[str, str, int], dict[str, Any]]


def load(path: Path) -> Rows:
    """Return the accuracy records by checkpoint, method and units kept."""
    found = json.loads(path.read_text())
    return {(r['case']['model'], r['case']['method'], r['case']['kept']): r for r in found
            if r['stage'] == 'selection' and r['metric'] == 'accuracy'}


def curve(rows: Rows, model: str, method: str) -> list[dict[str, Any]]:
    """Return a method's records, cheapest first."""
    own = [r for (m, n, _), r in rows.items() if (m, n) == (model, method)]
    return sorted(own, key=lambda r: r['flops_share'])


Walls = dict[str, dict[str, Any]]


def walls(path: Path) -> Walls:
    """Return by method the records of answers of models/tiny on the wall clock, by metric."""
    found: Walls = {}
    for r in json.loads(path.read_text()):
        if r['stage'] == 'selection' and r['case'].get('model') == 'tiny' and r['metric'] in (
                'ms_per_answer', 'ms_select', 'ms_reflect'):
            found.setdefault(r['case']['method'], {})[r['metric']] = r
    return found


def draw(rows: Rows, model: str, path: Path) -> None:
    """Draw accuracy against FLOPs with scoring, and by family, for one checkpoint."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(13, 10.5))
    first = axes[0][0]
    whole = rows[model, 'full', 192]
    colours = pyplot.get_cmap('tab20')
    for number, method in enumerate(DRAWN):
        own = curve(rows, model, method)
        if not own:
            continue
        style = {'oracle': '--', 'grad_cam': ':'}.get(method, '-')
        width = 2.5 if method == 'head' else 1.2
        for axis, family in [(first, ''), *zip(axes.flat[1:], whole['families'])]:
            values = [(r['flops_share'], r['families'][family][0] if family else r['value'])
                      for r in own if not family or family in r['families']]
            axis.plot(*zip(*values), style, color=colours(number), linewidth=width, marker='.',
                      label=NAMES[method][0])
    for axis, family in [(first, 'mean of families'), *zip(axes.flat[1:], whole['families'])]:
        level = whole['value'] if axis is first else whole['families'][family][0]
        axis.axhline(level, color='grey', linewidth=0.8)
        axis.set_title(family, fontsize=10)
        axis.set_xlim(0, 1.6)
        axis.grid(alpha=0.3)
    first.axvline(0.35, color='grey', linestyle=':', linewidth=0.8)
    for axis in axes[2]:
        axis.set_xlabel('FLOPs of the full frame, scoring included')
    figure.legend(*first.get_legend_handles_labels(), loc='lower center', ncol=6, fontsize=9)
    figure.suptitle(f'models/{model}: exact match', fontsize=12)
    figure.tight_layout(rect=(0, 0.05, 1, 0.98))
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def table(rows: Rows, model: str, clock: Walls) -> str:
    """
    Return the table of all methods and budgets of one checkpoint.

    :param clock: empty leaves the column out.
    """
    whole = rows[model, 'full', 192]
    ms = f", {clock['full']['ms_per_answer']['value']:.1f} ms a question" if clock else ''
    lines = [f"All tokens: {whole['value']:.3f} (mean of families, {whole['runs']} items){ms}.",
             '',
             '| method | decides | ' + ' | '.join(f'{k / 192:.0%}' for k in BUDGETS)
             + ' | FLOPs at 33 % | evidence kept at 33 % | right where downsampling fails |'
             + (' ms (choosing) |' if clock else ''),
             '|---|---|' + '---|' * (len(BUDGETS) + 3 + bool(clock))]
    for method, (name, when) in NAMES.items():
        own = {k: rows[model, method, k] for k in BUDGETS if (model, method, k) in rows}
        third = own.get(63)
        if method == 'threshold' and (over := curve(rows, model, method)):
            kept = over[0]['case']['kept']
            lines.append(f"| {name}, keeps {kept / 192:.0%} on average | {when} | "
                         f"{over[0]['value']:.3f} | | | | | {over[0]['flops_share']:.2f} | | |"
                         + (f' {_clocked(clock, method)} |' if clock else ''))
        if third is None:
            continue
        saved = third['where_downsampling_fails']
        lines.append(' | '.join([
            f'| {name}', when, *(f"{own[k]['value']:.3f}" for k in BUDGETS),
            f"{third['flops_share']:.2f}",
            '' if third['evidence_recall'] is None else f"{third['evidence_recall']:.2f}",
            f'{saved[0]:.2f}' if saved and not method.startswith('downsample') else '',
            *([_clocked(clock, method)] if clock else [])]) + ' |')
    most = [f"{NAMES[m][0]} {rows[model, m, 154]['value']:.3f}" for m in ('random', 'uniform')
            if (model, m, 154) in rows]
    if most:
        lines += ['', f"With 80 % kept, which is where PatchDropout begins: {', '.join(most)}."]
    return '\n'.join(lines)


def _clocked(clock: Walls, method: str) -> str:
    """Return median milliseconds of a question, and what of them choosing takes."""
    # What was trained for smaller pictures is the same model on the same pictures.
    own = clock.get('downsample' if method == 'downsample_trained' else method)
    if own is None:
        return ''
    cell = f"{own['ms_per_answer']['value']:.1f}"
    if 'ms_select' in own:
        cell += f" ({own['ms_select']['value']:.2f})"
    if 'ms_reflect' in own:
        cell += f" + {own['ms_reflect']['value']:.1f}"
    return cell


def families(rows: Rows, model: str, kept: int) -> str:
    """Return accuracy with interval by family at one budget, for the methods that matter."""
    names = list(rows[model, 'full', 192]['families'])
    lines = ['| | ' + ' | '.join(names) + ' |', '|---|' + '---|' * len(names)]
    for method in ('full', 'head', 'next_frame', 'next_head', 'saliency', 'gradient', 'head_after',
                   'divprune', 'dart', 'downsample_trained', 'downsample', 'oracle'):
        one = rows.get((model, method, 192 if method == 'full' else kept))
        if one is not None:
            cells = [f"{a:.3f} ({low:.2f}–{high:.2f})"
                     for a, low, high, *_ in one['families'].values()]
            lines.append(f"| {NAMES.get(method, ('all tokens',))[0]} | {' | '.join(cells)} |")
    return '\n'.join(lines)


def goal(rows: Rows, model: str) -> str:
    """Return how far the methods that are held to a goal lie below the full frame."""
    lines = ['| method | units | FLOPs with scoring | points below the full frame (95 %) |',
             '|---|---|---|---|']
    for method in ('head', 'next_frame', 'next_head', 'saliency', 'downsample_trained', 'oracle'):
        for r in curve(rows, model, method):
            if 54 <= r['case']['kept'] <= 96:
                lines.append(
                    f"| {NAMES[method][0]} | {r['case']['kept']} | {r['flops_share']:.3f} | "
                    f"{100 * r['below_full']:.2f} ± {100 * r['below_full_95']:.2f} |")
    return '\n'.join(lines)


#: Methods whose answers of models/tiny are shown by stage.
CLOCKED = ('full', 'head', 'saliency', 'next_frame', 'next_head', 'uniform', 'divprune',
           'downsample')
#: Metrics of the wall clock, as the page calls them.
TIMES = {'ms_per_answer': 'answer', 'ms_first_token': 'to the first token',
         'ms_select': 'stage `select`', 'ms_reflect': 'gradient after it',
         'ms_frame_to_map': 'frame to map',
         'ms_frame_to_map_new_question': 'frame to map, new question',
         'ms_net': 'its graph: upload to download'}


def wall(found: list[dict[str, Any]]) -> str:
    """Return what answers and selectors take, one at a time."""
    lines = ['| machine | model | picture | method | what | ms (median) | p95 | '
             'of the whole frame |', '|---|---|---|---|---|---|---|---|']
    for r in found:
        case = r['case']
        if r['stage'] != 'selection' or r['metric'] not in TIMES or case['method'] == 'controller':
            continue
        if case.get('model') == 'tiny' and case['method'] not in CLOCKED:
            continue  # the table of all methods has them
        model = {'2b': '2B shape', '7b': '7B shape'}.get(case.get('model'), 'tiny')
        picture = case.get('size', '448x336')
        picture += f", {case['kept']} of 192 units" if case.get('kept', 192) < 192 else ''
        picture += f", keep {case['keep']:.0%}" if 'keep' in case else ''
        method = NAMES.get(case['method'], ('all tokens',))[0]
        method += f" {case['dtype']}" if 'size' in case and 'dtype' in case else ''
        share = r.get('share_of_whole_frame')
        if r['metric'] == 'ms_per_answer':
            share = r['value'] / r['baseline']['value']
        lines.append(f"| {r['machine'].split(',')[0]} | {model} | {picture} | {method} | "
                     f"{TIMES[r['metric']]} | {r['value']:.2f} | {r['p95']:.2f} | "
                     + ('' if share is None else f'{share:.1%}') + ' |')
    return '\n'.join(lines)


def controller(found: list[dict[str, Any]]) -> str:
    """Return how the latency controller held its targets."""
    lines = ['| case | target, ms | settled at, ms (median) | p95 | rungs over the answers | '
             'moves in the last 30 |', '|---|---|---|---|---|---|']
    ladder = ''
    for r in found:
        if r['stage'] != 'selection' or r['case']['method'] != 'controller':
            continue
        steps: list[list[int]] = []
        for rung in r['rungs']:
            if steps and steps[-1][0] == rung:
                steps[-1][1] += 1
            else:
                steps.append([rung, 1])
        lines.append(
            f"| {r['case']['case']} | {r['baseline']['value']:.1f} | {r['value']:.1f} | "
            f"{r['p95']:.1f} | {', '.join(f'{rung} ({n}x)' for rung, n in steps)} | "
            f"{' and '.join(map(str, r['moves_when_settled']))} |")
        ladder = ', '.join(f'{ms:.1f}' for ms in r['rungs_ms'])
    return '\n'.join([*lines, '', f'The rungs 0 to 6 by themselves: {ladder} ms.'])


def fill(text: str, name: str, content: str) -> str:
    """Put content between the page's markers of that name."""
    begin, end = f'<!-- {name} -->', f'<!-- end of {name} -->'
    before, rest = text.split(begin, 1)
    return before + begin + '\n' + content + '\n' + end + rest.split(end, 1)[1]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--results', type=Path,
                        default=ROOT / 'benchmarks' / 'results' / 'h200.json')
    args = parser.parse_args()
    rows, clock = load(args.results), walls(args.results)
    text = PAGE.read_text()
    IMAGES.mkdir(exist_ok=True)
    for model in ('tiny', 'tiny-dense'):
        if (model, 'full', 192) in rows:
            draw(rows, model, IMAGES / f'accuracy-{model}.png')
            shown = table(rows, model, clock if model == 'tiny' else {})
            text = fill(text, f'table {model}', shown)
            text = fill(text, f'families {model}', families(rows, model, 63))
    text = fill(text, 'goal tiny', goal(rows, 'tiny'))
    both = [r for file in sorted(args.results.parent.glob('*.json'))
            for r in json.loads(file.read_text())]
    text = fill(text, 'controller', controller(both))
    PAGE.write_text(fill(text, 'wall', wall(both)))


if __name__ == '__main__':
    main()
