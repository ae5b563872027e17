"""The decoder: prefill of many positions and the step of one, apart from each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.config import LanguageConfig
from qwen_vl_ros.engine.cuda_prefill import CudaPrefill
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.layers import Linear, activate, inverse_frequencies, rms_norm, rotate
from qwen_vl_ros.engine.quant_files import QuantFormat, take_linear

#: Fewer rows than this are left to plain torch: they are steps of a decoder, not prompts.
FUSED_ROWS = 8

#: Tokens that plain torch prefills between two looks at cancel.
PLAIN_CHUNK = 512


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; query, key and value rows are stacked, gate and up rows too."""

    norm1: Tensor
    qkv: Linear
    out: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


class LanguageModel:
    """
    Qwen2 decoder with multimodal rotary positions (M-RoPE) and grouped-query attention.

    On a GPU that has kernels for its shape, prefill runs fused (see cuda_prefill.py).

    :param config: its shape.
    :param tensors: canonical names to weights; entries are taken out.
    :param form: how the layers' matrices are stored; ``None`` is in floats.
    """

    def __init__(
        self, config: LanguageConfig, tensors: dict[str, Tensor], form: QuantFormat | None = None,
    ) -> None:
        self.config = config
        take = tensors.pop
        self.embedding = take('language.embed_tokens.weight')
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.layers = []
        for i in range(config.layers):
            base = f'language.layers.{i}'
            attn, mlp = f'{base}.self_attn', f'{base}.mlp'
            self.layers.append(DecoderLayer(
                take(f'{base}.input_layernorm.weight'),
                take_linear(tensors, [f'{attn}.{n}_proj' for n in 'qkv'], form, bias=True),
                take_linear(tensors, [f'{attn}.o_proj'], form),
                take(f'{base}.post_attention_layernorm.weight'),
                take_linear(tensors, [f'{mlp}.{n}_proj' for n in ('gate', 'up')], form),
                take_linear(tensors, [f'{mlp}.down_proj'], form)))
        self.norm = take('language.norm.weight')
        self.head = Linear(tensors.pop('lm_head.weight', self.embedding))
        self.frequencies = inverse_frequencies(config.head_dim, config.theta).to(self.device)
        axes = [axis for axis, count in enumerate(config.mrope_section) for _ in range(count)]
        self.axes = torch.tensor(axes, device=self.device)
        #: Fused prefill; ``None`` is plain torch.
        self.fused = CudaPrefill.make(self)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that one decoded token reads (one embedding row aside)."""
        total = self.head.nbytes + self.norm.nbytes
        for x in self.layers:
            total += sum(m.nbytes for m in (x.qkv, x.out, x.gate_up, x.down))
            total += x.norm1.nbytes + x.norm2.nbytes
        return total

    def embed(self, ids: Tensor) -> Tensor:
        """Look up token embeddings; ids int64 [n] -> [n, width]."""
        return F.embedding(ids, self.embedding)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return cos and sin of M-RoPE, [n, head_dim] in the model's dtype.

        Frequency i turns with the axis that its section names: time, row or column.

        :param positions: int64 [3, n].
        """
        angles = positions[self.axes].T.float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def prefill(self, x: Tensor, positions: Tensor, cache: KVCache, start: int,
                wanted: int | None = None) -> Tensor:
        """
        Run a chunk of the prompt and store its keys and values.

        :param x: embeddings [n, width].
        :param positions: int64 [3, n].
        :param cache: holds the ``start`` positions before the chunk; its rows from ``start`` are
            written.
        :param start: index of the first row.
        :param wanted: how many of the last hidden states are wanted, 0 or 1; ``None`` is all.
        :return: hidden states [n or wanted, width] after the last layer, before the final norm.
        """
        if self.fused is not None and x.shape[0] >= FUSED_ROWS and self.fused.fits(cache):
            return self.fused.run(x, positions, cache, start, wanted)
        hidden = self.prefill_plain(x, positions, cache, start)
        return hidden if wanted is None else hidden[hidden.shape[0] - wanted:]

    def chunk(self, most: int) -> int:
        """Return how many tokens to prefill between two looks at cancel; at most ``most``."""
        return min(most, PLAIN_CHUNK) if self.fused is None else self.fused.chunk(most)

    def prefill_plain(self, x: Tensor, positions: Tensor, cache: KVCache, start: int) -> Tensor:
        """Run a chunk in plain torch; the fused form is held against this."""
        cos, sin = self.rotary(positions)
        mask = causal_mask(x.shape[0], start, x.device)
        for i, layer in enumerate(self.layers):
            x = self._layer(x, layer, cos, sin, mask, cache, i, start)
        return x

    def decode(self, token: Tensor, position: int, cache: KVCache, start: int) -> Tensor:
        """
        Run one token.

        :param token: int64 [1] on the model's device.
        :param position: its M-RoPE position, the same on all three axes.
        :param cache: holds ``start`` positions.
        :return: logits [vocab] of the next token.
        """
        positions = torch.full((3, 1), position, device=self.device)
        return self.logits(self.prefill(self.embed(token), positions, cache, start))[0]

    def logits(self, x: Tensor) -> Tensor:
        """Return logits; x [n, width] -> [n, vocab]."""
        return self.head(rms_norm(x, self.norm, self.config.eps))

    def best(self, hidden: Tensor) -> Tensor | None:
        """
        Choose the likeliest token in one launch, where there is a kernel for it.

        :param hidden: the last hidden state [1, width].
        :return: float64 [4] as of :func:`~qwen_vl_ros.engine.generate.choice_row`, from logits
            that were not rounded; ``None`` where there is no kernel.
        """
        if self.fused is None or type(self.head) is not Linear or (
                not self.fused.prompt.takes(self.head.weight)):
            return None
        out = torch.empty(4, dtype=torch.float64, device=self.device)
        return self.fused.prompt.first_token(
            hidden, self.norm, self.config.eps, self.head.weight, out)

    def _layer(
        self, x: Tensor, layer: DecoderLayer, cos: Tensor, sin: Tensor, mask: Tensor | None,
        cache: KVCache, index: int, start: int,
    ) -> Tensor:
        cfg = self.config
        n = x.shape[0]
        y = layer.qkv(rms_norm(x, layer.norm1, cfg.eps))
        y = y.reshape(n, cfg.heads + 2 * cfg.kv_heads, cfg.head_dim).transpose(0, 1)
        turned = rotate(y[:cfg.heads + cfg.kv_heads], cos, sin)
        q, k = turned[:cfg.heads], turned[cfg.heads:]
        keys, values = cache.write(index, start, k, y[cfg.heads + cfg.kv_heads:])
        y = causal_attention(q, keys, values, mask)
        x = x + layer.out(y.transpose(0, 1).reshape(n, cfg.width))
        gate, up = layer.gate_up(rms_norm(x, layer.norm2, cfg.eps)).chunk(2, dim=-1)
        return x + layer.down(activate(gate, cfg.activation) * up)


def causal_mask(n: int, start: int, device: torch.device) -> Tensor | None:
    """
    Return which of ``start + n`` keys each of the last n positions may see, bool [n, start + n].

    With n = 2 after start = 2::

        q0  x x x .
        q1  x x x x

    ``None`` where attention needs no mask: a single position, or a chunk with nothing before it.
    """
    if n == 1 or start == 0:
        return None
    return torch.ones(n, start + n, dtype=torch.bool, device=device).tril_(start)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """
    Attend from the last n positions to all up to their own; scores and softmax in float32.

    :param q: [heads, n, D].
    :param k: [kv_heads, m, D], m >= n; head h reads group h // (heads / kv_heads).
    :param v: as k.
    :param mask: of :func:`causal_mask`.
    :return: [heads, n, D].
    """
    heads, n, dim = q.shape
    kv_heads, m, _ = k.shape
    group = heads // kv_heads
    if n == 1:
        # One position: the heads of a group become the rows of one small product.
        out = F.scaled_dot_product_attention(q.reshape(1, kv_heads, group, dim), k[None], v[None])
        return out.reshape(heads, 1, dim)
    k, v = (z[:, None].expand(-1, group, -1, -1).reshape(1, heads, m, dim) for z in (k, v))
    return F.scaled_dot_product_attention(
        q[None], k, v, attn_mask=mask, is_causal=mask is None)[0]
