"""
What measuring costs: timelines, and all exports on with a collector that does not answer.

Answers of the tiny model with and without, in turns: of an engine, and of a running node where ROS
2 is. Timelines cannot be switched off; their cost is that of a recorded stage, times the
stages of an answer.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages._node import Node, interval, windows
from benchmarks.stages.answer import ask, picture
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.measure.export import Exports, Finished, open_exports
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.share import share

#: Answers of a window.
ANSWERS = 8

#: Seconds between two looks of Prometheus; its own default is 15.
LOOK_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--answers', type=int, default=100, help='with and without')
    parser.add_argument('--tokens', type=int, default=8, help='of an answer')
    parser.add_argument('--windows', type=int, default=60,
                        help='with and without, of a running node; 0 starts none (%(default)s)')


def run(args: argparse.Namespace) -> list[Record]:
    """Time answers with and without exports, of an engine and of a node."""
    found = engine(args)
    if args.windows:
        try:
            found += node(args, alive=False) + node(args, alive=True)
        except CannotRun as error:
            print(f'left out: {error}')
    return found


class Collector(HTTPServer):
    """Takes what is sent to it; nothing more."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers['Content-Length']))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        super().__init__(('127.0.0.1', 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def node(args: argparse.Namespace, alive: bool) -> list[Record]:
    """
    Ask a running node in turns with all its exports on and with none.

    :param alive: the collector answers.
    """
    port = _free()
    collector = Collector() if alive else None
    to = collector.server_port if collector else _free()
    running = Node({'export.otel': 'true', 'export.prometheus_port': port}, {
        'OTEL_EXPORTER_OTLP_ENDPOINT': f'http://127.0.0.1:{to}'})
    looked = [0.0]

    def work(on: bool) -> None:
        for _ in range(ANSWERS):
            running.ask(args.tokens)
        if on and time.monotonic() > looked[0] + LOOK_S:
            looked[0] = time.monotonic()
            with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=5) as reply:
                reply.read()

    try:
        for _ in range(20):
            running.ask(args.tokens)
        taken = windows(work, args.windows, running.switch, {
            'seconds': time.perf_counter, 'processor': running.spent})
        named = sum('does not answer' in line for line in running.output)
    finally:
        running.close()
        if collector is not None:
            collector.shutdown()
            collector.server_close()
    rate = {on: ANSWERS / median(times) for on, times in taken['seconds'].items()}
    which = 'a collector' if alive else 'dead collector'
    case = {'model': 'tiny', 'size': '320x240', 'answer_tokens': args.tokens, 'path': 'cpu',
            'variant': f'running node, all exports on, {which}'}
    found = [record(
        'node', case, 'answers_per_s', rate[True], '1/s', higher_is_better=True,
        baseline=('the same node, no exports', rate[False]), runs=args.windows,
        note=f'all answered; a dead collector was named {named} time{"s"[named == 1:]}')]
    for meter, metric, words in (('seconds', 'share_lost', 'time of an answer'), (
            'processor', 'share_more', 'processor time of the node, sending included')):
        middle, low, high = interval(taken[meter][True], taken[meter][False])
        found.append(record(
            'node', case, metric, middle - 1, '', runs=args.windows,
            note=f'{words}: median of {args.windows} pairs of windows of {ANSWERS} answers, '
            f'Prometheus looking every {LOOK_S:g} s; 95 % interval {low - 1:+.4f} to '
            f'{high - 1:+.4f}'))
        print(f'{which}: {found[-1]["note"]}')
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
