"""Several sequences in one decode step, each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_checkpoints import SHAPES

from qwen_vl_ros.engine.decoder import GREEDY, Row, TorchDecoder, step_logits
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import Sampling, choose
from qwen_vl_ros.engine.kv_cache import NO_TOKEN, KVCache
from qwen_vl_ros.engine.quantize import quantize_language

LENGTHS = (5, 1, 12, 7)


def prefilled(language, length, seed, capacity=40):
    """Return a cache with a random prompt, its greedy next token, and the prompt's ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, language.config.vocab, (length,), generator=generator)
    cache = KVCache(language.config, capacity, language.device, language.dtype)
    positions = torch.arange(length).expand(3, -1)
    with torch.inference_mode():
        x = language.prefill(language.embed(ids), positions, cache, 0)
        token = choose(language.logits(x[-1:])[0], GREEDY).token
    cache.extend(ids.numpy())
    return cache, token, ids


def decode(decoder, sequences, steps, sampling=GREEDY, **more):
    """Return tokens by sequence; all are admitted together."""
    slots = [decoder.admit(Row(cache, 0, sampling, seed=i, **more), token)
             for i, (cache, token, _) in enumerate(sequences)]
    rounds = [decoder.step() for _ in range(steps)]
    for slot in slots:
        decoder.release(slot)
    return [[r[slot].token for r in rounds] for slot in slots]


@pytest.fixture(params=SHAPES)
def language(request, engines):
    """Return a decoder's weights, one shape after the other."""
    return engines[request.param].model.language


def test_steps_give_the_logits_of_prefill(language):
    cache, token, ids = prefilled(language, 6, seed=3)
    row = Row(cache, offset=0)
    whole = KVCache(language.config, 40, language.device, language.dtype)
    for _ in range(4):
        with torch.inference_mode():
            got = step_logits(language, [token], [row])[0]
            ids = torch.cat((ids, torch.tensor([token])))
            cache.extend(np.array([token]))
            x = language.prefill(
                language.embed(ids), torch.arange(len(ids)).expand(3, -1), whole, 0)
            expected = language.logits(x[-1:])[0]
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
        token = int(got.argmax())


@pytest.mark.parametrize('sampling', [Sampling(), Sampling(0.8, 20, 0.9)])
def test_neighbours_change_nothing(language, sampling):
    def alone(index, length):
        decoder = TorchDecoder(language)
        cache, token, _ = prefilled(language, length, index)
        slot = decoder.admit(Row(cache, 0, sampling, seed=index), token)
        return [decoder.step()[slot].token for _ in range(8)]

    expected = [alone(i, n) for i, n in enumerate(LENGTHS)]
    together = [prefilled(language, n, i) for i, n in enumerate(LENGTHS)]
    assert decode(TorchDecoder(language), together, 8, sampling) == expected


@pytest.mark.parametrize('kind', ['int8', 'int4'])
def test_quantised_weights_decode_together(folders, kind):
    engine = Engine.load(str(folders['small']), device='cpu')
    quantize_language(engine.model.language, kind)
    language = engine.model.language
    expected = [decode(TorchDecoder(language), [prefilled(language, n, 0)], 6)[0]
                for n in LENGTHS[:2]]
    assert decode(TorchDecoder(language), [prefilled(language, n, 0) for n in LENGTHS[:2]],
                  6) == expected
    engine.close()


def test_sequences_come_and_go(engines):
    language = engines['small'].model.language
    first, second = (decode(TorchDecoder(language), [prefilled(language, n, n)], 6)[0]
                     for n in (5, 9))
    decoder = TorchDecoder(language, slots=2)
    (cache, token, ids), late = prefilled(language, 5, 5), prefilled(language, 9, 9)
    a = decoder.admit(Row(cache, 0), token)
    got = [decoder.step()[a].token for _ in range(3)]
    b = decoder.admit(Row(late[0], 0, named=False), late[1])
    with pytest.raises(EngineError, match='2 sequences are being decoded'):
        decoder.admit(Row(late[0], 0), 0)
    both = [decoder.step() for _ in range(3)]
    got += [r[a].token for r in both]
    decoder.release(a)
    rest = [decoder.step() for _ in range(3)]
    assert got == first
    assert [r[b].token for r in both + rest] == second
    assert all(set(r) == {b} for r in rest)
    # The caches know what they hold: the tokens that were run, or that these have no name.
    assert cache.tokens[:cache.length].tolist() == [*ids.tolist(), token, *first[:5]]
    assert late[0].length == 9 + 6 and set(late[0].tokens[9:15]) == {NO_TOKEN}
    decoder.release(b)
    assert decoder.step() == {}


def test_a_broken_sequence_ends_alone(engines):
    language = engines['small'].model.language
    expected = decode(TorchDecoder(language), [prefilled(language, 5, 5)], 2)[0]
    sound, broken = prefilled(language, 5, 5), prefilled(language, 5, 6)
    broken[0].rows[1, 1, :, 2] = float('nan')
    decoder = TorchDecoder(language)
    slots = [decoder.admit(Row(c, 0, Sampling(0.5)), t) for c, t, _ in (broken,)]
    slots += [decoder.admit(Row(c, 0), t) for c, t, _ in (sound,)]
    first = decoder.step()
    assert not first[slots[0]].finite and first[slots[1]].finite
    decoder.release(slots[0])
    assert [first[slots[1]].token, decoder.step()[slots[1]].token] == expected


def test_a_grammar_binds_its_own_slot(engines):
    language = engines['small'].model.language
    decoder = TorchDecoder(language)
    slots = [decoder.admit(Row(c, 0), t)
             for c, t, _ in (prefilled(language, 5, 5), prefilled(language, 5, 5))]
    free = decode(TorchDecoder(language), [prefilled(language, 5, 5)], 1)[0]
    mask = torch.zeros(language.config.vocab, dtype=torch.bool)
    mask[[17, 23]] = True
    found = decoder.step({slots[1]: mask})
    assert found[slots[0]].token == free[0]
    assert found[slots[1]].token in (17, 23)


def test_what_does_not_fit_is_refused(engines):
    language = engines['small'].model.language
    decoder = TorchDecoder(language)
    cache, token, _ = prefilled(language, 5, 5, capacity=7)
    with pytest.raises(EngineError, match='3 tokens after 5 exceed the cache of 7') as caught:
        decoder.admit(Row(cache, 0, steps=3), token)
    assert caught.value.code == ErrorCode.PROMPT_TOO_LONG
    for wrong in (-1, language.config.vocab):
        with pytest.raises(EngineError, match='outside the vocabulary'):
            decoder.admit(Row(cache, 0), wrong)
    decoder.admit(Row(cache, 0, steps=2), token)
    decoder.step()
    decoder.step()
    with pytest.raises(EngineError, match='cache of 7 tokens is full'):
        decoder.step()
