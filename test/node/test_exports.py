"""The node with all exports on, and a collector that does not exist."""

import socket
import urllib.request

import pytest
from harness import wait_for
from qwen_vl_msgs.srv import Ask

pytestmark = pytest.mark.ros
pytest.importorskip('prometheus_client', reason='prometheus-client is optional')
pytest.importorskip('opentelemetry.exporter.otlp.proto.http',
                    reason='the opentelemetry packages are optional')


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def test_answers_are_counted_and_a_dead_collector_is_named_once(
        programs, start_node, client, monkeypatch):
    port = free_port()
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', f'http://127.0.0.1:{free_port()}')
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_TIMEOUT', '1')
    monkeypatch.setenv('OTEL_BSP_SCHEDULE_DELAY', '100')
    program = start_node(export__otel=True, export__prometheus_port=port)
    programs('publish_frames.py', 64, 48, 30, 0, 'BEST_EFFORT')
    client.await_status('camera topic status',
                        lambda level, message, values: int(values['frames_received']) > 0)
    for _ in range(3):
        assert client.ask('words=2').error_code == Ask.Response.NONE
    assert client.ask(' ').error_code != Ask.Response.NONE

    def counted():
        with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics') as reply:
            text = reply.read().decode()
        return 'qwen_vl_questions_total{code="none"} 3.0' in text and (
            'qwen_vl_questions_total{code="bad_request"} 1.0' in text)

    wait_for(counted)
    program.says('does not answer')
    assert program.output.count('does not answer') == 1
    code, seconds = program.end()
    assert code == 0 and seconds < 4.0
