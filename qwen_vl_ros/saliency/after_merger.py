"""
Dropping after the merger: the encoder sees everything, the decoder what a dropper leaves.

For comparison, and for models whose decoder is the larger part (on a 2B model two thirds of the
arithmetic are done by then). DivPrune and DART choose among the merged tokens; FastV by the
attention of the last prompt token in the second decoder layer, for which those two layers are run
once more than in the original, which drops in the middle of its pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.layers import rms_norm, rotate
from qwen_vl_ros.engine.model import Placed
from qwen_vl_ros.engine.prompt import Prompt, Turn, VisualToken
from qwen_vl_ros.engine.request import check_length, check_request
from qwen_vl_ros.engine.running import plan_visuals
from qwen_vl_ros.engine.stages import DeviceClock
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.measure.timeline import Timeline, spend
from qwen_vl_ros.saliency import costs
from qwen_vl_ros.saliency.droppers import dart, divprune, fastv, last_row_attention
from qwen_vl_ros.saliency.grad_cam import run_layers
from qwen_vl_ros.saliency.region import with_region
from qwen_vl_ros.saliency.select import budget

#: The layer whose attention FastV reads (its K = 2 counts layers before the drop).
FASTV_LAYER = 1


def drop_after_merger(engine: Engine, request: Request, name: str,
                      timeline: Timeline | None = None) -> Request:
    """
    Encode a request's visuals and choose which of their merged tokens the decoder gets.

    :param request: visuals with masks of their own are left as they are.
    :param name: one of :data:`DROPPERS`.
    :param timeline: gets the stages of encoding and ``select``.
    :return: the request with masks; the engine's cache holds the features that belong to them.
    :raises ValueError: another name.
    :raises EngineError: PROMPT_TOO_LONG where it would be with what is kept; nothing is encoded.
    """
    if name not in DROPPERS:
        raise ValueError(f"dropper '{name}' is not one of {', '.join(DROPPERS)}")
    if request.keep_ratio >= 1 or not request.visuals:
        return request
    check_request(request, engine.prompts)
    timeline = timeline or Timeline(request.request_id)
    clock = DeviceClock(timeline, engine.model.device)
    planned = plan_visuals(engine, replace(request, keep_ratio=1.0))
    prompt = engine.prompts.build((Turn(request.question, planned),), request.system_prompt)
    least = [v.kept if given.keep is not None else budget(v.total, request.keep_ratio)
             for given, v in zip(request.visuals, planned)]
    check_length(prompt.ids.size - sum(v.kept for v in planned) + sum(least), sum(least),
                 engine.options.max_context)
    features = [(span, engine.model.encode(v, timeline, clock)[0])
                for span, v in zip(prompt.spans, planned)]
    chosen = []
    with timeline.stage('select'):
        for index, (given, visual) in enumerate(zip(request.visuals, planned)):
            if given.keep is not None:
                chosen.append(given)
                continue
            keep = _chosen(engine, prompt, features, index, visual, request.keep_ratio, name)
            # Every slice must leave a token in the prompt.
            first = np.arange(visual.grid[0]) * (visual.total // visual.grid[0])
            per_slice = keep.reshape(visual.grid[0], -1)
            keep[first[~per_slice.any(1)]] = True
            chosen.append(Visual(given.frames, keep, name))
    masked = replace(request, visuals=tuple(chosen))
    for visual, (_, merged) in zip(plan_visuals(engine, masked), features):
        if visual.units is not None:
            rows = torch.from_numpy(visual.units).to(merged.device)
            engine.features.put(visual.key, merged[rows], visual.glance)
    return masked


def _chosen(engine: Engine, prompt: Prompt, features: list[Placed], index: int,
            visual: VisualToken, ratio: float, name: str) -> np.ndarray:
    """Return bool [total] of one visual: the selector's region, then the dropper's choice."""
    count, always = budget(visual.total, ratio), None
    region = getattr(engine.options.selector, 'always', None)
    if region is not None:
        slices, rows, columns = visual.grid[0], visual.grid[1] // 2, visual.grid[2] // 2
        units = region(rows, columns)
        count = with_region(count, units, slices)
        always = torch.from_numpy(np.tile(units.reshape(-1), slices)).to(engine.model.device)
    return DROPPERS[name](engine, prompt, features, index, count, always)


def _divprune(engine: Engine, prompt: Prompt, features: list[Placed], index: int, count: int,
              always: Tensor | None) -> np.ndarray:
    merged = features[index][1]
    spend(**costs.divprune(merged.shape[0], merged.shape[1], count))
    return np.asarray(divprune(merged, count, always))


def _dart(engine: Engine, prompt: Prompt, features: list[Placed], index: int, count: int,
          always: Tensor | None) -> np.ndarray:
    merged = features[index][1]
    spend(**costs.dart(merged.shape[0], merged.shape[1]))
    return np.asarray(dart(merged, count, always=always))


@torch.inference_mode()
def _fastv(engine: Engine, prompt: Prompt, features: list[Placed], index: int, count: int,
           always: Tensor | None) -> np.ndarray:
    language = engine.model.language
    spend(**costs.fastv(language.config, prompt.ids.size, FASTV_LAYER,
                        engine.model.read_bytes[1]))
    positions = torch.from_numpy(prompt.positions).to(language.device)
    x = run_layers(language, engine.model.embed(prompt, 0, features), positions, FASTV_LAYER)
    layer, cfg = language.layers[FASTV_LAYER], language.config
    y = layer.qkv(rms_norm(x, layer.norm1, cfg.eps)).unflatten(-1, (-1, cfg.head_dim))
    turned = rotate(y.transpose(0, 1)[:cfg.heads + cfg.kv_heads], *language.rotary(positions))
    row = last_row_attention(turned[:cfg.heads, -1], turned[cfg.heads:])
    start, end = features[index][0]
    return np.asarray(fastv(row[start:end], count, always))


#: Name to function of (engine, prompt, features, index of the visual, tokens to keep, those that
#: are kept first).
DROPPERS: dict[str, Callable[..., np.ndarray]] = {
    'divprune': _divprune, 'dart': _dart, 'fastv': _fastv}
