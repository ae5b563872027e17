"""Copies between two GPUs, direct and through the host (see ``qwen_vl interconnect``)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.records import CannotRun, Record, record
from qwen_vl_ros.measure.interconnect import SIZES, analyse, grid, measure
from qwen_vl_ros.measure.transport import Transport, compute_ms

#: Vision tokens of a 640x480 picture times Qwen2-VL-2B's width times two bytes.
HAND_OVER_BYTES = 391 * 1536 * 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--runs', type=int, default=5)
    parser.add_argument('--most-bytes', type=int, default=1 << 30)
    parser.add_argument('--tuning', type=Path, metavar='FILE', help='write all measurements there')


def run(args: argparse.Namespace) -> list[Record]:
    """Measure the grid."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        raise CannotRun(f'this machine has {count} GPUs that torch can use; two are needed')
    sizes = [size for size in SIZES if size <= args.most_bytes]
    transport = Transport('cuda:0', 'cuda:1', max(sizes))
    result = analyse(measure(grid(sizes), transport.time_one, args.runs), HAND_OVER_BYTES,
                     compute_ms(transport.devices[0]))
    if args.tuning:
        args.tuning.write_text(json.dumps(result, indent=1) + '\n')
    found = []
    for direction in ('one way', 'both ways'):
        host = result['ways'][f'staged pinned, {direction}']
        for name, way in result['ways'].items():
            if not name.endswith(direction):
                continue
            case = {'variant': name}
            found.append(record('interconnect', case, 'gb_s', way['gb_s'], 'GB/s', baseline=(
                'staged pinned', host['gb_s']), higher_is_better=True))
            found.append(record('interconnect', case, 'us', way['latency_us'], 'us', baseline=(
                'staged pinned', host['latency_us'])))
    found.append(record('interconnect', {'variant': 'hand-over, 640x480'}, 'contribution',
                        result['contribution'], '', kind='computed',
                        note='B_link / (B_link + B_host) x measured share of communication'))
    return found
