"""The same answers on a GPU, and its clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from engine_asking import QUESTION, ask, names, no_memory

from qwen_vl_ros.engine.device import memory_available, pick_dtype
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.stages import DeviceClock
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.measure.timeline import Timeline

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')


class FakeEvent:
    """Stands in for a CUDA event: each record is one millisecond after the last."""

    ticks = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.waited = False

    def record(self, stream: object) -> None:
        FakeEvent.ticks += 1
        self.at = FakeEvent.ticks

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.at >= self.at
        return float(other.at - self.at)


def test_device_stages_are_read_with_the_timeline(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'Event', FakeEvent)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: None)
    timeline = Timeline()
    clock = DeviceClock(timeline, torch.device('cuda', 0))
    origin = clock._origin_ns
    with clock.stage('encode', flops=7):
        pass
    with pytest.raises(ValueError), clock.stage('prefill'):
        raise ValueError
    encode, prefill = timeline.spans
    assert (encode.name, encode.flops, encode.stream) == ('encode', 7, 'cuda:0')
    assert (encode.start_ns - origin, encode.end_ns - origin) == (1000000, 2000000)
    assert (prefill.start_ns - origin, prefill.end_ns - origin) == (3000000, 4000000)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize('shape', ['small', 'wide', 'full'])
def test_a_gpu_gives_the_same_logits(shape, folders, engines, picture):
    engine = Engine.load(str(folders[shape]), device='cuda', dtype='float32')
    request = Request(QUESTION, (
        Visual((picture(448, 336),)), Visual(tuple(picture(112, 112, s) for s in range(5)))))
    _, logits = engine.trace(request)
    _, expected = engines[shape].trace(request)
    assert (logits.cpu() - expected).abs().max() < 1e-4 * expected.abs().max()
    assert ask(engine, QUESTION, picture(448, 336)).token_ids == ask(
        engines[shape], QUESTION, picture(448, 336)).token_ids


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_times_its_stages(folders, picture):
    engine = Engine.load(str(folders['small']), device='cuda')
    assert engine.info.dtype == 'bfloat16'
    engine.warm_up([(448, 336)])
    answer = ask(engine, QUESTION, picture(448, 336))
    assert names(answer)['token'] == len(answer.token_ids) - 1
    spans = answer.timeline.spans
    assert all(0 < s.ms < 10000 for s in spans if s.name in ('encode', 'prefill', 'token'))
    stages = [s for s in spans if s.stream != 'cpu']
    assert all(a.end_ns <= b.start_ns + 1000 for a, b in pairwise(stages))


@pytest.mark.gpu
@needs_gpu
def test_running_out_of_gpu_memory_gives_it_back(folders, picture):
    engine = Engine.load(str(folders['small']), device='cuda')
    free = memory_available(engine.model.device)
    assert free and free == pytest.approx(torch.cuda.mem_get_info()[0], rel=0.1)
    assert pick_dtype('auto', engine.model.device) == torch.bfloat16
    frame = picture(448, 336)
    expected = ask(engine, QUESTION, frame).token_ids
    engine.forget()
    with no_memory():
        with pytest.raises(Exception, match='out of memory') as caught:
            ask(engine, QUESTION, picture(1280, 720))
        assert caught.value.code.name == 'OUT_OF_MEMORY'
    assert engine.pool.used_bytes == 0 and len(engine.features) == 0
    assert ask(engine, QUESTION, frame).token_ids == expected
