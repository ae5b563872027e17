"""
Many pictures with one question each through a tiny checkpoint: dropped, gated or whole.

The arithmetic is that of ``tools/train_tiny/model.py``, with three additions: any grid (smaller
pictures, crops), several pictures in one prompt, and a gate for each unit. A gate is the logarithm
of a weight that every attention of encoder and decoder gives to the unit's keys: 0 keeps the unit
as it is, minus infinity is the same as dropping it (the units' own rows are computed and never
looked at), and in between a gradient passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W
from tools.train_tiny.data import encode, prefix_ids
from tools.train_tiny.model import (
    PATCH,
    Shape,
    TinyQwen2VL,
    load_published,
    mrope,
    rotate,
)

#: A gate under which nothing passes.
CLOSED = -1e4
_HEAD = 64


@dataclass
class Picture:
    """
    One picture's place in the prompts of a batch.

    :param merged: [B, V, dim].
    :param units: int64 [B, V], raster indices over all slices.
    :param grid: rows and columns in units.
    :param gate: [B, V] or ``None``.
    """

    merged: Tensor
    units: Tensor
    grid: tuple[int, int] = (GRID_H, GRID_W)
    gate: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, causal: bool = False) -> Tensor:
    """
    Attend with gated keys: one more channel of queries and keys adds the gate to every score.

    :param q: [B, heads, S, 64]; k and v alike.
    :param gate: [B, S], logarithms of the keys' weights.
    :return: [B, heads, S, 64].
    """
    if gate is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    b, heads, s, d = q.shape
    root = d ** 0.5
    ones = F.pad(q.new_full((b, heads, s, 1), root), (0, 7))
    more = F.pad(gate.to(k.dtype)[:, None, :, None].expand(b, heads, s, 1), (0, 7))
    out = F.scaled_dot_product_attention(
        torch.cat((q, ones), -1), torch.cat((k, more), -1), F.pad(v, (0, 8)), is_causal=causal,
        scale=1 / root)
    return out[..., :d]


class TinyBatch:
    """
    A frozen tiny checkpoint.

    :param folder: of the checkpoint.
    :param dtype: of weights and activations; bfloat16 on CUDA, float32 on the CPU by default.
    """

    def __init__(self, folder: Path, device: torch.device,
                 dtype: torch.dtype | None = None) -> None:
        from safetensors.torch import load_file
        tensors = load_file(folder / 'model.safetensors')
        self.device = device
        self.dtype = dtype or (torch.bfloat16 if device.type == 'cuda' else torch.float32)
        vocab = tensors['model.embed_tokens.weight'].shape[0]
        model = TinyQwen2VL(Shape(vocab=vocab))
        load_published(model, tensors)
        self.model = model.to(device, self.dtype).requires_grad_(False).eval()
        # Angles and pixel statistics stay in float32.
        model.vision_angles = model.vision_angles.float()
        model.pixel_mean, model.pixel_std = model.pixel_mean.float(), model.pixel_std.float()
        self.prefix = torch.tensor(prefix_ids(), device=device)
        self.close = torch.tensor(encode('<|vision_end|>'), device=device)
        self.open = self.prefix[-1:]
        self._angles: dict[tuple[int, int], Tensor] = {(GRID_H, GRID_W): model.vision_angles}

    def patches(self, rgb: Tensor) -> Tensor:
        """Cut uint8 or float [B, 28 r, 28 c, 3] into normalised [B, r * c, 4, 588]."""
        m = self.model
        rows, columns = rgb.shape[1] // (2 * PATCH), rgb.shape[2] // (2 * PATCH)
        x = ((rgb.float() - m.pixel_mean) / m.pixel_std).to(self.dtype)
        x = x.view(-1, rows, 2, PATCH, columns, 2, PATCH, 3)
        return x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, rows * columns, 4, 3 * PATCH ** 2)

    def angles(self, grid: tuple[int, int]) -> Tensor:
        """Return rotary angles [rows * columns, 4, 64] of a grid in units."""
        if grid not in self._angles:
            rows, columns = grid
            inv = 1.0 / (10000.0 ** (torch.arange(0, 32, 2, device=self.device).float() / 32))
            spots = torch.meshgrid(torch.arange(2 * rows, device=self.device),
                                   torch.arange(2 * columns, device=self.device), indexing='ij')
            order = [t.view(rows, 2, columns, 2).permute(0, 2, 1, 3).reshape(-1, 4)
                     for t in spots]
            freqs = torch.cat([o.float()[..., None] * inv for o in order], dim=-1)
            self._angles[grid] = torch.cat((freqs, freqs), dim=-1)
        return self._angles[grid]

    def encode(self, rgb: Tensor, keep: Tensor | None = None, gate: Tensor | None = None,
               entropy_of: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """
        Encode pictures of one size.

        :param rgb: uint8 [B, 28 r, 28 c, 3].
        :param keep: int64 [B, K] ascending; ``None`` keeps all.
        :param gate: [B, K or r * c].
        :param entropy_of: also return the focus (log n - entropy of attention, one row a unit) of
            this block, float32 [B, K].
        :return: [B, K, dim].
        """
        grid = (rgb.shape[1] // (2 * PATCH), rgb.shape[2] // (2 * PATCH))
        x, angles = self.patches(rgb), self.angles(grid)[None]
        if keep is not None:
            x = x.gather(1, keep[:, :, None, None].expand(-1, -1, 4, x.shape[-1]))
            angles = angles[0][keep]
        m = self.model
        x = x.flatten(1, 2) @ m.patch.T
        angles = angles.flatten(1, 2)[:, None]
        cos, sin = angles.cos(), angles.sin()
        bias = None if gate is None else gate.repeat_interleave(4, 1)
        focus = None
        for index, block in enumerate(m.blocks):
            b, s, d = x.shape
            qkv = block.attn['qkv'](block.norm1(x)).view(b, s, 3, d // _HEAD, _HEAD)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            if index == entropy_of:
                logp = (q[:, :, ::4].float() @ k.float().transpose(2, 3) / 8).log_softmax(-1)
                focus = torch.log(torch.tensor(float(s))) + (logp.exp() * logp).sum(-1).mean(1)
            out = attend(q, k, v, bias)
            x = x + block.attn['proj'](out.transpose(1, 2).reshape(b, s, d))
            h = block.mlp['fc1'](block.norm2(x))
            x = x + block.mlp['fc2'](h * torch.sigmoid(1.702 * h))
        x = m.ln_q(x).view(x.shape[0], -1, 4 * m.shape.vision_dim)
        x = m.merge2(F.gelu(m.merge0(x)))
        return x if focus is None else (x, focus)

    def prompt(self, pictures: Sequence[Picture], tokens: Tensor
               ) -> tuple[Tensor, Tensor, Tensor | None]:
        """
        Put pictures and questions together.

        :param tokens: int64 [B, L], question and answer, padded.
        :return: embeddings [B, S, dim], positions [3, B, S], gates [B, S] or ``None``.
        """
        b = tokens.shape[0]
        parts, places, gates = [], [], []
        at = 0

        def text(ids: Tensor) -> None:
            nonlocal at
            ids = ids.expand(b, -1)
            parts.append(self.model.embed(ids))
            n = ids.shape[1]
            places.append((torch.arange(n, device=self.device) + at).expand(3, b, n))
            gates.append(parts[-1].new_zeros((b, n)))
            at += n

        text(self.prefix)
        for index, picture in enumerate(pictures):
            if index:
                text(self.open)
            rows, columns = picture.grid
            inside = picture.units % (rows * columns)
            parts.append(picture.merged)
            places.append(torch.stack((picture.units // (rows * columns), inside // columns,
                                       inside % columns)) + at)
            gates.append(picture.merged.new_zeros(picture.units.shape) if picture.gate is None
                         else picture.gate.to(picture.merged.dtype))
            at += max(rows, columns)
            text(self.close)
        text(tokens)
        gated = any(p.gate is not None for p in pictures)
        return (torch.cat(parts, 1), torch.cat(places, 2),
                torch.cat(gates, 1) if gated else None)

    def layers(self, x: Tensor, positions: Tensor, gate: Tensor | None, count: int | None = None,
               first: int = 0) -> Tensor:
        """Run decoder layers ``first`` to ``count``; x [B, S, dim]."""
        shape = self.model.shape
        cos, sin = mrope(positions, shape.rope_theta, shape.sections)
        for layer in self.model.layers[first:count]:
            x = self.layer(layer, x, cos, sin, gate)
        return x

    def layer(self, layer, x: Tensor, cos: Tensor, sin: Tensor, gate: Tensor | None) -> Tensor:
        """Run one decoder layer."""
        q, k, v = self.qkv(layer, x, cos, sin)
        out = attend(q, k, v, gate, causal=True)
        x = x + layer.self_attn['o_proj'](out.transpose(1, 2).flatten(2))
        h = layer.post_attention_layernorm(x)
        return x + layer.mlp['down_proj'](F.silu(layer.mlp['gate_proj'](h))
                                          * layer.mlp['up_proj'](h))

    @staticmethod
    def qkv(layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, all [B, heads, S, 64]."""
        b, s, _ = x.shape
        h, a = layer.input_layernorm(x), layer.self_attn
        q = a['q_proj'](h).view(b, s, layer.heads, _HEAD).transpose(1, 2)
        k = a['k_proj'](h).view(b, s, layer.kv_heads, _HEAD).transpose(1, 2)
        v = a['v_proj'](h).view(b, s, layer.kv_heads, _HEAD).transpose(1, 2)
        group = layer.heads // layer.kv_heads
        return (rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(group, 1),
                v.repeat_interleave(group, 1))

    def logits(self, hidden: Tensor, length: int) -> Tensor:
        """Return the logits of the last ``length`` rows, [B, length, vocab]."""
        return F.linear(self.model.norm(hidden[:, -length:]), self.model.embed.weight)

    def answer(self, pictures: Sequence[Picture], tokens: Tensor) -> Tensor:
        """Return logits [B, L, vocab] of questions and their answers."""
        x, positions, gate = self.prompt(pictures, tokens)
        return self.logits(self.layers(x, positions, gate), tokens.shape[1])


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return bool [B]: every token of the answer is the best one (greedy decoding says it)."""
    return ((logits.argmax(-1) == labels) | (labels < 0)).all(-1)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """
    Return how far each answer's tokens stand above the best other token, summed; [B].

    The contrastive target of Grad-CAM: it does not fade where the model is sure.
    """
    wide = logits.float()
    at = labels.clamp(min=0)[..., None]
    own = wide.gather(-1, at)[..., 0]
    other = wide.scatter(-1, at, -torch.inf).amax(-1)
    return ((own - other) * (labels >= 0)).sum(-1)


def log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed log-probability of each answer, [B]."""
    logp = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (logp * (labels >= 0)).sum(-1)


def grad_cam(batch: TinyBatch, pictures: Sequence[Picture], tokens: Tensor, labels: Tensor,
             target=margins, count: int | None = None) -> tuple[list[Tensor], Tensor]:
    """
    Return relu(sum of gradient x activation) of every picture's merged tokens, and the logits.

    :param target: from logits and labels to one value an item.
    :param count: decoder layers to pass; ``None`` is all.
    :return: (float32 [B, V] of each picture, logits [B, L, vocab]).
    """
    with torch.enable_grad():
        leaves = [p.merged.detach().clone().requires_grad_() for p in pictures]
        x, positions, gate = batch.prompt(
            [Picture(leaf, p.units, p.grid, p.gate) for leaf, p in zip(leaves, pictures)], tokens)
        logits = batch.logits(batch.layers(x, positions, gate, count), tokens.shape[1])
        grads = torch.autograd.grad(target(logits, labels).sum(), leaves)
    maps = [F.relu((g.float() * leaf.detach().float()).sum(-1)) for g, leaf in zip(grads, leaves)]
    return maps, logits.detach()
