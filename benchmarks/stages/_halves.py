"""
Encoder and decoder of an official shape with random weights, made on the GPU: ours and
transformers' over the same tensors. Speed does not depend on the values.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.records import CannotRun
from qwen_vl_ros.engine.checkpoint import canonical
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.patches import IMAGE_MEAN, IMAGE_STD
from qwen_vl_ros.engine.vision import VisionEncoder
from qwen_vl_ros.measure.roofline import SHAPES, Shape

EAGER, COMPILED = 'transformers eager', 'transformers blocks compiled'


class Halves:
    """
    Both halves of a model.

    :param shape: 2b or 7b.
    :param dtype: bfloat16 or float16.
    :param more: further fields of transformers' config.
    :raises CannotRun: without a GPU.
    """

    def __init__(self, shape: str, dtype: torch.dtype, **more: Any) -> None:
        if not torch.cuda.is_available():
            raise CannotRun('torch finds no CUDA device')
        self.device = torch.device('cuda', torch.cuda.current_device())
        self.shape = SHAPES[shape]
        self.dtype = dtype
        self.reference = random_model(self.shape, dtype, self.device, **more)
        tensors = {canonical(key): value for key, value in self.reference.state_dict().items()}
        if self.shape.tied:
            tensors.pop('lm_head.weight', None)
        self.vision = VisionEncoder(self.shape.vision, tensors)
        self.language = LanguageModel(self.shape.language, tensors)

    @property
    def their_vision(self) -> nn.Module:
        """Return transformers' encoder."""
        return self.reference.model.visual

    @property
    def their_language(self) -> nn.Module:
        """Return transformers' decoder without the output matrix."""
        return self.reference.model.language_model


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device, **more: Any) -> Any:
    """Return transformers' model with random weights."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text, vision = shape.language, shape.vision
    config = Qwen2VLConfig.from_dict({
        'model_type': 'qwen2_vl', 'architectures': ['Qwen2VLForConditionalGeneration'],
        'vocab_size': text.vocab, 'hidden_size': text.width, 'num_hidden_layers': text.layers,
        'intermediate_size': text.mlp_width, 'num_attention_heads': text.heads,
        'num_key_value_heads': text.kv_heads, 'rope_theta': text.theta, 'hidden_act': 'silu',
        'tie_word_embeddings': shape.tied, 'max_position_embeddings': text.max_positions,
        'rms_norm_eps': text.eps,
        'rope_scaling': {'type': 'mrope', 'mrope_section': list(text.mrope_section)},
        'vision_config': {
            'depth': vision.depth, 'embed_dim': vision.width, 'num_heads': vision.heads,
            'hidden_size': text.width, 'mlp_ratio': vision.mlp_width // vision.width,
            'hidden_act': vision.activation, 'patch_size': 14, 'spatial_merge_size': 2,
            'temporal_patch_size': 2, 'in_channels': 3}, **more})
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            return Qwen2VLForConditionalGeneration(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def in_float32(module: nn.Module) -> nn.Module:
    """Return a float32 copy."""
    return copy.deepcopy(module).float()


def pixel_values(patches: Tensor) -> Tensor:
    """
    Return what transformers' processor would have made of patches.

    :param patches: uint8 [n, 588] or [n, 1176].
    :return: float32 [n, 1176].
    """
    mean, std = (torch.tensor(x, device=patches.device)[:, None, None]
                 for x in (IMAGE_MEAN, IMAGE_STD))
    frames = patches.shape[1] // 588
    x = (patches.reshape(patches.shape[0], 3, frames, 196).float() / 255 - mean) / std
    return (x if frames == 2 else x.expand(-1, -1, 2, -1)).reshape(patches.shape[0], -1)


def merged(found: Any) -> Tensor:
    """Return the merged tokens out of what transformers' encoder returns, by release."""
    if isinstance(found, Tensor):
        return found
    return found.pooler_output if found.pooler_output is not None else found.last_hidden_state


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the error's norm over that of what is expected."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def wall_ms(call: Callable[[int], object], seconds: float, least: int = 5) -> list[float]:
    """Return milliseconds from call to result on the device, each call awaited."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    for i in range(-2, 100_000):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call(max(i, 0))
        torch.cuda.synchronize()
        if i >= 0:
            times.append((time.perf_counter() - started) * 1e3)
        if i >= least and time.perf_counter() > until:
            break
    return times


def product_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """Return TFLOP/s of a large square product of random numbers by cuBLAS, through torch."""
    a, b = (torch.randn(size, size, device='cuda', dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = float('inf')
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 2 * size ** 3 / best / 1e9
