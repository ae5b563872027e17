"""How the decode step's matrices are shared out over a GPU, and the order of their scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Forms of weights as kernels/include/qwen_vl_decode.h numbers them.
FLOAT, INT8, INT4, INT8_GROUP = range(4)
#: The matrices of a step in the order in which they are read.
OPS = ('qkv', 'out', 'gate_up', 'down', 'head')
#: Outputs of a tile, and bytes of one output's weights in an item.
TILE, ITEM_ROW = 16, 128
#: Groups of inputs that the kernels read; multiples of the largest are cut into it.
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Shape:
    """
    Sizes of a decoder, as in :class:`~qwen_vl_ros.engine.config.LanguageConfig`.

    :param form: of the layers' matrices; ``head_form`` of the output matrix.
    """

    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    form: int = FLOAT
    head_form: int = FLOAT

    def inputs(self, op: str) -> int:
        """Return the inputs of a matrix."""
        return {'out': self.heads * self.head_dim, 'down': self.mlp}.get(op, self.width)

    def outputs(self, op: str) -> int:
        """Return the outputs of a matrix, gate and up counted apart."""
        return {'qkv': (self.heads + 2 * self.kv_heads) * self.head_dim,
                'gate_up': 2 * self.mlp, 'head': self.vocab}.get(op, self.width)

    def per_tile(self, op: str) -> int:
        """Return the items of a tile."""
        form = self.head_form if op == 'head' else self.form
        size = {FLOAT: 2.0, INT4: 0.5}.get(form, 1.0)
        return -(-int(self.inputs(op) * size) // ITEM_ROW)

    def tiles(self, op: str) -> int:
        """Return the tiles of a matrix."""
        return self.outputs(op) // TILE


@dataclass(frozen=True)
class Plan:
    """
    Who reads what.

    :param ranges: int32 [ops, blocks, 8], ``qwen_vl_decode_range``.
    :param parts_out: parts in which sums of the output projection come; ``parts_down`` alike.
    """

    ranges: np.ndarray
    parts_out: int
    parts_down: int


def plan(shape: Shape, blocks: int) -> Plan:
    """
    Share every matrix out over ``blocks`` blocks.

    Tiles of all but ``down`` go to one block whole: what follows (rotation, activation, the next
    token) needs whole sums. ``down`` is cut anywhere, so that the bytes of a layer, which stream
    without regard to the order of the matrices, come out the same for every block.
    """
    ranges = np.zeros((len(OPS), blocks, 8), np.int32)
    load = np.zeros(blocks, np.int64)
    for index, op in enumerate(OPS):
        per, tiles = shape.per_tile(op), shape.tiles(op)
        if op == 'down':
            edges = _even_out(load, per * tiles)
        else:
            edges = np.arange(blocks + 1, dtype=np.int64) * tiles // blocks * per
        ranges[index, :, 0], ranges[index, :, 1], ranges[index, :, 2] = edges[:-1], edges[1:], per
        load += np.diff(edges)
    down = ranges[OPS.index('down')]
    parts = 1
    for block in range(blocks):
        begin, end, per = (int(x) for x in down[block, :3])
        if begin == end:
            continue
        tile_begin = begin // per * per
        # Blocks before this one with items of the same tile.
        before = sum(1 for b, e in down[:block, :2] if e > max(tile_begin, b))
        down[block, 3] = before
        parts = max(parts, before + 1)
    return Plan(ranges, 1, parts)


def _even_out(load: np.ndarray, total: int) -> np.ndarray:
    """Return edges [n + 1] of shares of ``total`` that bring every block to the same load."""
    low, high = 0.0, float(load.max() + total)
    for _ in range(60):
        level = (low + high) / 2
        if np.maximum(level - load, 0).sum() < total:
            low = level
        else:
            high = level
    shares = np.maximum(high - load, 0)
    edges = np.concatenate(([0.0], np.cumsum(shares)))
    rounded = np.rint(edges * (total / edges[-1])).astype(np.int64)
    rounded[-1] = total
    return rounded


def tile_rows(shape: Shape, op: str) -> np.ndarray:
    """
    Return the rows of a matrix in the order of its tiles, int64 [tiles, 16].

    A tile of ``qkv`` pairs channels that rotate together, one of ``gate_up`` the gate and up rows
    of the same channels; others take neighbours.
    """
    tile = np.arange(shape.tiles(op))
    step, other = TILE, 8
    if op == 'gate_up':
        step, other = 8, shape.mlp
    first = tile * step
    if op == 'qkv':
        per_head = shape.head_dim // TILE
        first = tile // per_head * shape.head_dim + tile % per_head * 8
        other = shape.head_dim // 2
    eight = np.arange(8)
    return first[:, None] + np.concatenate((eight, eight + other))


def channel_scales(scales: Tensor, rows: np.ndarray) -> Tensor:
    """Return scales of outputs, float32 [out] -> [tiles, 16]."""
    return scales.float()[torch.from_numpy(rows).to(scales.device)].contiguous()


def group_of(scales: Tensor, inputs: int) -> int:
    """
    Return the inputs a group, at most 128 (larger ones are cut).

    :param scales: [out, groups].
    :raises ValueError: for groups that the kernels do not read.
    """
    group = inputs // scales.shape[1]
    if group % GROUPS[-1] == 0:
        group = GROUPS[-1]
    if group not in GROUPS:
        raise ValueError(f'groups of {group} inputs; expected 32, 64 or a multiple of 128')
    return group


def group_scales(scales: Tensor, zeros: Tensor, rows: np.ndarray, inputs: int, group: int
                 ) -> Tensor:
    """
    Return scales and zero points in the order of tiles.

    :param scales: float16 [out, groups]; ``zeros`` alike, of integers.
    :param rows: of :func:`tile_rows`.
    :param group: inputs a group in the result; divides the matrix's own.
    :return: float16 [tiles * groups + padding, 16, 2].
    """
    repeat = inputs // scales.shape[1] // group
    index = torch.from_numpy(rows).to(scales.device)
    both = torch.stack((scales.half(), zeros.half()), -1).repeat_interleave(repeat, 1)[index]
    ordered = both.transpose(1, 2).reshape(-1, TILE, 2)  # from [tiles, 16, groups, 2]
    # The last item of a row may reach beyond the last group.
    return torch.cat((ordered, ordered.new_zeros(256 // GROUPS[0], TILE, 2))).contiguous()
