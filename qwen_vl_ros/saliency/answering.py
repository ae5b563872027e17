"""
Asking with fewer tokens than the engine's own way: droppers after the merger, a region of interest
first, and the way back to the full frame.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qwen_vl_ros.engine.patches import grid_of
from qwen_vl_ros.engine.types import Answer, Delta, Done, Event, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.saliency.region import within
from qwen_vl_ros.saliency.roi import Window, best_window, overview_and_crop
from qwen_vl_ros.saliency.select import UnitSelector

LOG = logging.getLogger(__name__)

#: How an answer is labelled that was given about the full frame after all.
FULL_FRAME = 'full_frame_after_low_margin'
#: How an answer is labelled that saw a crop and an overview.
REGION = 'region_of_interest'


@dataclass(frozen=True)
class Fewer:
    """
    How tokens are saved beside the engine's selector.

    :param dropper: a name of :data:`after_merger.DROPPERS`; '' leaves it to the selector.
    :param least_margin: logit distance of an answer's first token to the next best under which the
        full frame is asked about; 0 never does.
    :param region: share of a still's area that is shown at full resolution, beside an overview of
        a sixth of its tokens; 0 shows the picture itself. Approximate, and places are mapped back.
        Clips and several pictures are shown as they are, which is logged once.
    :param least_units: fewest units kept of overview and crop together, or all that they have.
    """

    dropper: str = ''
    least_margin: float = 0.0
    region: float = 0.0
    least_units: int = 0


#: Nothing but the engine's selector.
AS_IT_IS = Fewer()


def answer(
    engine: Any, request: Request, timeline: Timeline | None = None,
    cancelled: Callable[[], bool] = lambda: False, *, fewer: Fewer = AS_IT_IS,
) -> Iterator[Event]:
    """
    Answer like :meth:`Engine.answer`, with fewer tokens, and again about all where unsure.

    An unsure answer is given up before any of its text is told, and what it cost stays in the
    timeline: its stages appear twice. Visuals that bring a mask of their own keep it.

    :param engine: or anything with the same ``answer``; droppers and regions need the engine.
    """
    timeline = timeline or Timeline(request.request_id)
    asked, window, grid = request, None, (1, 1)
    still = len(request.visuals) == 1 and len(request.visuals[0].frames) == 1
    if fewer.region > 0 and request.visuals and not still:
        _say_no_region()
    if fewer.region > 0 and still:
        asked, window, grid = _region_first(engine, request, fewer, timeline)
    elif fewer.dropper and request.keep_ratio < 1:
        # Imports torch, which a node that drops nothing has no need of here.
        from qwen_vl_ros.saliency.after_merger import drop_after_merger
        asked = drop_after_merger(engine, request, fewer.dropper, timeline)
    events: Iterator[Event] = engine.answer(asked, timeline=timeline, cancelled=cancelled)
    if window is not None:
        events = _mapped(events, window, grid)
    free = any(v.keep is None for v in request.visuals)
    if not fewer.least_margin > 0 or not (window or (request.keep_ratio < 1 and free)):
        yield from events
        return
    for event in events:
        if not isinstance(event, (Delta, Done)):
            yield event
            continue
        if _sure(event, fewer.least_margin):
            yield event
            yield from events
            return
        break
    events.close()  # type: ignore[attr-defined]
    for event in engine.answer(replace(request, keep_ratio=1.0), timeline=timeline,
                               cancelled=cancelled):
        if isinstance(event, Done):
            event = Done(_labelled(event.answer, FULL_FRAME))
        yield event


@functools.cache
def _say_no_region() -> None:
    LOG.warning('a region of interest is shown of one still alone; questions about clips or '
                'several pictures are answered without it')


def _sure(event: Delta | Done, least: float) -> bool:
    """Tell whether an answer's beginning may stand; one that was cut off is no reason to go on."""
    if isinstance(event, Done) and event.answer.finish_reason in ('cancelled', 'deadline'):
        return True
    margin = event.margin if isinstance(event, Delta) else event.answer.margin
    return math.isnan(margin) or margin >= least


def _labelled(answered: Answer, label: str) -> Answer:
    return replace(answered, approximate=(*answered.approximate, label))


def _region_first(engine: Any, request: Request, fewer: Fewer, timeline: Timeline
                  ) -> tuple[Request, Window, tuple[int, int]]:
    """Return the request about overview and crop, where the crop lies, and the frame's grid."""
    frame, = request.visuals[0].frames
    with timeline.stage('select'):
        rows, columns = _grid(engine, frame)
        selector = engine.options.selector
        if not hasattr(selector, 'saliency'):
            selector = UnitSelector()
        values = selector.saliency([frame], rows, columns, request.question)[0]
        window = best_window(values, fewer.region, frame.width, frame.height)
        small, part = overview_and_crop(frame, window, max(4, rows * columns // 6))
        if request.keep_ratio < 1:
            # What is shown is smaller than the frame. Each picture rounds its own share.
            units = math.prod(_grid(engine, small)) + math.prod(_grid(engine, part))
            least = min(1.0, (fewer.least_units + 1) / units)
            request = replace(request, keep_ratio=max(request.keep_ratio, least))
        keep = _kept_of_crop(engine, part, window, request)
    shown = Visual((small,)), Visual((part,), keep)
    return replace(request, visuals=shown), window, (rows, columns)


def _grid(engine: Any, frame: Frame) -> tuple[int, int]:
    """Return rows and columns in units of a still as the model sees it."""
    _, h, w = grid_of((frame,), engine.options.min_pixels, engine.info.max_pixels,
                      engine.model.config.vision.factor)
    return h // 2, w // 2


def _kept_of_crop(engine: Any, part: Frame, window: Window, request: Request
                  ) -> np.ndarray | None:
    """
    Choose the crop's units where a region is always kept, which lies elsewhere in the crop.

    :return: ``None`` leaves it to the engine's selector.
    """
    selector = engine.options.selector
    always = getattr(selector, 'always', None)
    if always is None or not request.keep_ratio < 1:
        return None
    rows, columns = _grid(engine, part)
    cropped = replace(selector, always=within(always, window))
    return np.asarray(cropped((part,), (1, 2 * rows, 2 * columns), request.keep_ratio,
                              request.question))


def _mapped(events: Iterator[Event], window: Window, grid: tuple[int, int]) -> Iterator[Event]:
    """Hold text back until it is whole, and tell it with places of the whole frame."""
    margin = float('nan')
    for event in events:
        if isinstance(event, Delta):
            margin = event.margin
            continue
        if isinstance(event, Done):
            seen = event.answer.kept_units[-1]  # of the crop, as the model saw it
            text = window.to_frame(event.answer.text, grid, (seen.shape[0], seen.shape[1]))
            if text:
                yield Delta(text, len(event.answer.token_ids), margin)
            kept = window.kept_units(seen, *grid)[None]
            event = Done(_labelled(replace(event.answer, text=text, kept_slices=(kept,)), REGION))
        yield event
