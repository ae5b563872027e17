"""The encoder: uint8 patches of kept units in, merged tokens out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.engine.config import VisionConfig
from qwen_vl_ros.engine.cuda_encoder import EPS, CudaEncoder
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.layers import Linear, activate, inverse_frequencies, rotate
from qwen_vl_ros.engine.patches import IMAGE_MEAN, IMAGE_STD

#: Called with (index of the block, segment lengths, q, k), q and k [heads, n, head_dim] rotated.
Probe = Callable[[int, list[int], Tensor, Tensor], None]


@dataclass(frozen=True)
class VisionBlock:
    """Weights of one pre-norm block; norms are (weight, bias)."""

    norm1: tuple[Tensor, Tensor]
    qkv: Linear
    proj: Linear
    norm2: tuple[Tensor, Tensor]
    fc1: Linear
    fc2: Linear


class VisionEncoder:
    """
    Qwen2-VL's vision transformer.

    On a GPU that has kernels for its shape, blocks and merger run fused (see cuda_encoder.py);
    elsewhere, and where a probe looks on, in plain torch.

    :param config: its shape.
    :param tensors: canonical names (``visual.…``) to weights; entries are taken out, so that what
        is copied does not stay twice.
    """

    def __init__(self, config: VisionConfig, tensors: dict[str, Tensor]) -> None:
        self.config = config
        take = tensors.pop
        kernel = take('visual.patch_embed.proj.weight')
        self.device, self.dtype = kernel.device, kernel.dtype
        self.still_weight, self.still_bias = fold_still(kernel)
        self.pair_weight, self.pair_bias = fold_pair(kernel)

        def pair(name: str) -> tuple[Tensor, Tensor]:
            return take(f'{name}.weight'), take(f'{name}.bias')

        self.blocks = []
        for i in range(config.depth):
            base = f'visual.blocks.{i}'
            self.blocks.append(VisionBlock(
                pair(f'{base}.norm1'), Linear(*pair(f'{base}.attn.qkv')),
                Linear(*pair(f'{base}.attn.proj')), pair(f'{base}.norm2'),
                Linear(*pair(f'{base}.mlp.fc1')), Linear(*pair(f'{base}.mlp.fc2'))))
        self.merge_norm = pair('visual.merger.ln_q')
        self.merge_fc1 = Linear(*pair('visual.merger.mlp.0'))
        self.merge_fc2 = Linear(*pair('visual.merger.mlp.2'))
        #: Fused form; ``None`` is plain torch.
        self.fused = CudaEncoder.make(self)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that one pass over a still reads."""
        total = self.still_weight.nbytes + self.merge_fc1.nbytes + self.merge_fc2.nbytes
        for block in self.blocks:
            total += sum(m.nbytes for m in (block.qkv, block.proj, block.fc1, block.fc2))
        return total

    def encode(
        self, patches: Tensor, grid: tuple[int, int, int], units: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """
        Encode one still or clip.

        Kept units keep their rows and columns; a temporal slice attends only to itself, so that
        slices can be encoded apart.

        :param patches: uint8 [t*h*w, 588] (still, t = 1) or [t*h*w, 1176] (clip), in unit order:
            patches 4u to 4u+3 make unit u. Or embedded already, the kept units alone:
            [4 * kept, width] in the encoder's dtype. On the encoder's device.
        :param grid: (t, h, w) in patches.
        :param units: int64, indices of the units to keep in any order; ``None`` keeps all.
        :param probe: is shown the rotated queries and keys of every block; it changes nothing.
        :return: [kept units, out_width] in raster order, the encoder's dtype.
        :raises EngineError: BAD_REQUEST for patches or units of another grid.
        """
        t, h, w = grid
        area = h * w // 4
        # Sorted where they are: on the host nothing has to wait for the device.
        units = None if units is None else units.sort().values
        check_units(patches, grid, units)
        fused = None if probe is not None else self.fused
        if isinstance(fused, CudaEncoder) and patches.dtype == torch.uint8 and (
                fused.fits(grid) and (patches if units is None else units).shape[0]):
            return fused.run(patches, grid, units)
        if units is not None and patches.dtype == torch.uint8:
            patches = patches.reshape(t * area, 4, -1)[units.to(self.device)].flatten(0, 1)
        if patches.shape[0] == 0:
            return torch.zeros(0, self.config.out_width, dtype=self.dtype, device=self.device)
        x = self.embed(patches) if patches.dtype == torch.uint8 else patches
        if fused is not None and fused.fits(grid):
            return fused.run(x, grid, units)
        return self.encode_plain(x, grid, units, probe)

    def encode_plain(
        self, x: Tensor, grid: tuple[int, int, int], units: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """
        Run blocks and merger in plain torch; the fused form is held against this.

        :param x: embeddings of the kept units [4 * kept, width], at least one.
        :param units: ascending.
        """
        t, h, w = grid
        area = h * w // 4
        spots = patch_positions(h, w).to(self.device)
        if units is None:
            spots = spots.repeat(t, 1)
            segments = [h * w] * t
        else:
            units = units.to(self.device)
            spots = spots.reshape(area, 4, 2)[units % area].flatten(0, 1)
            counts = torch.bincount(units // area, minlength=t).tolist()
            segments = [4 * n for n in counts if n]
        cos, sin = rotary_tables(spots, self.config.head_dim, self.config.theta)
        for index, block in enumerate(self.blocks):
            x = self.block(x, block, cos, sin, segments, probe and partial(probe, index, segments))
        return self.merge(x)

    def embed(self, patches: Tensor) -> Tensor:
        """
        Project patches; normalisation is folded into weight and bias (see :func:`fold_still`).

        :param patches: uint8 [n, 588] or [n, 1176].
        :return: [n, width].
        """
        # Centred on 128 the bytes are exact in every dtype and small where rounded weights err.
        x = patches.to(self.dtype) - 128
        if patches.shape[1] == self.still_weight.shape[1]:
            return F.linear(x, self.still_weight, self.still_bias)
        return F.linear(x, self.pair_weight, self.pair_bias)

    def block(
        self, x: Tensor, block: VisionBlock, cos: Tensor, sin: Tensor, segments: list[int],
        probe: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Run one block; x [n, width], cos and sin float32 [n, head_dim]."""
        cfg = self.config
        n = x.shape[0]
        y = F.layer_norm(x, (cfg.width,), *block.norm1, EPS)
        q, k, v = block.qkv(y).reshape(n, 3, cfg.heads, cfg.head_dim).permute(1, 2, 0, 3).unbind(0)
        q = rotate(q.float(), cos, sin).to(x.dtype)
        k = rotate(k.float(), cos, sin).to(x.dtype)
        if probe is not None:
            probe(q, k)
        y = segment_attention(q, k, v, segments)
        x = x + block.proj(y.transpose(0, 1).reshape(n, cfg.width))
        y = F.layer_norm(x, (cfg.width,), *block.norm2, EPS)
        return x + block.fc2(activate(block.fc1(y), cfg.activation))

    def merge(self, x: Tensor) -> Tensor:
        """Merge the four patches of each unit; x [4u, width] -> [u, out_width]."""
        y = F.layer_norm(x, (self.config.width,), *self.merge_norm, EPS)
        y = self.merge_fc1(y.reshape(-1, self.config.width * self.config.merge ** 2))
        return self.merge_fc2(F.gelu(y))


def check_units(patches: Tensor, grid: tuple[int, int, int], units: Tensor | None) -> None:
    """
    Hold patches and kept units against their grid; on a GPU a wrong index would end the process.

    :param patches: as for :meth:`VisionEncoder.encode`.
    :param units: ascending.
    :raises EngineError: BAD_REQUEST with what was found and expected.
    """
    t, h, w = grid
    count = t * h * w // 4
    if units is not None and units.numel() and not 0 <= int(units[0]) <= int(units[-1]) < count:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'units {int(units[0])} to {int(units[-1])} are kept of a grid {t}x{h}x{w} that has '
            f'{count}')
    kept = count if units is None or patches.dtype == torch.uint8 else units.numel()
    if patches.shape[0] != 4 * kept:
        raise EngineError(
            ErrorCode.BAD_REQUEST,
            f'{patches.shape[0]} patches came for a grid {t}x{h}x{w}; expected {4 * kept}')


def fold_still(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """
    Fold both temporal halves and the normalisation into one matrix over ``byte - 128``.

    A still shows the same frame twice, so the halves add; (x / 255 - mean) / std is affine. With
    W' = (W0 + W1) / (255 std), rounded to the kernel's dtype, the bias is the sum over k of
    W'[k] * (128 - 255 mean): taken from the rounded W', it does not add their rounding error
    times the large mean of the bytes.

    :param kernel: [width, 3, 2, 14, 14].
    :return: weight [width, 588] and bias [width] in the kernel's dtype.
    """
    return _fold(kernel.double().sum(2, keepdim=True), kernel.dtype)


def fold_pair(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Fold the normalisation alone: weight [width, 1176] over a pair of frames, bias [width]."""
    return _fold(kernel.double(), kernel.dtype)


def _fold(kernel: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (1, 3, 1, 1, 1)
    mean = torch.tensor(IMAGE_MEAN, dtype=torch.double, device=kernel.device).reshape(shape)
    std = torch.tensor(IMAGE_STD, dtype=torch.double, device=kernel.device).reshape(shape)
    weight = (kernel / (255.0 * std)).to(dtype)
    bias = (weight.double() * (128.0 - 255.0 * mean)).sum((1, 2, 3, 4))
    return weight.reshape(kernel.shape[0], -1).contiguous(), bias.to(dtype)


def patch_positions(h: int, w: int) -> Tensor:
    """
    Return (row, column) of every patch of one slice in unit order.

    For h = 2, w = 4 the order is::

        0 1 | 4 5
        2 3 | 6 7

    :return: int64 [h*w, 2].
    """
    rows = torch.arange(h).reshape(h // 2, 1, 2, 1).expand(h // 2, w // 2, 2, 2)
    cols = torch.arange(w).reshape(1, w // 2, 1, 2).expand(h // 2, w // 2, 2, 2)
    return torch.stack((rows.reshape(-1), cols.reshape(-1)), dim=1)


def rotary_tables(spots: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """
    Return cos and sin, float32 [n, head_dim]: a quarter of the channels turns with the row, a
    quarter with the column, and both again for the second half of each pair.

    :param spots: int64 [n, 2], row and column.
    """
    freq = inverse_frequencies(head_dim // 2, theta).to(spots.device)
    angles = (spots[:, :, None].float() * freq).flatten(1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: list[int]) -> Tensor:
    """
    Attend within each segment, in all directions.

    :param q: [heads, n, head_dim]; k and v alike.
    :param segments: lengths that add up to n.
    :return: [heads, n, head_dim].
    """
    heads, n, dim = q.shape
    if len(set(segments)) == 1:
        # As a batch of slices.
        a, b, c = (z.reshape(heads, len(segments), -1, dim).transpose(0, 1) for z in (q, k, v))
        out = F.scaled_dot_product_attention(a, b, c)
        return out.transpose(0, 1).reshape(heads, n, dim)
    parts = [F.scaled_dot_product_attention(a[None], b[None], c[None])[0] for a, b, c in zip(
        q.split(segments, 1), k.split(segments, 1), v.split(segments, 1))]
    return torch.cat(parts, dim=1)
