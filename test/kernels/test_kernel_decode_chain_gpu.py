"""The chain of kernels on a GPU: graphs, programmatic launches, official widths, every form."""

from __future__ import annotations

import pytest
import torch
from decode_cases import admit

from benchmarks.stages._decode_models import random_weights, widened
from qwen_vl_ros.engine.config import LanguageConfig
from qwen_vl_ros.engine.cuda_decoder import _describe
from qwen_vl_ros.engine.decoder import Row, step_logits
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.quantize import quantize_language
from qwen_vl_ros.kernels.decode import FINITE, ChainKernels

pytestmark = pytest.mark.gpu
#: width, mlp, heads, kv_heads of Qwen2-VL-2B and 7B; three layers and a short vocabulary.
SHAPES = {'2b': (1536, 8960, 12, 2), '7b': (3584, 18944, 28, 4)}
LENGTHS = (512, 37, 1, 700)


def on_gpu(shape, kind, dtype):
    """Return a decoder with random weights."""
    width, mlp, heads, kv_heads = SHAPES[shape]
    config = LanguageConfig(
        4096, width, mlp, 3, heads, kv_heads, 1e-6, 1e6, (16, 24, 24), 'silu', 32768)
    language = LanguageModel(config, random_weights(config, True, dtype, torch.device('cuda')))
    if kind != 'none':
        quantize_language(language, kind)
    return language


def caches_of(language, lengths, dtype=None):
    """Return caches with random rows, the same ones for every dtype."""
    found = []
    for i, length in enumerate(lengths):
        cache = KVCache(language.config, 1200, language.device, language.dtype)
        generator = torch.Generator('cuda').manual_seed(i)
        cache.rows.copy_(torch.randn(cache.rows.shape, generator=generator, device='cuda'))
        cache.rows = cache.rows.to(dtype or language.dtype)
        cache.length = length
        found.append(cache)
    return found


@torch.inference_mode()
@pytest.mark.parametrize('count', [1, 4])
@pytest.mark.parametrize(('shape', 'kind', 'dtype'), [
    ('2b', 'none', torch.bfloat16), ('2b', 'none', torch.float16), ('2b', 'int8', torch.bfloat16),
    ('2b', 'int4', torch.float16), ('7b', 'none', torch.bfloat16), ('7b', 'int4', torch.bfloat16)])
def test_steps_are_as_close_to_float32_as_plain_ones(shape, kind, dtype, count):
    language = on_gpu(shape, kind, dtype)
    wide, lengths = widened(language), LENGTHS[:count]
    kernels = ChainKernels(*_describe(language))
    caches, plain = caches_of(language, lengths), caches_of(language, lengths)
    exact = caches_of(language, lengths, torch.float32)
    tokens = [7 + 31 * i for i in range(count)]
    admit(kernels, caches, tokens)
    for number in range(3):
        logits = torch.full((8, language.config.vocab), float('nan'), device='cuda')
        kernels.step(list(range(count)), logits=logits)
        torch.cuda.synchronize()
        twin = step_logits(language, tokens, [Row(c, 3 * i) for i, c in enumerate(plain)])
        true = step_logits(wide, tokens, [Row(c, 3 * i) for i, c in enumerate(exact)])
        for i in range(count):
            ours, theirs = ((x[i].float() - true[i]).norm() for x in (logits, twin))
            assert ours <= 2 * theirs
            result = kernels.results[i, number]
            assert result['ready'] == number + 1 and result['flags'] == FINITE
            assert result['token'] == int(logits[i].argmax())
        tokens = logits[:count].argmax(-1).tolist()
        for cache in (*caches, *plain, *exact):
            cache.length += 1


@torch.inference_mode()
@pytest.mark.parametrize('kind', ['none', 'int8', 'int4'])
def test_the_same_bits_alone_and_beside_others_many_times(kind):
    language = on_gpu('2b', kind, torch.bfloat16)
    kernels = ChainKernels(*_describe(language))
    lengths, steps = (512, 37, 1, 700, 5, 64, 128, 300), 40
    seen = []
    for slots, pace in (([2], 0), (list(range(8)), 0), ([3, 2, 6], 700), ([2], 700)):
        kernels.pace(pace)
        caches = caches_of(language, lengths)
        admit(kernels, caches, [7] * 8)
        kernels.results[:] = 0
        torch.cuda.synchronize()
        kernels.step(slots, steps=steps)
        torch.cuda.synchronize()
        found = kernels.results[2, :steps].copy()
        assert found['ready'].tolist() == list(range(1, steps + 1))
        seen.append([found[field].tolist() for field in ('token', 'probability', 'margin')]
                    + [caches[2].rows[..., :steps, :].clone()])
    for other in seen[1:]:
        assert other[:3] == seen[0][:3]
        assert torch.equal(other[3], seen[0][3])
