"""Frames to embeddings over CPU and device: the same; pairs reuse their halves."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine import offload as module
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.offload import Offload, Profile
from qwen_vl_ros.engine.patches import extract_patches
from qwen_vl_ros.engine.vision import fold_pair, fold_still
from qwen_vl_ros.frame import Frame

WIDTH = 48


def frames_of(count, size=(90, 70)):
    rng = np.random.default_rng(count)
    return [Frame.from_rgb(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
            for _ in range(count)]


@pytest.fixture(scope='module')
def kernel():
    torch.manual_seed(3)
    return torch.randn(WIDTH, 3, 2, 14, 14).mul_(0.03)


def offload_of(kernel, dtype=torch.float32, **more):
    return Offload(kernel.to(dtype), **more)


def embed(offload, frames, grid, units=None, way=None):
    prepared = offload.prepare(frames, grid, way)
    offload.upload(prepared)
    return offload.embed(prepared, units)


def expected(kernel, dtype, frames, grid):
    """Return float64 [n, width], folded in float64, in one product over both halves."""
    kernel = kernel.to(dtype).double()
    weight, bias = (fold_still if len(frames) == 1 else fold_pair)(kernel)
    patches = torch.from_numpy(extract_patches(frames, grid))
    return (patches.double() - 128) @ weight.double().T + bias.double()


def relative(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize('dtype,most', [(torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)])
@pytest.mark.parametrize('count', [1, 2, 3, 5])
def test_stills_and_clips_equal_the_pair_product(kernel, count, dtype, most):
    frames, grid = frames_of(count), ((count + 1) // 2, 4, 6)
    offload = offload_of(kernel, dtype)
    wanted = expected(kernel, dtype, frames, grid)
    first = embed(offload, frames, grid)
    assert first.dtype == dtype and relative(first, wanted) < most
    # Older halves are known now; nothing changes.
    assert torch.equal(embed(offload, frames, grid), first)
    units = np.array([0, 2, 5, *(range(6, 6 * grid[0], 5))])
    kept = embed(offload, frames, grid, units)
    assert torch.equal(kept.reshape(len(units), 4, WIDTH), first.reshape(-1, 4, WIDTH)[units])
    # Slice by slice.
    prepared = offload.prepare(frames, grid)
    apart = [offload.embed(prepared, None, s, s + 1) for s in range(grid[0])]
    assert torch.equal(torch.cat(apart), first)
    assert torch.equal(offload.embed(prepared, np.array([1]), grid[0] - 1, grid[0]),
                       first.reshape(-1, 4, WIDTH)[6 * (grid[0] - 1) + 1])


def test_an_older_half_is_computed_when_its_frame_arrives(kernel):
    frames, grid = frames_of(3), (1, 4, 6)
    offload = offload_of(kernel)
    embed(offload, frames[:2], grid)
    computed = []
    project = offload._project

    def counted(picture, prepared, projection, *more, **named):
        computed.append((picture.frame is frames[1], projection is offload._older))
        return project(picture, prepared, projection, *more, **named)

    offload._project = counted
    prepared = offload.prepare(frames[1:], grid)
    assert prepared.pictures[0].memory is None and prepared.bytes_read == frames[2].data.size
    got = offload.embed(prepared)
    assert computed == [(False, False), (False, True)]
    assert relative(got, expected(kernel, torch.float32, frames[1:], grid)) < 1e-6


def test_kept_halves_go_by_content_and_stay_within_their_limit(kernel, monkeypatch):
    frames, grid = frames_of(6), (1, 4, 6)
    one = 24 * WIDTH * 4
    monkeypatch.setattr(module, 'KEPT_BYTES', 3 * one)
    offload = offload_of(kernel)
    for older, newer in pairwise(frames):
        embed(offload, [older, newer], grid)
    assert offload.kept_bytes == 3 * one
    twin = Frame.from_rgb(frames[5].rgb().copy())
    assert offload.prepare([twin, frames[0]], grid).pictures[0].older is not None
    other = frames[5].rgb().copy()
    other[0, 0, 0] ^= 1
    assert offload.prepare([Frame.from_rgb(other), frames[0]], grid).pictures[0].older is None
    assert offload.prepare([frames[0], frames[1]], grid).pictures[0].older is None
    offload.forget()
    assert offload.kept_bytes == 0
    monkeypatch.setattr(module, 'KEPT_BYTES', one - 1)
    got = embed(offload, frames[:2], grid)
    assert offload.kept_bytes == 0
    assert relative(got, expected(kernel, torch.float32, frames[:2], grid)) < 1e-6


def test_pictures_are_prepared_beside_the_encoder(kernel):
    """From several threads at once, while this one embeds."""
    offload, grid = offload_of(kernel), (1, 4, 6)
    frames = frames_of(24)
    prepared = {}

    def work(start):
        for number in range(start, 24, 3):
            prepared[number] = offload.prepare([frames[number]], grid)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    for frame in frames[:8]:
        embed(offload, [frame, frames[0]], grid)
    for thread in threads:
        thread.join()
    for number, one in prepared.items():
        wanted = expected(kernel, torch.float32, [frames[number]], grid)
        assert relative(offload.embed(one), wanted) < 1e-6


def test_auto_takes_what_was_measured_and_says_so_once(kernel, caplog):
    offload, grid = offload_of(kernel), (1, 4, 6)
    frame = frames_of(1)[0]
    assert offload.choose(frame, grid) == 'cpu'  # no kernels: no choice
    assert not offload.profiles
    offload.way = 'auto'
    offload.measure = lambda frame, grid, way: (
        Profile(2.0, 0.5, 0.1) if way == 'cpu' else Profile(0.3, 0.5, 0.2))
    with caplog.at_level('INFO', 'qwen_vl_ros.engine.offload'):
        assert [offload.choose(frame, grid) for _ in range(3)] == ['gpu'] * 3
    assert [r.message for r in caplog.records] == [
        'preprocess.device auto takes gpu for 90x70 rgb8: cpu 2.600 ms = CPU 2.000 + transfer '
        '0.500 + GPU 0.100; gpu 1.000 ms = CPU 0.300 + transfer 0.500 + GPU 0.200']
    thin = Frame.from_rgb(np.zeros((20, 90, 3), np.uint8))
    assert offload.choose(thin, (1, 2, 6)) == 'cpu'


def test_a_measured_way_has_all_its_parts(kernel):
    profile = offload_of(kernel).measure(frames_of(1)[0], (1, 4, 6), 'cpu')
    assert profile.cpu_ms > 0 and profile.gpu_ms > 0
    assert profile.total_ms == profile.cpu_ms + profile.transfer_ms + profile.gpu_ms


def test_ways_that_cannot_be(kernel):
    with pytest.raises(EngineError, match="'npu' is not one of cpu, gpu, auto"):
        offload_of(kernel, way='npu')
    with pytest.raises(EngineError, match="is 'gpu' and the model runs on 'cpu'"):
        offload_of(kernel, way='gpu')
    small = frames_of(1, (20, 20))
    got = embed(offload_of(kernel), small, (1, 4, 4))
    assert relative(got, expected(kernel, torch.float32, small, (1, 4, 4))) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize('way', ['cpu', 'gpu', 'auto'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_ways_on_a_device(kernel, way, dtype):
    offload = offload_of(kernel.cuda(), dtype, way=way)
    for count, size in ((1, (640, 480)), (4, (320, 240)), (1, (30, 5600))):
        frames = frames_of(count, size)
        grid = ((count + 1) // 2, 16, 20)
        wanted = expected(kernel, dtype, frames, grid)
        units = np.arange(1, 80 * grid[0], 3)
        for _ in range(2):
            assert relative(embed(offload, frames, grid).cpu(), wanted) < 2.5e-3
            kept = embed(offload, frames, grid, units).cpu().reshape(len(units), 4, WIDTH)
            assert relative(kept, wanted.reshape(-1, 4, WIDTH)[units]) < 2.5e-3
