"""``qwen_vl sensors``: what the board says about itself, live or from a recorded log."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_vl_ros.cli.common import CliError, check_writable

if TYPE_CHECKING:
    from qwen_vl_ros.measure.samples import Sample

DESCRIPTION = '''\
Memory bandwidth in use, GPU load, clocks, power, temperature and throttling, every 100 ms on one
clock. Sources, each optional: tegrastats, jtop (jetson_stats), kernel files, NVML. What none of
them knows is '-', never 0, and the end says why: the memory controller's load, for example, is
readable by root only.

Ctrl-C ends it early: what was sampled until then is still written, and the exit code is 130.'''

EPILOG = '''\
examples:
  qwen_vl sensors --seconds 5
  tegrastats --interval 100 > drive.log     and later: qwen_vl sensors --log drive.log
  qwen_vl sensors --log drive.log --module 'AGX Orin' --json -'''

#: Column heading, width, decimals.
COLUMNS = (('s', 8, 1), ('mem GB/s', 9, 1), ('EMC %', 6, 0), ('EMC MHz', 8, 0), ('GPU %', 6, 0),
           ('GPU MHz', 8, 0), ('RAM MB', 8, 0), ('W', 7, 2), ('tj C', 6, 1))


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'sensors', help="the board's bandwidth, clocks, power and heat", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, default=2.0, metavar='S',
                        help='how long to look; 0: until Ctrl-C (%(default)s)')
    parser.add_argument('--log', type=Path, metavar='FILE',
                        help='a recorded output of tegrastats instead of this machine')
    parser.add_argument('--interval', type=float, default=100.0, metavar='MS',
                        help='between lines of the log that have no other stamp (%(default)s)')
    parser.add_argument('--module', metavar='NAME',
                        help="the board's name, for its memory width (default: this machine's)")
    parser.add_argument('--warn-at', type=float, default=95.0, metavar='C',
                        help='junction temperature that counts as throttling (%(default)s)')
    parser.add_argument('--json', metavar='FILE', help="write all samples as JSON; '-' is stdout")


def run(args: argparse.Namespace) -> int:
    """Run it."""
    from qwen_vl_ros.measure.jetson import Throttle, bandwidth_gb_s, bytes_per_clock
    from qwen_vl_ros.measure.sysfs import read

    for name, good, expected in (
            ('seconds', 0 <= args.seconds <= 86400, '0 (until Ctrl-C) to 86400'),
            ('interval', 0 < args.interval <= 86400e3, 'over 0, at most 86400000'),
            ('warn_at', 0 < args.warn_at <= 150, 'over 0, at most 150')):
        if not good:
            raise CliError(f"--{name.replace('_', '-')} is {getattr(args, name)}; "
                           f'expected {expected}')
    check_writable(args.json)
    module = args.module or read(Path('/'), ['proc/device-tree/model'])[0] or ''
    width = bytes_per_clock(module)
    out = sys.stderr if args.json == '-' else sys.stdout
    throttle = Throttle(warn_c=args.warn_at)
    missing: dict[str, str] = {}
    whys: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    stream = _recorded(args) if args.log else _live(args, missing)
    interrupted = False

    def show(sample: Sample) -> None:
        reason = throttle.update(sample)
        bandwidth = bandwidth_gb_s(sample, width) if width else None
        rows.append(asdict(sample) | {'bandwidth_gb_s': bandwidth, 'throttle': reason})
        whys.update(sample.whys)
        values = (sample.time_ns / 1e9, bandwidth, sample.emc_percent, sample.emc_mhz,
                  sample.gpu_percent, sample.gpu_mhz[0] if sample.gpu_mhz else None,
                  sample.ram_used_mb, None if sample.total_mw is None else sample.total_mw / 1e3,
                  sample.junction_c)
        print(' '.join(f'{"-":>{size}}' if value is None else f'{value:>{size}.{digits}f}'
                       for value, (_, size, digits) in zip(values, COLUMNS)),
              reason, file=out, flush=True)

    print(' '.join(f'{name:>{size}}' for name, size, _ in COLUMNS), file=out)
    try:
        # Closing ends the sampling thread, wherever the interrupt came.
        with contextlib.closing(stream):
            for sample in stream:
                show(sample)
    except KeyboardInterrupt:
        interrupted = True
    for name, why in {**missing, **whys}.items():
        print(f'{name}: {why}', file=out)
    if not width:
        print('mem GB/s: the width of the memory of this board is not known (--module NAME)',
              file=out)
    document = {'module': module, 'bytes_per_clock': width, 'unavailable': missing,
                'samples': rows}
    if args.json == '-':
        print(json.dumps(document, indent=1))
    elif args.json:
        try:
            Path(args.json).write_text(json.dumps(document, indent=1) + '\n')
        except OSError as error:
            raise CliError(f'cannot write {args.json}: {error.strerror}') from None
    if interrupted:
        print('qwen_vl sensors: interrupted', file=sys.stderr)
    return 130 if interrupted else 0


def _recorded(args: argparse.Namespace) -> Generator[Sample, None, None]:
    """
    Return the samples of a log.

    :raises CliError: at once, where the file cannot be read or holds none.
    """
    from qwen_vl_ros.measure.tegrastats import replay

    try:
        lines: Iterable[str] = args.log.read_text(errors='replace').splitlines()
    except OSError as error:
        raise CliError(f'{args.log} cannot be read: {error.strerror}') from None
    samples = list(replay(lines, args.interval))
    if not samples:
        raise CliError(f'{args.log} holds no line of tegrastats')
    return (sample for sample in samples)


def _live(args: argparse.Namespace, missing: dict[str, str]) -> Generator[Sample, None, None]:
    from dataclasses import replace

    from qwen_vl_ros.measure.jetson import PERIOD_S, Sampler, find_sources

    sources, absent = find_sources()
    missing |= absent
    sampler = Sampler(sources)
    begin = seen = time.monotonic_ns()
    sampler.start()
    try:
        while not args.seconds or time.monotonic_ns() - begin < args.seconds * 1e9:
            time.sleep(PERIOD_S)
            for sample in sampler.between(seen + 1, time.monotonic_ns()):
                seen = sample.time_ns
                yield replace(sample, time_ns=sample.time_ns - begin)
    finally:
        sampler.close()
        missing |= sampler.faults
