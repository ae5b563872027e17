"""Decoders of the official shapes with random weights, ours and transformers' alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.config import LanguageConfig
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import DecoderLayer, LanguageModel
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8Linear
from qwen_vl_ros.engine.quantize import quantize_language
from qwen_vl_ros.measure.roofline import SHAPES

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}


def random_weights(config: LanguageConfig, tied: bool, dtype: torch.dtype, device: torch.device,
                   ) -> dict[str, Tensor]:
    """Return weights under the names that :class:`LanguageModel` takes, always the same ones."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
        # In place: what lies about in float32 would leave holes in the device's memory.
        return torch.empty(shape, dtype=dtype, device=device).normal_(
            mean, scale, generator=generator)

    c, m, kv = config.width, config.mlp_width, config.kv_heads * config.head_dim
    out = {'language.embed_tokens.weight': normal(config.vocab, c, scale=0.05),
           'language.norm.weight': normal(c, scale=0.1, mean=1.0)}
    if not tied:
        out['lm_head.weight'] = normal(config.vocab, c, scale=0.05)
    for i in range(config.layers):
        base = f'language.layers.{i}'
        for name in ('input_layernorm', 'post_attention_layernorm'):
            out[f'{base}.{name}.weight'] = normal(c, scale=0.1, mean=1.0)
        for name, rows in (('q', c), ('k', kv), ('v', kv), ('o', c)):
            out[f'{base}.self_attn.{name}_proj.weight'] = normal(rows, c, scale=c ** -0.5)
            if name != 'o':
                out[f'{base}.self_attn.{name}_proj.bias'] = normal(rows, scale=0.2)
        for name, rows, inputs in (('gate', m, c), ('up', m, c), ('down', c, m)):
            out[f'{base}.mlp.{name}_proj.weight'] = normal(rows, inputs, scale=inputs ** -0.5)
    return out


def language_model(shape: str, dtype: str, device: torch.device) -> LanguageModel:
    """
    Return a decoder with random weights.

    :param shape: 2b, 7b or tiny.
    :param dtype: bf16, fp16, or int8 or int4 made from bf16.
    """
    found = SHAPES[shape]
    weights = random_weights(
        found.language, found.tied, DTYPES.get(dtype, torch.bfloat16), device)
    language = LanguageModel(found.language, weights)
    if dtype not in DTYPES:
        quantize_language(language, dtype)
    return language


def filled_cache(language: LanguageModel, length: int, capacity: int) -> KVCache:
    """Return a cache with random rows up to ``length``."""
    cache = KVCache(language.config, capacity, language.device, language.dtype)
    cache.rows.normal_()
    cache.length = length
    return cache


def widened(language: LanguageModel) -> LanguageModel:
    """Return the same decoder in float32, quantised matrices dequantised."""
    def wide(linear: Linear) -> Linear:
        bias = None if linear.bias is None else linear.bias.float()
        if isinstance(linear, (Int8Linear, Int4Linear)):
            return Linear(linear.dequantised(torch.float32), bias)
        return Linear(linear.weight.float(), bias)

    out = copy.copy(language)
    out.layers = [DecoderLayer(
        x.norm1.float(), wide(x.qkv), wide(x.out), x.norm2.float(), wide(x.gate_up), wide(x.down))
        for x in language.layers]
    out.head, out.norm = wide(language.head), language.norm.float()
    out.embedding, out.dtype = language.embedding.float(), torch.float32
    return out


class TheirDecoder:
    """
    transformers' text model with the same random weights, one sequence, without ``generate``.

    :param compiled: with a static cache and ``torch.compile`` in mode reduce-overhead.
    """

    def __init__(self, shape: str, device: torch.device, dtype: torch.dtype, capacity: int,
                 compiled: bool = False) -> None:
        from transformers import DynamicCache, StaticCache
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

        found = SHAPES[shape]
        c = found.language
        config = Qwen2VLTextConfig(
            vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp_width,
            num_hidden_layers=c.layers, num_attention_heads=c.heads, rms_norm_eps=c.eps,
            num_key_value_heads=c.kv_heads, max_position_embeddings=c.max_positions,
            rope_parameters={'rope_type': 'default', 'rope_theta': c.theta,
                             'mrope_section': list(c.mrope_section)},
            use_sliding_window=False, bos_token_id=None, eos_token_id=None)
        weights = random_weights(c, found.tied, dtype, device)
        head = weights.pop('lm_head.weight', weights['language.embed_tokens.weight'])
        with device:
            model = Qwen2VLTextModel(config)
        model.load_state_dict(
            {k.removeprefix('language.'): v for k, v in weights.items()}, strict=True, assign=True)
        self.device, self.head = device, head
        self.model = model.eval()
        self.cache: Any = (StaticCache(config=config, max_cache_len=capacity) if compiled
                           else DynamicCache(config=config))
        self._call = self._forward
        if compiled:
            self._call = torch.compile(self._forward, mode='reduce-overhead', fullgraph=True)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, position_ids=positions.expand(3, 1, -1),
                            past_key_values=self.cache, use_cache=True).last_hidden_state
        return F.linear(hidden[0, -1], self.head)

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> Tensor:
        """Run a prompt from the beginning; return the logits [vocab] of its end."""
        return self._forward(torch.tensor([ids], device=self.device),
                             torch.arange(len(ids), device=self.device))

    @torch.inference_mode()
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Run one token, int64 [1, 1], at position int64 [1]; return its logits [vocab]."""
        return self._call(token, position)
