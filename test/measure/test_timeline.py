"""Timelines: accounting, what they cost, and their trace file."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine import stages
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.samples import Sample
from qwen_vl_ros.measure.timeline import STAGES, Timeline
from qwen_vl_ros.measure.trace import trace_events, write_trace
from qwen_vl_ros.share import share

MS = 1_000_000


def line():
    timeline = Timeline('r1')
    t = timeline.start_ns
    timeline.add('image_age', t - 30 * MS, t)
    timeline.add('queue', t, t + 2 * MS)
    timeline.add('encode', t + 3 * MS, t + 9 * MS, stream='cuda:0', bytes_read=600, flops=12_000)
    timeline.add('prefill', t + 5 * MS, t + 11 * MS, stream='cuda:1')
    timeline.add('token', t + 12 * MS, t + 13 * MS)
    return timeline


def test_overlapping_stages_count_once_and_gaps_are_named():
    timeline = line()
    assert timeline.total_ms() == pytest.approx(13)
    assert timeline.busy_ms() == pytest.approx(2 + 8 + 1)
    assert timeline.unaccounted_ms() == pytest.approx(2)
    assert Timeline().busy_ms() == Timeline().unaccounted_ms() == 0


def test_a_stage_is_recorded_when_its_block_raises():
    timeline = Timeline()
    with pytest.raises(RuntimeError), timeline.stage('encode', flops=5):
        raise RuntimeError
    assert [(s.name, s.flops) for s in timeline.spans] == [('encode', 5)]
    assert math.isnan(timeline.time_to_first_token_ms())


def test_a_device_span_is_resolved_once_and_only_when_read():
    timeline, calls = Timeline(), []

    def resolve(span):
        calls.append(span)
        span.end_ns = span.start_ns + 7 * MS

    timeline.add('encode', timeline.start_ns, timeline.start_ns)._resolve = resolve
    assert not calls
    assert timeline.ms('encode') == pytest.approx(7) and timeline.ms('encode') == pytest.approx(7)
    assert len(calls) == 1


def test_the_stages_of_an_answer_account_for_its_time():
    engine = Engine.load(str(share('models', 'tiny')), device='cpu')
    frame = Frame.from_rgb(np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8))
    shares = []
    for number in range(5):
        engine.forget()
        for event in engine.answer(Request(f'What is it? {number}', (Visual((frame,)),),
                                           max_new_tokens=8)):
            if isinstance(event, Done):
                timeline = event.answer.timeline
        assert {s.name for s in timeline.spans} <= set(STAGES)
        shares.append(timeline.busy_ms() / timeline.total_ms())
    # The best of five: a machine that others use may stop us between any two stages.
    assert max(shares) > 0.9
    engine.close()


def test_trace_of_live_timelines_with_sensors():
    timeline = line()
    events = trace_events([timeline], [Sample(timeline.start_ns, gpu_percent=50.0,
                                              power_mw={'VDD_IN': 9000.0}), Sample(5)])
    spans = {e['name']: e for e in events if e['ph'] == 'X'}
    assert spans['encode']['ts'] == pytest.approx(timeline.start_ns / 1e3 + 3000)
    assert spans['encode']['dur'] == pytest.approx(6000)
    assert spans['encode']['args'] == {'bytes_read': 600, 'flops': 12_000, 'gb_per_s': 0.0,
                                       'gflop_per_s': 0.002}
    names = {e['args']['name'] for e in events if e['ph'] == 'M'}
    assert names == {'r1', 'cpu', 'cuda:0', 'cuda:1'}
    assert spans['encode']['tid'] != spans['prefill']['tid'] != spans['queue']['tid']
    counters = [(e['name'], e['args']) for e in events if e['ph'] == 'C']
    assert counters == [('load %', {'gpu': 50.0}), ('power mW', {'total': 9000.0})]


def test_recorded_timelines_lie_one_behind_the_other(tmp_path):
    data = line().to_dict()
    path = tmp_path / 'trace.json'
    write_trace(path, [data | {'title': 'Wo? ä'}, data])
    document = json.loads(path.read_text(encoding='utf-8'))
    spans = [e for e in document['traceEvents'] if e['ph'] == 'X']
    ends = max(e['ts'] + e['dur'] for e in spans if e['pid'] == 1)
    starts = min(e['ts'] for e in spans if e['pid'] == 2)
    assert starts > ends and min(e['ts'] for e in spans) >= 0
    assert document['traceEvents'][0]['args']['name'] == 'Wo? ä'


class Gpu:
    """One stream of a made-up device, milliseconds; stands in for torch.cuda's events."""

    def __init__(self, monkeypatch):
        self.host = self.busy_until = 1000.0
        self.events = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing=True):
                gpu.events += 1

            def record(self, stream):
                self.at = max(gpu.busy_until, gpu.host)

            def synchronize(self):
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, other):
                return other.at - self.at

        monkeypatch.setattr(stages, '_SPARE', {})
        monkeypatch.setattr(stages.torch.cuda, 'Event', Event)
        monkeypatch.setattr(stages.torch.cuda, 'current_stream', lambda device: None)
        monkeypatch.setattr(stages.time, 'monotonic_ns', lambda: round(self.host * 1e6))

    def launch(self, ms):
        self.busy_until = max(self.busy_until, self.host) + ms


def test_steps_on_a_device_begin_where_the_last_one_ended_or_when_they_are_launched(monkeypatch):
    gpu = Gpu(monkeypatch)
    timeline = Timeline()
    clock = stages.DeviceClock(timeline, torch.device('cuda', 0))
    with clock.stage('prefill'):
        gpu.launch(4)
    gpu.host += 4.5  # the first token is waited for
    for ms, pause in ((2, 1), (3, 0.5), (2, 9), (2, 0)):
        launched = time.monotonic_ns()
        gpu.launch(ms)
        chosen = {3: Choice(7, 1.0, 1.0, True, launched, round(gpu.busy_until * 1e6))}
        assert stages.timed_step({3: (clock, 5)}, lambda past: {'flops': 10 * past},
                                 chosen.copy) == chosen
        gpu.host += pause
    # Launched at 0, 4.5, 5.5, 6 and 15 ms; the device falls behind, then waits.
    assert [(s.name, s.start_ns - timeline.start_ns, s.end_ns - timeline.start_ns, s.flops)
            for s in timeline.spans] == [
        ('prefill', 0, 4 * MS, 0), ('token', 4.5 * MS, 6.5 * MS, 50),
        ('token', 6.5 * MS, 9.5 * MS, 50), ('token', 9.5 * MS, 11.5 * MS, 50),
        ('token', 15 * MS, 17 * MS, 50)]
    # The origin and two of prefill: steps are stamped by the kernels.
    assert gpu.events == 3
    assert timeline.busy_ms() == timeline.total_ms() - 4
    again = Timeline()
    with stages.DeviceClock(again, torch.device('cuda', 0)).stage('encode'):
        gpu.launch(1)
    assert again.ms('encode') == pytest.approx(1) and gpu.events == 4  # its origin


def test_a_stamp_whose_place_was_guessed_too_early_makes_no_negative_step():
    timeline = Timeline()
    clock = stages.DeviceClock(timeline, torch.device('cpu'))
    at = timeline.start_ns
    for ended in (at + 9 * MS, at + 5 * MS):
        stages.timed_step({0: (clock, 1)}, lambda past: {}, lambda ended=ended: {
            0: Choice(1, 1.0, 1.0, True, at + MS, ended)})
    assert [(s.start_ns - at, s.end_ns - at) for s in timeline.spans] == [
        (MS, 9 * MS), (9 * MS, 9 * MS)]


def test_of_two_threads_that_read_a_timeline_each_span_is_resolved_once():
    timeline, calls = Timeline(), []

    def resolve(span):
        calls.append(span)
        time.sleep(0.01)
        span.end_ns = span.start_ns + 5 * MS

    for name in ('encode', 'token'):
        timeline.add(name, timeline.start_ns, timeline.start_ns)._resolve = resolve
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: timeline.ms('token'), range(4)))
    assert len(calls) == 2 and found == [5] * 4
