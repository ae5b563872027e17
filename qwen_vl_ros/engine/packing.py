"""Weights side by side in a GPU's memory, so that what their making took can be given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from qwen_vl_ros.engine.device import give_back
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.kernels.memory import ALIGNED, together

if TYPE_CHECKING:
    from qwen_vl_ros.engine.language import LanguageModel
    from qwen_vl_ros.engine.model import Model


def pack_weights(model: Model) -> None:
    """
    Pack the matrices of a model on a GPU that would leave holes.

    The allocator of torch gives matrices under 10 MB places in blocks of 20 MB, and others blocks
    of whole megabytes. Between the ones that stay lie those that were stacked to larger ones; none
    of that could be given back (447 MB of the 2B shape). Before anything holds their addresses.
    """
    if model.device.type == 'cuda':
        close_ranks(model.language)
    for group in _groups(model):
        if group and group[0].weight.device.type == 'cuda':
            pack(group)
            # Now and not at the end: so much more is needed for the time of a group alone.
            give_back(group[0].weight.device)


def pack(linears: Sequence[Linear]) -> None:
    """
    Move weights of one dtype into one allocation.

    :param linears: their weights are replaced.
    """
    first = linears[0].weight
    step = ALIGNED // first.element_size()
    places = [-(-linear.weight.numel() // step) * step for linear in linears]
    room = torch.empty(sum(places), dtype=first.dtype, device=first.device)
    for linear, part in zip(linears, room.split(places)):
        weight = part[:linear.weight.numel()].view(linear.weight.shape)
        linear.weight = weight.copy_(linear.weight)


def _groups(model: Model) -> Iterator[list[Linear]]:
    """Give matrices of one place in all layers; quantised ones are laid out by what makes them."""
    blocks, layers = model.vision.blocks, model.language.layers
    for rows in (zip(*((b.qkv, b.proj, b.fc1, b.fc2) for b in blocks)),
                 zip(*((x.qkv, x.out) for x in layers))):
        for row in rows:
            yield [linear for linear in row if type(linear) is Linear]


def close_ranks(language: LanguageModel) -> None:
    """
    Lay codes and scales of quantised matrices side by side in a GPU's memory.

    By way of the host's. What making them took (float copies of whole matrices, codes as integers)
    is free by now, but lies between them: torch could give none of it back.
    """
    matrices = [m for x in language.layers for m in (x.qkv, x.out, x.gate_up, x.down)]
    made = [(matrix, name) for matrix in (*matrices, language.head)
            for name in type(matrix).parts]
    held = []
    for matrix, name in made:
        held.append(getattr(matrix, name).to('cpu', copy=True))
        delattr(matrix, name)
    torch.cuda.empty_cache()
    for (matrix, name), tensor in zip(made, together(held, language.device)):
        setattr(matrix, name, tensor)
