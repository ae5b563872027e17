"""
Timelines as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

The Trace Event Format: complete events ('X') in microseconds; each request is a process, each
stream a thread; sensor samples become counters on the same clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen_vl_ros.measure.samples import Sample
from qwen_vl_ros.measure.timeline import Timeline

#: Process of the sensors' counters; requests count from 1.
SENSORS = 0


def trace_events(
    timelines: Iterable[Timeline | Mapping[str, Any]], samples: Iterable[Sample] = (),
) -> list[dict[str, Any]]:
    """
    Return the events of a trace.

    :param timelines: timelines, or their :meth:`~Timeline.to_dict` with an optional ``title``; the
        latter lie one behind the other, since they do not hold their start.
    :param samples: of the sensors, on the timelines' clock; for live timelines only.
    """
    events: list[dict[str, Any]] = []
    offset_us = 0.0
    for number, line in enumerate(timelines, 1):
        data = line.to_dict() if isinstance(line, Timeline) else line
        begin = line.start_ns / 1e3 if isinstance(line, Timeline) else offset_us
        title = data.get('title') or data.get('request_id') or f'request {number}'
        events.append({'ph': 'M', 'name': 'process_name', 'pid': number, 'tid': 0,
                       'args': {'name': title}})
        threads: dict[str, int] = {}
        spans = data.get('spans', ())
        # An old picture's age begins before the request.
        early_us = min([0.0, *(s['start_ms'] * 1e3 for s in spans)])
        shift = 0.0 if isinstance(line, Timeline) else -early_us
        last = begin
        for span in spans:
            stream = span.get('stream', 'cpu')
            if stream not in threads:
                threads[stream] = len(threads) + 1
                events.append({'ph': 'M', 'name': 'thread_name', 'pid': number,
                               'tid': threads[stream], 'args': {'name': stream}})
            start = begin + shift + span['start_ms'] * 1e3
            events.append({
                'ph': 'X', 'name': span['name'], 'cat': 'stage', 'pid': number,
                'tid': threads[stream], 'ts': start, 'dur': span['ms'] * 1e3,
                'args': _rates(span)})
            last = max(last, start + span['ms'] * 1e3)
        offset_us = last + 1e3
    for sample in samples:
        for name, values in (('load %', {'gpu': sample.gpu_percent, 'emc': sample.emc_percent}),
                             ('power mW', {'total': sample.total_mw}),
                             ('junction C', {'tj': sample.junction_c})):
            known = {key: value for key, value in values.items() if value is not None}
            if known:
                events.append({'ph': 'C', 'name': name, 'pid': SENSORS, 'tid': 0,
                               'ts': sample.time_ns / 1e3, 'args': known})
    return events


def _rates(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span's counts, with GB/s and GFLOP/s where there are any."""
    moved = span.get('bytes_read', 0) + span.get('bytes_written', 0)
    out = {key: span[key] for key in ('bytes_read', 'bytes_written', 'flops') if span.get(key)}
    if span['ms'] > 0 and moved:
        out['gb_per_s'] = round(moved / span['ms'] / 1e6, 3)
    if span['ms'] > 0 and span.get('flops'):
        out['gflop_per_s'] = round(span['flops'] / span['ms'] / 1e6, 3)
    return out


def write_trace(
    path: Path, timelines: Iterable[Timeline | Mapping[str, Any]], samples: Iterable[Sample] = (),
) -> None:
    """
    Write a trace file.

    :raises OSError: when it cannot be written.
    """
    document = {'displayTimeUnit': 'ms', 'traceEvents': trace_events(timelines, samples)}
    path.write_text(json.dumps(document, ensure_ascii=False) + '\n', encoding='utf-8')
