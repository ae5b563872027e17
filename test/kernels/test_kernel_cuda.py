"""
The CUDA kernels: the CPU kernel's bytes, and products as exact as float32 sums are.

Every test runs twice: on a GPU where there is one, and everywhere on test/kernels/emulator, which
compiles the same sources for the CPU with a fiber for each thread.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_frames import frame_of

from qwen_vl_ros.engine.offload import Offload
from qwen_vl_ros.engine.vision import fold_pair, fold_still
from qwen_vl_ros.kernels.cuda import CudaKernels, Projection, project_plain
from qwen_vl_ros.kernels.loader import KernelError
from qwen_vl_ros.kernels.patches import ENCODINGS, RESAMPLERS, Patcher

pytestmark = pytest.mark.usefixtures('built')

ROOT = Path(__file__).parents[2]
EMULATOR = Path(__file__).parent / 'emulator'
SOURCES = ('cuda/cuda.cu', 'cpu/axis.cc', 'cpu/check.cc')


@pytest.fixture(scope='session')
def emulated():
    """Compile the CUDA sources for this CPU."""
    compiler = shutil.which('g++')
    if compiler is None:
        pytest.skip('g++ is not installed')
    out = ROOT / 'build' / 'emulator' / 'libqwen_vl_cuda.so'
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [compiler, '-O2', '-std=c++17', '-ffp-contract=off', '-fPIC', '-shared', '-x', 'c++',
         '-I', str(EMULATOR), '-I', str(ROOT / 'kernels' / 'include'),
         *(str(ROOT / 'kernels' / source) for source in SOURCES), '-o', str(out)], check=True)
    return ctypes.CDLL(str(out))


@pytest.fixture(scope='module', params=[
    'emulated', pytest.param('device', marks=pytest.mark.gpu)])
def kernels(request):
    """Return a function from a resampler to kernels, here or on the device."""
    if request.param == 'device':
        return lambda resampler=None: CudaKernels('cuda', resampler=resampler)
    native = request.getfixturevalue('emulated')
    return lambda resampler=None: CudaKernels('cpu', native, resampler)


def check(kernels, frame, height, width, resampler):
    cuda = kernels(resampler)
    pixels = torch.from_numpy(frame.data).to(cuda.device)
    got = cuda.patches(frame, pixels, height, width)
    expected = Patcher(resampler=resampler).patches(frame, height, width)
    assert np.array_equal(got.cpu().numpy(), expected), (frame.encoding, frame.width, frame.height)


@pytest.mark.parametrize('resampler', RESAMPLERS)
@pytest.mark.parametrize('encoding', ENCODINGS)
def test_the_bytes_of_the_cpu_kernel(kernels, encoding, resampler):
    for size, resized, padding in (((61, 49), (84, 28), 0), ((90, 203), (56, 84), 5)):
        check(kernels, frame_of(encoding, *size, padding), resized[1], resized[0], resampler)


@pytest.mark.parametrize('size,resized', [
    ((56, 56), (56, 56)),     # nothing to resample
    ((56, 70), (56, 56)),     # one axis only
    ((70, 56), (56, 56)),
    ((1500, 40), (28, 56)),   # more taps than fit at a time
    ((40, 900), (84, 28)),    # the same, columns first
    ((300, 250), (28, 28)),
    ((33, 35), (140, 112)),   # larger
])
@pytest.mark.parametrize('resampler', RESAMPLERS)
def test_sizes_that_matter(kernels, size, resized, resampler):
    for encoding in ('bgr8', 'nv12'):
        check(kernels, frame_of(encoding, *size, padding=1), resized[1], resized[0], resampler)


@pytest.mark.gpu
@pytest.mark.parametrize('size,resized', [
    ((640, 480), (644, 476)), ((1280, 720), (1288, 728)), ((1920, 1080), (1316, 728)),
    ((3840, 2160), (1316, 728)), ((448, 336), (448, 336))])
@pytest.mark.parametrize('encoding', ENCODINGS)
def test_camera_sizes(size, resized, encoding):
    for resampler in RESAMPLERS:
        check(lambda r: CudaKernels(resampler=r), frame_of(encoding, *size, padding=16),
              resized[1], resized[0], resampler)


@pytest.mark.gpu
def test_a_pinned_frame_is_read_in_place():
    frame = frame_of('rgb8', 640, 480)
    pinned = torch.from_numpy(frame.data).pin_memory()
    got = CudaKernels().patches(frame, pinned, 476, 644)
    assert np.array_equal(got.cpu().numpy(), Patcher().patches(frame, 476, 644))


def test_a_clip_interleaves_its_frames(kernels):
    cuda = kernels()
    frame = frame_of('rgb8', 70, 60)
    out = torch.full((8, 3, 2, 196), 7, dtype=torch.uint8, device=cuda.device)
    cuda.patches(frame, torch.from_numpy(frame.data).to(cuda.device), 56, 28, out[:, :, 1])
    expected = Patcher().patches(frame, 56, 28).reshape(8, 3, 196)
    assert np.array_equal(out[:, :, 1].cpu().numpy(), expected)
    assert (out[:, :, 0] == 7).all()


def weights(width, pair, dtype):
    torch.manual_seed(width)
    kernel = torch.randn(width, 3, 2, 14, 14).mul_(0.03).to(dtype)
    return (fold_pair if pair else fold_still)(kernel)


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('pair', [False, True])
@pytest.mark.parametrize('width', [8, 264])
def test_projection(kernels, dtype, pair, width):
    """Against float64 on the same weights: the sum errs as float32 does, the rest is rounding."""
    cuda = kernels()
    weight, bias = weights(width, pair, dtype)
    projection = Projection.make(weight.to(cuda.device), bias.to(cuda.device))
    patches = torch.randint(0, 256, (4 * 19, weight.shape[1]), dtype=torch.uint8)
    expected = (patches.double() - 128) @ weight.double().T + bias.double()
    on_device = patches.to(cuda.device)
    exact = cuda.project(on_device, projection, dtype=torch.float32).cpu()
    assert relative(exact, expected) < 1e-6
    got = cuda.project(on_device, projection).cpu()
    assert got.dtype == dtype
    assert torch.equal(got, exact.to(dtype))
    twin = project_plain(on_device, projection).cpu()
    assert relative(got, expected) < 2 * relative(twin, expected)


def test_kept_units_only(kernels):
    cuda = kernels()
    weight, bias = weights(40, False, torch.bfloat16)
    projection = Projection.make(weight.to(cuda.device), bias.to(cuda.device))
    patches = torch.randint(0, 256, (4 * 40, 588), dtype=torch.uint8).to(cuda.device)
    units = torch.tensor([39, 0, 7, 7, 21], dtype=torch.int32, device=cuda.device)
    got = cuda.project(patches, projection, units)
    every = cuda.project(patches, projection).reshape(40, 4, 40)
    assert torch.equal(got.reshape(5, 4, 40), every[units.long()])
    assert relative(got.cpu(), project_plain(patches, projection, units).cpu().double()) < 5e-3


def test_a_pair_is_the_sum_of_its_halves(kernels):
    """The older frame's half is projected when that frame comes, and added to the newer one's."""
    cuda = kernels()
    weight, bias = weights(72, True, torch.float16)
    halves = weight.reshape(72, 3, 2, 196)
    older, newer = (torch.randint(0, 256, (4 * 9, 3, 196), dtype=torch.uint8) for _ in range(2))
    first = Projection.make(halves[:, :, 0].reshape(72, 588).to(cuda.device), None)
    second = Projection.make(halves[:, :, 1].reshape(72, 588).to(cuda.device),
                             bias.to(cuda.device))
    kept = cuda.project(older.flatten(1).to(cuda.device), first, dtype=torch.float32)
    got = cuda.project(newer.flatten(1).to(cuda.device), second, addend=kept,
                       dtype=torch.float32).cpu()
    both = torch.stack((older, newer), 2).flatten(1).double() - 128
    expected = both @ weight.double().T + bias.double()
    assert relative(got, expected) < 1e-6
    plain = project_plain(newer.flatten(1).to(cuda.device), second, addend=kept)
    assert relative(plain.cpu(), expected) < 1e-3


@pytest.mark.parametrize('encoding,size,resized', [
    ('nv12', (121, 90), (112, 84)), ('rgb8', (60, 250), (56, 140)), ('mono8', (84, 56), (84, 56))])
def test_both_in_one_launch(kernels, encoding, size, resized):
    cuda = kernels()
    weight, bias = weights(136, False, torch.bfloat16)
    projection = Projection.make(weight.to(cuda.device), bias.to(cuda.device))
    frame = frame_of(encoding, *size, padding=2)
    pixels = torch.from_numpy(frame.data).to(cuda.device)
    patches = cuda.patches(frame, pixels, resized[1], resized[0])
    assert torch.equal(cuda.embed(frame, pixels, resized[1], resized[0], projection),
                       cuda.project(patches, projection))
    units = torch.tensor([2, 0], dtype=torch.int32, device=cuda.device)
    assert torch.equal(cuda.embed(frame, pixels, resized[1], resized[0], projection, units),
                       cuda.project(patches, projection, units))


def test_refusals(kernels):
    cuda = kernels('pillow13')
    frame = frame_of('rgb8', 60, 50)
    pixels = torch.from_numpy(frame.data).to(cuda.device)
    weight, bias = weights(40, False, torch.bfloat16)
    projection = Projection.make(weight.to(cuda.device), bias.to(cuda.device))
    patches = torch.zeros(8, 588, dtype=torch.uint8, device=cuda.device)
    odd = Projection(projection.weight, None, 12, 588)
    pair = Projection(projection.weight, None, 40, 1176)
    units = torch.zeros(99, dtype=torch.int32, device=cuda.device)
    for call, words in (
            (lambda: cuda.patches(frame_of('rgb8', 20, 50), pixels[:3000], 28, 28),
             '20x50 has a side outside'),
            (lambda: cuda.patches(frame, pixels, 29, 28), '28x29: sides must be multiples of 28'),
            (lambda: cuda.patches(frame, pixels[:-1], 28, 28), 'a frame of 9000 bytes'),
            (lambda: cuda.patches(frame, pixels, 28, 28, patches[:3]), r'got .*uint8 \[3, 588'),
            (lambda: cuda.project(patches, odd), 'width 12 is no multiple of 8'),
            (lambda: cuda.project(patches[:6], projection), r'got torch.uint8 \[6, 588\]'),
            (lambda: cuda.project(patches, projection, units[:0]), '0 units'),
            (lambda: cuda.project(patches, projection, units.long()), 'int32 units'),
            (lambda: cuda.project(patches, projection, addend=torch.zeros(8, 39)), r'to add'),
            (lambda: cuda.embed(frame, pixels, 28, 28, pair), 'a single frame has 588'),
            (lambda: cuda.embed(frame, pixels, 28, 28, projection, units), '99 units of a'),
            (lambda: cuda.patches(frame_of('rgba8', 30, 5600), torch.zeros(
                672000, dtype=torch.uint8, device=cuda.device), 28, 28), 'use the CPU')):
        with pytest.raises(KernelError, match=words):
            call()
    cuda.close()
    with pytest.raises(KernelError, match='null pointer'):
        cuda.patches(frame, pixels, 28, 28)


@pytest.mark.parametrize('count', [1, 3])
def test_both_ways_of_a_visual_give_the_same(kernels, count):
    """The way over the CPU and the device's own differ in nothing; kept units neither."""
    cuda = kernels()
    torch.manual_seed(1)
    kernel = torch.randn(40, 3, 2, 14, 14).mul_(0.03).bfloat16().to(cuda.device)
    frames = [frame_of('bgr8', 90, 70, seed=seed) for seed in range(count)]
    grid = ((count + 1) // 2, 4, 6)
    units = np.array([0, 1, 4, *range(6, 6 * grid[0], 2)])
    found = []
    for way in ('cpu', 'gpu'):
        offload = Offload(kernel, way=way, kernels=cuda)
        for chosen in (None, units):
            prepared = offload.prepare(frames, grid)
            assert {p.way for p in prepared.pictures} == {way}
            offload.upload(prepared)
            found.append(offload.embed(prepared, chosen))
    every, kept = found[:2]
    assert torch.equal(every, found[2]) and torch.equal(kept, found[3])
    assert torch.equal(kept.reshape(-1, 4, 40), every.reshape(-1, 4, 40)[units])
    # Taps that shared memory cannot hold: the CPU does it.
    tall = frame_of('rgba8', 30, 5600)
    one = Offload(kernel, way='gpu', kernels=cuda)
    prepared = one.prepare([tall], (1, 2, 2))
    one.upload(prepared)
    assert one.embed(prepared).shape == (4, 40)
