"""The decoder that computes ahead, on the emulated kernels: whoever comes, goes or binds it."""

from __future__ import annotations

import time

import pytest
import torch
from decode_cases import SMALL, decoder, filled
from test_kernel_decode import native  # noqa: F401
from test_kernel_decode_chain import native as chain  # noqa: F401

from qwen_vl_ros.engine.cuda_decoder import CudaDecoder, Stamps
from qwen_vl_ros.engine.decoder import Row, TorchDecoder
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.kernels.loader import KernelError

ONE_LAYER = (256, 448, 1, 4, 2, 512)


@pytest.fixture(params=['native', 'chain'])
def pair(request):
    """Return the decoder in kernels, in either form, and the plain one, of the same weights."""
    language = decoder(ONE_LAYER)
    library = request.getfixturevalue(request.param)
    return CudaDecoder(language, native=library), TorchDecoder(language)


def test_tokens_are_those_of_the_plain_decoder(pair):
    caches = [filled(pair[0].language, (20, 7)) for _ in pair]
    slots = [[d.admit(Row(c, 0, steps=4), t) for c, t in zip(own, (7, 9))]
             for d, own in zip(pair, caches)]
    launched = []
    step = pair[0].kernels.step
    pair[0].kernels.step = lambda slots, *a, **k: (launched.append(list(slots)),
                                                   step(slots, *a, **k))
    for _ in range(4):
        ours, theirs = (d.step() for d in pair)
        for a, b in zip(*slots):
            assert ours[a].token == theirs[b].token
            assert ours[a].probability == pytest.approx(theirs[b].probability, rel=0.05)
    # Two at first, one more with each, and none beyond what was announced.
    assert launched == [[0, 1]] * 4
    assert [c.length for c in caches[0]] == [24, 11]
    assert (caches[0][0].tokens[20:24] == caches[1][0].tokens[20:24]).all()


def test_who_comes_later_never_steps_alone(pair):
    decoder = pair[0]
    first, late = filled(decoder.language, (20, 7))
    alone, launched = [], []
    step = decoder.kernels.step
    decoder.kernels.step = lambda slots, *a, **k: (launched.append(list(slots)),
                                                   step(slots, *a, **k))
    a = decoder.admit(Row(first, 0, steps=9), 7)
    decoder.step()
    b = decoder.admit(Row(late, 0, steps=3), 9)
    for _ in range(3):
        decoder.step()
    # Two ahead of the first; then both until nothing of the second is left to launch.
    assert launched == [[a], [a], [a, b], [a, b], [a, b]]
    plain = pair[1]
    theirs = [plain.admit(Row(c, 0), t) for c, t in zip(filled(plain.language, (20, 7)), (7, 9))]
    for _ in range(3):
        alone.append(plain.step())
    assert late.tokens[7:10].tolist() == [9, *(found[theirs[1]].token for found in alone[:2])]
    assert first.tokens[20:24].tolist() == [
        7, *(found[theirs[0]].token for found in alone)]


def test_choices_say_when_their_step_was_launched_and_had_ended(pair, monkeypatch):
    decoder = pair[0]
    slot = decoder.admit(Row(filled(decoder.language, (20,))[0], 0), 7)
    started = time.monotonic_ns()
    found = [decoder.step()[slot] for _ in range(3)]
    ended = time.monotonic_ns()
    launched = [choice.launched_ns for choice in found]
    assert started <= launched[0] < launched[1] < launched[2] <= ended
    assert started < found[0].ended_ns <= ended


def test_stamps_of_a_device_lie_on_the_host_clock():
    stamps = Stamps()
    # The device's clock is 1000 behind, and stamps are seen 50, 10, 70 and 30 later.
    found = [stamps.host_ns(at, at + 1000 + late)
             for at, late in ((100, 50), (200, 10), (300, 70), (400, 30))]
    assert found == [1150, 1210, 1310, 1410]
    # The clocks run apart by 50 in a second: the distance follows.
    at = 1_000_000_000
    assert stamps.host_ns(at, at + 1000 + 60) == at + 1060
    assert stamps.host_ns(2 * at, 2 * at + 1000 + 500_000) == 2 * at + 1060 + 100_049


def test_sequences_join_and_leave(pair):
    own, other = (filled(pair[0].language, (20, 7)) for _ in pair)
    (a,), (b,) = ([d.admit(Row(c[0], 0), 7)] for d, c in zip(pair, (own, other)))
    found = [(pair[0].step()[a].token, pair[1].step()[b].token)]
    late, plain = (d.admit(Row(c[1], 0), 9) for d, c in zip(pair, (own, other)))
    ours, theirs = (d.step() for d in pair)
    found += [(ours[a].token, theirs[b].token), (ours[late].token, theirs[plain].token)]
    for d, slot in zip(pair, (a, b)):
        d.release(slot)
    ours, theirs = (d.step() for d in pair)
    assert set(ours) == {late}
    found.append((ours[late].token, theirs[plain].token))
    assert all(x == y for x, y in found)
    # Nothing of a sequence that left is under way: its cache can be filled anew.
    pair[0].release(late)
    before = own[1].rows.clone()
    assert pair[0].step() == {} and torch.equal(own[1].rows, before)


def test_a_grammar_takes_back_what_ran_ahead(pair):
    own, other = (filled(pair[0].language, (20,)) for _ in pair)
    (a, b) = (d.admit(Row(c[0], 0), 7) for d, c in zip(pair, (own, other)))
    assert pair[0].step()[a].token == pair[1].step()[b].token
    mask = torch.zeros(pair[0].language.config.vocab, dtype=torch.bool)
    mask[[17, 400]] = True
    ours, theirs = pair[0].step({a: mask})[a], pair[1].step({b: mask})[b]
    assert ours.token == theirs.token and ours.token in (17, 400)
    assert pair[0].step()[a].token == pair[1].step()[b].token
    assert own[0].length == other[0].length == 23


def test_what_does_not_fit_is_refused(pair):
    ours = pair[0]
    cache = filled(ours.language, (198,))[0]
    with pytest.raises(EngineError, match='3 tokens after 198 exceed the cache of 200'):
        ours.admit(Row(cache, 0, steps=3), 7)
    slot = ours.admit(Row(cache, 0), 7)
    ours.step()
    ours.step()
    with pytest.raises(EngineError, match='cache of 200 tokens is full'):
        ours.step()
    ours.release(slot)
    with pytest.raises(EngineError, match=r'a cache of torch\.float32'):
        ours.admit(Row(filled(ours.language, (5,), torch.float32)[0], 0), 7)


def test_other_models_have_no_kernels(native):  # noqa: F811
    language = decoder(SMALL)
    object.__setattr__(language.config, 'activation', 'gelu')
    with pytest.raises(KernelError, match='no decode kernel for the activation gelu'):
        CudaDecoder(language, native=native)
