"""Exports: what they say of a question, and that nothing of theirs reaches an answer."""

import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from export_questions import MS, question

from qwen_vl_ros.measure.export import Exports, open_exports


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'nothing happened'
        time.sleep(0.01)


# OpenTelemetry

@pytest.fixture
def otel():
    pytest.importorskip('opentelemetry.sdk', reason='the opentelemetry packages are optional')
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from qwen_vl_ros.measure.otel import OpenTelemetry

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    export = OpenTelemetry('robot', spans, reader)
    yield export, spans, reader
    export.close()


def test_a_trace_has_one_span_a_stage_on_the_wall_clock(otel):
    export, spans, _ = otel
    before = time.time_ns()
    asked = question()
    export.finished(asked)
    export._traces.force_flush()
    found = {s.name: s for s in spans.get_finished_spans()}
    root = found.pop('answer')
    assert set(found) == {'encode', 'first_token', 'token'}
    assert root.attributes['qwen_vl.request_id'] == 'q-1'
    assert root.attributes['gen_ai.usage.input_tokens'] == 428
    assert root.attributes['qwen_vl.camera'] == 'front'
    assert 'error.type' not in root.attributes and root.status.is_unset
    assert root.end_time - root.start_time == 230 * MS
    assert abs(root.start_time - before) < 5_000 * MS
    encode = found['encode']
    assert encode.end_time - encode.start_time == 200 * MS
    assert encode.parent.span_id == root.context.span_id
    assert encode.attributes['qwen_vl.flops'] == 5000
    # Tokens are one span.
    tokens = found['token']
    assert tokens.end_time - tokens.start_time == 20 * MS
    assert tokens.attributes['qwen_vl.count'] == 2
    assert tokens.attributes['qwen_vl.bytes_read'] == 3000
    assert root.resource.attributes['service.name'] == 'robot'


def test_a_failed_question_is_an_error(otel):
    export, spans, _ = otel
    export.finished(question('stale_image'))
    export._traces.force_flush()
    root = next(s for s in spans.get_finished_spans() if s.name == 'answer')
    assert not root.status.is_ok and root.attributes['error.type'] == 'stale_image'


def test_metrics_of_questions_stages_and_tokens(otel):
    export, _, reader = otel
    export.finished(question())
    export.finished(question('deadline'))
    metrics = {m.name: m.data.data_points
               for r in reader.get_metrics_data().resource_metrics
               for s in r.scope_metrics for m in s.metrics}
    assert sum(p.count for p in metrics['gen_ai.client.operation.duration']) == 2
    assert sum(p.sum for p in metrics['gen_ai.server.time_to_first_token']) == pytest.approx(0.42)
    assert {p.attributes['kind']: p.value for p in metrics['qwen_vl.tokens']} == {
        'input': 856, 'output': 4}
    assert {p.attributes['stage']: p.value for p in metrics['qwen_vl.stage.io']} == {
        'encode': 2048, 'token': 6000}
    tokens = metrics['gen_ai.server.time_per_output_token']
    assert sum(p.sum for p in tokens) == pytest.approx(0.02) and sum(p.count for p in tokens) == 2


def test_no_traces_are_made_for_a_dead_collector_but_it_is_found_back(otel, monkeypatch):
    export, spans, reader = otel
    export._said.silent = True
    now = [1000.0]
    monkeypatch.setattr('qwen_vl_ros.measure.otel.time.monotonic', lambda: now[0])
    for _ in range(7):
        export.finished(question())
        now[0] += 1.0
    export._traces.force_flush()
    assert [s.name for s in spans.get_finished_spans()].count('answer') == 2  # at 0 s and at 5 s
    export._said.silent = False
    export.finished(question())
    export._traces.force_flush()
    assert [s.name for s in spans.get_finished_spans()].count('answer') == 3
    data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    asked = next(m for m in data if m.name == 'gen_ai.client.operation.duration')
    assert sum(p.count for p in asked.data.data_points) == 8  # counters miss nothing


class Collector(HTTPServer):
    """Counts what arrives."""

    def __init__(self, port):
        self.paths = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers['Content-Length']))
                outer.paths.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        super().__init__(('127.0.0.1', port), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def test_traces_reach_the_collector_that_the_environment_names(monkeypatch):
    pytest.importorskip('opentelemetry.exporter.otlp.proto.http')
    collector = Collector(0)
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', f'http://127.0.0.1:{collector.server_port}')
    exports = open_exports(otel=True)
    assert len(exports) == 1
    exports.finished(question())
    exports.close()
    wait_for(lambda: {'/v1/traces', '/v1/metrics'} <= set(collector.paths))
    collector.shutdown()
    collector.server_close()


def test_a_dead_collector_is_named_once_and_costs_nothing(monkeypatch, caplog):
    pytest.importorskip('opentelemetry.exporter.otlp.proto.http')
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', f'http://127.0.0.1:{free_port()}')
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_TIMEOUT', '1')
    monkeypatch.setenv('OTEL_BSP_SCHEDULE_DELAY', '50')
    caplog.set_level(logging.DEBUG)
    exports = open_exports(otel=True)
    spent = []
    for _ in range(30):
        asked = question()
        start = time.perf_counter()
        exports.finished(asked)
        spent.append(time.perf_counter() - start)
        time.sleep(0.01)
    said = [r for r in caplog.records if 'does not answer' in r.getMessage()]
    wait_for(lambda: [r for r in caplog.records if 'does not answer' in r.getMessage()])
    start = time.monotonic()
    exports.close()
    assert time.monotonic() - start < 3.0
    said = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1 and 'answers go on' in said[0].getMessage()
    # Waiting for a connection would take a second; nothing waits.
    assert sorted(spent)[len(spent) // 2] < 0.1


def test_a_collector_that_does_not_listen_is_knocked_at_before_anything_is_sent(monkeypatch):
    pytest.importorskip('opentelemetry.sdk')
    from types import SimpleNamespace

    from qwen_vl_ros.measure import otel

    class Exporter:
        sent = 0

        def export(self, spans):
            self.sent += 1
            return SimpleNamespace(name='FAILURE' if self.sent == 1 else 'SUCCESS')

    monkeypatch.setattr(otel, 'getproxies', dict)
    with socket.create_server(('127.0.0.1', 0)) as place:
        port = place.getsockname()[1]
    exporter, said = Exporter(), otel._Once('it')
    exporter._endpoint = f'http://127.0.0.1:{port}/v1/traces'
    watched = otel._watched(exporter, said, 'nobody')
    watched.export([])
    assert said.silent and exporter.sent == 1
    assert watched.export([]) == 'nobody' and exporter.sent == 1
    with socket.create_server(('127.0.0.1', port)):
        assert watched.export([]).name == 'SUCCESS'
    assert not said.silent and exporter.sent == 2


def test_of_two_ways_to_a_dead_collector_one_line_tells(caplog):
    pytest.importorskip('opentelemetry.sdk')
    from qwen_vl_ros.measure.otel import _Once

    caplog.set_level(logging.INFO)
    traces = _Once('traces')
    metrics = _Once('metrics', traces)
    for good in (False, False, True, True):  # it goes and comes back
        traces.note(good)
        metrics.note(good)
    assert [(r.levelname, r.getMessage().split()[0]) for r in caplog.records] == [
        ('WARNING', 'traces'), ('INFO', 'metrics')]
    caplog.clear()
    for _ in range(3):  # it takes traces alone
        traces.note(True)
        metrics.note(False)
    assert [r.getMessage().split()[0] for r in caplog.records] == ['metrics']


def test_a_collector_that_comes_back_is_named(caplog):
    pytest.importorskip('opentelemetry.sdk')
    from types import SimpleNamespace

    from qwen_vl_ros.measure.otel import _Once, _watched

    caplog.set_level(logging.INFO)
    results = iter(['FAILURE', 'FAILURE', 'SUCCESS', 'SUCCESS', 'FAILURE'])
    exporter = SimpleNamespace(export=lambda batch: SimpleNamespace(name=next(results)))
    watched = _watched(exporter, _Once('it'))
    for _ in range(5):
        watched.export([])
    assert [r.levelname for r in caplog.records] == ['WARNING', 'INFO', 'WARNING']


def test_traces_that_arrive_and_metrics_that_do_not_are_told_apart(monkeypatch, caplog):
    pytest.importorskip('opentelemetry.exporter.otlp.proto.http')
    from qwen_vl_ros.measure.otel import OpenTelemetry

    class Half(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers['content-length']))
            self.send_response(200 if self.path == '/v1/traces' else 404)
            self.send_header('content-length', '0')
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(('127.0.0.1', 0), Half)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', f'http://127.0.0.1:{server.server_port}')
    caplog.set_level(logging.INFO, 'qwen_vl_ros')
    export = OpenTelemetry('half')
    try:
        for _ in range(3):
            export.finished(question())
            export._processor.force_flush()
            export._metrics.force_flush()
            assert not export._said.silent, 'traces are held back for what metrics lack'
    finally:
        export.close()
        server.shutdown()
    said = [r.getMessage() for r in caplog.records if r.name == 'qwen_vl_ros.measure.otel']
    assert len(said) == 1 and 'collector of metrics does not answer' in said[0]


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, 'opentelemetry.sdk.metrics', None)
    monkeypatch.setitem(sys.modules, 'prometheus_client', None)
    exports = open_exports(otel=True, prometheus_port=9999)
    assert len(exports) == 0
    text = caplog.text
    assert 'pip install opentelemetry-sdk' in text and 'pip install prometheus-client' in text


# All together

def test_a_broken_exporter_is_logged_once_and_the_others_are_told(caplog):
    class Broken:
        def finished(self, *arguments):
            raise KeyError('x')

        entered = close = finished

    class Good(list):
        def entered(self, request_id, stage):
            self.append(stage)

        def finished(self, question):
            self.append(question.code)

        def close(self):
            self.append('closed')

    good = Good()
    exports = Exports([Broken(), good])
    exports.entered('q', 'vision')
    exports.finished(question())
    exports.finished(question('deadline'))
    exports.close()
    assert [g for g in good if g] == ['vision', 'none', 'deadline', 'closed']
    assert good.count('') == 2
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_the_log_holds_the_request_id(caplog):
    class Silent:
        def finished(self, *arguments):
            pass

        entered = close = finished

    caplog.set_level(logging.DEBUG)
    exports = Exports([Silent()])
    exports.finished(question(name='run-7'))
    exports.close()
    assert 'run-7' in caplog.text and '230.0 ms' in caplog.text


def test_exporters_that_fall_behind_lose_questions_but_hold_up_nobody(caplog, monkeypatch):
    from qwen_vl_ros.measure import export

    monkeypatch.setattr(export, 'WAITING', 2)
    go = threading.Event()

    class Slow(list):
        def finished(self, question):
            go.wait(10)
            self.append(question)

        def entered(self, request_id, stage):
            pass

        def close(self):
            pass

    slow = Slow()
    exports = Exports([slow])
    asked = [question() for _ in range(20)]
    start = time.monotonic()
    for one in asked:
        exports.finished(one)
    assert time.monotonic() - start < 5
    assert caplog.text.count('fall behind') == 1
    go.set()
    wait_for(lambda: exports._queue.empty())
    exports.close()
    assert 2 <= len(slow) <= 3
