"""
Saturation: how many rows a product needs to reach this machine's own roof.

Peak bandwidth, peak arithmetic and launch time are measured first, then the products of the model
with ever more rows, their weights read from memory each time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.records import Record, record
from qwen_vl_ros.measure.saturation import measure_device, plot, sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--threads', type=int, help='of torch (its own choice)')
    parser.add_argument('--most-rows', type=int, help='of the sweep (CPU 1024, GPU 16384)')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='draw it (PNG)')


def run(args: argparse.Namespace) -> list[Record]:
    """Measure peaks and sweep."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    measured = measure_device(device)
    mode = measured.modes['measured']
    base = {'path': device.type, 'threads': torch.get_num_threads()}
    found = [
        record('roofline', {**base, 'variant': 'best of copy and sum'}, 'gb_s', mode.gb_s,
               'GB/s'),
        record('roofline', {**base, 'variant': 'matrix product'}, 'tflop_s', mode.tflops,
               'TFLOP/s'),
        record('roofline', {**base, 'variant': 'launch'}, 'us', measured.launch_us, 'us')]
    points = []
    rows = args.most_rows or (16384 if device.type == 'cuda' else 1024)
    for point in sweep(device, measured, rows):
        points.append(point)
        case = {**base, 'variant': point.name, 'rows': point.rows}
        found.append(record('roofline', case, 'share_of_limit', point.attainable_ms / point.ms, '',
                            note=f'{point.gb_s:.1f} GB/s, {point.tflops:.3f} TFLOP/s'))
    if args.plot:
        try:
            plot(points, measured, args.plot)
        except ImportError:
            print('no plot: matplotlib is missing')
    return found
