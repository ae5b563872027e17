"""Questions as OpenTelemetry traces and metrics, sent by OTLP over HTTP."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from qwen_vl_ros import __version__
from qwen_vl_ros.measure.export import CLOSE_S, ExportError, Finished

LOG = logging.getLogger(__name__)

#: Seconds between traces while the collector does not answer.
PROBE_S = 5.0

#: Seconds for a collector that did not answer to take a connection.
KNOCK_S = 1.0

PACKAGES = 'opentelemetry-sdk opentelemetry-exporter-otlp-proto-http'


class OpenTelemetry:
    """
    A trace a question and metrics, through the official SDK.

    Attribute and metric names follow OpenTelemetry's conventions for generative AI where there is
    one.

    :param span_exporter: and ``metric_reader``: stand-ins for the OTLP ones.
    :raises ExportError: without the packages.
    """

    def __init__(self, service: str, span_exporter: Any = None, metric_reader: Any = None) -> None:
        try:
            from opentelemetry.metrics import Observation
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import (
                MetricExportResult,
                PeriodicExportingMetricReader,
            )
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            if span_exporter is None or metric_reader is None:
                from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
                    OTLPMetricExporter,
                )
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ExportError(f'OpenTelemetry is asked for but {error.name} is missing: '
                              f'pip install {PACKAGES}') from None
        _hush()
        # One each: a collector may take the ones and not the others.
        self._said = _Once('the OpenTelemetry collector of traces')
        self._said_metrics = _Once('the OpenTelemetry collector of metrics', self._said)
        if span_exporter is None:
            span_exporter = _watched(OTLPSpanExporter(), self._said, SpanExportResult.FAILURE)
        if metric_reader is None:
            metric_reader = PeriodicExportingMetricReader(
                _watched(OTLPMetricExporter(), self._said_metrics, MetricExportResult.FAILURE),
                export_interval_millis=10_000)
        resource = Resource.create({'service.name': service, 'service.version': __version__})
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(span_exporter)
        self._traces.add_span_processor(self._processor)
        self._metrics = MeterProvider([metric_reader], resource=resource, shutdown_on_exit=False)
        self._span, self._ids = ReadableSpan, RandomIdGenerator()
        self._scope = InstrumentationScope('qwen_vl_ros', __version__)
        meter = self._metrics.get_meter('qwen_vl_ros', __version__)
        self._duration = meter.create_histogram(
            'gen_ai.client.operation.duration', 's', 'Time of a question, waiting included')
        self._first = meter.create_histogram(
            'gen_ai.server.time_to_first_token', 's', 'Time to the first token')
        self._each = meter.create_histogram(
            'gen_ai.server.time_per_output_token', 's', 'Time of a token after the first')
        # Sums are added up here and read when they are sent: cheaper than recording each.
        self._sums: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for name, unit, text in (
                ('qwen_vl.tokens', '{token}', 'Tokens by kind'),
                ('qwen_vl.stage.time', 's', 'Time by stage'),
                ('qwen_vl.stage.io', 'By', 'Bytes by stage, computed from shapes')):
            self._sums[name] = {}
            meter.create_observable_counter(
                name, [partial(_observe, self._sums[name], Observation)], unit, text)
        self._next_probe = 0.0
        #: Wall clock less monotonic clock: spans are on the latter.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def entered(self, request_id: str, stage: str) -> None:
        """Do nothing: traces are made from the timeline."""

    def finished(self, question: Finished) -> None:
        """
        Record the trace and the metrics; nothing is sent on this thread.

        While the collector does not answer, one trace in :data:`PROBE_S` is made, to find it back;
        the counters go on.
        """
        line = question.timeline
        labels = {'gen_ai.request.model': question.model}
        if question.code != 'none':
            labels['error.type'] = question.code
        if self._worth_a_trace():
            self._trace(question, labels)
        for span in line.spans:
            self._add('qwen_vl.stage.time', 'stage', span.name, max(0.0, span.ms / 1e3))
            moved = span.bytes_read + span.bytes_written
            if moved:
                self._add('qwen_vl.stage.io', 'stage', span.name, moved)
        tokens = [span for span in line.spans if span.name == 'token']
        if tokens:
            self._each.record(sum(span.ms for span in tokens) / len(tokens) / 1e3, labels)
        self._duration.record(line.total_ms() / 1e3, labels)
        first = line.time_to_first_token_ms()
        if not math.isnan(first):
            self._first.record(first / 1e3, labels)
        for kind, count in (('input', question.prompt_tokens),
                            ('output', question.output_tokens)):
            self._add('qwen_vl.tokens', 'kind', kind, count)

    def _add(self, name: str, label: str, value: str, amount: float) -> None:
        sums, key = self._sums[name], ((label, value),)
        sums[key] = sums.get(key, 0) + amount

    def _worth_a_trace(self) -> bool:
        if not self._said.silent:
            return True
        now = time.monotonic()
        if now < self._next_probe:
            return False
        self._next_probe = now + PROBE_S
        return True

    def _trace(self, question: Finished, labels: dict[str, str]) -> None:
        from opentelemetry import trace

        line = question.timeline
        spans = line.spans
        attributes: dict[str, Any] = {
            **labels, 'gen_ai.operation.name': 'chat', 'qwen_vl.request_id': line.request_id,
            'gen_ai.usage.input_tokens': question.prompt_tokens,
            'gen_ai.usage.output_tokens': question.output_tokens,
            'gen_ai.response.finish_reasons': (question.finish_reason,),
            'qwen_vl.vision_tokens.in': question.vision_tokens_in,
            'qwen_vl.vision_tokens.kept': question.vision_tokens_kept,
            **{f'qwen_vl.{key}': value for key, value in question.attributes.items()}}
        trace_id = self._ids.generate_trace_id()
        if not self._traces.sampler.should_sample(
                None, trace_id, 'answer', attributes=attributes).decision.is_sampled():
            return
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        root = trace.SpanContext(trace_id, self._ids.generate_span_id(), False, flags)

        def made(name: str, context: Any, parent: Any, about: dict[str, Any], start: int,
                 end: int, code: Any = trace.StatusCode.UNSET) -> None:
            # A finished span at once: half of what starting and ending one costs.
            self._processor.on_end(self._span(
                name, context, parent, self._traces.resource, about,
                instrumentation_scope=self._scope,
                status=trace.Status(code, question.code if code.value else None),
                start_time=self._epoch_ns + start, end_time=self._epoch_ns + end))

        # Tokens are one span: a long answer has hundreds.
        tokens = [span for span in spans if span.name == 'token']
        for span in spans:
            parts = tokens if span.name == 'token' else [span]
            if span is not parts[0]:
                continue
            about: dict[str, Any] = {'qwen_vl.stream': span.stream}
            if len(parts) > 1:
                about['qwen_vl.count'] = len(parts)
            for name in ('bytes_read', 'bytes_written', 'flops'):
                value = sum(getattr(part, name) for part in parts)
                if value:
                    about[f'qwen_vl.{name}'] = value
            own = trace.SpanContext(trace_id, self._ids.generate_span_id(), False, flags)
            made(span.name, own, root, about, span.start_ns, parts[-1].end_ns)
            # The engine's thread must not wait for the interpreter while all spans are made.
            time.sleep(0)
        made('answer', root, None, attributes, line.start_ns,
             max((s.end_ns for s in spans), default=line.start_ns),
             trace.StatusCode.ERROR if question.code != 'none' else trace.StatusCode.UNSET)

    def close(self) -> None:
        """Send what is left; a dead collector is given up after :data:`CLOSE_S`."""
        self._said.closing = self._said_metrics.closing = True

        def end() -> None:
            self._traces.shutdown()
            self._metrics.shutdown()

        ending = threading.Thread(target=end, name='otel close', daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def _observe(sums: dict[tuple[tuple[str, str], ...], float], kind: Any, options: Any) -> list[Any]:
    """Return the sums as the SDK's observations (``kind``)."""
    return [kind(value, dict(key)) for key, value in tuple(sums.items())]


class _Once:
    """
    Says once that something does not answer, and once that it does again.

    :param other: the other way to the same place: where both are dead, one line says so.
    """

    def __init__(self, what: str, other: _Once | None = None) -> None:
        self._what = what
        self._other = other
        self._lock: threading.Lock = other._lock if other is not None else threading.Lock()
        if other is not None:
            other._other = self
        self.silent = False
        self.closing = False

    def note(self, good: bool, why: str = '') -> None:
        with self._lock:
            changed = good == self.silent and not (self._other and self._other.silent)
            self.silent = not good
        if changed and not self.closing:
            if good:
                LOG.info('%s answers again', self._what)
            else:
                LOG.warning('%s does not answer%s; answers go on, what they cost is not exported '
                            'until it does', self._what, f' ({why})' if why else '')


def _knock(endpoint: str) -> bool:
    """Say whether anybody listens at a URL, in a tenth of a millisecond where that is refused."""
    parts = urlsplit(endpoint)
    try:
        port = parts.port or (443 if parts.scheme == 'https' else 80)
        with socket.create_connection((parts.hostname or '', port), KNOCK_S):
            return True
    except (OSError, ValueError):
        return False


def _watched(exporter: Any, said: _Once, failure: Any = None) -> Any:
    """
    Return the exporter with its results told to ``said``.

    Where the last one failed it knocks first: the SDK would try again and again for ten seconds,
    with the interpreter that answers need.

    :param failure: what it returns where nobody listens; ``None`` does not knock.
    """
    send = exporter.export
    # A proxy may know the way to a host that we do not.
    endpoint = '' if failure is None or getproxies() else getattr(exporter, '_endpoint', '')

    def export(*args: Any, **more: Any) -> Any:
        if said.silent and endpoint and not _knock(endpoint):
            return failure
        try:
            result = send(*args, **more)
        except Exception as error:
            said.note(False, f'{type(error).__name__}: {error}')
            raise
        said.note(getattr(result, 'name', '') == 'SUCCESS')
        return result

    exporter.export = export
    return exporter


def _hush() -> None:
    """Keep the SDK's own complaints about every failed attempt out of the log."""
    for name in ('opentelemetry.exporter', 'opentelemetry.sdk.trace.export',
                 'opentelemetry.sdk._shared_internal', 'opentelemetry.sdk.metrics',
                 'opentelemetry.sdk.metrics._internal.export'):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
