"""Prometheus: counters, the loopback interface alone, and what is said of a missing package."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from export_questions import question

from qwen_vl_ros.measure.export import open_exports


def test_prometheus_counts_and_listens_on_loopback_only():
    pytest.importorskip('prometheus_client', reason='prometheus-client is optional')
    from qwen_vl_ros.measure.prometheus import Prometheus

    export = Prometheus(0)
    export.finished(question())
    export.finished(question('deadline'))
    with urllib.request.urlopen(f'http://127.0.0.1:{export.port}/metrics') as reply:
        text = reply.read().decode()
    assert 'qwen_vl_questions_total{code="none"} 1.0' in text
    assert 'qwen_vl_questions_total{code="deadline"} 1.0' in text
    assert 'qwen_vl_answer_seconds_count 2.0' in text
    assert 'qwen_vl_stage_bytes_total{stage="encode"} 2048.0' in text
    assert 'qwen_vl_tokens_total{kind="output"} 4.0' in text
    assert export._server.server_address[0] == '127.0.0.1'
    export.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f'http://127.0.0.1:{export.port}/metrics', timeout=1)


def test_a_taken_port_is_named_and_the_rest_works(caplog):
    pytest.importorskip('prometheus_client')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        assert len(open_exports(prometheus_port=s.getsockname()[1])) == 0
    assert 'cannot listen on 127.0.0.1' in caplog.text


def test_a_package_of_another_version_is_named_and_nothing_is_raised(monkeypatch, caplog):
    prometheus_client = pytest.importorskip('prometheus_client')
    monkeypatch.setattr(prometheus_client, 'start_http_server', lambda *a, **k: None)
    assert len(open_exports(prometheus_port=9999)) == 0
    assert 'an export cannot be opened: TypeError' in caplog.text
