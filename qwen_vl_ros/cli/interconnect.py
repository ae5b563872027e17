"""``qwen_vl interconnect``: what a link between two GPUs gives over the way through the host."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from qwen_vl_ros.cli.common import CliError, check_writable

DESCRIPTION = '''\
Read the state of all NVLinks (nothing is set), measure copies between two GPUs, 4 KB to 1 GB, one
way and both ways, direct and through the host, and say: latency and bandwidth of each way, the
link's contribution to a hand-over from encoder to decoder, which parameter matters (variance-based
ranking), and the best setting by size.

The retry policy and the clock of a link cannot be set by anybody. An Orin has no link at all: CPU
and GPU share one memory.

exit code 1: fewer than two GPUs, nothing to measure.'''

EPILOG = '''\
examples:
  qwen_vl interconnect --links                    the links' state only
  qwen_vl interconnect --json build/tuning.json   all of it
  qwen_vl interconnect --analyse build/tuning.json'''

#: Vision tokens of a 640x480 picture times the decoder's width times two bytes: the hand-over.
HAND_OVER_BYTES = 391 * 1536 * 2


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'interconnect', help='copies between two GPUs, NVLink state', description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--links', action='store_true', help='only show the links')
    parser.add_argument('--analyse', type=Path, metavar='FILE',
                        help='show a file that --json wrote, without measuring')
    parser.add_argument('--most-bytes', type=int, default=1 << 30, metavar='N',
                        help='largest transfer (%(default)s)')
    parser.add_argument('--runs', type=int, default=5, metavar='N',
                        help='of each setting (%(default)s)')
    parser.add_argument('--json', metavar='FILE', help="write everything as JSON; '-' is stdout")


def run(args: argparse.Namespace) -> int:
    """Run it; 1 where there are no two GPUs."""
    if args.analyse:
        data = _read(args.analyse)
        try:
            text = format_result(data)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise CliError(f'{args.analyse} is incomplete: not all of what qwen_vl interconnect '
                           '--json writes is in it') from None
        print(text)
        return 0
    if args.runs < 1 or args.most_bytes < 16384:
        raise CliError(f'--runs {args.runs} and --most-bytes {args.most_bytes}: expected at '
                       'least 1 and 16384')
    check_writable(args.json)
    out = sys.stderr if args.json == '-' else sys.stdout
    result = {'links': _links()}
    print(format_links(result['links']), file=out)
    code = 0
    if not args.links:
        found = _measure(args, out)
        if found is None:
            code = 1
        else:
            result |= found
            print(format_result(result), file=out)
    if args.json == '-':
        print(json.dumps(result, indent=1))
    elif args.json:
        try:
            Path(args.json).write_text(json.dumps(result, indent=1) + '\n')
        except OSError as error:
            raise CliError(f'cannot write {args.json}: {error.strerror}') from None
    return code


def _links() -> dict[str, Any]:
    from qwen_vl_ros.measure.links import NOT_SETTABLE, links, summary
    from qwen_vl_ros.measure.nvml import UnavailableError, load

    try:
        return summary(links(load()))
    except UnavailableError as error:
        return {'links': [], 'pairs': [], 'active': None, 'unavailable': str(error),
                'notes': list(NOT_SETTABLE)}


def _measure(args: argparse.Namespace, out: Any) -> dict[str, Any] | None:
    import torch

    from qwen_vl_ros.measure.interconnect import SIZES, analyse, grid, measure
    from qwen_vl_ros.measure.record import record
    from qwen_vl_ros.measure.transport import Transport, compute_ms

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        print(f'this machine has {count} GPU{"s"[count == 1:]} that torch can use; two are needed '
              'to measure a link', file=out)
        return None
    sizes = [s for s in SIZES if s <= args.most_bytes]
    transport = Transport('cuda:0', 'cuda:1', max(sizes))
    measured = measure(
        grid(sizes), transport.time_one, args.runs,
        lambda m: print(f'{m.setting.size:>11} {m.setting.way:<16} {m.setting.streams} streams '
                        f'{m.setting.chunks:>2} chunks {"both" if m.setting.both else "one "} '
                        f'{m.ms:>9.4f} ms {m.gb_s:>8.2f} GB/s', file=out, flush=True))
    result = analyse(measured, HAND_OVER_BYTES, compute_ms(transport.devices[0]))
    template = record('interconnect', {}, 'gb_s', 0.0, 'GB/s', runs=args.runs)
    result['peer_access'] = torch.cuda.can_device_access_peer(0, 1)
    result['records'] = [template | {'case': {'variant': name}, 'value': way['gb_s'],
                                     'latency_us': way['latency_us']}
                         for name, way in result['ways'].items()]
    return result


def _read(path: Path) -> dict[str, Any]:
    from qwen_vl_ros.measure.interconnect import load_tuning

    try:
        load_tuning(path)
    except ValueError as error:
        raise CliError(str(error)) from None
    data: dict[str, Any] = json.loads(path.read_text())
    if not {'ways', 'hand_over', 'contribution', 'sensitivity'} <= data.keys():
        raise CliError(f'{path} holds no measurements of qwen_vl interconnect')
    return data


def format_links(found: dict[str, Any]) -> str:
    """Return the links as text."""
    lines = []
    if found.get('unavailable'):
        lines.append(f'links: {found["unavailable"]}')
    elif not found['links']:
        lines.append('links: no card here has NVLink')
    for link in found['links']:
        state = {True: 'up', False: 'down', None: 'state unknown'}[link['active']]
        speed = f'{link["mb_s"] / 1e3:.1f} GB/s' if link['mb_s'] else 'speed unknown'
        errors = ', '.join(f'{k} {v}' for k, v in link['errors'].items()) or 'counters unknown'
        lines.append(f'card {link["card"]} link {link["number"]}: {state}, version '
                     f'{link["version"] or "unknown"}, {speed}, to {link["remote"] or "unknown"}, '
                     f'{errors}')
    lines += [f'card {pair["card"]} to {pair["remote"] or "an unknown end"}: width '
              + ('unknown' if pair['width'] is None else f'{pair["width"]} links')
              for pair in found['pairs']]
    return '\n'.join([*lines, *found['notes']])


def format_result(result: dict[str, Any]) -> str:
    """Return the analysis as text."""
    lines = ['', f"{'way':<28}{'latency us':>11}{'GB/s':>9}{'fit error':>10}"]
    lines += [f"{name:<28}{way['latency_us']:>11.2f}{way['gb_s']:>9.2f}{way['error']:>10.1%}"
              for name, way in result['ways'].items()]
    over = result['hand_over']
    lines += [
        '', f"hand-over of {over['bytes']} bytes: {over['direct_ms']:.4f} ms direct, "
        f"{over['host_ms']:.4f} ms through the host, beside {over['compute_ms']:.2f} ms of the "
        f"encoder's products: communication is {over['communication_share']:.2%}",
        f"contribution of the link (eta = B_link / (B_link + B_host) x communication): "
        f"{result['contribution']:.4f}", '', 'what the time depends on (share of the variance):']
    lines += [f"  {s['factor']:<9} alone {s['alone']:>7.2%}   with interactions {s['total']:>7.2%}"
              for s in result['sensitivity']]
    lines += [f"  between runs of one setting {result['noise']:.2%}", '', 'best setting by size:']
    lines += [f"  {row['size']:>11} {'both ways' if row['both'] else 'one way  '} {row['way']:<16}"
              f"{row['streams']} streams {row['chunks']:>2} chunks {row['gb_s']:>8.2f} GB/s"
              for row in result['tuning']]
    return '\n'.join(lines)
