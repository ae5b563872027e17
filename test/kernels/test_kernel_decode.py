"""
The decode step against float32, on test/kernels/decode_emulator: the same source as on a GPU.

The emulator runs all blocks and threads as fibers; copies to shared memory arrive as late as they
may, so that a wait that is missing shows.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from decode_cases import (
    EMULATORS,
    LONG_HEADS,
    SMALL,
    check_bits_alone,
    check_draws,
    check_masks_broken_rows_and_unknown_tokens,
    check_two_steps,
    decoder,
    emulated,
)

from qwen_vl_ros.engine.cuda_decoder import _describe
from qwen_vl_ros.kernels.decode import DecodeKernels
from qwen_vl_ros.kernels.loader import KernelError

pytestmark = pytest.mark.skipif(not shutil.which('g++'), reason='no C++ compiler')


@pytest.fixture(scope='session')
def native():
    """Return the step, compiled for the emulator."""
    return emulated('qwen_vl_decode', [EMULATORS / 'decode_emulator'], 'cuda/decode*')


@torch.inference_mode()
@pytest.mark.parametrize(('shape', 'kind', 'lengths'), [
    (SMALL, 'none', (5, 133, 40)), (SMALL, 'int8', (133,)), (SMALL, 'int4', (5, 133)),
    (SMALL, 'int8 groups', (20,)), (LONG_HEADS, 'none', (150, 20, 30, 40, 50, 1, 7, 9))])
def test_steps_are_as_close_to_float32_as_plain_ones(native, shape, kind, lengths):
    language = decoder(shape, kind)
    check_two_steps(DecodeKernels(*_describe(language), native=native), language, lengths)


@torch.inference_mode()
def test_several_steps_in_one_launch_and_bits_alone(native):
    language = decoder(SMALL)
    check_bits_alone(DecodeKernels(*_describe(language), native=native), language, 3)


@torch.inference_mode()
def test_masks_broken_rows_and_unknown_tokens(native):
    language = decoder(SMALL)
    kernels = DecodeKernels(*_describe(language), native=native)
    check_masks_broken_rows_and_unknown_tokens(kernels, language)


@torch.inference_mode()
def test_a_seed_draws_the_same_token_whatever_runs_beside(native):
    language = decoder(SMALL)
    kernels = DecodeKernels(*_describe(language), native=native)
    check_draws(kernels, language)


def test_what_no_kernel_serves_is_refused(native):
    language = decoder(SMALL)
    shape, weights = _describe(language)
    with pytest.raises(KernelError, match='qkv has'):
        DecodeKernels(type(shape)(**{**shape.__dict__, 'heads': 8}), weights, native=native)
    wide = decoder(SMALL, dtype=torch.float32)
    with pytest.raises(KernelError, match=r'no decode kernel for torch\.float32'):
        DecodeKernels(*_describe(wide), native=native)
