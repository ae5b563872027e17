"""
Grad-CAM on merged tokens: which units the answer of a question leans on.

The map already lives on the unit grid, so nothing is interpolated: a unit's score is
relu(sum over channels of gradient x activation) of its merged token (Selvaraju et al. 2017, on
tokens instead of convolution cells). On the same frame it costs more than dropping saves, so it is
a teacher: for key frames, for the next frames, and for the light head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.language import LanguageModel, causal_attention
from qwen_vl_ros.engine.layers import activate, rms_norm, rotate
from qwen_vl_ros.engine.model import Placed
from qwen_vl_ros.engine.prompt import Prompt
from qwen_vl_ros.engine.types import Request
from qwen_vl_ros.measure.timeline import spend
from qwen_vl_ros.saliency import costs

#: Question whose map is divided out: what any question looks at (sinks, borders).
GENERIC = 'Describe the scene.'


def run_layers(language: LanguageModel, x: Tensor, positions: Tensor, count: int) -> Tensor:
    """
    Run the first ``count`` decoder layers without a cache, so that gradients can pass.

    The plain twin of :meth:`LanguageModel.prefill`, which writes keys and values in place.

    :param x: embeddings [n, width].
    :param positions: int64 [3, n].
    :return: hidden states [n, width].
    """
    cfg, n = language.config, x.shape[0]
    cos, sin = language.rotary(positions)
    for layer in language.layers[:count]:
        y = layer.qkv(rms_norm(x, layer.norm1, cfg.eps))
        y = y.reshape(n, cfg.heads + 2 * cfg.kv_heads, cfg.head_dim).transpose(0, 1)
        turned = rotate(y[:cfg.heads + cfg.kv_heads], cos, sin)
        y = causal_attention(turned[:cfg.heads], turned[cfg.heads:],
                             y[cfg.heads + cfg.kv_heads:], None)
        x = x + layer.out(y.transpose(0, 1).reshape(n, cfg.width))
        gate, up = layer.gate_up(rms_norm(x, layer.norm2, cfg.eps)).chunk(2, dim=-1)
        x = x + layer.down(activate(gate, cfg.activation) * up)
    return x


def score_units(
    engine: Engine, request: Request, *, layers: int | None = None, answer: Sequence[int] = (),
    generic: bool = True,
) -> list[np.ndarray]:
    """
    Score the units of a request's pictures by what its answer leans on.

    The target is the distance of the best and the second-best logit at the first answer position
    (contrastive: words that are always likely cancel out), or, where the answer is known, the
    summed log-probability of its tokens.

    :param engine: its weights are used as they are; nothing of its state changes.
    :param request: one question with its visuals; all their units are scored.
    :param layers: decoder layers to pass; ``None`` is all (the reference), 2 to 4 are fast, with
        the head read off the last of them.
    :param answer: token ids of the answer just given.
    :param generic: divide by the map of :data:`GENERIC`.
    :return: a float32 map [T, H/2, W/2] for each visual, largest 1 (all 0 where nothing counts).
    """
    visuals, prompt, features = engine.look(request)
    depth = layers or engine.model.config.language.layers
    maps = token_maps(engine, prompt, features, depth, answer)
    if generic:
        plain = Request(GENERIC, request.visuals, request.system_prompt)
        usual = token_maps(engine, engine.look(plain)[1], features, depth, ())
        maps = [divided(m, u) for m, u in zip(maps, usual)]
    out = []
    for values, visual in zip(maps, visuals):
        if visual.units is not None:
            raise ValueError('units were dropped: score a request with keep_ratio 1 and no mask')
        t, h, w = visual.grid
        peak = values.max()
        values = values / peak if peak > 0 else values
        out.append(values.reshape(t, h // 2, w // 2).astype(np.float32))
    return out


def divided(values: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """
    Divide a map by what any question leans on.

    A tenth of the mean keeps units that nobody looks at from dividing by nothing.
    """
    return np.asarray(values / (usual + 0.1 * usual.mean() + 1e-12))


def token_maps(engine: Engine, prompt: Prompt, features: Sequence[Placed], depth: int,
               answer: Sequence[int]) -> list[np.ndarray]:
    """
    Return relu(sum of gradient x activation) of each visual's merged tokens, [kept] each.

    :param features: merged tokens and their places in the prompt.
    :param depth: decoder layers to pass.
    :param answer: token ids of the answer; empty takes the margin of the first position.
    """
    language = engine.model.language
    spend(**costs.gradient(language.config, prompt.ids.size + len(answer[:-1]), depth,
                           max(1, len(answer)), engine.model.read_bytes[1]))
    ids = np.concatenate([prompt.ids, np.asarray(answer[:-1], prompt.ids.dtype)])
    extra = np.arange(len(answer[:-1])) + prompt.next_position
    positions = np.concatenate([prompt.positions, np.tile(extra, (3, 1))], axis=1)
    with torch.enable_grad():
        # Clones: what was computed in inference mode cannot take part in a gradient.
        x = language.embed(torch.from_numpy(ids).to(language.device)).clone()
        leaves = []
        for (start, end), merged in features:
            leaf = merged.clone().requires_grad_()
            leaves.append(leaf)
            x = torch.cat((x[:start], leaf, x[end:]))
        hidden = run_layers(language, x, torch.from_numpy(positions).to(language.device), depth)
        logits = language.logits(hidden[prompt.ids.size - 1:]).float()
        if answer:
            rows = torch.arange(len(answer), device=logits.device)
            chosen = torch.as_tensor(list(answer), device=logits.device)
            target = logits.log_softmax(-1)[rows, chosen].sum()
        else:
            best = logits[0].topk(2).values
            target = best[0] - best[1]
        grads = torch.autograd.grad(target, leaves)
    return [torch.relu((g.float() * leaf.detach().float()).sum(-1)).cpu().numpy()
            for g, leaf in zip(grads, leaves)]
