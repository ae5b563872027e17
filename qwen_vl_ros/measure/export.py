"""
Answers to the tools that people watch robots with: OpenTelemetry, Prometheus, ros2_tracing.

All are off unless asked for, and each needs a package that nothing else needs. None may cost an
answer: what a question took is handed over when it has ended, and sending it happens elsewhere. A
collector that does not answer is named once, not at every attempt.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from qwen_vl_ros.measure.timeline import Timeline

LOG = logging.getLogger(__name__)

#: Seconds that closing may take where a collector is dead.
CLOSE_S = 1.0

#: Questions that may wait for the exporters.
WAITING = 256


class ExportError(Exception):
    """An export that cannot be had here; one sentence with the way to get it."""


@dataclass(frozen=True)
class Finished:
    """
    A question that has ended.

    :param timeline: of the question.
    :param code: name of its error code, ``none`` for an answer.
    :param model: name of the model.
    :param attributes: further ones, such as camera and source.
    """

    timeline: Timeline
    code: str = 'none'
    finish_reason: str = ''
    prompt_tokens: int = 0
    output_tokens: int = 0
    vision_tokens_in: int = 0
    vision_tokens_kept: int = 0
    model: str = ''
    attributes: Mapping[str, str] = field(default_factory=dict)


class Exporter(Protocol):
    """Something that is told about questions."""

    def entered(self, request_id: str, stage: str) -> None:
        """Take note that a question entered a stage; an empty one: it has ended."""

    def finished(self, question: Finished) -> None:
        """Take over what a question cost; must not wait."""

    def close(self) -> None:
        """Hand on what is left, within :data:`CLOSE_S`."""


class Exports:
    """
    Several exporters as one; a fault of one is logged once and reaches nobody else.

    What a question cost is handed to a thread of its own: the engine's goes on at once.
    """

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = tuple(exporters)
        self._faulty: set[int] = set()
        self._full = False
        self._queue: queue.Queue[Finished | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        if self._exporters:
            self._thread = threading.Thread(target=self._work, name='exports', daemon=True)
            self._thread.start()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._exporters)

    def entered(self, request_id: str, stage: str) -> None:
        """See :class:`Exporter`; told at once, on this thread."""
        self._each(lambda exporter: exporter.entered(request_id, stage))

    def finished(self, question: Finished) -> None:
        """See :class:`Exporter`; also writes a log line with the question's id."""
        if self._thread is None:
            return
        self.entered(question.timeline.request_id, '')
        try:
            self._queue.put_nowait(question)
        except queue.Full:
            if not self._full:
                self._full = True
                LOG.warning('exports fall behind: %d questions wait, further ones are not '
                            'exported', WAITING)

    def _work(self) -> None:
        while (question := self._queue.get()) is not None:
            self._hand_over(question)

    def _hand_over(self, question: Finished) -> None:
        LOG.debug('request %s: %s %s in %.1f ms', question.timeline.request_id, question.code,
                  question.finish_reason, question.timeline.total_ms())
        self._each(lambda exporter: exporter.finished(question))

    def close(self) -> None:
        """Hand over what waits and close all."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(CLOSE_S)
            self._thread = None
        self._each(lambda exporter: exporter.close())
        self._exporters = ()

    def _each(self, call: Callable[[Exporter], None]) -> None:
        for number, exporter in enumerate(self._exporters):
            try:
                call(exporter)
            except Exception as error:
                if number not in self._faulty:
                    self._faulty.add(number)
                    LOG.warning('%s fails: %s: %s', type(exporter).__name__,
                                type(error).__name__, error)


def open_exports(*, otel: bool = False, prometheus_port: int = 0, ros2_tracing: bool = False,
                 service: str = 'qwen_vl') -> Exports:
    """
    Open what is asked for; what cannot be had is named in the log, and the others work.

    :param otel: traces and metrics by OTLP over HTTP; the collector is where the standard
        environment variables say (OTEL_EXPORTER_OTLP_ENDPOINT ..., by default localhost:4318).
    :param prometheus_port: of 127.0.0.1; 0 is off.
    :param ros2_tracing: tracepoints, where the tracetools library is; silent where it is not.
    """
    wanted: list[tuple[int, Callable[[], Exporter]]] = []
    if otel:
        def open_otel() -> Exporter:
            from qwen_vl_ros.measure.otel import OpenTelemetry

            return OpenTelemetry(service)

        wanted.append((logging.WARNING, open_otel))
    if prometheus_port:
        def open_prometheus() -> Exporter:
            from qwen_vl_ros.measure.prometheus import Prometheus

            return Prometheus(prometheus_port)

        wanted.append((logging.WARNING, open_prometheus))
    if ros2_tracing:
        def open_tracepoints() -> Exporter:
            from qwen_vl_ros.measure.tracepoints import Tracepoints

            return Tracepoints()

        wanted.append((logging.DEBUG, open_tracepoints))
    exporters: list[Exporter] = []
    for level, make in wanted:
        try:
            exporters.append(make())
        except ExportError as error:
            LOG.log(level, '%s', error)
        except Exception as error:
            # A package of another version, a full disk: never a reason not to answer.
            LOG.warning('an export cannot be opened: %s: %s', type(error).__name__, error)
    return Exports(exporters)
