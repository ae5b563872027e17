"""What is taken from an answer after it was given: what it leaned on, and the encoder's focus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.model import Placed
from qwen_vl_ros.engine.patches import extract_patches
from qwen_vl_ros.engine.prompt import Prompt, Turn, VisualToken
from qwen_vl_ros.measure.timeline import spend
from qwen_vl_ros.saliency import costs, grad_cam
from qwen_vl_ros.saliency.attention_entropy import EntropyProbe


@dataclass
class Said:
    """
    An answer whose gradient has not been taken yet.

    :param features: merged tokens of the visuals and their places in the prompt.
    :param ids: tokens of the answer.
    """

    prompt: Prompt
    features: list[Placed]
    ids: tuple[int, ...]
    visuals: tuple[VisualToken, ...]
    question: str
    system_prompt: str | None = None


def leaned_on(engine: Engine, said: Said, layers: int) -> list[np.ndarray]:
    """
    Return Grad-CAM of the answer, [rows, columns] of each visual; 0 where units were dropped.

    :param layers: decoder layers that the gradient passes; 0 is all.
    :raises RuntimeError: where the weights have no gradient.
    """
    depth = layers or engine.model.config.language.layers
    maps = grad_cam.token_maps(engine, said.prompt, said.features, depth, said.ids)
    return [_on_grid(v, values, 0.0) for v, values in zip(said.visuals, maps)]


def usual_of(engine: Engine, said: Said, layers: int) -> list[np.ndarray]:
    """
    Return what a generic prompt leans on in the same visuals, [rows, columns] of each.

    The target is the margin of its first answer position. Dropped units get the others' mean.
    """
    depth = layers or engine.model.config.language.layers
    prompt = engine.prompts.build((Turn(grad_cam.GENERIC, said.visuals),), said.system_prompt)
    features = [(span, merged) for span, (_, merged) in zip(prompt.spans, said.features)]
    maps = grad_cam.token_maps(engine, prompt, features, depth, ())
    return [_on_grid(v, values, float(values.mean())) for v, values in zip(said.visuals, maps)]


def _on_grid(visual: VisualToken, values: np.ndarray, dropped: float) -> np.ndarray:
    """Return the largest value over the slices, float32 [rows, columns]."""
    whole = np.full(visual.total, dropped, np.float32)
    whole[np.arange(whole.size) if visual.units is None else visual.units] = values
    return whole.reshape(visual.grid[0], visual.grid[1] // 2, visual.grid[2] // 2).max(0)


def focus_of(engine: Engine, visual: VisualToken) -> np.ndarray:
    """
    Return the focus of the encoder's attention on the newest slice, [rows, columns].

    Runs the encoder once more with a probe, which the answer itself had no time for.
    """
    vision = engine.model.vision
    patches = torch.from_numpy(extract_patches(visual.frames, visual.grid))
    units = None if visual.units is None else torch.from_numpy(visual.units)
    segments = 4 * visual.slice_maps.sum((1, 2))
    spend(**costs.entropy(vision.config, patches.shape[1], segments.tolist(), vision.weight_bytes))
    probe = EntropyProbe(vision.config.depth)
    with torch.inference_mode():
        vision.encode(patches.to(vision.device), visual.grid, units, probe)
    return probe.map(visual.grid, visual.units)[-1]
