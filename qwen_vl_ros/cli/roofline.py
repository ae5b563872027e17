"""``qwen_vl roofline``: what an answer costs at least, and what an Orin would need."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from qwen_vl_ros.cli.common import CliError, check_writable

DESCRIPTION = '''\
FLOPs, bytes and their bound for each stage of one answer about one new picture.

'limit' is the highest of three roofs: arithmetic at the peak rate, bytes at the peak bandwidth,
kernels at the time of an empty one. 'projected' (Orin only) divides by the efficiencies that
published Orin figures show; --peers lists those figures with how well they are reproduced. Limits
are computed, projections projected: neither is a measurement.'''

EPILOG = '''\
examples:
  qwen_vl roofline --device orin-agx-64 --mode 30w --size 1280x720 --dtype w4-head8 --keep 0.5
  qwen_vl roofline --device h200 --model 7b --json -
  qwen_vl roofline --table                       answers/s of the 2B on an AGX Orin
  qwen_vl roofline --peers                       the figures behind the projection
  qwen_vl roofline --device this --sweep build/saturation'''


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'roofline', help='limits and projections by device', description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='orin-agx-64', metavar='NAME',
                        help="one of the table (--devices), or 'this': this machine, measured "
                             '(%(default)s)')
    parser.add_argument('--mode', metavar='MODE', help='power mode (the fastest)')
    parser.add_argument('--model', default='2b', metavar='SHAPE',
                        help='2b, 7b, tiny, or a folder with config.json (%(default)s)')
    parser.add_argument('--size', default='640x480', metavar='WxH',
                        help="of the camera's picture (%(default)s)")
    parser.add_argument('--patch', type=int, metavar='N', help='side of a patch (the model\'s)')
    parser.add_argument('--dtype', default=None, metavar='FORMAT',
                        help='of the weights: fp32, fp16, bf16, w8, w8-head16, w4, w4-head8, '
                             'w4-all (fp16; fp32 for a CPU)')
    parser.add_argument('--keep', type=float, default=1.0, metavar='R',
                        help='share of the vision tokens kept (%(default)s)')
    parser.add_argument('--answer', type=int, default=33, metavar='N',
                        help='tokens of the answer (%(default)s)')
    parser.add_argument('--text', type=int, default=None, metavar='N',
                        help='tokens of the prompt that are not visual (37)')
    parser.add_argument('--max-pixels', type=int, default=1280 * 28 * 28, metavar='N',
                        help='larger pictures are reduced to it (%(default)s)')
    parser.add_argument('--no-fold', action='store_true',
                        help='projection over both frames of a still (K 1176), as in stock code')
    parser.add_argument('--efficiency', nargs='+', default=[], metavar='STAGE=SHARE',
                        help='project with these efficiencies (encode, prefill: of the peak rate; '
                             'token: of the bandwidth), measured elsewhere; all three for a '
                             'device that is no Orin')
    parser.add_argument('--json', metavar='FILE', help="write JSON; '-' is stdout")
    parser.add_argument('--devices', action='store_true', help='list devices and modes')
    parser.add_argument('--peers', action='store_true',
                        help='list the published figures and how the projection meets them')
    parser.add_argument('--table', action='store_true',
                        help='answers/s of the 2B on --device, by mode, weights, size, length')
    parser.add_argument('--results', type=Path, metavar='DIR',
                        help='with --table: once more, from what the files of benchmark records '
                             "there show of this engine's own kernels")
    parser.add_argument('--sweep', type=Path, metavar='DIR',
                        help='measure the saturation curve of this machine; writes PNG and JSON')


def run(args: argparse.Namespace) -> int:
    """Run it."""
    check_writable(args.json)
    check_writable(args.sweep, folder=True)
    if args.devices:
        return _devices(args)
    if args.peers:
        return _peers(args)
    if args.table:
        return _table(args)
    if args.results:
        raise CliError('--results is for --table; name both')
    if args.sweep:
        return _sweep(args)
    from qwen_vl_ros.engine.errors import EngineError

    try:
        document = _document(args)
    except (ValueError, EngineError) as error:
        raise CliError(getattr(error, 'message', str(error))) from None
    if args.json != '-':
        print(format_document(document))
    _write(args.json, document)
    return 0


def _case(args: argparse.Namespace, cpu: bool) -> Any:
    from qwen_vl_ros.measure.roofline import FORMATS, TEXT_TOKENS, Case, find_shape

    width, _, height = args.size.lower().partition('x')
    if not (width.isdigit() and height.isdigit() and 0 < int(width) <= 65535
            and 0 < int(height) <= 65535):
        raise CliError(f"--size is '{args.size}'; expected WxH, such as 640x480")
    name = args.dtype or ('fp32' if cpu else 'fp16')
    text = TEXT_TOKENS if args.text is None else args.text
    for good, words in (
            (name in FORMATS, f"--dtype '{name}' is not one of {', '.join(FORMATS)}"),
            (0 < args.keep <= 1, f'--keep is {args.keep}; expected over 0 to 1'),
            (1 <= args.answer <= 32768, f'--answer is {args.answer}; expected 1 to 32768'),
            (0 <= text <= 32768, f'--text is {text}; expected 0 to 32768'),
            (args.patch is None or 1 <= args.patch <= 256,
             f'--patch is {args.patch}; expected 1 to 256'),
            (args.max_pixels >= (2 * (args.patch or 14)) ** 2,
             f'--max-pixels is {args.max_pixels}; expected at least one 2x2 unit of patches')):
        if not good:
            raise CliError(words)
    return Case(find_shape(args.model), name, (int(width), int(height)), args.keep, args.answer,
                text, args.patch, not args.no_fold,
                min_pixels=min(56 * 56, args.max_pixels), max_pixels=args.max_pixels)


def _own(words: list[str]) -> dict[str, float]:
    from qwen_vl_ros.measure.projection import OWN

    out = {}
    for word in words:
        name, _, text = word.partition('=')
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in OWN or not 0 < value <= 1:
            raise CliError(f"--efficiency '{word}': expected one of {', '.join(OWN)} with a share "
                           'over 0 to 1, such as token=0.8')
        out[name] = value
    return out


def _document(args: argparse.Namespace) -> dict[str, Any]:
    from qwen_vl_ros.measure.headline import describe, summary

    if args.device != 'this':
        return summary(_case(args, False), args.device, args.mode, _own(args.efficiency))
    import torch

    from qwen_vl_ros.measure.saturation import measure_device

    where = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    measured = measure_device(where)
    case = _case(args, where.type == 'cpu')
    return describe(case, measured.modes['measured'], measured.launch_us, None) | {
        'device': 'this', 'title': measured.title, 'mode': 'measured', 'source': measured.source,
        'projection_refused': 'peaks measured on this machine; qwen_vl bench measures the stages'}


def format_document(document: dict[str, Any]) -> str:
    """Return the document as text for a terminal."""
    d = document
    lines = [
        f"{d['title']} · {d['mode']} · {d['gb_s']:.1f} GB/s · {d['tflops']:.3g} TFLOP/s "
        f"({d['source']})",
        f"{d['model']} {d['format']} · {d['size']} resized to {d['resized']}: {d['patches']} "
        f"patches, {d['tokens']} tokens, {d['kept_tokens']} kept · prompt {d['prompt_tokens']}, "
        f"answer {d['answer_tokens']} tokens",
        f"ridge at {d['ridge_flops_per_byte']:g} FLOP/byte · encoder {d['encoder_tflop']:.2f} "
        f"TFLOP · decode limit {d['decode_limit_tokens_per_s']:.1f} tokens/s", '',
        f"{'stage':<13}{'runs':>5}{'GFLOP':>11}{'MB':>10}{'FLOP/B':>9}{'limit ms':>10}  "
        f"{'bound':<9}" + (f"{'projected ms':>13}" if 'projection' in d else '')]
    spent = d['projection']['stages_ms'] if 'projection' in d else {}
    for row in d['stages']:
        name = f"- {row['stage']}" if row['part_of'] else row['stage']
        moved = (row['bytes_read'] + row['bytes_written']) / 1e6
        lines.append(
            f"{name:<13}{row['count']:>5}{row['flops'] / 1e9:>11.3f}{moved:>10.2f}"
            f"{row['flops_per_byte']:>9.1f}{row['limit_ms']:>10.3f}  {row['bound']:<9}"
            + (f"{spent[row['stage']]:>13.3f}" if spent else ''))
    lines += ['', f"at the limits: {d['limit_ms']:.1f} ms an answer, "
              f"{d['limit_answers_per_s']:.2f} answers/s (computed)"]
    if 'projection' in d:
        p = d['projection']
        lines += [f"projected: {p['answer_ms']:.0f} ms an answer, {p['answers_per_s']:.2f} "
                  f"answers/s, {p['decode_tokens_per_s']:.1f} tokens/s while decoding",
                  *(f'  assumes: {a}' for a in p['assumptions']),
                  '  published figures deviate from these efficiencies by up to: ' + ', '.join(
                      f'{k} {v:.0%}' for k, v in p['deviation_of_published_figures'].items())]
    else:
        lines.append(f"not projected: {d['projection_refused']}")
    return '\n'.join(lines)


def _devices(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from qwen_vl_ros.measure.devices import DEVICES

    if args.json != '-':
        for name, device in DEVICES.items():
            print(f'{name}: {device.title} ({device.source})')
            for mode, m in device.modes.items():
                print(f'  {mode:<11} {m.gb_s:>7.1f} GB/s {m.tflops:>6.1f} TFLOP/s'
                      + (f'  {m.sms} SMs at {m.mhz:g} MHz' if m.sms else ''))
    _write(args.json, {name: asdict(device) for name, device in DEVICES.items()})
    return 0


def _peers(args: argparse.Namespace) -> int:
    from qwen_vl_ros.measure.peers import NOT_COMPARABLE
    from qwen_vl_ros.measure.projection import TOLERANCE, peer_rows, validated

    fit, checks = validated()
    rows = [{'source': p.source, 'figure': p.name, 'stage': p.stage, 'weights': p.weight_format,
             'device': p.device, 'mode': p.mode, 'role': role, 'published_ms': p.ms,
             'predicted_ms': p.ms * (1 + off), 'deviation': off, 'note': p.note,
             'excluded': p.excluded} for p, role, off in peer_rows()]
    if args.json != '-':
        for row in rows:
            print(f"{row['role']:<9}{row['stage']:<15}{row['weights']:<5}"
                  f"{row['published_ms']:>8.1f} ms {row['deviation']:>+7.1%}  {row['figure']} "
                  f"({row['device']} {row['mode']})")
            for why in filter(None, (row['note'], row['excluded'])):
                print(f'{"":<38}  {why}')
        print(f'\nfitted: {fit.layer_us:.0f} us a layer of a decode step at 1300 MHz, and')
        for (stage, kind), check in checks.items():
            verdict = 'valid' if check.good else 'REFUSED: ' + '; '.join(check.misses)
            print(f'  {stage:<8}{kind:<5} {check.efficiency:.1%} of the peak; {check.held} held '
                  f'figures within {check.worst:.1%}: {verdict}\n{"":<15}either half fitted, any '
                  f'figure: up to {check.spread:.0%} ({check.spread_at})')
        print(f'a kind is projected when no held figure is off by more than {TOLERANCE:.0%}')
        for name, why in NOT_COMPARABLE.items():
            print(f'not comparable: {name}: {why}')
    _write(args.json, {
        'layer_us': fit.layer_us, 'figures': rows, 'not_comparable': NOT_COMPARABLE,
        'checks': {f'{stage} {kind}': {
            'efficiency': c.efficiency, 'fitted': c.fitted, 'held': c.held, 'worst': c.worst,
            'valid': c.good, 'misses': c.misses, 'spread': c.spread, 'spread_at': c.spread_at}
            for (stage, kind), c in checks.items()}})
    return 0


def _table(args: argparse.Namespace) -> int:
    from qwen_vl_ros.measure.devices import DEVICES
    from qwen_vl_ros.measure.efficiency import Own, load_efficiencies
    from qwen_vl_ros.measure.headline import (
        format_headline,
        headline,
        headline_records,
        own_assumptions,
    )
    from qwen_vl_ros.measure.projection import ASSUMPTIONS, Key

    if args.device not in DEVICES or not DEVICES[args.device].orin:
        raise CliError(f"--table is of an Orin; '{args.device}' is none")
    own = None
    if args.results:
        if not args.results.is_dir():
            raise CliError(f'--results {args.results} is no folder of benchmark records')
        try:
            own = load_efficiencies(args.results)
        except ValueError as error:
            raise CliError(str(error)) from None
    modes = tuple(DEVICES[args.device].modes)
    if args.json != '-':
        tables: list[tuple[str, dict[Key, Own] | None, list[str]]] = [
            ('', None, list(ASSUMPTIONS))]
        if own:
            tables.append((", from this engine's own kernels", own, own_assumptions(own)))
        for words, shares, assumptions in tables:
            print(f'answers/s of Qwen2-VL-2B on {DEVICES[args.device].title}, projected{words}:\n')
            print(format_headline(list(headline(args.device, modes, shares))))
            print()
            for assumption in assumptions:
                print(f'assumes: {assumption}')
        if args.results and not own:
            print(f'no records in {args.results} show an efficiency of a GPU')
    if args.json:
        _write(args.json, headline_records(args.device, modes, own))
    return 0


def _sweep(args: argparse.Namespace) -> int:
    import torch

    from qwen_vl_ros.measure.record import record
    from qwen_vl_ros.measure.saturation import measure_device, plot, sweep

    where = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    measured = measure_device(where)
    mode = measured.modes['measured']
    out = sys.stderr if args.json == '-' else sys.stdout
    print(f'{measured.title}: {mode.gb_s:.1f} GB/s, {mode.tflops:.3f} TFLOP/s, '
          f'{measured.launch_us:.1f} us a launch', file=out)
    print(f"{'product':<14}{'rows':>6}{'ms':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of the roof':>12}",
          file=out)
    points = []
    for point in sweep(where, measured, 16384 if where.type == 'cuda' else 1024):
        points.append(point)
        print(f'{point.name:<14}{point.rows:>6}{point.ms:>10.4f}{point.gb_s:>9.1f}'
              f'{point.tflops:>9.3f}{point.attainable_ms / point.ms:>12.0%}', file=out, flush=True)
    template = record('roofline', {}, 'ms', 0.0, 'ms', runs=5)
    records = [template | {
        'case': {'variant': p.name, 'rows': p.rows, 'inputs': p.inputs, 'outputs': p.outputs,
                 'path': where.type},
        'value': p.ms, 'gb_s': p.gb_s, 'tflop_s': p.tflops,
        'share_of_limit': p.attainable_ms / p.ms} for p in points]
    try:
        args.sweep.mkdir(parents=True, exist_ok=True)
        (args.sweep / 'saturation.json').write_text(json.dumps(records, indent=1) + '\n')
        plot(points, measured, args.sweep / 'saturation.png')
    except OSError as error:
        raise CliError(f'cannot write into {args.sweep}: {error.strerror}') from None
    except ImportError:
        print('no plot: matplotlib is missing (pip install matplotlib)', file=out)
    _write(args.json, records)
    return 0


def _write(target: str | None, data: Any) -> None:
    """:raises CliError: when the file cannot be written."""
    if target == '-':
        print(json.dumps(data, indent=1))
    elif target:
        try:
            Path(target).write_text(json.dumps(data, indent=1) + '\n')
        except OSError as error:
            raise CliError(f'cannot write {target}: {error.strerror}') from None
