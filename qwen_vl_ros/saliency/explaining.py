"""What an answer was given about, drawn from what was really chosen: nothing is chosen again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_vl_ros.engine.types import Answer, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.picture import explain, sheet
from qwen_vl_ros.saliency.select import slice_frames


@dataclass(frozen=True)
class Chosen:
    """
    A map that units were chosen by.

    :param frames: one for each slice.
    :param values: float32 [T, rows, columns], larger matters more.
    """

    frames: tuple[Frame, ...]
    values: np.ndarray


def keep_maps(selector: Any) -> list[Chosen]:
    """
    Return a list that fills with the maps that a selector chooses by.

    Asking it for a map afterwards would not do: what it remembers has moved on by then. One that
    has no maps (``saliency``) fills nothing.
    """
    maps: list[Chosen] = []
    find = getattr(selector, 'saliency', None)
    if find is not None:
        def saliency(frames: Sequence[Frame], rows: int, columns: int, question: str = ''
                     ) -> np.ndarray:
            values: np.ndarray = find(frames, rows, columns, question)
            maps.append(Chosen(tuple(frames), values.copy()))
            return values

        # Selectors call their own method, and some are frozen.
        object.__setattr__(selector, 'saliency', saliency)
    return maps


def explain_answer(visuals: Sequence[Visual], answer: Answer, maps: Sequence[Chosen] = ()
                   ) -> np.ndarray:
    """
    Draw every slice of every picture of an answer, see :func:`picture.explain`.

    :param visuals: of the request that was answered.
    :param maps: of all choices that were made for it, see :func:`keep_maps`. Maps of one clip
        share their colours, as its slices share a budget.
    :return: uint8 [H, W, 3] BGR.
    """
    rows = []
    for number, (visual, kept) in enumerate(zip(visuals, answer.kept_slices), 1):
        frames = slice_frames(visual.frames, len(kept))
        values = next((m.values for m in maps if m.values.shape == kept.shape
                       and all(a is b for a, b in zip(m.frames, frames))), None)
        scale = None if values is None else (float(values.min()), float(values.max()))
        for part, frame in enumerate(frames):
            name = frame.camera or f'picture {number}'
            if len(kept) > 1:
                name += f', slice {part + 1} of {len(kept)}'
            rows.append((f'{name}: {kept[part].sum()} of {kept[part].size} units', explain(
                frame.rgb(), kept[part], None if values is None else values[part], scale)))
    return sheet(rows)
