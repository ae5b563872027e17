"""Counters and histograms for Prometheus, on the loopback interface only."""

from __future__ import annotations

import math
import time
from typing import Any

from qwen_vl_ros.measure.export import CLOSE_S, ExportError, Finished

#: Edges of latency histograms, seconds.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


class Prometheus:
    """
    Text for Prometheus on 127.0.0.1.

    :param port: to listen on; 0 takes a free one, see :attr:`port`.
    :raises ExportError: without the package, or where the port is taken.
    """

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import (
                CollectorRegistry,
                Counter,
                Gauge,
                Histogram,
                start_http_server,
            )
        except ImportError:
            raise ExportError('Prometheus is asked for but prometheus_client is missing: '
                              'pip install prometheus-client') from None
        self.registry = CollectorRegistry()
        more: dict[str, Any] = {'registry': self.registry}
        self._questions = Counter(
            'qwen_vl_questions', 'Questions by error code', ['code'], **more)
        self._answer = Histogram(
            'qwen_vl_answer_seconds', 'Time of a question, waiting included', buckets=BUCKETS,
            **more)
        self._first = Histogram(
            'qwen_vl_time_to_first_token_seconds', 'Time to the first token', buckets=BUCKETS,
            **more)
        self._stage = Counter('qwen_vl_stage_seconds', 'Time by stage', ['stage'], **more)
        self._bytes = Counter('qwen_vl_stage_bytes', 'Bytes by stage, computed from shapes',
                              ['stage'], **more)
        self._flops = Counter('qwen_vl_stage_flops', 'FLOPs by stage, computed from shapes',
                              ['stage'], **more)
        self._tokens = Counter('qwen_vl_tokens', 'Tokens by kind', ['kind'], **more)
        self._kept = Gauge('qwen_vl_vision_tokens_kept_ratio',
                           'Share of vision tokens kept in the newest answer', **more)
        try:
            self._server, self._thread = start_http_server(
                port, addr='127.0.0.1', registry=self.registry)
        except OSError as error:
            raise ExportError(f'Prometheus cannot listen on 127.0.0.1:{port}: '
                              f'{error.strerror}') from None
        self.port = self._server.server_port

    def entered(self, request_id: str, stage: str) -> None:
        """Do nothing: counters are made from the timeline."""

    def finished(self, question: Finished) -> None:
        """Count a question."""
        line = question.timeline
        self._questions.labels(question.code).inc()
        self._answer.observe(line.total_ms() / 1e3)
        first = line.time_to_first_token_ms()
        if not math.isnan(first):
            self._first.observe(first / 1e3)
        stages: dict[str, list[float]] = {}
        for span in line.spans:
            sums = stages.setdefault(span.name, [0.0, 0.0, 0.0])
            sums[0] += max(0.0, span.ms / 1e3)
            sums[1] += span.bytes_read + span.bytes_written
            sums[2] += span.flops
        for name, sums in stages.items():
            for counter, value in zip((self._stage, self._bytes, self._flops), sums):
                counter.labels(name).inc(value)
            time.sleep(0)  # see OpenTelemetry: others may want the interpreter
        self._tokens.labels('input').inc(question.prompt_tokens)
        self._tokens.labels('output').inc(question.output_tokens)
        if question.vision_tokens_in:
            self._kept.set(question.vision_tokens_kept / question.vision_tokens_in)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)
