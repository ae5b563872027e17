"""
What measuring costs: timelines, and all exports on with a collector that does not answer.

Answers of the tiny model with and without, in turns: of an engine, and of two running nodes where
ROS 2 is. Timelines cannot be switched off; their cost is that of a recorded stage, times the
stages of an answer.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import urllib.request

import torch

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages._nodes import Nodes, compare, interval
from benchmarks.stages.answer import ask, picture
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.measure.export import Exports, Finished, open_exports
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.share import share

#: Answers of a window.
ANSWERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--answers', type=int, default=100, help='with and without')
    parser.add_argument('--tokens', type=int, default=8, help='of an answer')
    parser.add_argument('--windows', type=int, default=60,
                        help='of each of two running nodes; 0 starts none (%(default)s)')


def run(args: argparse.Namespace) -> list[Record]:
    """Time answers with and without exports, of an engine and of nodes."""
    found = engine(args)
    if args.windows:
        try:
            found += nodes(args)
        except CannotRun as error:
            print(f'left out: {error}')
    return found


def nodes(args: argparse.Namespace) -> list[Record]:
    """Ask a node with all exports on and one with none, in turns."""
    port = _free()
    two = Nodes({
        'exports': ({'export.otel': 'true', 'export.prometheus_port': port}, {
            'OTEL_EXPORTER_OTLP_ENDPOINT': f'http://127.0.0.1:{_free()}'}),
        'plain': ({}, {})})

    def scrape() -> None:
        with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=5) as reply:
            reply.read()

    try:
        for name in ('exports', 'plain'):
            for _ in range(5):
                two.ask(name, args.tokens)
        taken = compare(lambda name: two.ask(name, args.tokens), two.spent, 'exports', 'plain',
                        args.windows, ANSWERS, scrape)
        named = sum('does not answer' in line for line in two.output['exports'])
    finally:
        two.close()
    rate = {name: ANSWERS / median(times) for name, times in taken['seconds'].items()}
    case = {'model': 'tiny', 'size': '320x240', 'answer_tokens': args.tokens, 'path': 'cpu',
            'variant': 'running node, exports on, dead collector'}
    found = [record(
        'node', case, 'answers_per_s', rate['exports'], '1/s', higher_is_better=True,
        baseline=('running node, no exports', rate['plain']), runs=args.windows,
        note=f'all answered; the dead collector was named {named} time{"s"[named == 1:]}')]
    for kind, metric, words in (('seconds', 'share_lost', 'answers/s'), (
            'processor', 'share_more', 'processor time of the node, sending included')):
        middle, low, high = interval(taken[kind]['exports'], taken[kind]['plain'])
        found.append(record(
            'node', case, metric, middle - 1, '', runs=args.windows,
            note=f'{words}: median of {args.windows} pairs of windows of {ANSWERS} answers, 95 % '
            f'interval {low - 1:+.4f} to {high - 1:+.4f}'))
        print(found[-1]['note'])
    return found


def engine(args: argparse.Namespace) -> list[Record]:
    """Time the answers of an engine with and without exports."""
    torch.set_num_threads(1)
    loaded = Engine.load(str(share('models', 'tiny')), device='cpu', repetition_window=0)
    loaded.end_tokens = frozenset()
    pictures = [picture((320, 240), seed) for seed in range(8)]
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        dead = probe.getsockname()[1]
    os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = f'http://127.0.0.1:{dead}'
    on, off = open_exports(otel=True, prometheus_port=_free(), ros2_tracing=True), Exports(())
    count = len(on)
    handing_over: list[float] = []

    times: dict[str, list[float]] = {'on': [], 'off': []}
    for number in range(args.answers):
        # One after the other, not in blocks: what disturbs the machine disturbs both.
        for name, exports in (('on', on), ('off', off)):
            started = time.perf_counter_ns()
            line = ask(loaded, pictures[number % 8], args.tokens)
            answered = time.perf_counter_ns()
            exports.finished(Finished(line, output_tokens=args.tokens))
            ended = time.perf_counter_ns()
            times[name].append((ended - started) / 1e6)
            if name == 'on':
                handing_over.append((ended - answered) / 1e6)
    with_exports, without = median(times['on']), median(times['off'])
    line = ask(loaded, pictures[0], args.tokens)
    per_span_us = span_cost_us()
    spent_us = per_span_us * len(line.spans)
    on.close()
    loaded.close()
    case = {'model': 'tiny', 'size': '320x240', 'answer_tokens': args.tokens, 'path': 'cpu'}
    return [
        record('node', {**case, 'variant': 'timeline'}, 'share_of_time',
               spent_us / 1e3 / without, '', note=f'{len(line.spans)} stages of {per_span_us:.2f} '
               f'us in an answer of {without:.1f} ms'),
        record('node', {**case, 'variant': f'{count} exports, dead collector'}, 'share_of_time',
               median(handing_over) / without, '', note=f'{median(handing_over):.3f} ms on the '
               "engine's thread to hand an answer over"),
        record('node', {**case, 'variant': f'{count} exports, dead collector'}, 'ms',
               with_exports, 'ms', times=times['on'], baseline=('no exports', without),
               note='answers one after another; the exports send on threads of their own')]


def span_cost_us(count: int = 20_000) -> float:
    """Return what one recorded stage costs, microseconds."""
    best = float('inf')
    for _ in range(5):
        timeline = Timeline()
        started = time.perf_counter_ns()
        for _ in range(count):
            with timeline.stage('token', bytes_read=1, bytes_written=1, flops=1):
                pass
        best = min(best, (time.perf_counter_ns() - started) / count / 1e3)
    return best


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return int(probe.getsockname()[1])
