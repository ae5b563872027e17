"""Validation of a request: one clear refusal before any work is done."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.parts import parts_of
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
    if request.top_k < 0:
        refuse('top_k', 'at least 0')
    if not 0 < request.keep_ratio <= 1:
        refuse('keep_ratio', 'a share in (0, 1]')
    if request.deadline_s is not None and not request.deadline_s > 0:
        refuse('deadline_s', 'more than 0 seconds, or None')
    builder.check_text(request.question, 'question')
    builder.check_text(request.system_prompt or '', 'system prompt')


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
    if not visual.frames:
        raise EngineError(ErrorCode.BAD_REQUEST, 'a visual without frames; expected at least one')
    grid = grid_of(visual.frames, *limits, factor)
    keep = visual.keep
    if keep is None and request.keep_ratio < 1:
        keep = selector(visual.frames, grid, request.keep_ratio, request.question)
    total = grid[0] * grid[1] * grid[2] // 4
    if keep is not None:
        keep = np.asarray(keep)
        if keep.dtype != np.bool_ or keep.shape != (total,):
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f'the keep mask is {keep.dtype} {list(keep.shape)}; expected bool [{total}] for a '
                f'grid of {grid[0]}x{grid[1] // 2}x{grid[2] // 2} units')
        if not keep.any():
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f'the keep mask keeps none of the {total} units; expected at least one')
        if keep.all():
            keep = None
    units = None if keep is None else np.flatnonzero(keep)
    key = content_key(visual.frames, grid, keep)
    if visual.variant and units is not None:
        key ^= zlib.crc32(visual.variant.encode()) << 24
    return VisualToken(grid, len(visual.frames) > 1, key, units, tuple(visual.frames))


def early_visual(
    request: Request, limits: tuple[int, int], factor: int, micro_batch: float,
) -> VisualToken | None:
    """
    Return a request's first visual without its key, where its size is all that has to be known.

    Hashing a frame takes longer than cutting it into patches: meanwhile it can be encoded.

    :param limits: as for :func:`plan_visual`, ``factor`` too.
    :param micro_batch: see :func:`qwen_vl_ros.engine.parts.parts_of`.
    :return: ``None`` for a frame that has been hashed before (its features may be there), and
        where units are chosen, or a session may have shown it.
    :raises EngineError: BAD_REQUEST.
    """
    if not request.visuals or micro_batch < 1 or request.keep_ratio < 1 or request.session_id:
        return None
    visual = request.visuals[0]
    known = any('digest' in vars(frame) for frame in visual.frames)
    if visual.keep is not None or not visual.frames or known:
        return None
    grid = grid_of(visual.frames, *limits, factor)
    token = VisualToken(grid, len(visual.frames) > 1, 0, None, tuple(visual.frames))
    return token if len(parts_of(token, micro_batch)) == 1 else None
