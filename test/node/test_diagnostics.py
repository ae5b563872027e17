"""Levels and sentences of the statuses, without a node."""

import math
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.types import Answer
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.node import diagnostics, messages
from qwen_vl_ros.node.cameras import Rates
from qwen_vl_ros.node.device import peak_bandwidth_gb_s
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.requests import Job, Outcome, Question
from qwen_vl_ros.pipeline import CameraCounts

OK, WARN, ERROR, STALE = b'\0', b'\1', b'\2', b'\3'


def answered(gigabytes=1.0, seconds=0.1):
    """Return a job and the outcome of an answer with one decode step of that cost."""
    job = Job(Question('x'), lambda job, event: None)
    line = job.timeline
    end = line.start_ns + int(seconds * 1e9)
    line.add('first_token', line.start_ns, line.start_ns + 10**6)
    line.add('token', line.start_ns, end, bytes_read=int(gigabytes * 1e9))
    return job, Outcome(ErrorCode.NONE, answer=Answer('a', 'stop', (1, 2), 0.5, 10, 5, 20, line))


def test_bandwidth_is_set_against_the_boards_peak():
    peak = peak_bandwidth_gb_s('NVIDIA Jetson AGX Orin Developer Kit')
    assert peak == 204.8 and math.isnan(peak_bandwidth_gb_s('x86_64 desk'))
    nano = 'NVIDIA Jetson Orin Nano Engineering Reference Developer Kit'
    assert (peak_bandwidth_gb_s(nano), peak_bandwidth_gb_s(f'{nano} Super')) == (68.3, 102.4)
    for name, known in (('AGX Thor', 273.0), ('AGX Xavier', 136.5), ('Xavier NX', 59.7)):
        assert peak_bandwidth_gb_s(f'NVIDIA Jetson {name} Developer Kit') == known
    statistics = diagnostics.Statistics()
    job, outcome = answered(gigabytes=10.24, seconds=0.1)
    statistics.count(job, outcome)
    level, _, values = diagnostics.inference_status(statistics, Settings(), 0, peak)
    assert level == OK and values['bandwidth_utilization'] == pytest.approx(0.5, rel=1e-3)
    metrics = messages.answer_message(job, outcome, peak).metrics
    assert metrics.decode_bandwidth_gb_s == pytest.approx(102.4, rel=1e-3)
    assert metrics.bandwidth_utilization == pytest.approx(0.5, rel=1e-3)
    settings = Settings(diagnostics_min_bandwidth_utilization=0.6)
    level, sentence, _ = diagnostics.inference_status(statistics, settings, 0, peak)
    assert level == WARN and '50% of the memory bandwidth, 60% are expected' in sentence
    level, _, values = diagnostics.inference_status(statistics, settings, 0, math.nan)
    assert level == OK and math.isnan(values['bandwidth_utilization'])


def test_failures_of_the_node_are_errors_and_those_of_clients_are_not():
    statistics = diagnostics.Statistics()
    job, outcome = answered()

    def level():
        return diagnostics.inference_status(statistics, Settings(), 0, math.nan)[0]

    assert level() == OK
    statistics.count(job, Outcome(ErrorCode.UNKNOWN, 'boom'))
    assert level() == ERROR
    statistics.count(job, outcome)
    assert level() == OK
    statistics.count(job, Outcome(ErrorCode.CANCELLED, 'by the client'))
    statistics.count(job, Outcome(ErrorCode.BAD_REQUEST, 'nonsense'))
    assert level() == OK and statistics.errors == 3 and statistics.answers == 1


def test_slow_answers_warn():
    statistics = diagnostics.Statistics()
    job, outcome = answered()
    job.timeline.start_ns -= 5 * 10**9
    statistics.count(job, outcome)
    level, sentence, _ = diagnostics.inference_status(
        statistics, Settings(diagnostics_max_latency_ms=1000.0), 0, math.nan)
    assert level == WARN and 'median latency 5' in sentence


def camera(**fields):
    rates = fields.pop('rates', Rates(30.0, 30.0, 0.0, 5.0))
    silent = fields.pop('silent', 0.0)
    return SimpleNamespace(**{
        'topic': '/c', 'received': 10, 'incompatible': '', 'has_publisher': True,
        'publishers': ('RELIABLE VOLATILE',), 'rates': lambda: rates,
        'silent_s': lambda: silent, **fields})


@pytest.mark.parametrize('state, lately, settings, level, words', [
    ({}, False, {}, OK, '30.0 frames/s'),
    ({'incompatible': 'RELIABILITY'}, False, {}, ERROR, 'another RELIABILITY'),
    ({'has_publisher': False, 'received': 0}, False, {}, ERROR, 'no publisher on /c'),
    ({'silent': 9.0}, False, {}, STALE, 'no frame for 9.0 s'),
    ({'received': 0}, False, {}, WARN, 'no frame yet'),
    ({}, True, {}, WARN, "rejected: encoding 'x'"),
    ({'rates': Rates(10.0, 10.0, 0.66, 5.0)}, False, {}, WARN, '66% of the frames are lost'),
    ({'rates': Rates(10.0, 10.0, 0.0, 5.0)}, False, {'diagnostics_expected_hz': 30.0}, WARN,
     '10.0 frames/s arrive, 30 are expected'),
])
def test_camera_states(state, lately, settings, level, words):
    found, sentence, values = diagnostics.camera_status(
        camera(**state), CameraCounts(last_reason="encoding 'x'"), lately, Settings(**settings))
    assert found == level and words in sentence and values['topic'] == '/c'


def test_quantiles_are_values_that_occurred():
    values = [float(n) for n in range(1, 101)]
    assert diagnostics.quantile(values, 0.5) == 50 and diagnostics.quantile(values, 0.95) == 95
    assert diagnostics.quantile([7.0], 0.95) == 7 and math.isnan(diagnostics.quantile([], 0.5))


def test_whole_numbers_do_not_reach_float_fields():
    """The generated C code ends the process at a whole number in a float field."""
    from rclpy.serialization import serialize_message
    line = Timeline()
    answer = Answer('', 'stop', (), 1, 0, 0, 1, line)
    job = Job(Question('x'), lambda job, event: None)
    serialize_message(messages.answer_message(job, Outcome(ErrorCode.NONE, answer=answer)))
    serialize_message(messages.answer_message(job, Outcome(ErrorCode.NO_IMAGE, 'none')))
    serialize_message(messages.model_info_message(FakeEngine().info))
