"""Health on /diagnostics: the model, the questions, every camera, the board."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.node.cameras import CameraInput
from qwen_vl_ros.node.device import Board
from qwen_vl_ros.node.messages import decode_rates
from qwen_vl_ros.node.overlap import Overlap
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.requests import Job, Outcome
from qwen_vl_ros.pipeline import CameraCounts, FrameStore
from qwen_vl_ros.saliency.answering import REGION

OK, WARN = DiagnosticStatus.OK, DiagnosticStatus.WARN
ERROR, STALE = DiagnosticStatus.ERROR, DiagnosticStatus.STALE

#: Latencies are those of so many newest answers.
KEPT = 100

#: Shares of missing frames that are warned of: against the expected rate, and lost on the way.
TOLERANCE = 0.2
MAX_LOST = 0.05

#: Refusals and wishes of the client: they say nothing about the node's health.
NOT_FAILURES = (ErrorCode.NONE, ErrorCode.CANCELLED, ErrorCode.BAD_REQUEST, ErrorCode.BAD_SCHEMA,
                ErrorCode.PROMPT_TOO_LONG, ErrorCode.QUEUE_FULL, ErrorCode.INACTIVE)


def quantile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie (nearest rank); NaN for none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


class Statistics:
    """Counters and newest latencies; written by the worker, read by the diagnostics timer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answers = 0
        self.errors = 0
        self.rejected = 0
        self.publish_errors = 0
        self.last_error = ''
        self.last_failed = False
        self._answers: deque[dict[str, float]] = deque(maxlen=KEPT)

    def refused(self) -> None:
        """Count a question that was not taken."""
        with self._lock:
            self.rejected += 1

    def count(self, job: Job, outcome: Outcome) -> None:
        """Count how a question ended."""
        latency_ms = (time.monotonic_ns() - job.timeline.start_ns) / 1e6
        with self._lock:
            if outcome.code == ErrorCode.NONE and outcome.answer is not None:
                answer = outcome.answer
                rate, bandwidth = decode_rates(answer.timeline)
                self.answers += 1
                self.last_failed = False
                self._answers.append({
                    'latency': latency_ms, 'first': answer.timeline.time_to_first_token_ms(),
                    'rate': rate, 'bandwidth': bandwidth,
                    'kept': (answer.vision_tokens_kept / answer.vision_tokens_in
                             if answer.vision_tokens_in else 1.0)})
            else:
                self.errors += 1
                self.last_failed = outcome.code not in NOT_FAILURES
                self.last_error = f'{outcome.code.name}: {outcome.message}'

    def note_publish_error(self, text: str) -> None:
        """Count an answer, chunk or picture that could not be published."""
        with self._lock:
            self.publish_errors += 1
            self.last_error = text

    def series(self, name: str) -> list[float]:
        """Return a figure of the newest answers: latency, first, rate, bandwidth, kept."""
        with self._lock:
            return [answer[name] for answer in self._answers if not math.isnan(answer[name])]


@dataclass(frozen=True)
class Facts:
    """What a report is about, at one moment."""

    state: str
    load_failure: str
    load_time_s: float
    info: Any
    queue_depth: int
    cameras: tuple[CameraInput, ...]
    store: FrameStore | None
    overlap: Overlap | None = None


class Reporter:
    """
    Makes the array that the node publishes.

    :param name: of the node, before each status name.
    :param hardware_id: see :func:`qwen_vl_ros.node.device.hardware_id`.
    :param statistics: of the questions.
    :param peak_gb_s: the device's memory bandwidth, 1e9 bytes/s; NaN when unknown.
    """

    def __init__(self, name: str, hardware_id: str, statistics: Statistics,
                 peak_gb_s: float) -> None:
        self._name = name
        self._hardware_id = hardware_id
        self._statistics = statistics
        self._peak_gb_s = peak_gb_s
        self._rejected: dict[str, int] = {}
        self._board = Board()

    def report(self, facts: Facts, settings: Settings) -> DiagnosticArray:
        """Return all statuses, without a stamp."""
        found = {
            'model': model_status(
                facts.state, facts.info, facts.load_time_s, facts.load_failure),
            'inference': inference_status(
                self._statistics, settings, facts.queue_depth, self._peak_gb_s),
            'pipeline': pipeline_status(
                facts.overlap, approximate(facts.info, settings, facts.overlap))}
        for camera in facts.cameras:
            if facts.store is None or camera.name not in facts.store.cameras:
                continue
            counts = facts.store.counts(camera.name)
            lately = counts.rejected > self._rejected.get(camera.name, 0)
            self._rejected[camera.name] = counts.rejected
            found[f'{camera.name} topic status'] = camera_status(
                camera, counts, lately, settings)
        self._board.throttle.warn_c = settings.diagnostics_max_temperature_c
        found['device'] = device_status(
            self._board, quantile(self._statistics.series('latency'), 0.5))
        return DiagnosticArray(status=[
            status(f'{self._name}: {name}', self._hardware_id, *parts)
            for name, parts in found.items()])


def status(name: str, hardware_id: str, level: bytes, message: str,
           values: dict[str, Any]) -> DiagnosticStatus:
    """Return a status; floats are written with at most three decimals."""
    return DiagnosticStatus(
        name=name, hardware_id=hardware_id, level=level, message=message,
        values=[KeyValue(key=key, value=_text(value)) for key, value in values.items()])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return 'nan' if math.isnan(value) else f'{value:.3f}'.rstrip('0').rstrip('.')
    return str(value)


def model_status(state: str, info: Any, load_time_s: float,
                 failure: str) -> tuple[bytes, str, dict[str, Any]]:
    """Return level, sentence and values of the status ``model``."""
    values = {'state': state, 'load_time_s': load_time_s}
    for key in ('name', 'revision', 'quantization', 'weight_bytes', 'dtype', 'device',
                'image_processor'):
        values[key] = getattr(info, key, '') if info is not None else ''
    if failure:
        return ERROR, failure, values
    return OK, state, values


def inference_status(statistics: Statistics, settings: Settings, depth: int,
                     peak_gb_s: float) -> tuple[bytes, str, dict[str, Any]]:
    """Return level, sentence and values of the status ``inference``; idle is OK."""
    latency, first = statistics.series('latency'), statistics.series('first')
    rates, kept = statistics.series('rate'), statistics.series('kept')
    bandwidth = statistics.series('bandwidth')
    median = quantile(latency, 0.5)
    utilization = quantile(bandwidth, 0.5) / peak_gb_s
    values = {
        'answers_total': statistics.answers, 'errors_total': statistics.errors,
        'rejected_total': statistics.rejected, 'queue_depth': depth,
        'latency_ms_p50': median, 'latency_ms_p95': quantile(latency, 0.95),
        'time_to_first_token_ms_p50': quantile(first, 0.5),
        'time_to_first_token_ms_p95': quantile(first, 0.95),
        'decode_tokens_per_s': quantile(rates, 0.5),
        'decode_bandwidth_gb_s': quantile(bandwidth, 0.5),
        'bandwidth_utilization': utilization,
        'vision_tokens_kept_ratio': quantile(kept, 0.5),
        'publish_errors_total': statistics.publish_errors, 'last_error': statistics.last_error}
    if statistics.last_failed:
        return ERROR, f'last question failed: {statistics.last_error}', values
    if 0 < settings.diagnostics_max_latency_ms < median:
        return WARN, (f'median latency {median:.0f} ms is above '
                      f'{settings.diagnostics_max_latency_ms:.0f} ms'), values
    if utilization < settings.diagnostics_min_bandwidth_utilization:
        return WARN, (f'decoding uses {utilization:.0%} of the memory bandwidth, '
                      f'{settings.diagnostics_min_bandwidth_utilization:.0%} are expected'), values
    return OK, 'answering' if statistics.answers else 'idle', values


def approximate(info: Any, settings: Settings, overlap: Overlap | None) -> tuple[str, ...]:
    """Return options in force that can change answers, by the names that answers give them."""
    options = {
        'micro_batch': overlap is not None and overlap.plan.options.micro_batch < 1,
        'keep_ratio': settings.pruning_enable and settings.pruning_keep_ratio < 1,
        REGION: settings.pruning_roi > 0, 'target_latency_ms': settings.target_latency_ms > 0}
    return (*getattr(info, 'approximate', ()), *(name for name, on in options.items() if on))


def pipeline_status(overlap: Overlap | None, changed: Sequence[str] = ()
                    ) -> tuple[bytes, str, dict[str, Any]]:
    """
    Return level, sentence and values of the status ``pipeline``.

    :param changed: see :func:`approximate`.
    """
    found = overlap.pipeline() if overlap is not None else None
    values = {
        'max_sequences': overlap.plan.options.max_sequences if overlap is not None else 1,
        'under_way': overlap.plan.under_way if overlap is not None else 'unavailable',
        'bubble_share': found.idle_share if found else math.nan,
        'bubble_ms_per_answer': (
            found.idle_ms / found.answers if found and found.answers else math.nan),
        'decode_waits_share': found.starved_share if found else math.nan,
        'approximate': ', '.join(changed)}
    return OK, 'stages overlap' if overlap is not None else 'one question after the other', values


def camera_status(camera: CameraInput, counts: CameraCounts, rejected_lately: bool,
                  settings: Settings) -> tuple[bytes, str, dict[str, Any]]:
    """Return level, sentence and values of a camera's ``topic status``."""
    rates = camera.rates()
    silent_s = camera.silent_s()
    values = {
        'topic': camera.topic, 'frame_rate_node': rates.node_hz,
        'frame_rate_msg': rates.message_hz, 'current_delay_from_realtime_ms': rates.delay_ms,
        'expected_frequency': settings.diagnostics_expected_hz, 'tolerance': TOLERANCE,
        'frames_received': camera.received, 'frames_replaced': counts.replaced,
        'frames_rejected': counts.rejected, 'last_rejection': counts.last_reason,
        'frames_lost_share': rates.lost, 'odd_stamps': counts.odd_stamps,
        'newest_frame_age_s': silent_s if camera.received else math.nan,
        'publisher_qos': ', '.join(camera.publishers)}
    level, sentence = _camera_health(camera, counts, rejected_lately, settings, silent_s)
    return level, sentence, values


def _camera_health(camera: CameraInput, counts: CameraCounts, rejected_lately: bool,
                   settings: Settings, silent_s: float) -> tuple[bytes, str]:
    rates = camera.rates()
    silent = silent_s > settings.diagnostics_stale_after_s
    if camera.incompatible:
        return ERROR, (f'QoS incompatible: a publisher offers another {camera.incompatible} than '
                       f'image_qos {settings.image_qos} asks for')
    if not camera.has_publisher and (silent or not camera.received):
        return ERROR, f'no publisher on {camera.topic}'
    if silent:
        return STALE, f'no frame for {silent_s:.1f} s'
    if not camera.received:
        return WARN, 'no frame yet'
    if rejected_lately:
        return WARN, f'frames are rejected: {counts.last_reason}'
    if rates.lost > MAX_LOST:
        return WARN, (f'{rates.lost:.0%} of the frames are lost on the way; do both ends use '
                      'config/fastdds.xml, or is the compressed topic a way out?')
    if rates.node_hz < settings.diagnostics_expected_hz * (1 - TOLERANCE):
        return WARN, (f'{rates.node_hz:.1f} frames/s arrive, '
                      f'{settings.diagnostics_expected_hz:g} are expected')
    return OK, f'{rates.node_hz:.1f} frames/s'


def device_status(board: Board, latency_ms: float) -> tuple[bytes, str, dict[str, Any]]:
    """
    Return level, sentence and values of the status ``device``.

    :param latency_ms: median of the newest answers, which a throttled board is named with.
    """
    values, throttled = board.read()
    if throttled:
        return WARN, throttled + (
            '' if math.isnan(latency_ms) else f'; median latency {latency_ms:.0f} ms'), values
    used, total = values['gpu_memory_used_mb'], values['gpu_memory_total_mb']
    if used.isdigit() and total.isdigit() and int(used) > 0.95 * int(total):
        return WARN, f'{used} of {total} MB of GPU memory are in use', values
    return OK, 'running', values
