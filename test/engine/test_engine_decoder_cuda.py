"""The decoder in CUDA kernels: the same tokens as plain torch, whatever runs beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_engine_decoder import prefilled

from qwen_vl_ros.engine.cuda_decoder import CudaDecoder, make_decoder
from qwen_vl_ros.engine.decoder import Row, TorchDecoder, step_logits
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.generate import Sampling, _distribution
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8GroupLinear, Int8Linear
from qwen_vl_ros.share import share

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
TINY = share('models', 'tiny')
LENGTHS = (5, 1, 140, 33)


@pytest.fixture(scope='module')
def tiny():
    """Return the shipped checkpoint on the GPU."""
    engine = Engine.load(str(TINY), device='cuda')
    yield engine
    engine.close()


def loaded(kind, dtype='bfloat16'):
    """Return the shipped decoder's weights in a form."""
    return Engine.load(str(TINY), device='cuda', dtype=dtype, quantization=kind).model.language


def wide(language, cache):
    """Return decoder and cache in float32 (dequantised)."""
    from benchmarks.stages._decode_models import widened

    other = KVCache(language.config, cache.capacity, language.device, torch.float32)
    other.rows.copy_(cache.rows)
    other.length = cache.length
    return widened(language), other


def copied(cache):
    """Return a cache with the same rows."""
    other = KVCache.__new__(KVCache)
    other.__dict__.update(cache.__dict__)
    other.rows, other.tokens = cache.rows.clone(), cache.tokens.copy()
    return other


def one_step(decoder, caches, tokens):
    """Return the logits [n, vocab] of a step that is forgotten afterwards."""
    slots = [decoder.admit(Row(c, i), t) for i, (c, t) in enumerate(zip(caches, tokens))]
    logits = torch.full((8, decoder.language.config.vocab), float('nan'), device='cuda')
    decoder.kernels.step(slots, logits=logits)
    for slot in slots:
        decoder.release(slot)
    return logits[:len(slots)]


def prompts(language, lengths=LENGTHS, capacity=256):
    """Return caches of random prompts and the tokens that follow."""
    generator = torch.Generator().manual_seed(1)
    caches = []
    for length in lengths:
        ids = torch.randint(0, language.config.vocab, (length,), generator=generator)
        cache = KVCache(language.config, capacity, language.device, language.dtype)
        with torch.inference_mode():
            language.prefill(language.embed(ids.cuda()), torch.arange(
                length, device='cuda').expand(3, -1), cache, 0)
        cache.extend(ids.numpy())
        caches.append(cache)
    return caches, [(11 * i + 3) % language.config.vocab for i in range(len(lengths))]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('kind', ['none', 'int8', 'int4'])
def test_logits_are_as_close_to_float32_as_plain_ones(kind, dtype):
    language = loaded(kind, dtype)
    decoder = CudaDecoder(language)
    caches, tokens = prompts(language)
    plain = [copied(c) for c in caches]
    got = one_step(decoder, caches, tokens)
    with torch.inference_mode():
        twin = step_logits(language, tokens, [Row(c, i) for i, c in enumerate(plain)])
        for i, cache in enumerate(caches):
            exact_language, exact_cache = wide(language, cache)
            exact = step_logits(exact_language, tokens[i:i + 1], [Row(exact_cache, i)])[0]
            bound = 2 * (twin[i].float() - exact).norm()
            assert (got[i] - exact).norm() < bound
    # The row that the step wrote is the one that plain torch writes.
    for a, b in zip(caches, plain):
        row, other = (c.rows[..., c.length, :].float() for c in (a, b))
        assert (row - other).norm() < 0.02 * other.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize('kind', ['none', 'int8', 'int4'])
def test_the_same_bits_alone_and_beside_others(kind):
    language = loaded(kind)
    decoder = CudaDecoder(language)
    lengths = (40, 33, 47, 35, 41, 38, 44, 36)
    caches, tokens = prompts(language, lengths)
    together = one_step(decoder, caches, tokens)
    for i in range(len(lengths)):
        slot = decoder.admit(Row(caches[i], i), tokens[i])
        alone = torch.empty((8, language.config.vocab), device='cuda')
        decoder.kernels.step([slot], logits=alone)
        decoder.release(slot)
        assert torch.equal(alone[0], together[i])


@pytest.mark.gpu
@needs_gpu
def test_a_file_with_8_bit_groups_decodes(tiny):
    language = loaded('none')

    def grouped(linear: Linear) -> Int8GroupLinear:
        four = Int4Linear.of(linear)
        codes = (four.codes().int() * 16 + 3).to(torch.uint8)
        return Int8GroupLinear(codes, four.scales / 16, (four.zeros.to(torch.int16) * 16),
                               linear.bias)

    from dataclasses import replace
    language.layers = [replace(
        x, qkv=grouped(x.qkv), out=grouped(x.out), gate_up=grouped(x.gate_up),
        down=grouped(x.down)) for x in language.layers]
    decoder = CudaDecoder(language)
    caches, tokens = prompts(language)
    got = one_step(decoder, caches, tokens)
    with torch.inference_mode():
        for i, cache in enumerate(caches):
            exact_language, exact_cache = wide(language, cache)
            exact = step_logits(exact_language, tokens[i:i + 1], [Row(exact_cache, i)])[0]
            assert (got[i] - exact).norm() < 0.05 * exact.norm()


@pytest.mark.gpu
@needs_gpu
def test_tokens_run_ahead_and_nobody_notices(tiny):
    language = tiny.model.language
    decoder, plain = make_decoder(language), TorchDecoder(language)
    assert isinstance(decoder, CudaDecoder)
    caches, tokens = prompts(language)
    others = [copied(c) for c in caches]
    a = [decoder.admit(Row(c, 0, steps=12), t) for c, t in zip(caches[:2], tokens)]
    b = [plain.admit(Row(c, 0), t) for c, t in zip(others[:2], tokens)]
    found = []
    for number in range(12):
        if number == 4:
            a.append(decoder.admit(Row(caches[2], 0), tokens[2]))
            b.append(plain.admit(Row(others[2], 0), tokens[2]))
        if number == 8:
            decoder.release(a.pop(0))
            plain.release(b.pop(0))
        ours, theirs = decoder.step(), plain.step()
        assert set(ours) == set(a)
        found += [(ours[i], theirs[j]) for i, j in zip(a, b)]
        assert all(x.finite and 0 < x.probability <= 1 and x.margin >= 0 for x in ours.values())
    same = np.mean([x.token == y.token for x, y in found])
    assert same > 0.9  # random prompts; near ties go either way in bfloat16
    assert caches[1].length == LENGTHS[1] + 12
    with pytest.raises(EngineError, match='full'):
        short = KVCache(language.config, 3, language.device, language.dtype)
        short.length = 3
        decoder.admit(Row(short, 0), 1)
        decoder.step()


@pytest.mark.gpu
@needs_gpu
def test_a_grammar_takes_back_what_ran_ahead(tiny):
    language = tiny.model.language
    decoder = CudaDecoder(language)
    caches, tokens = prompts(language, (20, 20))
    slots = [decoder.admit(Row(c, 0), t) for c, t in zip(caches, tokens)]
    decoder.step()
    mask = torch.zeros(language.config.vocab, dtype=torch.bool, device='cuda')
    mask[[17, 23]] = True
    for _ in range(4):
        found = decoder.step({slots[1]: mask})
        assert found[slots[1]].token in (17, 23) and found[slots[0]].finite
    assert [c.length for c in caches] == [25, 25]
    free = decoder.step()
    assert set(free) == set(slots)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize('sampling', [
    Sampling(1.0), Sampling(0.7, 20, 0.9), Sampling(1.3, 5), Sampling(0.9, 0, 0.8)])
def test_draws_follow_the_distribution(tiny, sampling):
    language = tiny.model.language
    decoder = CudaDecoder(language)
    caches, tokens = prompts(language, (50,))
    expected = _distribution(one_step(decoder, caches, tokens)[0], sampling).cpu().double()
    counts = torch.zeros_like(expected)
    draws = 600
    for seed in range(draws):
        slot = decoder.admit(Row(copied(caches[0]), 0, sampling, seed, steps=1), tokens[0])
        counts[decoder.step()[slot].token] += 1
        decoder.release(slot)
    assert counts[expected == 0].sum() == 0
    # Pearson's statistic over tokens that are expected often enough, rest pooled: five sigma.
    often = expected * draws >= 5
    pooled = torch.cat((expected[often], expected[~often].sum()[None])) * draws
    seen = torch.cat((counts[often], counts[~often].sum()[None]))
    keep = pooled > 1
    statistic = ((seen - pooled)[keep] ** 2 / pooled[keep]).sum()
    freedom = int(keep.sum()) - 1
    assert statistic < freedom + 5 * (2 * max(freedom, 1)) ** 0.5


@pytest.mark.gpu
@needs_gpu
def test_a_seed_gives_the_same_tokens_beside_others(tiny):
    language = tiny.model.language
    caches, tokens = prompts(language)
    sampling = Sampling(0.9, 50, 0.95)

    def run(indices):
        decoder = CudaDecoder(language)
        slots = {i: decoder.admit(Row(copied(caches[i]), 0, sampling, seed=i), tokens[i])
                 for i in indices}
        rounds = [decoder.step() for _ in range(6)]
        return {i: [r[slot].token for r in rounds] for i, slot in slots.items()}

    together = run(range(4))
    assert run([2])[2] == together[2]


@pytest.mark.gpu
@needs_gpu
def test_a_broken_sequence_ends_alone_on_the_gpu(tiny):
    language = tiny.model.language
    decoder = CudaDecoder(language)
    caches, tokens = prompts(language, (20, 20))
    caches[0].rows[2, 1, :, 4] = float('nan')
    a, b = (decoder.admit(Row(c, 0), t) for c, t in zip(caches, tokens))
    found = decoder.step()
    assert not found[a].finite and found[b].finite
    decoder.release(a)
    assert decoder.step()[b].finite


@pytest.mark.gpu
@needs_gpu
def test_shapes_without_kernels_fall_back_to_torch(folders, caplog):
    engine = Engine.load(str(folders['small']), device='cuda')
    with caplog.at_level('WARNING'):
        decoder = make_decoder(engine.model.language)
    assert isinstance(decoder, TorchDecoder)
    assert 'plain torch is used instead' in caplog.text
    cache, token, _ = prefilled(Engine.load(
        str(folders['small']), device='cpu').model.language, 5, 5)
    other = KVCache(engine.model.config.language, 40, engine.model.device, engine.model.dtype)
    other.rows.copy_(cache.rows)
    other.length = cache.length
    slot = decoder.admit(Row(other, 0), token)
    assert decoder.step()[slot].finite
    engine.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize('rows', [1, 33, 200])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_prompts_through_quantised_weights(rows, dtype):
    generator = torch.Generator('cuda').manual_seed(rows)
    weight = torch.randn(258, 448, generator=generator, device='cuda') / 20
    bias = torch.randn(258, generator=generator, device='cuda').to(dtype)
    x = torch.randn(rows, 448, generator=generator, device='cuda').to(dtype)
    for form in (Int8Linear, Int4Linear):
        matrix = form.of(Linear(weight.to(dtype), bias))
        exact = x.float() @ matrix.dequantised(torch.float32).T + bias.float()
        plain = torch.nn.functional.linear(x, matrix.dequantised(dtype), bias)
        got = matrix(x)
        assert (got - exact).norm() <= 2 * (plain - exact).norm()
