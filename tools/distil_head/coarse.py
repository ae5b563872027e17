"""
Adapt a copy of a tiny checkpoint to smaller pictures: the fair form of the baseline downsampling.

The shipped checkpoints were trained on pictures of one size; shown a smaller one they are lost for
a reason that has nothing to do with what the picture lacks. The copy is trained on smaller
pictures (grids of :data:`GRIDS`, places named in their own bins) and thrown away afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNIT
from tools.distil_head.batched import Picture, TinyBatch
from tools.distil_head.group import Group, groups
from tools.train_tiny.data import Batch, Mix, batches, tokenizer

#: Rows and columns of the smaller pictures, and how often each is trained on.
GRIDS = (((7, 9), .5), ((7, 10), .1), ((6, 7), .15), ((4, 5), .1), ((8, 12), .15))


def shrink(rgb: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize uint8 [B, h, w, 3] to a grid in units, bicubic and antialiased; float32 levels."""
    x = F.interpolate(rgb.permute(0, 3, 1, 2).float(), (grid[0] * UNIT, grid[1] * UNIT),
                      mode='bicubic', antialias=True, align_corners=False)
    return x.round().clamp(0, 255).permute(0, 2, 3, 1)


def coarse_bins(grid: tuple[int, int], device: torch.device) -> Tensor:
    """
    Return int64 [vocab]: each token as it is called in a smaller grid.

    A bin that lies in two bins of the smaller grid becomes -1: its answer is not trained on.
    """
    vocab = tokenizer()
    table = np.arange(4096)
    for letter, size, count in (('x', GRID_W, grid[1]), ('y', GRID_H, grid[0])):
        for bin_ in range(size):
            low = math.floor(bin_ * count / size)
            high = math.ceil((bin_ + 1) * count / size) - 1
            table[vocab.token_to_id(f'<{letter}{bin_}>')] = (
                vocab.token_to_id(f'<{letter}{low}>') if low == high else -1)
    return torch.from_numpy(table).to(device)


def adapted(folder: Path, device: torch.device, seconds: float, *, stills: int = 160,
            clips: int = 24, workers: int = 12, lr: float = 7e-4, steps: int = 0,
            feed: Iterator[Batch] | None = None) -> TinyBatch:
    """
    Train a copy on smaller pictures.

    :param seconds: of training; with ``steps``, so many steps instead.
    :param feed: batches of training scenes; ``None`` draws them by ``workers`` processes.
    :return: in the dtype that the device answers in.
    """
    copy = TinyBatch(folder, device, torch.float32)
    copy.model.requires_grad_(True)
    tables = {grid: coarse_bins(grid, device) for grid, _ in GRIDS}
    optimizer = torch.optim.AdamW(copy.model.parameters(), lr=lr, betas=(0.9, 0.95),
                                  weight_decay=0.02, fused=device.type == 'cuda')
    rng = np.random.default_rng(3)
    drawn = feed or batches(300, 0, Mix(stills, clips), workers)
    next(drawn)  # workers take seconds to start: that is no time of training
    begin, step = time.monotonic(), 0
    losses: list[Tensor] = []
    for batch in drawn:
        done = step / steps if steps else min(1.0, (time.monotonic() - begin) / seconds)
        if done >= 1:
            break
        for part in optimizer.param_groups:
            part['lr'] = lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done))
        grid = GRIDS[rng.choice(len(GRIDS), p=[w for _, w in GRIDS])][0]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            loss = sum(_loss(copy, group, grid, tables[grid])
                       for group in groups(batch, device, 3))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(copy.model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        step += 1
    if feed is None:
        drawn.close()
    if losses:
        print(f'smaller pictures: {step} steps, loss {float(losses[0]):.3f} to '
              f'{float(torch.stack(losses[-50:]).mean()):.3f}', flush=True)
    copy.model.requires_grad_(False)
    copy.dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    buffers = (copy.model.vision_angles, copy.model.pixel_mean, copy.model.pixel_std)
    copy.model.to(copy.dtype)
    copy.model.vision_angles, copy.model.pixel_mean, copy.model.pixel_std = buffers
    return copy


def _loss(copy: TinyBatch, group: Group, grid: tuple[int, int], table: Tensor) -> Tensor:
    merged = copy.encode(shrink(group.rgb, grid))[group.rows()].flatten(1, 2)
    units = torch.arange(merged.shape[1], device=merged.device).expand(len(merged), -1)
    labels = torch.where(group.labels >= 0, table[group.labels.clamp(min=0)], -1)
    # Where a bin has no name in the smaller grid the whole answer is left out.
    lost = ((group.labels >= 0) & (labels < 0)).any(1, keepdim=True)
    labels = labels.masked_fill(lost, -1)
    # What was answered stands in the prompt too: the label one place before each token says it.
    said = F.pad(labels, (1, 0), value=-1)[:, :-1]
    tokens = torch.where((group.tokens >= 0) & (said >= 0), said, group.tokens)
    logits = copy.answer([Picture(merged, units, grid)], tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-1)
