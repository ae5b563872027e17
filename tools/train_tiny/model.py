"""
A batched Qwen2-VL for training: fixed grids, one block mask, published parameter names.

The arithmetic is transformers' Qwen2VLForConditionalGeneration (vision blocks with 2-D rotary
embedding, 2x2 merger, grouped-query decoder with M-RoPE); what differs is only the batching: all
pictures have the same grid, and several questions share one picture through a mask in which each
sees the picture and itself. Stills see the patch embedding with both temporal halves added.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
PATCH = 14


@dataclass(frozen=True)
class Shape:
    """Sizes of the tiny model; head dimension is 64 everywhere."""

    vision_depth: int = 6
    vision_dim: int = 256
    depth: int = 6
    dim: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 448
    vocab: int = 0
    rope_theta: float = 100.0
    sections: tuple[int, int, int] = (8, 12, 12)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding in float32: x [B, heads, S, 64], cos and sin broadcastable."""
    y = x.float()
    a, b = y.chunk(2, dim=-1)
    return (y * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class VisionBlock(nn.Module):
    """One encoder block; names as in the published checkpoints."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({'qkv': nn.Linear(dim, 3 * dim), 'proj': nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({'fc1': nn.Linear(dim, 4 * dim), 'fc2': nn.Linear(4 * dim, dim)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, dim]; cos, sin [B or 1, 1, S, 64]."""
        b, s, d = x.shape
        qkv = self.attn['qkv'](self.norm1(x)).view(b, s, 3, d // 64, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.attn['proj'](out.transpose(1, 2).reshape(b, s, d))
        h = self.mlp['fc1'](self.norm2(x))
        return x + self.mlp['fc2'](h * torch.sigmoid(1.702 * h))


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class DecoderLayer(nn.Module):
    """One language layer; names as in the published checkpoints."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, kv = shape.dim, shape.kv_heads * 64
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.input_layernorm = RMSNorm(d)
        self.post_attention_layernorm = RMSNorm(d)
        self.self_attn = nn.ModuleDict({
            'q_proj': nn.Linear(d, shape.heads * 64), 'k_proj': nn.Linear(d, kv),
            'v_proj': nn.Linear(d, kv), 'o_proj': nn.Linear(shape.heads * 64, d, bias=False)})
        self.mlp = nn.ModuleDict({
            'gate_proj': nn.Linear(d, shape.ffn, bias=False),
            'up_proj': nn.Linear(d, shape.ffn, bias=False),
            'down_proj': nn.Linear(shape.ffn, d, bias=False)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, dim]; cos, sin [B or 1, 1, S, 64]; mask [1, 1, S, S] additive."""
        b, s, _ = x.shape
        h, a = self.input_layernorm(x), self.self_attn
        q = a['q_proj'](h).view(b, s, self.heads, 64).transpose(1, 2)
        k = a['k_proj'](h).view(b, s, self.kv_heads, 64).transpose(1, 2)
        v = a['v_proj'](h).view(b, s, self.kv_heads, 64).transpose(1, 2)
        group = self.heads // self.kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        x = x + a['o_proj'](out.transpose(1, 2).reshape(b, s, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp['down_proj'](F.silu(self.mlp['gate_proj'](h))
                                         * self.mlp['up_proj'](h))


class TinyQwen2VL(nn.Module):
    """Encoder, merger and decoder; :meth:`save` writes a Hugging Face folder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d = shape.vision_dim
        self.patch = nn.Parameter(torch.empty(d, 3 * PATCH * PATCH))
        self.blocks = nn.ModuleList(VisionBlock(d) for _ in range(shape.vision_depth))
        self.ln_q = nn.LayerNorm(d, eps=1e-6)
        self.merge0 = nn.Linear(4 * d, 4 * d)
        self.merge2 = nn.Linear(4 * d, shape.dim)
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.depth))
        self.norm = RMSNorm(shape.dim)
        # Only for training: what the thing whose centre lies in a unit is (colour, shape, digits).
        self.aux = nn.Linear(shape.dim, 8 + 6 + 33)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                out = name.endswith(('proj.weight', 'fc2.weight', 'o_proj.weight',
                                     'down_proj.weight')) and 'qkv' not in name
                nn.init.normal_(p, std=0.02 / (2 * shape.depth) ** 0.5 if out and (
                    'o_proj' in name or 'attn.proj' in name or 'down' in name or 'fc2' in name)
                    else 0.02)
            elif name.endswith('bias'):
                nn.init.zeros_(p)
        # Made last: the weights before it stay those that the seed alone gives.
        self.centres = nn.Linear(shape.dim, 4)
        self.register_buffer('vision_angles', _vision_angles(), persistent=False)
        self.register_buffer('pixel_mean', torch.tensor(MEAN) * 255, persistent=False)
        self.register_buffer('pixel_std', torch.tensor(STD) * 255, persistent=False)

    def patches(self, rgb: Tensor) -> Tensor:
        """Cut uint8 [B, 336, 448, 3] into normalised [B, 192, 4, 588] in unit order."""
        x = (rgb.float() - self.pixel_mean) / self.pixel_std
        x = x.to(torch.bfloat16 if rgb.is_cuda else torch.float32)
        x = x.view(-1, GRID_H, 2, PATCH, GRID_W, 2, PATCH, 3)
        return x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, UNITS, 4, 3 * PATCH * PATCH)

    def encode(self, rgb: Tensor, keep: Tensor | None = None) -> Tensor:
        """
        Encode pictures to merged tokens.

        :param rgb: uint8 [B, 336, 448, 3].
        :param keep: int64 [B, K] ascending unit indices; ``None`` keeps all 192.
        :return: [B, K, dim].
        """
        x, angles = self.patches(rgb), self.vision_angles[None]
        if keep is not None:
            x = x.gather(1, keep[:, :, None, None].expand(-1, -1, 4, x.shape[-1]))
            angles = self.vision_angles[keep]
        x = x.flatten(1, 2) @ self.patch.to(x.dtype).T
        angles = angles.flatten(1, 2)[:, None]
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.ln_q(x).view(x.shape[0], -1, 4 * self.shape.vision_dim)
        return self.merge2(F.gelu(self.merge0(x)))

    def decode(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """
        Run the language layers.

        :param x: embeddings [B, S, dim].
        :param positions: int64 [3, B or 1, S] M-RoPE positions (time, row, column).
        :param mask: additive [1, 1, S, S].
        :return: normalised hidden states [B, S, dim].
        """
        cos, sin = mrope(positions, self.shape.rope_theta, self.shape.sections)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def save(self, folder: Path, ids: dict[str, int], shard_mib: int = 0) -> None:
        """
        Write config and bf16 weights under the names that the published checkpoints use.

        :param folder: exists and holds the tokenizer.
        :param ids: token ids by token, from the tokenizer.
        :param shard_mib: split the weights into files of at most that size; 0 writes one.
        """
        tensors = {k: v.detach().to(torch.bfloat16).cpu().contiguous()
                   for k, v in published_names(self).items()}
        _write(folder, tensors, shard_mib)
        (folder / 'config.json').write_text(json.dumps(config(self.shape, ids), indent=2))
        (folder / 'preprocessor_config.json').write_text(json.dumps(PREPROCESSOR, indent=2))
        (folder / 'generation_config.json').write_text(json.dumps({
            'do_sample': False, 'bos_token_id': ids['<|endoftext|>'],
            'pad_token_id': ids['<|endoftext|>'],
            'eos_token_id': [ids['<|im_end|>'], ids['<|endoftext|>']]}, indent=2))


def _vision_angles() -> Tensor:
    """Return rotary angles [192, 4, 64] of all patches in unit order (20 -> 16 frequencies)."""
    inv = 1.0 / (10000.0 ** (torch.arange(0, 32, 2).float() / 32))
    rows, cols = torch.meshgrid(torch.arange(2 * GRID_H), torch.arange(2 * GRID_W), indexing='ij')
    order = [t.view(GRID_H, 2, GRID_W, 2).permute(0, 2, 1, 3).reshape(UNITS, 4)
             for t in (rows, cols)]
    freqs = torch.cat([o.float()[..., None] * inv for o in order], dim=-1)
    return torch.cat((freqs, freqs), dim=-1)


def mrope(positions: Tensor, theta: float, sections: tuple[int, int, int]
          ) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, S, 64] of three-axis positions [3, B, S]."""
    inv = 1.0 / (theta ** (torch.arange(0, 64, 2, device=positions.device).float() / 64))
    freqs = positions[..., None].float() * inv
    parts = [chunk[axis] for axis, chunk in enumerate(freqs.split(list(sections), dim=-1))]
    half = torch.cat(parts, dim=-1)
    angles = torch.cat((half, half), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def published_names(model: TinyQwen2VL) -> dict[str, Tensor]:
    """Map parameters to the published names; the still's patch weight is halved into both."""
    out: dict[str, Tensor] = {}
    half = (model.patch.detach() / 2).view(-1, 3, 1, PATCH, PATCH)
    out['visual.patch_embed.proj.weight'] = half.expand(-1, -1, 2, -1, -1)
    for name, p in model.named_parameters():
        if name.startswith('blocks.'):
            out[f'visual.{name}'] = p
        elif name.startswith('layers.'):
            out[f'model.{name}'] = p
    for ours, theirs in (('ln_q', 'visual.merger.ln_q'), ('merge0', 'visual.merger.mlp.0'),
                         ('merge2', 'visual.merger.mlp.2')):
        for part in ('weight', 'bias'):
            out[f'{theirs}.{part}'] = getattr(getattr(model, ours), part)
    out['model.embed_tokens.weight'] = model.embed.weight
    out['model.norm.weight'] = model.norm.weight
    return out


def load_published(model: TinyQwen2VL, tensors: dict[str, Tensor]) -> None:
    """Load what :func:`published_names` gave back into a model."""
    for name, p in published_names(model).items():
        if name == 'visual.patch_embed.proj.weight':
            model.patch.data.copy_(tensors[name].float().sum(2).flatten(1))
        else:
            p.data.copy_(tensors[name].float())


def _write(folder: Path, tensors: dict[str, Tensor], shard_mib: int) -> None:
    from safetensors.torch import save_file
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, t in tensors.items():
        if shard_mib and size + t.nbytes > shard_mib << 20:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += t.nbytes
    if len(shards) == 1:
        save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
        return
    index = {}
    for i, shard in enumerate(shards, 1):
        file = f'model-{i:05d}-of-{len(shards):05d}.safetensors'
        save_file(shard, folder / file, metadata={'format': 'pt'})
        index.update(dict.fromkeys(shard, file))
    (folder / 'model.safetensors.index.json').write_text(json.dumps(
        {'metadata': {'total_size': sum(t.nbytes for t in tensors.values())},
         'weight_map': index}, indent=2))


PREPROCESSOR = {
    'image_processor_type': 'Qwen2VLImageProcessor', 'processor_class': 'Qwen2VLProcessor',
    'min_pixels': 3136, 'max_pixels': 153600, 'patch_size': PATCH, 'temporal_patch_size': 2,
    'merge_size': 2, 'image_mean': list(MEAN), 'image_std': list(STD)}


def config(shape: Shape, ids: dict[str, int]) -> dict:
    """Return config.json in the published (flat) form."""
    s = asdict(shape)
    return {
        'architectures': ['Qwen2VLForConditionalGeneration'], 'model_type': 'qwen2_vl',
        'attention_dropout': 0.0, 'bos_token_id': ids['<|endoftext|>'],
        'eos_token_id': ids['<|im_end|>'], 'vision_start_token_id': ids['<|vision_start|>'],
        'vision_end_token_id': ids['<|vision_end|>'], 'vision_token_id': ids['<|vision_pad|>'],
        'image_token_id': ids['<|image_pad|>'], 'video_token_id': ids['<|video_pad|>'],
        'hidden_act': 'silu', 'hidden_size': s['dim'], 'initializer_range': 0.02,
        'intermediate_size': s['ffn'], 'max_position_embeddings': 4096,
        'num_attention_heads': s['heads'], 'num_hidden_layers': s['depth'],
        'num_key_value_heads': s['kv_heads'], 'rms_norm_eps': 1e-6,
        'rope_theta': s['rope_theta'], 'tie_word_embeddings': True, 'torch_dtype': 'bfloat16',
        'use_cache': True, 'use_sliding_window': False, 'vocab_size': s['vocab'],
        'rope_scaling': {'type': 'mrope', 'mrope_section': list(s['sections'])},
        'vision_config': {
            'depth': s['vision_depth'], 'embed_dim': s['vision_dim'], 'hidden_act': 'quick_gelu',
            'hidden_size': s['dim'], 'in_chans': 3, 'in_channels': 3, 'mlp_ratio': 4,
            'num_heads': s['vision_dim'] // 64, 'patch_size': PATCH, 'spatial_merge_size': 2,
            'spatial_patch_size': PATCH, 'temporal_patch_size': 2, 'model_type': 'qwen2_vl'}}
