"""What a message tells of an answer's costs is what its timeline holds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from qwen_vl_msgs.msg import InferenceMetrics
from rclpy.serialization import deserialize_message, serialize_message

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Answer, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import STAGES, Timeline
from qwen_vl_ros.node.messages import metrics_message, stage_messages
from qwen_vl_ros.saliency.selectors import make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


def test_stages_are_summed_and_come_in_their_order():
    line = Timeline()
    line.add('token', 9_000_000, 11_000_000, bytes_read=5_000_000_000, flops=7)
    line.add('token', 11_000_000, 12_500_000, bytes_read=np.int64(1), bytes_written=2, flops=1)
    line.add('encode', 0, 4_000_000, flops=2.4e12)
    line.add('own', 0, 1_000_000)
    line.add('queue', 0, 500_000)
    told = stage_messages(line)
    assert [(c.name, c.time, c.calls, c.bytes_read, c.bytes_written, c.flops) for c in told] == [
        ('queue', 0.5, 1, 0, 0, 0), ('encode', 4.0, 1, 0, 0, 2_400_000_000_000),
        ('token', 3.5, 2, 5_000_000_001, 2, 8), ('own', 1.0, 1, 0, 0, 0)]
    message = metrics_message(Answer('', 'stop', (), math.nan, 0, 0, 0, line))
    again = deserialize_message(serialize_message(message), InferenceMetrics)
    assert again.stages == told
    assert stage_messages(Timeline()) == []


@pytest.mark.parametrize('ratio', [1.0, 0.3])
def test_an_answer_tells_bytes_and_operations_of_its_stages(ratio):
    engine = Engine.load(str(TINY), device='cpu', selector=make_selector('head', model=TINY))
    noise = np.random.default_rng(0).integers(0, 255, (336, 448, 3), np.uint8)
    *_, done = engine.answer(Request('What is it?', (Visual((Frame.from_rgb(noise),)),),
                                     keep_ratio=ratio, max_new_tokens=3))
    message = metrics_message(done.answer)
    stages = {cost.name: cost for cost in message.stages}
    assert list(stages) == [name for name in STAGES if name in stages]
    assert {'patches', 'select', 'encode', 'prefill', 'first_token'} <= set(stages)
    for name in ('encode', 'prefill', 'first_token'):
        assert stages[name].flops > 0 and stages[name].bytes_read > 0, name
    assert stages['encode'].flops > stages['first_token'].flops
    assert stages['encode'].time == pytest.approx(message.vision)
    spans = done.answer.timeline.spans
    assert sum(cost.flops for cost in message.stages) == sum(span.flops for span in spans)
