"""On a GPU: stages account for the time and bytes, NVML is read, copies in streams arrive."""

import statistics
import time

import pytest
import torch

from qwen_vl_ros.measure.interconnect import grid
from qwen_vl_ros.measure.nvml import Nvml
from qwen_vl_ros.measure.saturation import measure_device
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.measure.transport import Transport

pytestmark = pytest.mark.gpu


def test_device_stages_sum_to_the_wall_time():
    """Stages on the stream of a request, one behind the other, within 3 % of the wall clock."""
    from qwen_vl_ros.engine.stages import DeviceClock

    device = torch.device('cuda', 0)
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def request():
        timeline = Timeline()
        clock = DeviceClock(timeline, device)
        for name in ('encode', 'prefill', 'first_token', 'token'):
            with clock.stage(name):
                for _ in range(40):
                    torch.mm(a, a)
        torch.cuda.synchronize(device)
        wall_ms = (time.monotonic_ns() - timeline.start_ns) / 1e6
        return timeline, wall_ms

    request()
    best = min(abs(timeline.busy_ms() / wall_ms - 1) for timeline, wall_ms in (
        request() for _ in range(10)))
    assert best < 0.03


def test_the_card_is_read():
    sample = Nvml().read()
    assert sample.gpu_memory_total_mb and sample.gpu_percent is not None
    assert sample.temperatures['gpu'] > 0


def test_the_card_is_measured():
    device = measure_device(torch.device('cuda', 0), runs=3)
    mode = device.modes['measured']
    assert mode.gb_s > 100 and mode.tflops > 1 and device.launch_us < 100


def test_copies_in_streams_arrive():
    transport = Transport('cuda:0', 'cuda:0', 1 << 22)
    for setting in grid((4096, 1 << 22)):
        assert transport.time_one(setting) > 0
        assert transport.received(0, setting.size)
        assert transport.received(1, setting.size) or not setting.both


@pytest.mark.parametrize('scheduled', [False, True])
def test_stages_of_a_request_account_for_its_wall_time(scheduled):
    """Qwen2-VL-2B's shape with random weights: what no stage counts stays within 3 %."""
    from benchmarks.stages._engines import picture, timed_engine
    from benchmarks.stages.answer import QUESTION
    from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler
    from qwen_vl_ros.engine.types import Request, Visual
    from qwen_vl_ros.frame import Frame

    engine = timed_engine('2b', device='cuda')
    plan = Scheduler(engine, ScheduleOptions(1))
    if scheduled:
        plan.start()
    shares = []
    for seed in range(8):
        request = Request(QUESTION, (Visual((Frame.from_rgb(picture((640, 480), seed)),)),),
                          max_new_tokens=33)
        started = time.monotonic_ns()
        *_, done = (plan if scheduled else engine).answer(request)
        wall_ms = (time.monotonic_ns() - started) / 1e6
        line = done.answer.timeline
        shares.append(abs(line.busy_ms() / wall_ms - 1))
        print(f'{line.busy_ms():.2f} ms in stages of {wall_ms:.2f} ms')
    plan.stop()
    engine.close()
    # The first one captures graphs; half of the others may have been disturbed.
    assert statistics.median(shares[1:]) < 0.03, shares


def test_bytes_are_those_that_the_profiler_counts():
    """Every kernel of the projection within 10 % of its own count."""
    from benchmarks.stages import _counters

    try:
        launches = _counters.count()
    except _counters.NoProfiler as error:
        pytest.skip(str(error))
    assert [launch.kernel.split('(')[0].split('<')[0].split()[-1] for launch in launches] == [
        'make_patches', 'project', 'embed', 'project']
    assert all(abs(launch.off) < 0.1 for launch in launches), launches
