"""
The decode step as a chain of kernels, held to what test_kernel_decode holds the other form to.

The same emulator, one kernel after another; what a graph and programmatic launches add shows on a
GPU alone.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from decode_cases import (
    EMULATORS,
    LONG_HEADS,
    SMALL,
    admit,
    check_bits_alone,
    check_draws,
    check_masks_broken_rows_and_unknown_tokens,
    check_two_steps,
    decoder,
    emulated,
    filled,
)

from qwen_vl_ros.engine.cuda_decoder import _describe
from qwen_vl_ros.kernels.decode import FINITE, ChainKernels

#: Like SMALL, with groups of 128 that divide the MLP.
GROUPS = (256, 384, 2, 4, 2, 512)

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='no C++ compiler')


@pytest.fixture(scope='session')
def native():
    """Return the chain, compiled for the emulator."""
    return emulated('qwen_vl_chain', [EMULATORS / 'chain_emulator', EMULATORS / 'decode_emulator'],
                    'cuda/decode*', 'cuda/chain/*')


@torch.inference_mode()
@pytest.mark.parametrize(('shape', 'kind', 'lengths', 'dtype'), [
    (SMALL, 'none', (133,), torch.bfloat16), (SMALL, 'none', (5, 133, 40), torch.float16),
    (SMALL, 'int8', (64,), torch.float16), (SMALL, 'int8', (5, 133), torch.bfloat16),
    (GROUPS, 'int4', (133,), torch.float16), (GROUPS, 'int4', (5, 133), torch.bfloat16),
    (GROUPS, 'int8 groups', (20,), torch.bfloat16), (GROUPS, 'int8 groups', (5,), torch.float16),
    (LONG_HEADS, 'none', (150, 20, 30, 40, 50, 1, 7, 9), torch.bfloat16)])
def test_steps_are_as_close_to_float32_as_plain_ones(native, shape, kind, lengths, dtype):
    language = decoder(shape, kind, dtype)
    check_two_steps(ChainKernels(*_describe(language), native=native), language, lengths)


@torch.inference_mode()
@pytest.mark.parametrize(('shape', 'kind'), [(SMALL, 'none'), (GROUPS, 'int4')])
def test_several_steps_in_one_launch_and_bits_alone(native, shape, kind):
    language = decoder(shape, kind)
    check_bits_alone(ChainKernels(*_describe(language), native=native), language, 2)


@torch.inference_mode()
@pytest.mark.parametrize(('shape', 'kind'), [(SMALL, 'int8'), (GROUPS, 'int4')])
def test_a_channel_that_stands_out_takes_nothing_from_the_others(native, shape, kind):
    """The inputs of a step of integers share a scale."""
    language = decoder(shape, kind)
    for layer in language.layers:
        layer.norm1[70] *= 300
        layer.norm2[5] *= 300
    check_two_steps(ChainKernels(*_describe(language), native=native), language, (20, 9))


@torch.inference_mode()
def test_how_early_weights_are_asked_for_changes_no_bit(native):
    language = decoder(SMALL)
    kernels = ChainKernels(*_describe(language), native=native)
    logits = []
    for pace in (0, 3):
        kernels.pace(pace)
        caches = filled(language, (20,))
        admit(kernels, caches, [7])
        logits.append(torch.zeros(8, language.config.vocab))
        kernels.step([0], logits=logits[-1])
    assert logits[0].any() and torch.equal(*logits)


@torch.inference_mode()
@pytest.mark.parametrize(('shape', 'kind'), [(SMALL, 'none'), (SMALL, 'int8'), (GROUPS, 'int4')])
def test_masks_broken_rows_and_unknown_tokens(native, shape, kind):
    language = decoder(shape, kind)
    kernels = ChainKernels(*_describe(language), native=native)
    check_masks_broken_rows_and_unknown_tokens(kernels, language)
    # What a broken sequence left behind does not reach the next one in its slot.
    fresh = filled(language, (20, 9))
    admit(kernels, [fresh[1], fresh[0]], [7, 7])
    kernels.step([1])
    assert kernels.results[1, 0]['flags'] == FINITE


@torch.inference_mode()
def test_a_seed_draws_the_same_token_whatever_runs_beside(native):
    language = decoder(SMALL)
    kernels = ChainKernels(*_describe(language), native=native)
    check_draws(kernels, language)
