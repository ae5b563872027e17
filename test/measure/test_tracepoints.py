"""Tracepoints of ros2_tracing: callbacks by stage and request."""

from __future__ import annotations

import logging
import sys

import pytest
from export_questions import question

from qwen_vl_ros.measure import tracepoints
from qwen_vl_ros.measure.export import open_exports
from qwen_vl_ros.measure.tracepoints import Tracepoints


class FakeTracetools:
    def __init__(self, compiled=True):
        self.calls = []
        self._compiled = compiled

    def ros_trace_compile_status(self):
        return self._compiled

    def ros_trace_rclcpp_callback_register(self, address, symbol):
        self.calls.append(('register', symbol.value.decode(), address.value))

    def ros_trace_callback_start(self, address, intra):
        self.calls.append(('start', address.value))

    def ros_trace_callback_end(self, address):
        self.calls.append(('end', address.value))


def test_stages_become_callbacks_with_their_names():
    library = FakeTracetools()
    points = Tracepoints(library)
    for stage in ('vision', 'prefill', ''):
        points.entered('q', stage)
    points.finished(question())
    points.entered('q', 'vision')
    points.close()
    names = {call[2]: call[1] for call in library.calls if call[0] == 'register'}
    assert list(names.values()) == ['qwen_vl vision', 'qwen_vl prefill']
    assert [(c[0], names[c[1]]) for c in library.calls if c[0] != 'register'] == [
        ('start', 'qwen_vl vision'), ('end', 'qwen_vl vision'), ('start', 'qwen_vl prefill'),
        ('end', 'qwen_vl prefill'), ('start', 'qwen_vl vision'), ('end', 'qwen_vl vision')]


def test_questions_at_the_same_time_keep_their_own_callbacks():
    library = FakeTracetools()
    points = Tracepoints(library)
    for name, stage in (('a', 'vision'), ('b', 'vision'), ('a', 'prefill'), ('b', ''), ('a', '')):
        points.entered(name, stage)
    points.entered('c', 'vision')
    points.close()
    names = {call[2]: call[1] for call in library.calls if call[0] == 'register'}
    events = [(c[0], c[1]) for c in library.calls if c[0] != 'register']
    a, b = events[0][1], events[1][1]
    assert a != b and names[a] == names[b] == 'qwen_vl vision'
    prefill = events[3][1]
    assert events[:6] == [('start', a), ('start', b), ('end', a), ('start', prefill), ('end', b),
                          ('end', prefill)]
    # What has ended is used again: a long run registers no more callbacks.
    assert len(names) == 3 and events[6][1] in (a, b) and events[7] == ('end', events[6][1])


def test_without_tracetools_nothing_is_said(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(sys, 'prefix', str(tmp_path))
    monkeypatch.setenv('AMENT_PREFIX_PATH', str(tmp_path))
    monkeypatch.delenv('CMAKE_PREFIX_PATH', raising=False)
    monkeypatch.setattr(tracepoints.ctypes, 'CDLL', lambda name: (_ for _ in ()).throw(OSError()))
    caplog.set_level(logging.INFO)
    assert len(open_exports(ros2_tracing=True)) == 0
    assert not caplog.records
    with pytest.raises(tracepoints.ExportError, match='without LTTng'):
        Tracepoints(FakeTracetools(compiled=False))


@pytest.mark.ros
def test_the_real_library_takes_the_calls():
    exports = open_exports(ros2_tracing=True)
    assert len(exports) == 1
    exports.entered('q', 'vision')
    exports.finished(question())
    exports.close()
