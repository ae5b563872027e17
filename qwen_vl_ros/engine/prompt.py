"""Chat template to token ids, M-RoPE positions and names of the tokens that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from qwen_vl_ros.engine.config import ModelConfig
from qwen_vl_ros.engine.errors import CheckpointError, EngineError, ErrorCode, one_line
from qwen_vl_ros.engine.patches import Grid
from qwen_vl_ros.frame import Frame


@dataclass(frozen=True)
class VisualToken:
    """
    What the prompt needs to know of a visual.

    :param grid: (t, h, w) in patches, of the whole visual.
    :param clip: whether it takes the video placeholder.
    :param key: :func:`qwen_vl_ros.engine.patches.content_key`.
    :param units: int64, kept units in raster order; ``None`` is all.
    :param frames: the pictures, to encode them when their features are not cached.
    """

    grid: Grid
    clip: bool
    key: int
    units: np.ndarray | None = None
    frames: tuple[Frame, ...] = ()

    @property
    def unit_map(self) -> np.ndarray:
        """Return which units of the last slice are kept, bool [h / 2, w / 2]."""
        return self.slice_maps[-1]

    @property
    def slice_maps(self) -> np.ndarray:
        """Return which units are kept, bool [t, h / 2, w / 2]."""
        kept = np.ones(self.total, np.bool_)
        if self.units is not None:
            kept[:] = False
            kept[self.units] = True
        return kept.reshape(self.grid[0], self.grid[1] // 2, self.grid[2] // 2)

    @property
    def total(self) -> int:
        """Return the merged tokens before dropping."""
        return self.grid[0] * self.grid[1] * self.grid[2] // 4

    @property
    def kept(self) -> int:
        """Return the merged tokens that the language model sees."""
        return self.total if self.units is None else self.units.size

    @property
    def kept_per_slice(self) -> list[int]:
        """Return the kept units of each temporal slice."""
        t, area = self.grid[0], self.grid[1] * self.grid[2] // 4
        if self.units is None:
            return [area] * t
        return [int(n) for n in np.bincount(self.units // area, minlength=t)]

    @property
    def glance(self) -> int:
        """Return a number that equal visuals share, see :attr:`Frame.glance`."""
        return hash((self.grid, *(frame.glance for frame in self.frames)))

    @property
    def frame_bytes(self) -> int:
        """Return the bytes that the frames hold."""
        return sum(frame.data.nbytes for frame in self.frames)


@dataclass(frozen=True)
class Turn:
    """
    One exchange of a conversation.

    :param question: the user's words.
    :param visuals: shown before the words.
    :param answer: what the assistant said; ``None`` in the turn to answer.
    """

    question: str
    visuals: tuple[VisualToken, ...] = ()
    answer: str | None = None


@dataclass(frozen=True)
class Prompt:
    """
    A prompt with dropped units left out.

    :param ids: int64 [n], token ids, placeholders at visual tokens.
    :param positions: int64 [3, n], computed on the whole prompt, then indexed by what is kept.
    :param names: int64 [n], as in :class:`qwen_vl_ros.engine.kv_cache.KVCache`.
    :param spans: of each visual: first index and one past its last, in the kept sequence.
    :param next_position: of the first generated token, on all axes; dropping does not change it.
    """

    ids: np.ndarray
    positions: np.ndarray
    names: np.ndarray
    spans: tuple[tuple[int, int], ...]
    next_position: int

    @property
    def runs_on(self) -> bool:
        """
        Tell whether an answer stands where the same words would stand in a longer prompt.

        Not so after a clip whose time axis reaches beyond all text: then the rows that decoding
        caches are of no use to the next turn.
        """
        return self.next_position == int(self.positions[0, -1]) + 1


#: Which of a turn's visuals are clips, the question, the answer.
Said = tuple[tuple[bool, ...], str, str | None]


def said(turns: Sequence[Turn]) -> tuple[Said, ...]:
    """Return what of a conversation its tokens depend on."""
    return tuple((tuple(v.clip for v in turn.visuals), turn.question, turn.answer)
                 for turn in turns)


class PromptBuilder:
    """
    Renders conversations.

    :param tokenizer: transformers' fast tokenizer.
    :param template: Jinja text of the chat template.
    :param config: for the placeholder ids.
    :raises CheckpointError: when the template does not put a placeholder where a visual is.
    """

    def __init__(self, tokenizer: Any, template: str, config: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._config = config
        self._control = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        # A robot asks the same of every frame; only a template that tells the time says it anew.
        self._tokens = self._render if 'strftime_now' in template else lru_cache(64)(self._render)
        probe = Turn('?', (VisualToken((1, 2, 2), False, 0), VisualToken((1, 2, 2), True, 1)))
        try:
            self.build((probe,), None)
        except EngineError as error:
            raise CheckpointError(f'the chat template is of no use: {error.message}') from error

    def is_plain(self, text: str) -> bool:
        """Tell whether a text spells no control token."""
        return not any(token in text for token in self._control)

    def check_text(self, text: str, what: str) -> None:
        """:raises EngineError: BAD_REQUEST when ``text`` spells a control token."""
        for token in self._control:
            if token in text:
                raise EngineError(
                    ErrorCode.BAD_REQUEST,
                    f"the {what} contains the control token '{token}'; expected plain text")

    def build(self, turns: Sequence[Turn], system_prompt: str | None) -> Prompt:
        """
        Render a conversation that ends in an open question.

        :param turns: oldest first.
        :param system_prompt: ``None`` leaves the template's own.
        """
        return self.expand(
            self._tokens(said(turns), system_prompt), [v for turn in turns for v in turn.visuals])

    def count(self, turns: Sequence[Turn], system_prompt: str | None) -> int:
        """Return the tokens that :meth:`build` gives; the visuals' keys may still be unknown."""
        kept = [v.kept for turn in turns for v in turn.visuals]
        return len(self._tokens(said(turns), system_prompt)) - len(kept) + sum(kept)

    def _render(self, turns: tuple[Said, ...], system_prompt: str | None) -> tuple[int, ...]:
        """Return the tokens of a conversation with one placeholder a visual."""
        messages: list[dict[str, Any]] = []
        if system_prompt is not None:
            messages.append({'role': 'system', 'content': system_prompt})
        for clips, question, answer in turns:
            content: list[dict[str, str]] = [
                {'type': 'video' if clip else 'image'} for clip in clips]
            content.append({'type': 'text', 'text': question})
            messages.append({'role': 'user', 'content': content})
            if answer is not None:
                messages.append({'role': 'assistant', 'content': answer})
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False,
                add_generation_prompt=True)
        except Exception as error:
            raise EngineError(
                ErrorCode.BAD_REQUEST, f'the chat template failed: {one_line(error)}') from error
        return tuple(self._tokenizer(text, add_special_tokens=False)['input_ids'])

    def expand(self, ids: Sequence[int], visuals: Sequence[VisualToken]) -> Prompt:
        """
        Put the visuals' tokens where their placeholders are.

        A text token's position follows its predecessor on all axes. A visual's tokens stand at
        start + (slice, row, column) in units; the text after it goes on at
        start + max(rows, columns), as in transformers 5 (4.57 also counts slices, which differs
        for a clip of more slices than rows and columns).

        :param ids: tokens with one placeholder a visual, in order.
        """
        config = self._config
        pads = [i for i, token in enumerate(ids)
                if token in (config.image_token, config.video_token)]
        wanted = [config.video_token if v.clip else config.image_token for v in visuals]
        if [ids[i] for i in pads] != wanted:
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f'the rendered prompt has {len(pads)} visual placeholders in another number or '
                f'order than the {len(visuals)} visuals shown')
        parts_ids, parts_pos, parts_names, spans = [], [], [], []
        position = highest = done = length = 0
        for pad, visual in zip([*pads, len(ids)], [*visuals, None]):
            words = np.asarray(ids[done:pad], np.int64)
            parts_ids.append(words)
            parts_names.append(words)
            parts_pos.append(np.broadcast_to(np.arange(words.size) + position, (3, words.size)))
            position += words.size
            highest = max(highest, position - 1)
            length += words.size
            done = pad + 1
            if visual is None:
                break
            t, rows, cols = visual.grid[0], visual.grid[1] // 2, visual.grid[2] // 2
            index = np.arange(visual.total) if visual.units is None else visual.units
            spot = np.unravel_index(index, (t, rows, cols))
            parts_pos.append(position + np.stack(spot))
            parts_ids.append(np.full(index.size, ids[pad], np.int64))
            # Below -1, so that no text token has the same name.
            parts_names.append(-2 - ((visual.key + index) & ((1 << 62) - 1)))
            # The whole visual counts, also where all units of its edge are dropped.
            highest = max(highest, position + max(t, rows, cols) - 1)
            position += max(rows, cols)
            spans.append((length, length + index.size))
            length += index.size
        return Prompt(
            np.concatenate(parts_ids), np.concatenate(parts_pos, axis=1),
            np.concatenate(parts_names), tuple(spans), highest + 1)
