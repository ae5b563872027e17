"""The CPU kernel gives Pillow's bytes, on every instruction set and with any number of threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_frames import frame_of, pillow_bytes

from qwen_vl_ros.engine.patches import extract_patches, native_patches, pillow_patches
from qwen_vl_ros.kernels.patches import (
    ENCODINGS,
    RESAMPLERS,
    Patcher,
    accepts,
    available_isas,
    cluster,
    default_patcher,
)

pytestmark = pytest.mark.usefixtures('built')

SIDES = st.integers(28, 400)
UNITS = st.integers(1, 12)


@cache
def patchers():
    """Return one patcher for each instruction set and resampler of this machine."""
    return [Patcher(isa=isa, resampler=resampler, threads=1 + i % 2)
            for i, isa in enumerate(available_isas()) for resampler in RESAMPLERS]


def check(frame, height, width):
    for patcher in patchers():
        got = patcher.patches(frame, height, width)
        expected = pillow_bytes(frame, height, width, patcher.resampler)
        assert np.array_equal(got, expected), (patcher.isa, patcher.resampler)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(ENCODINGS), SIDES, SIDES, UNITS, UNITS, st.integers(0, 70),
       st.integers(0, 99))
def test_any_size_encoding_and_step(encoding, width, height, columns, rows, padding, seed):
    check(frame_of(encoding, width, height, padding, seed), rows * 28, columns * 28)


@pytest.mark.parametrize('encoding', ENCODINGS)
@pytest.mark.parametrize('size,resized', [
    ((448, 336), (448, 336)),       # nothing to resample
    ((448, 300), (448, 336)),       # one axis only
    ((450, 336), (448, 336)),
    ((640, 480), (644, 476)),       # Pillow 13 takes the columns first
    ((1279, 721), (1288, 728)),
    ((28, 28), (28, 28)),
    ((29, 31), (1120, 84)),         # forty times wider
    ((3001, 37), (28, 588)),        # a hundred times narrower: hundreds of taps
    ((41, 2999), (364, 28)),
    ((5600, 28), (2800, 28)),       # the aspect at the limit
])
def test_sizes_that_matter(encoding, size, resized):
    check(frame_of(encoding, *size, padding=3), resized[1], resized[0])


def test_extremes_of_the_pixel_values():
    """Steps between black and white overshoot on both sides."""
    frame = frame_of('rgb8', 200, 150)
    for low, high in ((0, 255), (1, 254), (0, 0), (255, 255)):
        frame.data[:] = np.where(frame.data < 128, low, high)
        check(frame, 196, 252)


def test_every_yuv_colour():
    """All pairs of luma and chroma that a byte can hold, against the plain conversion."""
    y, u = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    frame = frame_of('nv12', 252, 504)
    frame.data[:252 * 504] = np.resize(y, 252 * 504)
    frame.data[252 * 504:] = np.resize(np.stack((u, u.T), -1), 252 * 252)
    check(frame, 504, 252)


@pytest.mark.parametrize('threads', [1, 2, 3, 5, 64])
@pytest.mark.parametrize('encoding', ['rgb8', 'nv12'])
def test_threads_do_not_show(threads, encoding):
    frame = frame_of(encoding, 333, 257, padding=5)
    for resampler in RESAMPLERS:
        with_many = Patcher(threads, resampler=resampler).patches(frame, 252, 336)
        assert np.array_equal(with_many, pillow_bytes(frame, 252, 336, resampler))


def test_pinned_threads():
    cpus = cluster(2)
    assert 1 <= len(cpus) <= 2
    assert set(cpus) <= os.sched_getaffinity(0)
    patcher = Patcher(3, cpus=cpus)
    frame = frame_of('bgr8', 333, 257)
    for _ in range(20):
        assert np.array_equal(patcher.patches(frame, 252, 336),
                              pillow_bytes(frame, 252, 336, patcher.resampler))
    patcher.close()


def test_one_patcher_many_callers():
    """Calls of different sizes at the same time: tables and scratch memory are not mixed up."""
    patcher = Patcher(2)
    frames = [frame_of(ENCODINGS[i % 9], 40 + 31 * i, 300 - 9 * i) for i in range(20)]
    expected = [pillow_bytes(f, 84 + 28 * (i % 3), 112, patcher.resampler)
                for i, f in enumerate(frames)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [(i, pool.submit(patcher.patches, frames[i], 84 + 28 * (i % 3), 112))
                for i in list(range(20)) * 5]
    assert all(np.array_equal(job.result(), expected[i]) for i, job in jobs)


def test_tables_of_old_sizes_are_dropped():
    """A stream of ever new sizes does not pile up tables."""
    patcher = Patcher()
    held = []
    for height in range(400, 520):
        patcher.patches(frame_of('mono8', 28, height), 252, 28)
        held.append(patcher.scratch_bytes)
    assert held[-1] < 1.5 * held[30]


def test_scratch_is_under_twice_the_output():
    patcher = Patcher()
    out = patcher.patches(frame_of('rgb8', 1280, 720), 728, 1288)
    assert 0 < patcher.scratch_bytes < 2 * out.nbytes


def test_a_clip_interleaves_its_frames():
    frames = [frame_of('nv12', 130, 117, seed=i) for i in range(5)]
    got = native_patches(frames, (3, 8, 10))
    assert got.shape == (240, 1176)
    assert np.array_equal(got, pillow_patches(frames, (3, 8, 10)))
    assert np.array_equal(got, extract_patches(frames, (3, 8, 10)))


def test_small_frames_are_left_to_pillow():
    small, narrow = frame_of('rgb8', 27, 40), frame_of('rgb8', 28, 40)
    assert not accepts(small)
    assert accepts(narrow)
    assert not accepts(frame_of('mono8', 28, 5601))
    assert native_patches([small], (1, 2, 2)) is None
    assert extract_patches([small, narrow], (1, 2, 2)).shape == (4, 1176)


def test_writes_into_a_given_array_only():
    held = np.full((4, 3, 2, 196), 7, np.uint8)
    out = held[:, :, 1]
    frame = frame_of('rgb8', 50, 40)
    patcher = Patcher()
    assert patcher.patches(frame, 28, 28, out) is out
    assert np.array_equal(out.reshape(4, 588), patcher.patches(frame, 28, 28))
    assert (held[:, :, 0] == 7).all()


def test_a_forked_child_has_its_own_threads():
    frame = frame_of('rgb8', 100, 80)
    before = default_patcher()
    pid = os.fork()
    if pid == 0:
        ok = default_patcher() is not before and native_patches([frame], (1, 6, 8)) is not None
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert default_patcher() is before
