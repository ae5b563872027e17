"""What both forms of the decode step are held to, and the small decoders it is done with."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.stages._decode_models import random_weights, widened
from qwen_vl_ros.engine.config import LanguageConfig
from qwen_vl_ros.engine.decoder import Row, step_logits
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8GroupLinear
from qwen_vl_ros.engine.quantize import quantize_language
from qwen_vl_ros.kernels.decode import FINITE, NativeRow

ROOT = Path(__file__).resolve().parents[2]
EMULATORS = Path(__file__).parent

#: width, mlp, layers, heads, kv_heads, vocab; the first is models/tiny but for its depth.
SMALL, LONG_HEADS = (256, 448, 2, 4, 2, 512), (512, 320, 1, 4, 1, 256)


def emulated(name, folders, *patterns):
    """
    Return a form of the step, compiled for the emulator where its sources have changed.

    :param name: of the library.
    :param folders: that are included, that of ``step.cc`` first.
    :param patterns: of sources in the folder of kernels, beside the folders in this one.
    """
    out = ROOT / 'build' / 'emulator' / f'lib{name}.so'
    out.parent.mkdir(parents=True, exist_ok=True)
    kernels = ROOT / 'kernels'
    sources = [path for folder in folders for path in folder.iterdir()]
    sources += [path for pattern in (*patterns, 'include/qwen_vl_decode.h')
                for path in kernels.glob(pattern)]
    if not out.exists() or out.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        subprocess.run(
            ['g++', '-std=c++17', '-O2', '-fPIC', '-shared',
             *(f'-I{x}' for x in (*folders, kernels / 'cuda', kernels / 'include')),
             str(folders[0] / 'step.cc'), '-o', str(out)], check=True)
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


def check_two_steps(kernels, language, lengths):
    """Hold logits, cache rows and results of two steps to float32, beside those of plain torch."""
    exact_language = widened(language)
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


def check_bits_alone(kernels, language, steps):
    """Hold a sequence alone, step by step, to itself beside another, all steps in one launch."""
    caches, alone = (filled(language, (5, 150)) for _ in range(2))
    admit(kernels, caches, [7, 9])
    kernels.step([0, 1], steps=steps)
    together = kernels.results[1, :steps].copy()
    assert together['ready'].tolist() == list(range(1, steps + 1))
    admit(kernels, alone, [7, 9])
    for _ in range(steps):
        kernels.step([1])
    for field in ('token', 'probability', 'margin'):
        assert (kernels.results[1, :steps][field] == together[field]).all()


def check_masks_broken_rows_and_unknown_tokens(kernels, language):
    """Hold a step to the mask of one sequence, the NaN of another, the odd token of a third."""
    caches = filled(language, (20, 20, 20))
    caches[1].rows[1, 1, :, 4] = float('nan')
    admit(kernels, caches, [7, 7, language.config.vocab + 5])
    mask = torch.zeros(language.config.vocab, dtype=torch.bool)
    mask[[17, 400]] = True
    kernels.step([0, 1, 2], [mask, None, None])
    assert kernels.results[0, 0]['token'] in (17, 400)
    assert kernels.results[:3, 0]['flags'].tolist() == [FINITE, 0, 0]


def check_draws(kernels, language):
    """Hold draws to their seed, whatever runs beside."""
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
