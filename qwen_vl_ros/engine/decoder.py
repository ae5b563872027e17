"""
One decode step for several sequences at a time, and its plain torch form.

Sequences that are pending together share each read of the weights; every one keeps its own cache,
length, sampling and end. What ``Model.next_token`` did for one sequence::

    choice = model.next_token(last, prompt, cache, pick, clock)

becomes, with a decoder that lives as long as the model::

    slot = decoder.admit(Row(cache, prompt.next_position - prompt.ids.size, sampling, seed,
                             named=prompt.runs_on, steps=most - 1), first_token)
    while ...:                                 # every pending sequence, each to its own end
        choice = decoder.step()[slot]
    decoder.release(slot)

:meth:`Decoder.step` runs the last token of each admitted sequence, so it also writes that token's
row into the cache and names it (``cache.extend``); callers do neither. The last token that a
sequence chooses is not run, as before. A decoder may compute steps ahead of those asked for: the
rows that it writes then lie behind ``cache.length``, where nobody reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import Choice, Sampling, choose
from qwen_vl_ros.engine.kv_cache import NO_TOKEN, KVCache
from qwen_vl_ros.engine.language import LanguageModel, causal_attention
from qwen_vl_ros.engine.layers import activate, rms_norm, rotate

#: Sequences that one step takes at most.
SLOTS = 8

GREEDY = Sampling()


@dataclass(frozen=True)
class Row:
    """
    A sequence to decode.

    :param cache: holds its prompt; a step appends to it.
    :param offset: M-RoPE position of a token less its index in the cache (all axes alike).
    :param sampling: how tokens are chosen.
    :param seed: of sampling; the same seed gives the same tokens from the same decoder.
    :param named: the decoded tokens can serve a later prompt that starts alike; otherwise their
        rows in the cache are named :data:`~qwen_vl_ros.engine.kv_cache.NO_TOKEN`.
    :param steps: most steps that will be asked for; ``None`` is what the cache has room for. A
        decoder that computes ahead stops there.
    """

    cache: KVCache
    offset: int
    sampling: Sampling = GREEDY
    seed: int = 0
    named: bool = True
    steps: int | None = None


class Decoder(Protocol):
    """What takes sequences from their first token on."""

    def admit(self, row: Row, token: int) -> int:
        """
        Take a sequence in; the next step runs ``token``.

        :return: its slot, under which steps report.
        :raises EngineError: BAD_REQUEST when all slots are taken or the token is no id of the
            vocabulary, PROMPT_TOO_LONG when its cache has no room for ``row.steps`` tokens.
        """

    def release(self, slot: int) -> None:
        """Let a sequence go; its cache keeps the rows of the steps that were asked for."""

    def step(self, allowed: Mapping[int, Tensor] | None = None) -> dict[int, Choice]:
        """
        Run the last token of every sequence and choose the ones after them.

        A sequence whose logits are not finite gets a choice that says so (``finite``), and only
        that one; it has to be released. Choices do not depend on the neighbours beyond rounding.

        :param allowed: by slot, bool [vocab] of the tokens that a grammar permits; a slot without
            an entry may choose any.
        :raises EngineError: PROMPT_TOO_LONG when a cache is full; nothing has run then.
        """


@dataclass
class Running:
    """A sequence in its slot: the token that runs next and the generator of its sampling."""

    row: Row
    token: int
    generator: torch.Generator | None


class TorchDecoder:
    """
    The decoder in plain torch: every device, dtype and form of weights.

    Norms and matrices work on the stacked embeddings [sequences, width], so that weights are read
    once; each sequence attends to its own cache.

    :param language: the weights.
    :param slots: sequences at a time.
    """

    def __init__(self, language: LanguageModel, slots: int = SLOTS) -> None:
        self.language = language
        self._slots: list[Running | None] = [None] * slots

    def admit(self, row: Row, token: int) -> int:
        """See :meth:`Decoder.admit`."""
        slot = check_admission(self._slots, row, token, self.language.config.vocab)
        generator = None
        if row.sampling.temperature > 0:
            generator = torch.Generator(self.language.device).manual_seed(row.seed)
        self._slots[slot] = Running(row, token, generator)
        return slot

    def release(self, slot: int) -> None:
        """See :meth:`Decoder.release`."""
        self._slots[slot] = None

    @torch.inference_mode()
    def step(self, allowed: Mapping[int, Tensor] | None = None) -> dict[int, Choice]:
        """See :meth:`Decoder.step`."""
        active = [(slot, s) for slot, s in enumerate(self._slots) if s is not None]
        for _, s in active:
            check_room(s.row)
        if not active:
            return {}
        logits = step_logits(
            self.language, [s.token for _, s in active], [s.row for _, s in active])
        found = {}
        for (slot, s), line in zip(active, logits):
            mask = (allowed or {}).get(slot)
            found[slot] = choose(line, s.row.sampling, s.generator, mask)
            append_name(s.row, s.token)
            s.token = found[slot].token
        return found


def step_logits(language: LanguageModel, tokens: list[int], rows: list[Row]) -> Tensor:
    """
    Run one token of each sequence; rows are written behind the caches' lengths.

    :return: logits [sequences, vocab].
    """
    cfg = language.config
    n, both = len(tokens), cfg.heads + cfg.kv_heads
    x = language.embed(torch.tensor(tokens, device=language.device))
    at = torch.tensor([row.cache.length + row.offset for row in rows], device=language.device)
    cos, sin = (z[:, None] for z in language.rotary(at.expand(3, n)))
    for i, layer in enumerate(language.layers):
        y = layer.qkv(rms_norm(x, layer.norm1, cfg.eps))
        y = y.reshape(n, both + cfg.kv_heads, cfg.head_dim)
        turned = rotate(y[:, :both], cos, sin)
        mixed = []
        for j, row in enumerate(rows):
            keys, values = row.cache.write(
                i, row.cache.length, turned[j, cfg.heads:, None], y[j, both:, None])
            mixed.append(causal_attention(turned[j, :cfg.heads, None], keys, values, None))
        x = x + layer.out(torch.stack(mixed).reshape(n, cfg.width))
        gate, up = layer.gate_up(rms_norm(x, layer.norm2, cfg.eps)).chunk(2, dim=-1)
        x = x + layer.down(activate(gate, cfg.activation) * up)
    return language.logits(x)


def check_admission(slots: Sequence[Running | None], row: Row, token: int, vocab: int) -> int:
    """
    Return the first free slot.

    :raises EngineError: see :meth:`Decoder.admit`.
    """
    if None not in slots:
        raise EngineError(
            ErrorCode.BAD_REQUEST, f'{len(slots)} sequences are being decoded already')
    if not 0 <= token < vocab:
        raise EngineError(
            ErrorCode.BAD_REQUEST, f'token {token} lies outside the vocabulary of {vocab}')
    room = row.cache.capacity - row.cache.length
    if row.steps is not None and row.steps > room:
        raise EngineError(
            ErrorCode.PROMPT_TOO_LONG,
            f'{row.steps} tokens after {row.cache.length} exceed the cache of '
            f'{row.cache.capacity}')
    return slots.index(None)


def check_room(row: Row) -> None:
    """:raises EngineError: PROMPT_TOO_LONG when the cache has no room for one more row."""
    if row.cache.length >= row.cache.capacity:
        raise EngineError(
            ErrorCode.PROMPT_TOO_LONG, f'the cache of {row.cache.capacity} tokens is full')


def append_name(row: Row, token: int) -> None:
    """Count the row that a step wrote for ``token`` as part of the cache."""
    row.cache.extend(np.array([token if row.named else NO_TOKEN]))
