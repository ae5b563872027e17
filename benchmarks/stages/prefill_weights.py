"""
Prefill through quantised weights, beside cuBLASLt on the same matrices dequantised.

An official shape with random weights on a GPU, 128 to 8,192 tokens: the four products of each
layer one after the other, and the whole prefill as the engine runs it. Weights of 16 bits are what
a dequantised copy would be, so that their time is the baseline. Of quantised weights also the
kernel that dequantises into its tiles, which every GPU up to Ada (and an Orin) takes.
"""

from __future__ import annotations

import argparse
import sys
from unittest import mock

import torch

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages import _decode_models as models
from benchmarks.stages.decode import timed
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.kernels import decode_gemm

PRODUCTS, WHOLE = 'products alone', 'as the engine runs it'
COPY = 'bf16: cuBLASLt on a dequantised copy'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--shape', choices=('2b', '7b'), default='2b')
    parser.add_argument('--dtype', nargs='+', default=['int8', 'int4'], choices=('int8', 'int4'))
    parser.add_argument('--tokens', type=int, nargs='+',
                        default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument('--runs', type=int, default=10, help='of each figure (%(default)s)')


@torch.inference_mode()
def run(args: argparse.Namespace) -> list[Record]:
    """Time bf16 first: it is what the others are held against."""
    if not torch.cuda.is_available():
        raise CannotRun('torch finds no CUDA device')
    device = torch.device('cuda', torch.cuda.current_device())
    base: dict[tuple[str, int], float] = {}
    found: list[Record] = []
    for dtype in ('bf16', *args.dtype):
        language = models.language_model(args.shape, dtype, device)
        if language.fused is None:
            raise CannotRun('the fused prefill is not there: see the log')
        for count in args.tokens:
            timed_ones = [(PRODUCTS, PRODUCTS, products(language, count, args.runs)),
                          (WHOLE, WHOLE, whole(language, count, args.runs))]
            if dtype != 'bf16':
                with mock.patch.object(decode_gemm, 'FEW_ROWS', sys.maxsize):
                    timed_ones.append((f'{PRODUCTS}, dequantised into tiles', PRODUCTS,
                                       products(language, count, args.runs)))
            for variant, against, times in timed_ones:
                ms = median(times)
                other = base.setdefault((against, count), ms)
                found.append(record(
                    'prefill', {'model': args.shape, 'dtype': dtype, 'path': 'cuda',
                                'tokens': count, 'variant': variant},
                    'ms', ms, 'ms', times=times,
                    baseline=None if dtype == 'bf16' else (COPY, other)))
        del language
        torch.cuda.empty_cache()
    return found


def products(language: LanguageModel, count: int, runs: int) -> list[float]:
    """Return milliseconds of the four matrices of each layer, for so many tokens."""
    config = language.config
    x, y = (torch.randn(count, width, dtype=language.dtype, device=language.device)
            for width in (config.width, config.mlp_width))

    def call() -> None:
        for layer in language.layers:
            layer.qkv(x)
            layer.out(x)
            layer.gate_up(x)
            layer.down(y)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    # As the engine does: launching so many small kernels one by one takes longer than they do.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return timed(graph.replay, runs, 1)


def whole(language: LanguageModel, count: int, runs: int) -> list[float]:
    """Return milliseconds of a prompt's prefill, the first two runs (which capture) left out."""
    x = torch.randn(count, language.config.width, dtype=language.dtype, device=language.device)
    positions = torch.arange(count, device=language.device).repeat(3, 1)
    cache = KVCache(language.config, count, language.device, language.dtype)
    return timed(lambda: language.prefill(x, positions, cache, 0), runs, 1)
