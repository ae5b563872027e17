"""
The decode step against float32, on test/kernels/decode_emulator: the same source as on a GPU.

The emulator runs all blocks and threads as fibers; copies to shared memory arrive as late as they
may, so that a wait that is missing shows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.stages._decode_models import random_weights, widened
from qwen_vl_ros.engine.config import LanguageConfig
from qwen_vl_ros.engine.cuda_decoder import _describe
from qwen_vl_ros.engine.decoder import Row, step_logits
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8GroupLinear
from qwen_vl_ros.engine.quantize import quantize_language
from qwen_vl_ros.kernels.decode import FINITE, DecodeKernels, NativeRow
from qwen_vl_ros.kernels.loader import KernelError

ROOT = Path(__file__).resolve().parents[2]
#: width, mlp, layers, heads, kv_heads, vocab; the first is models/tiny but for its depth.
SMALL, LONG_HEADS = (256, 448, 2, 4, 2, 512), (512, 320, 1, 4, 1, 256)

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='no C++ compiler')


@pytest.fixture(scope='session')
def native():
    """Return the step, compiled for the emulator."""
    out = ROOT / 'build' / 'emulator' / 'libqwen_vl_decode.so'
    out.parent.mkdir(parents=True, exist_ok=True)
    here, kernels = Path(__file__).parent / 'decode_emulator', ROOT / 'kernels'
    sources = [*here.iterdir(), *kernels.glob('cuda/decode*'),
               kernels / 'include' / 'qwen_vl_decode.h']
    if not out.exists() or out.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        subprocess.run(
            ['g++', '-std=c++17', '-O2', '-fPIC', '-shared', f'-I{here}', f'-I{kernels}/cuda',
             f'-I{kernels}/include', str(here / 'step.cc'), '-o', str(out)], check=True)
    return ctypes.CDLL(str(out))


def decoder(shape, kind='none', dtype=torch.bfloat16):
    """Return a small decoder with random weights."""
    width, mlp, layers, heads, kv_heads, vocab = shape
    half = width // heads // 2
    config = LanguageConfig(
        vocab, width, mlp, layers, heads, kv_heads, 1e-6, 1e4, (half - 4, 2, 2), 'silu', 4096)
    weights = random_weights(config, True, dtype, torch.device('cpu'))
    language = LanguageModel(config, weights)
    if kind in ('int8', 'int4'):
        quantize_language(language, kind)
    elif kind == 'int8 groups':
        for layer in language.layers:
            for name in ('qkv', 'out', 'gate_up', 'down'):
                four = Int4Linear.of(getattr(layer, name))
                object.__setattr__(layer, name, Int8GroupLinear(
                    four.codes() * 16 + 3, four.scales / 16, four.zeros.to(torch.int16) * 16,
                    four.bias))
    return language


def filled(language, lengths, dtype=None):
    """Return caches with random rows."""
    caches = []
    for i, length in enumerate(lengths):
        cache = KVCache(language.config, 200, language.device, language.dtype)
        generator = torch.Generator().manual_seed(i)
        cache.rows.copy_(torch.randn(cache.rows.shape, generator=generator))
        cache.rows = cache.rows.to(dtype or language.dtype)
        cache.length = length
        caches.append(cache)
    return caches


def admit(kernels, caches, tokens, **more):
    """Put sequences into the first slots; sequence i stands 3i positions further on."""
    for i, (cache, token) in enumerate(zip(caches, tokens)):
        kernels.admit(i, NativeRow(
            cache=cache.rows.data_ptr(), capacity=cache.capacity, length=cache.length,
            offset=3 * i, token=token, top_p=1.0, **more))


@torch.inference_mode()
@pytest.mark.parametrize(('shape', 'kind', 'lengths'), [
    (SMALL, 'none', (5, 133, 40)), (SMALL, 'int8', (133,)), (SMALL, 'int4', (5, 133)),
    (SMALL, 'int8 groups', (20,)), (LONG_HEADS, 'none', (150, 20, 30, 40, 50, 1, 7, 9))])
def test_steps_are_as_close_to_float32_as_plain_ones(native, shape, kind, lengths):
    language = decoder(shape, kind)
    exact_language = widened(language)
    kernels = DecodeKernels(*_describe(language), native=native)
    caches, plain = filled(language, lengths), filled(language, lengths)
    exact = filled(language, lengths, torch.float32)
    tokens = [(7 + 31 * i) % language.config.vocab for i in range(len(lengths))]
    admit(kernels, caches, tokens)
    slots = list(range(len(lengths)))
    for number in range(2):
        logits = torch.full((8, language.config.vocab), float('nan'))
        kernels.step(slots, logits=logits)
        got = logits[:len(slots)]
        twin = step_logits(language, tokens, [Row(c, 3 * i) for i, c in enumerate(plain)])
        true = step_logits(exact_language, tokens, [Row(c, 3 * i) for i, c in enumerate(exact)])
        for i in slots:
            assert (got[i] - true[i]).norm() <= 2 * (twin[i].float() - true[i]).norm()
            a, b = (c[i].rows[..., c[i].length, :].float() for c in (caches, plain))
            assert (a - b).norm() <= 0.02 * b.norm()
            result = kernels.results[i, number]
            assert result['ready'] == number + 1 and result['flags'] == FINITE
            best = got[i].topk(2)
            assert result['token'] == best.indices[0]
            assert result['margin'] == pytest.approx(float(best.values[0] - best.values[1]))
            assert result['probability'] == pytest.approx(
                float(got[i].softmax(0).max()), rel=1e-4)
        tokens = got.argmax(-1).tolist()
        for cache in (*caches, *plain, *exact):
            cache.length += 1


@torch.inference_mode()
def test_several_steps_in_one_launch_and_bits_alone(native):
    language = decoder(SMALL)
    kernels = DecodeKernels(*_describe(language), native=native)
    caches = filled(language, (5, 150))
    admit(kernels, caches, [7, 9])
    kernels.step([0, 1], steps=3)
    together = kernels.results[1, :3].copy()
    assert together['ready'].tolist() == [1, 2, 3]
    alone = filled(language, (5, 150))
    admit(kernels, alone, [7, 9])
    for _ in range(3):
        kernels.step([1])
    for field in ('token', 'probability', 'margin'):
        assert (kernels.results[1, :3][field] == together[field]).all()


@torch.inference_mode()
def test_masks_broken_rows_and_unknown_tokens(native):
    language = decoder(SMALL)
    kernels = DecodeKernels(*_describe(language), native=native)
    caches = filled(language, (20, 20, 20))
    caches[1].rows[1, 1, :, 4] = float('nan')
    admit(kernels, caches, [7, 7, language.config.vocab + 5])
    mask = torch.zeros(language.config.vocab, dtype=torch.bool)
    mask[[17, 400]] = True
    kernels.step([0, 1, 2], [mask, None, None])
    assert kernels.results[0, 0]['token'] in (17, 400)
    assert kernels.results[:3, 0]['flags'].tolist() == [FINITE, 0, 0]


@torch.inference_mode()
def test_a_seed_draws_the_same_token_whatever_runs_beside(native):
    language = decoder(SMALL)
    kernels = DecodeKernels(*_describe(language), native=native)
    drawn = set()
    for seed in range(4):
        tokens = []
        for slots in ([0], [1, 0]):
            caches = filled(language, (20, 9))
            admit(kernels, caches, [7, 8], temperature=1.5, seed=seed)
            kernels.step(slots)
            tokens.append(int(kernels.results[0, 0]['token']))
        assert tokens[0] == tokens[1]
        drawn.add(tokens[0])
    assert len(drawn) > 1


def test_what_no_kernel_serves_is_refused(native):
    language = decoder(SMALL)
    shape, weights = _describe(language)
    with pytest.raises(KernelError, match='qkv has'):
        DecodeKernels(type(shape)(**{**shape.__dict__, 'heads': 8}), weights, native=native)
    wide = decoder(SMALL, dtype=torch.float32)
    with pytest.raises(KernelError, match=r'no decode kernel for torch\.float32'):
        DecodeKernels(*_describe(wide), native=native)
