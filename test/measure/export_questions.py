"""A question as exporters are told of it."""

from __future__ import annotations

from qwen_vl_ros.measure.export import Finished
from qwen_vl_ros.measure.timeline import Timeline

MS = 1_000_000


def question(code='none', name='q-1'):
    timeline = Timeline(name)
    t = timeline.start_ns
    timeline.add('encode', t, t + 200 * MS, stream='cuda:0', bytes_read=1000, bytes_written=24,
                 flops=5000)
    timeline.add('first_token', t + 200 * MS, t + 210 * MS)
    timeline.add('token', t + 210 * MS, t + 220 * MS, bytes_read=1000)
    timeline.add('token', t + 220 * MS, t + 230 * MS, bytes_read=2000)
    return Finished(timeline, code, 'stop', 428, 2, 391, 196, 'tiny', {'camera': 'front'})
