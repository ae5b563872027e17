"""The fused encoder and prefill on a GPU, against float32 and beside plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_asking import no_memory

from qwen_vl_ros.engine.checkpoint import expected_shapes
from qwen_vl_ros.engine.config import LanguageConfig, ModelConfig, VisionConfig
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.quantize import quantize_language
from qwen_vl_ros.engine.quantize_vision import quantize_vision
from qwen_vl_ros.engine.vision import VisionEncoder
from qwen_vl_ros.kernels.encoder import FORMS

pytestmark = pytest.mark.gpu

#: Widths and heads of the official 2B, three layers deep.
VISION = VisionConfig(3, 1280, 16, 5120, 1536, 'quick_gelu')
LANGUAGE = LanguageConfig(512, 1536, 8960, 3, 12, 2, 1e-6, 1e6, (16, 24, 24), 'silu', 4096)


def halves(dtype):
    """Return encoder and decoder with the same random weights for every dtype."""
    generator = torch.Generator('cuda').manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(
            ModelConfig(VISION, LANGUAGE, True, 1, 2, 3, 4, ())).items():
        value = torch.randn(shape, device='cuda', generator=generator)
        if name.endswith('.weight') and len(shape) > 1:
            value *= np.prod(shape[1:]) ** -0.5
        elif name.endswith('.weight'):
            value = 1 + 0.1 * value
        # Rounded once for all: float32 has the weights that the others have.
        tensors[name] = value.bfloat16().to(dtype)
    tensors.pop('lm_head.weight')
    return VisionEncoder(VISION, tensors), LanguageModel(LANGUAGE, tensors)


@pytest.fixture(scope='module')
def exact():
    return halves(torch.float32)


@pytest.fixture(scope='module', params=[torch.bfloat16, torch.float16])
def model(request):
    vision, language = halves(request.param)
    if vision.fused is None:
        pytest.skip('libqwen_vl_encoder or cuBLASLt is missing')
    return vision, language


def patches_of(grid, seed=0):
    t, h, w = grid
    generator = torch.Generator('cuda').manual_seed(seed)
    return torch.randint(0, 256, (t * h * w, 588 * (2 if t > 1 else 1)), dtype=torch.uint8,
                         device='cuda', generator=generator)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def grids(count):
    rng = np.random.default_rng()
    return [(1, 2, 2), (1, 2, 200), (1, 200, 2), (1, 34, 46), (4, 6, 8), *(
        (int(rng.integers(1, 4)), *(2 * int(n) for n in rng.integers(1, 24, 2)))
        for _ in range(count))]


@torch.inference_mode()
def test_any_grid_and_mask_errs_no_more_than_twice_as_plain_torch(exact, model):
    vision, _ = model
    assert exact[0].fused is None
    rng = np.random.default_rng()
    for grid in grids(6):
        patches = patches_of(grid)
        count = patches.shape[0] // 4
        for units in (None, torch.from_numpy(np.sort(rng.permutation(count)[:-(-count // 3)]))):
            x = patches if units is None else patches.view(
                count, 4, -1)[units.cuda()].flatten(0, 1)
            expected = exact[0].encode_plain(exact[0].embed(x), grid, units)
            plain = relative(vision.encode_plain(vision.embed(x), grid, units), expected)
            assert relative(vision.encode(patches, grid, units), expected) <= 2 * plain, grid
            key = next(reversed(vision.fused.graphs._graphs))  # the last one used
            for form in filter(vision.fused.kernels.has, FORMS):
                for activated in {False, vision.fused.kernels.has('wgmma')}:
                    vision.fused.forms[key[:2]] = form
                    vision.fused.activated[key[0]] = activated
                    vision.fused.rotated[key[0]] = activated
                    vision.fused.graphs.clear()
                    got = vision.encode(patches, grid, units)
                    assert relative(got, expected) <= 2 * plain, (grid, form, activated)
            on_device = None if units is None else units.cuda()
            assert relative(vision.encode(patches, grid, on_device), expected) <= 2 * plain


@torch.inference_mode()
def test_a_size_costs_one_capture(model):
    vision, _ = model
    grid = (1, 12, 14)
    first = vision.encode(patches_of(grid, 1), grid)
    captured = len(vision.fused.graphs.captured)
    vision.encode(patches_of(grid, 2), grid)
    assert torch.equal(first, vision.encode(patches_of(grid, 1), grid))
    assert len(vision.fused.graphs.captured) == captured


@torch.inference_mode()
def test_streams_take_turns(model):
    vision, _ = model
    grid = (1, 20, 20)
    pictures = [patches_of(grid, seed) for seed in range(6)]
    expected = [vision.encode(p, grid) for p in pictures]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    got = []
    for i, picture in enumerate(pictures):
        with torch.cuda.stream(streams[i % 3]):
            got.append(vision.encode(picture, grid))
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, expected))


@torch.inference_mode()
def test_prefill_errs_no_more_than_twice_as_plain_torch(exact, model):
    _, language = model
    caches = [KVCache(LANGUAGE, 2048, torch.device('cuda', 0), m.dtype)
              for m in (exact[1], language, language)]
    for sizes in ((9,), (428,), (64, 128, 77), (1300, 40)):
        n = sum(sizes)
        ids = torch.randint(0, 512, (n,), device='cuda')
        positions = torch.arange(n, device='cuda').repeat(3, 1)
        positions[1:, n // 2:] += torch.arange(n - n // 2, device='cuda') % 7
        for cache in caches:
            cache.rows.fill_(float('nan'))
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            expected, plain, got = (
                run(m.embed(ids[part]), positions[:, part], cache, start)
                for m, cache, run in (
                    (exact[1], caches[0], exact[1].prefill), (language, caches[1],
                                                              language.prefill_plain),
                    (language, caches[2], language.prefill)))
            assert relative(got, expected) <= 2 * relative(plain, expected)
            start += size
        wanted, plain_rows, rows = (c.rows[:, :, :, :n] for c in caches)
        assert relative(rows, wanted) <= 2 * relative(plain_rows, wanted)
        assert torch.isnan(caches[2].rows[:, :, :, n:]).all()


@torch.inference_mode()
@pytest.mark.parametrize('kind', ['int8', 'int4'])
def test_prefill_through_quantised_weights(kind):
    """It errs no more than twice as plain torch with the same codes, and graphs take no memory."""
    exact, language = halves(torch.float32)[1], halves(torch.bfloat16)[1]
    if language.fused is None:
        pytest.skip('libqwen_vl_encoder or cuBLASLt is missing')
    quantize_language(language, kind)
    for layer, coded in zip(exact.layers, language.layers):
        for name in ('qkv', 'out', 'gate_up', 'down'):
            getattr(layer, name).weight = getattr(coded, name).dequantised(torch.float32)
    device = torch.device('cuda', 0)
    caches = [KVCache(LANGUAGE, 1024, device, m.dtype) for m in (exact, language, language)]
    reserved = []
    for n in (20, 448, 30, 64, 128, 192, 320):
        x = exact.embed(torch.randint(0, 512, (n,), device='cuda'))
        positions = torch.arange(n, device='cuda').repeat(3, 1)
        expected = exact.prefill_plain(x, positions, caches[0], 0)[-1:]
        x = x.bfloat16()
        plain = language.prefill_plain(x, positions, caches[1], 0)[-1:]
        got = language.fused.run(x, positions, caches[2], 0, 1)
        assert relative(got, expected) <= 2 * relative(plain, expected), n
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved(device))
    # The first bucket makes the buffers; each graph may have a smallest block of its own.
    assert reserved[-1] - reserved[1] <= 4 * len(reserved) << 20


@torch.inference_mode()
def test_after_running_out_of_memory_the_next_picture_works(model):
    vision, _ = model
    grid = (1, 12, 14)
    expected = vision.encode(patches_of(grid), grid)
    large = patches_of((1, 64, 80))
    vision.fused.release()
    with no_memory(), pytest.raises(torch.cuda.OutOfMemoryError):
        vision.encode(large, (1, 64, 80))
    assert torch.equal(expected, vision.encode(patches_of(grid), grid))


@torch.inference_mode()
def test_int8_stays_near(model):
    vision, _ = model
    grid = (1, 20, 24)
    before, blocks = vision.encode(patches_of(grid), grid), vision.blocks
    try:
        outcome = quantize_vision(vision, 'int8')
        assert outcome.name == 'int8', outcome
        assert 0 < relative(vision.encode(patches_of(grid), grid), before) < 0.1
    finally:
        vision.blocks = blocks
        vision.fused.reweighted()
