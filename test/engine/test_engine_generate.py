"""Choosing tokens, and every way to stop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import (
    Choice,
    Generated,
    Sampling,
    choose,
    generate,
    repeats,
)


def run(tokens, most=100, window=48, ends=(99,), stop=lambda: '', finite=True):
    """Generate from a script of tokens; return pieces, state and how many steps were computed."""
    script = iter(tokens)
    calls = []

    def next_choice(last):
        calls.append(last)
        return Choice(next(script), 0.5, 2.0, finite)

    state = Generated()
    pieces = list(generate(
        next_choice, state, end_tokens=frozenset(ends), most=most, repetition_window=window,
        stop=stop))
    return pieces, state, calls


def test_greedy_takes_the_largest_and_reports_it():
    choice = choose(torch.tensor([0.0, 3.0, 1.0]), Sampling())
    assert choice.token == 1
    assert choice.margin == pytest.approx(2.0)
    assert choice.probability == pytest.approx(math.exp(3) / (1 + math.exp(3) + math.exp(1)))
    assert choice.finite


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_logits_that_are_not_finite_are_seen(bad, temperature):
    logits = torch.tensor([1.0, bad, 0.0])
    assert not choose(logits, Sampling(temperature, 2, 0.9)).finite


def test_a_mask_forbids_tokens():
    allowed = torch.tensor([True, False, True])
    for sampling in (Sampling(), Sampling(1.0)):
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            choice = choose(torch.tensor([0.0, 30.0, 1.0]), sampling, generator, allowed)
            assert choice.token != 1
            assert choice.finite


@pytest.mark.parametrize('temperature,top_k,top_p', [
    (1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.6), (0.9, 20, 0.8), (2.0, 1, 0.5),
    (1.0, 10 ** 6, 0.01)])
def test_the_distribution_is_that_of_transformers(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(50) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    counts = torch.zeros(50)
    generator = torch.Generator().manual_seed(1)
    sampling = Sampling(temperature, top_k, top_p)
    for _ in range(3000):
        counts[choose(logits, sampling, generator).token] += 1
    assert (counts[expected == 0] == 0).all()
    assert (counts / 3000 - expected).abs().sum() < 0.15


def test_a_seed_repeats_itself():
    logits = torch.zeros(1000)
    first, second, other = (
        [choose(logits, Sampling(1.0), g).token for _ in range(5)]
        for g in (torch.Generator().manual_seed(s) for s in (3, 3, 4)))
    assert first == second != other


def test_both_end_tokens_stop():
    """C12."""
    for end in (98, 99):
        pieces, state, _ = run([1, 2, end, 3], ends=(98, 99))
        assert pieces == [[1], [2]]
        assert (state.ids, state.reason) == ([1, 2], 'stop')
    pieces, state, _ = run([99])
    assert (pieces, state.ids, state.reason) == ([], [], 'stop')
    assert math.isnan(state.confidence)
    assert state.margin == 2.0


def test_length_stops_without_another_step():
    pieces, state, calls = run(range(1, 50), most=4)
    assert [t for p in pieces for t in p] == [1, 2, 3, 4]
    assert (state.reason, calls) == ('length', [None, 1, 2, 3])
    assert state.confidence == 0.5


@pytest.mark.parametrize('cycle', [[7], [7, 8], [7, 8, 9, 8], list(range(1, 61))])
def test_an_endless_repetition_stops(cycle):
    lead = [500, 501, 502]
    _, state, _ = run(lead + cycle * 200, most=10 ** 6)
    assert state.reason == 'repetition'
    assert len(state.ids) == len(lead) + max(48, 3 * len(cycle))


@given(st.integers(1, 64), st.integers(0, 30), st.integers(1, 80))
def test_repeats_finds_exactly_what_it_says(period, lead, window):
    cycle = [1000 + i for i in range(period)]
    ids = [*range(lead), *(cycle * 200)[:max(window, 3 * period)]]
    assert repeats(ids, window)
    assert not repeats(ids[:-1], window) or window < max(48, 3 * period)


def test_varied_answers_are_not_repetitions():
    assert not repeats(list(range(300)), 48)
    assert not repeats([1, 2] * 23, 48)
    assert not repeats([5] * 300, 0)


def test_sixteen_zeros_are_a_numerical_failure():
    """C1: rows of '!' end with an error, and none of them was handed out."""
    given_out = []
    state = Generated()
    with pytest.raises(EngineError) as caught:
        for piece in generate(
                lambda last: Choice(5 if last is None else 0, 1.0, 1.0, True), state,
                end_tokens=frozenset(), most=100, repetition_window=0, stop=lambda: ''):
            given_out += piece
    assert caught.value.code == ErrorCode.NUMERICAL
    assert 'numerical failure' in caught.value.message
    assert given_out == [5]
    assert len(state.ids) == 17


def test_a_few_zeros_are_text():
    pieces, _, _ = run([0] * 15 + [4, 0, 0, 99])
    assert pieces == [[0] * 15 + [4], [0, 0]]
    pieces, state, _ = run([0] * 100, most=3)
    assert (pieces, state.reason) == ([[0, 0, 0]], 'length')


def test_broken_logits_end_at_once():
    with pytest.raises(EngineError, match='not finite at token 0') as caught:
        run([1], finite=False)
    assert caught.value.code == ErrorCode.NUMERICAL


def test_stop_is_asked_before_every_token():
    asked = []

    def stop():
        asked.append(1)
        return 'cancelled' if len(asked) == 3 else ''

    pieces, state, calls = run(range(1, 50), stop=stop)
    assert pieces == [[1], [2]]
    assert (state.reason, len(calls)) == ('cancelled', 2)
