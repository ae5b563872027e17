"""
What measuring costs: timelines, and all exports on with a collector that does not answer.

Answers with and without, in turns: of an engine, and of a running node where ROS 2 is. Both run
the tiny model on a CPU and random weights of the 2B shape on a GPU. Timelines cannot be switched
off; their cost is that of a recorded stage, times the stages of an answer.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from unittest import mock

import numpy as np
import torch

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages._engines import picture, timed_engine
from benchmarks.stages._node import SHAPE, SIZE, Node, interval, windows
from benchmarks.stages.answer import ask
from qwen_vl_ros.engine import model
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.stages import DeviceClock
from qwen_vl_ros.measure.export import Exports, Finished, open_exports
from qwen_vl_ros.measure.timeline import Span, Timeline

COST = {'bytes_read': 1, 'bytes_written': 1, 'flops': 1}

#: Answers of a window.
ANSWERS = 8

#: Pictures a second: more than there are answers, so that each is about a new one.
RATE_HZ = {'tiny': 20, '2b': 50}

#: Seconds between two looks of Prometheus; its own default is 15.
LOOK_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--answers', type=int, default=100, help='with and without')
    parser.add_argument('--tokens', type=int, help='of an answer (33 on a GPU, else 8)')
    parser.add_argument('--shape', choices=('tiny', '2b'), help='(2b on a GPU, else tiny)')
    parser.add_argument('--windows', type=int, default=60,
                        help='with and without, of a running node; 0 starts none (%(default)s)')


def run(args: argparse.Namespace) -> list[Record]:
    """Time answers with and without exports, of an engine and of a node."""
    args.tokens = args.tokens or (33 if torch.cuda.is_available() else 8)
    args.shape = args.shape or ('2b' if torch.cuda.is_available() else 'tiny')
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
        'OTEL_EXPORTER_OTLP_ENDPOINT': f'http://127.0.0.1:{to}',
        SHAPE: '' if args.shape == 'tiny' else args.shape}, RATE_HZ[args.shape])
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
    case = {**case_of(args), 'variant': f'running node, all exports on, {which}'}
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


def case_of(args: argparse.Namespace) -> dict[str, object]:
    """Return what all records have in common."""
    return {'model': args.shape, 'size': f'{SIZE[0]}x{SIZE[1]}', 'answer_tokens': args.tokens,
            'path': 'cuda' if torch.cuda.is_available() else 'cpu'}


def engine(args: argparse.Namespace) -> list[Record]:
    """Time the answers of an engine with and without exports."""
    torch.set_num_threads(1)
    loaded = timed_engine(None if args.shape == 'tiny' else args.shape)
    pictures = [picture(SIZE, seed) for seed in range(8)]
    os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = f'http://127.0.0.1:{_free()}'
    on, off = open_exports(otel=True, prometheus_port=_free(), ros2_tracing=True), Exports(())
    count = len(on)
    handing_over: list[float] = []

    for number in range(4):
        ask(loaded, pictures[number], args.tokens)
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
    times |= bare(loaded, pictures, args)
    with_exports, without = median(times['on']), median(times['off'])
    line = ask(loaded, pictures[0], args.tokens)
    device = loaded.model.device
    per_span_us = {'cpu': span_cost_us(torch.device('cpu')), 'device': span_cost_us(device)}
    spans = {'cpu': sum(span.stream == 'cpu' for span in line.spans)}
    spans['device'] = len(line.spans) - spans['cpu']
    spent_us = sum(per_span_us[where] * number for where, number in spans.items())
    on.close()
    loaded.close()
    case = case_of(args)
    middle, low, high = interval(times['timed'], times['bare'])
    return [
        record('node', {**case, 'variant': 'timeline'}, 'share_lost', middle - 1, '',
               runs=args.answers, note=f'time of an answer: median of {args.answers} pairs with '
               f'and without, 95 % interval {low - 1:+.4f} to {high - 1:+.4f}'),
        record('node', {**case, 'variant': 'timeline'}, 'share_of_time',
               spent_us / 1e3 / without, '',
               note=f'{spans["cpu"]} stages of the host of {per_span_us["cpu"]:.2f} us and '
               f'{spans["device"]} of a GPU of {per_span_us["device"]:.2f} us, reading them '
               f'included, in an answer of {without:.1f} ms'),
        record('node', {**case, 'variant': f'{count} exports, dead collector'}, 'share_of_time',
               median(handing_over) / without, '', note=f'{median(handing_over):.3f} ms on the '
               "engine's thread to hand an answer over"),
        record('node', {**case, 'variant': f'{count} exports, dead collector'}, 'ms',
               with_exports, 'ms', times=times['on'], baseline=('no exports', without),
               note='answers one after another; the exports send on threads of their own')]


def bare(loaded: Engine, pictures: list[np.ndarray], args: argparse.Namespace,
         ) -> dict[str, list[float]]:
    """Return milliseconds of answers with timelines and with clocks that note nothing."""
    @contextmanager
    def nothing(*about: object, **more: object) -> Iterator[Span]:
        yield Span('', 0, 0)

    order = random.Random(0)
    found: dict[str, list[float]] = {'timed': [], 'bare': []}
    for number in range(args.answers):
        for name in order.sample(('timed', 'bare'), 2):
            with ExitStack() as patches:
                if name == 'bare':
                    for kind in (Timeline, DeviceClock):
                        patches.enter_context(mock.patch.object(kind, 'stage', nothing))
                    patches.enter_context(mock.patch.object(
                        model, 'timed_step', lambda rows, cost, run: run()))
                started = time.perf_counter_ns()
                line = ask(loaded, pictures[number % 8], args.tokens)
                line.busy_ms()  # reading them is a part
                found[name].append((time.perf_counter_ns() - started) / 1e6)
    return found


def span_cost_us(device: torch.device, count: int = 5_000) -> float:
    """Return what recording and reading a decode step costs the host, microseconds."""
    best, chosen = float('inf'), {0: Choice(1, 1.0, 1.0, True)}
    for _ in range(5):
        timeline = Timeline()
        clock = DeviceClock(timeline, device)
        started = time.perf_counter_ns()
        for _ in range(count):
            model.timed_step({0: (clock, 1)}, lambda past: COST, lambda: chosen)
        recorded = time.perf_counter_ns()
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        again = time.perf_counter_ns()
        timeline.busy_ms()
        spent = recorded - started + time.perf_counter_ns() - again
        best = min(best, spent / count / 1e3)
    return best


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return int(probe.getsockname()[1])
