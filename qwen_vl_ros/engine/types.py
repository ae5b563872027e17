"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline


@dataclass(frozen=True)
class Visual:
    """
    One thing to look at: a still (one frame) or a clip (two or more frames, oldest first).

    :param frames: the frames; a clip of odd length repeats its last frame (as transformers does).
    :param keep: bool, one entry a 2x2 unit of the grid in raster order over all temporal slices
        (shape [T * H/2 * W/2], or [T, H/2, W/2]); ``None`` keeps all.
    :param variant: names features that are not those of the encoder on the kept units alone, so
        that caches tell them apart (see :mod:`qwen_vl_ros.saliency.after_merger`).
    """

    frames: tuple[Frame, ...]
    keep: np.ndarray | None = None
    variant: str = ''


@dataclass(frozen=True)
class Request:
    """
    One question.

    :param question: the user's words.
    :param visuals: stills and clips, in the order in which the prompt shows them.
    :param system_prompt: replaces the template's default; ``None`` keeps the engine's.
    :param session_id: turns of one non-empty session share their history.
    :param max_new_tokens: most tokens to generate, at least 1.
    :param temperature: 0 is greedy, and so is anything under 0.0001.
    :param top_p: nucleus of sampling, (0, 1].
    :param top_k: 0 is off.
    :param seed: of sampling.
    :param keep_ratio: share of units kept where a visual brings no mask of its own, (0, 1].
    :param deadline_s: seconds from submission after which the answer is cut off; ``None`` is none.
    :param json_schema: when not empty, the answer is constrained to this JSON schema.
    :param request_id: appears in logs, traces and answers.
    """

    question: str
    visuals: tuple[Visual, ...] = ()
    system_prompt: str | None = None
    session_id: str = ''
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    keep_ratio: float = 1.0
    deadline_s: float | None = None
    json_schema: str = ''
    request_id: str = ''


@dataclass(frozen=True)
class Answer:
    """
    A finished answer.

    :param text: all deltas joined.
    :param finish_reason: stop, length, repetition, deadline or cancelled.
    :param token_ids: generated ids without the end token.
    :param confidence: mean probability of the chosen tokens, NaN when there are none.
    :param vision_tokens_in: merged tokens of all visuals before dropping.
    :param vision_tokens_kept: merged tokens that the language model saw.
    :param prompt_tokens: length of the prompt as prefilled, cached prefix included.
    :param timeline: the stages with their times and bytes.
    :param margin: logit distance of best and second-best token at the first answer position.
    :param kept_slices: for each visual of the request, bool [slices, rows, columns] of its units,
        in the picture's own arrangement; a still has one slice, a clip one for two frames.
    :param approximate: options in force that can change an answer beyond rounding, by name.
    """

    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    confidence: float
    vision_tokens_in: int
    vision_tokens_kept: int
    prompt_tokens: int
    timeline: Timeline = field(repr=False)
    margin: float = float('nan')
    kept_slices: tuple[np.ndarray, ...] = field(default=(), repr=False, compare=False)
    approximate: tuple[str, ...] = ()

    @property
    def kept_units(self) -> tuple[np.ndarray, ...]:
        """Return bool [rows, columns] of the units of each visual's last frames."""
        return tuple(kept[-1] for kept in self.kept_slices)


@dataclass(frozen=True)
class Stage:
    """The request entered a stage: ``'vision'``, ``'prefill'`` or ``'decode'``."""

    name: str


@dataclass(frozen=True)
class Delta:
    """
    Text that became final; never ends inside a character.

    :param tokens: generated so far.
    :param margin: of the answer's first position, as in :class:`Answer`.
    """

    text: str
    tokens: int
    margin: float = field(default=float('nan'), compare=False)


@dataclass(frozen=True)
class Done:
    """The last event of a request that did not fail."""

    answer: Answer


Event = Stage | Delta | Done
