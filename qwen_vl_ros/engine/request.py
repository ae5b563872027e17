"""Validation of a request: one clear refusal before any work is done."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.patches import Grid, content_key, grid_of
from qwen_vl_ros.engine.prompt import PromptBuilder, VisualToken
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.frame import Frame

#: Chooses units of a visual: (frames, grid in patches, share, question) -> bool [t * h/2 * w/2].
#: One that has ``bind(engine)`` is given the engine when that is loaded; one that has
#: ``observe(request, visuals, prompt, ids)`` is told of every answer (see saliency/next_frame.py).
Selector = Callable[[Sequence[Frame], Grid, float, str], np.ndarray]


def check_request(request: Request, builder: PromptBuilder) -> None:
    """:raises EngineError: BAD_REQUEST that names the field, its value and what it may be."""
    def refuse(name: str, expected: str) -> None:
        raise EngineError(
            ErrorCode.BAD_REQUEST, f'{name} is {getattr(request, name)!r}; expected {expected}')

    if not request.question.strip():
        refuse('question', 'text')
    if request.max_new_tokens < 1:
        refuse('max_new_tokens', 'at least 1')
    if not 0 <= request.temperature < math.inf:
        refuse('temperature', 'a number from 0')
    if not 0 < request.top_p <= 1:
        refuse('top_p', 'a share in (0, 1]')
    if not isinstance(request.top_k, Integral) or request.top_k < 0:
        refuse('top_k', 'a whole number from 0')
    if not isinstance(request.seed, Integral) or not -1 << 63 <= request.seed < 1 << 63:
        refuse('seed', 'a whole number of 64 bits, -2^63 to 2^63 - 1')
    if not 0 < request.keep_ratio <= 1:
        refuse('keep_ratio', 'a share in (0, 1]')
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        refuse('deadline_s', 'more than 0 seconds, or None')
    builder.check_text(request.question, 'question')
    builder.check_text(request.system_prompt or '', 'system prompt')


def check_length(size: int, visual: int, limit: int) -> None:
    """
    Refuse a prompt that leaves no room for an answer.

    :param size: tokens of the prompt, ``visual`` of them of pictures.
    :param limit: tokens of the context.
    :raises EngineError: PROMPT_TOO_LONG.
    """
    if size >= limit:
        raise EngineError(
            ErrorCode.PROMPT_TOO_LONG,
            f'the prompt has {size} tokens ({visual} of them visual), the context holds {limit} '
            'with at least one for the answer')


def plan_visual(
    visual: Visual, request: Request, selector: Selector, limits: tuple[int, int], factor: int,
) -> VisualToken:
    """
    Fix grid, kept units and content key of a visual, before its pixels are touched.

    :param request: its keep_ratio counts where the visual has no mask.
    :param limits: pixels of the resized picture, least and most.
    :param factor: pixels along a side of a unit.
    :raises EngineError: BAD_REQUEST.
    """
    return named(lay_out(visual, request, selector, limits, factor), visual.variant)


def lay_out(
    visual: Visual, request: Request, selector: Selector, limits: tuple[int, int], factor: int,
) -> VisualToken:
    """
    Do what :func:`plan_visual` says but for the key, which is 0.

    Hashing a frame takes longer than cutting it into patches: meanwhile it can be encoded.
    """
    if not visual.frames:
        raise EngineError(ErrorCode.BAD_REQUEST, 'a visual without frames; expected at least one')
    grid = grid_of(visual.frames, *limits, factor)
    keep = visual.keep
    if keep is None and request.keep_ratio < 1:
        keep = selector(visual.frames, grid, request.keep_ratio, request.question)
    total = grid[0] * grid[1] * grid[2] // 4
    if keep is not None:
        keep = np.asarray(keep)
        units = grid[0], grid[1] // 2, grid[2] // 2
        if keep.dtype != np.bool_ or keep.shape not in ((total,), units):
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f'the keep mask is {keep.dtype} {list(keep.shape)}; expected bool [{total}] or '
                f'{list(units)} for a grid of {units[0]}x{units[1]}x{units[2]} units')
        keep = keep.reshape(-1)
        if not keep.any():
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f'the keep mask keeps none of the {total} units; expected at least one')
        if keep.all():
            keep = None
    kept = None if keep is None else np.flatnonzero(keep)
    return VisualToken(grid, len(visual.frames) > 1, 0, kept, tuple(visual.frames))


def named(token: VisualToken, variant: str = '') -> VisualToken:
    """
    Return a visual under its content key.

    :param variant: see :class:`~qwen_vl_ros.engine.types.Visual`.
    """
    keep = None
    if token.units is not None:
        keep = np.zeros(token.total, np.bool_)
        keep[token.units] = True
    key = content_key(token.frames, token.grid, keep)
    if variant and keep is not None:
        key ^= zlib.crc32(variant.encode()) << 24
    return replace(token, key=key)
