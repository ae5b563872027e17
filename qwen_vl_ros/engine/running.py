"""One request on its way through the stages; what drives it, decides when each of them runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from qwen_vl_ros.engine.constrain import Constraint, Constraints
from qwen_vl_ros.engine.decoder import Row
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import Acceptor, Choice, Generated, Sampling, choice_of
from qwen_vl_ros.engine.kv_cache import CachePool, KVCache
from qwen_vl_ros.engine.model import Model, Placed
from qwen_vl_ros.engine.offload import Prepared
from qwen_vl_ros.engine.options import ModelInfo, Options
from qwen_vl_ros.engine.parts import Look, banded, parts_of
from qwen_vl_ros.engine.prompt import Prompt, PromptBuilder, Turn, VisualToken
from qwen_vl_ros.engine.request import (
    check_length,
    check_request,
    lay_out,
    named,
    plan_visual,
)
from qwen_vl_ros.engine.sessions import Sessions, without_repeats
from qwen_vl_ros.engine.stages import Arriving, DeviceClock, FeatureCache
from qwen_vl_ros.engine.text import TextStream
from qwen_vl_ros.engine.types import Answer, Delta, Done, Request
from qwen_vl_ros.measure.timeline import Timeline

#: How an answer is labelled whose pictures were encoded in bands, or in part.
BANDS, DROPPED = 'micro_batch', 'keep_ratio'

#: The one of :attr:`ModelInfo.approximate` that only answers about pictures have.
VISION_QUANTIZATION = 'vision_quantization'


#: Deadlines later than that, 30 years, come to the same.
FOREVER_S = 1e9

#: Temperatures below it are greedy: logits divided by them would leave the range of float.
COLDEST = 1e-4


def sampling_of(request: Request) -> Sampling:
    """Return how a request's tokens are chosen."""
    temperature = request.temperature if request.temperature >= COLDEST else 0.0
    return Sampling(temperature, request.top_k, request.top_p)


class Shared(Protocol):
    """What requests share: a loaded engine."""

    model: Model
    options: Options
    info: ModelInfo
    tokenizer: Any
    prompts: PromptBuilder
    constraints: Constraints
    sessions: Sessions
    features: FeatureCache
    pool: CachePool
    end_tokens: frozenset[int]


class Running:
    """
    State and stages of a request: plan, open, encode and prefill in steps, choose, accept, close.

    :meth:`plan` may run on any thread; all others on the one that owns the device.

    :param shared: the engine.
    :param request: the question.
    :param timeline: made when it was submitted; its start counts for the deadline.
    :param cancelled: polled wherever the work can be cut off.
    :param micro_batch: see :func:`parts_of`.
    """

    def __init__(
        self, shared: Shared, request: Request, timeline: Timeline,
        cancelled: Callable[[], bool], micro_batch: float = float('inf'),
    ) -> None:
        self.request = request
        self.timeline = timeline
        self.micro_batch = micro_batch
        self.generated = Generated()
        self.looks: list[Look] = []
        self.hidden: Tensor | None = None
        self._first: Arriving | None = None
        self.cache: KVCache | None = None
        self.slot: int | None = None
        self._shared = shared
        self._cancelled = cancelled
        # What is no number is refused when the request is laid out.
        deadline = math.nan if request.deadline_s is None else request.deadline_s
        self._end_ns = None if math.isnan(deadline) else (
            timeline.start_ns + int(min(deadline, FOREVER_S) * 1e9))
        self._said: list[str] = []
        self._finite: list[tuple[Look, Tensor]] = []

    # On any thread

    def stop(self) -> str:
        """Return 'cancelled' or 'deadline' when it is to end, else ''."""
        if self._cancelled():
            return 'cancelled'
        if self._end_ns is not None and time.monotonic_ns() >= self._end_ns:
            return 'deadline'
        return ''

    def lay_out(self) -> VisualToken | None:
        """
        Check the request and fix what its visuals show, all but their keys.

        :return: the first visual where it can be encoded before all is planned: in one part, and
            nothing that looks like it is remembered.
        :raises EngineError: BAD_REQUEST, BAD_SCHEMA, PROMPT_TOO_LONG.
        """
        shared, request = self._shared, self.request
        with self.timeline.stage('select'):
            check_request(request, shared.prompts)
            self._constraint: Constraint | None = shared.constraints.compile(request.json_schema)
            limits = (shared.options.min_pixels, shared.info.max_pixels)
            self._laid = tuple(
                lay_out(v, request, shared.options.selector, limits,
                        shared.model.config.vision.factor) for v in request.visuals)
            # The question alone; old turns go before it is refused.
            check_length(
                shared.prompts.count((Turn(request.question, self._laid),), request.system_prompt),
                sum(v.kept for v in self._laid), shared.options.max_context)
            for visual in self._laid[:1]:
                if len(parts_of(visual, self.micro_batch)) == 1 and self.micro_batch >= 1 and (
                        not shared.features.may_hold(visual.glance)):
                    return visual
        return None

    def plan(self) -> None:
        """Lay out the prompt, after :meth:`lay_out`."""
        with self.timeline.stage('select'):
            self.visuals = tuple(
                banded(named(token, visual.variant), self.micro_batch)
                for token, visual in zip(self._laid, self.request.visuals))
            self.turns, self.prompt = self._fit(Turn(self.request.question, self.visuals))
        self.shown = [v for turn in self.turns for v in turn.visuals]

    def adopt(self, features: Tensor, finite: Tensor) -> bool:
        """
        Take the merged tokens of the first visual, encoded before it was known to be needed.

        :return: whether it is.
        """
        for look in self.looks[:1]:
            if look.visual is self.visuals[0] and look.parts:
                look.parts, look.done = [], [features]
                self._finite.append((look, finite))
                return True
        return False

    def _fit(self, turn: Turn) -> tuple[tuple[Turn, ...], Prompt]:
        """Return the turns to show and their prompt; old turns go first, the question never."""
        request, prompts = self.request, self._shared.prompts
        history = self._shared.sessions.history(request.session_id)
        for drop in range(len(history)):
            turns = without_repeats((*history[drop:], turn))
            prompt = prompts.build(turns, request.system_prompt)
            if prompt.ids.size + request.max_new_tokens <= self._shared.options.max_context:
                return turns, prompt
        return (turn,), prompts.build((turn,), request.system_prompt)

    # On the device's thread

    def open(self, clock: DeviceClock | None = None) -> None:
        """
        Take a cache and find out which visuals have to be encoded.

        :param clock: times the stages; made here where ``None``.
        :raises EngineError: OUT_OF_MEMORY when all caches are in use.
        """
        shared = self._shared
        self.clock = clock or DeviceClock(self.timeline, shared.model.device)
        self.cache, self.reused = shared.pool.acquire(self.prompt.names)
        for span, visual in zip(self.prompt.spans, self.shown):
            if span[1] <= max(span[0], self.reused):
                continue
            features = shared.features.get(visual.key)
            if features is None:
                self.looks.append(Look(visual, span, parts_of(visual, self.micro_batch)))
            else:
                self.looks.append(Look(visual, span, [], [features], cached=True))

    @property
    def to_encode(self) -> Look | None:
        """Return the first visual with parts left to encode."""
        return next((look for look in self.looks if look.parts), None)

    def patches(self, look: Look) -> Prepared:
        """Return the patches of a visual; may run on another thread."""
        return self._shared.model.patches(look.visual, self.timeline)

    def encode(self, look: Look, patches: Prepared) -> None:
        """Encode the next part of a visual; the device may still be at it on return."""
        part = look.parts.pop(0)
        features, finite = self._shared.model.encode_part(
            look.visual, patches, part, self.clock)
        look.done.append(features)
        self._finite.append((look, finite))

    @property
    def ready(self) -> int:
        """Return the prompt's index up to which it can be prefilled."""
        look = self.to_encode
        return self.prompt.ids.size if look is None else look.ready

    @property
    def prefilled(self) -> int:
        """Return the prompt's index up to which it has been prefilled."""
        assert self.cache is not None
        return self.cache.length

    def prefill(self, most: int) -> int:
        """
        Prefill the next tokens of what is ready.

        :param most: tokens at most; fewer where these would take the device too long.
        :return: how many there were.
        """
        assert self.cache is not None
        start = self.prefilled
        stop = min(self.ready, start + self._shared.model.language.chunk(most))
        placed: list[Placed] = []
        for look in self.looks:
            begin = look.span[0]
            for features in look.done:
                placed.append(((begin, begin + features.shape[0]), features))
                begin += features.shape[0]
        self.hidden = self._shared.model.prefill(
            self.prompt, placed, start, stop, self.cache, self.clock)
        return stop - start

    def launch_first(self) -> None:
        """Put the choice of the first token behind the prefill; :meth:`first_choice` reads it."""
        if self._constraint is None:
            self._first = self._launch_first()

    @property
    def chooses(self) -> bool:
        """Say whether the first token is being chosen."""
        return self._first is not None

    def _launch_first(self) -> Arriving:
        assert self.hidden is not None
        request, model = self.request, self._shared.model
        sampling = sampling_of(request)
        generator = None
        if sampling.temperature:
            generator = torch.Generator(model.device).manual_seed(request.seed)
        return Arriving(model.first_token(
            self.hidden, sampling, generator, self.allowed(None), self.clock))

    def first_choice(self) -> Choice:
        """
        Choose the first token; waits for the device.

        :raises EngineError: NUMERICAL for a picture whose features are not finite.
        """
        request, shared = self.request, self._shared
        first = self._first or self._launch_first()
        self._acceptor = Acceptor(
            self.generated, shared.end_tokens,
            min(request.max_new_tokens, shared.options.max_context - self.prompt.ids.size),
            shared.options.repetition_window)
        self._text = TextStream(shared.tokenizer)
        choice = choice_of(first.wait())
        self._chosen_ns = time.monotonic_ns()
        if not choice.finite:
            self._check_features()
        self.hidden = self._first = None
        if self.cache is not None:
            # The choice was waited for, so that all rows before it are written.
            self.cache.settled = self.cache.length
        self._keep_features()
        return choice

    def allowed(self, last: int | None) -> Tensor | None:
        """
        Return the tokens that a schema permits after ``last``, bool [vocab]; ``None`` is any.

        :param last: the token just chosen; ``None`` before the first.
        """
        if self._constraint is None:
            return None
        return self._constraint.advance(last).to(self._shared.model.device)

    def _check_features(self) -> None:
        """:raises EngineError: NUMERICAL where it was the encoder; its NaN reach every token."""
        for _, finite in self._finite:
            if not bool(finite):
                raise EngineError(
                    ErrorCode.NUMERICAL,
                    'numerical failure: the encoder gave features that are not finite; '
                    'use bfloat16 or float32')

    def _keep_features(self) -> None:
        for look in self.looks:
            if not look.cached:
                features = look.done[0] if len(look.done) == 1 else torch.cat(look.done)
                self._shared.features.put(
                    look.visual.key, features, look.visual.glance)
        self._finite, self.looks = [], []

    def admit(self, token: int) -> int:
        """Give the sequence to the decoder, which runs ``token`` next; return its slot."""
        request, prompt = self.request, self.prompt
        assert self.cache is not None
        sampling = sampling_of(request)
        # Another seed than the first token's, whose draw would otherwise come twice.
        row = Row(self.cache, prompt.next_position - prompt.ids.size, sampling, request.seed + 1,
                  named=prompt.runs_on, steps=self._acceptor.most - 1)
        self.slot = self._shared.model.decoder.admit(row, token)
        self.timeline.add('admit', self._chosen_ns, time.monotonic_ns())
        return self.slot

    def accept(self, choice: Choice) -> Delta | None:
        """
        Count a choice in; ``generated.reason`` is set when it was the last.

        :return: the text that became final.
        :raises EngineError: NUMERICAL.
        """
        ids = self._acceptor.take(choice)
        return self._delta(''.join(self._text.push(token) for token in ids))

    def end(self) -> Delta | None:
        """Return the rest of the text when no more tokens come."""
        if not hasattr(self, '_text'):
            return None
        rest = ''.join(self._text.push(token) for token in self._acceptor.rest())
        return self._delta(rest + self._text.finish())

    def _delta(self, text: str) -> Delta | None:
        self._said.append(text)
        return Delta(text, len(self.generated.ids), self.generated.margin) if text else None

    def answer(self) -> Done:
        """Return the answer, and remember it where it belongs to a session."""
        said, state = ''.join(self._said), self.generated
        shared, shown = self._shared, self.shown
        if state.reason in ('stop', 'length') and shared.prompts.is_plain(said):
            shared.sessions.store(
                self.request.session_id, (*self.turns[:-1], replace(self.turns[-1], answer=said)))
        observe = getattr(shared.options.selector, 'observe', None)
        if observe is not None:
            observe(self.request, self.visuals, self.prompt, tuple(state.ids))
        seen, kept = sum(v.total for v in shown), sum(v.kept for v in shown)
        labels = ((BANDS, self.micro_batch < 1 and bool(shown)), (DROPPED, kept < seen))
        return Done(Answer(
            said, state.reason, tuple(state.ids), state.confidence,
            seen, kept, self.prompt.ids.size, self.timeline, state.margin,
            tuple(v.slice_maps for v in self.visuals),
            (*(name for name in shared.info.approximate if shown or name != VISION_QUANTIZATION),
             *(label for label, holds in labels if holds))))

    def release(self) -> None:
        """Take the sequence out of the decoder."""
        if self.slot is not None:
            slot, self.slot = self.slot, None
            self._shared.model.decoder.release(slot)

    def close(self, keep: bool = True) -> None:
        """
        Give back what it holds; the device has done all its work.

        :param keep: the cache's rows can be trusted.
        """
        self.release()
        self.looks, self._finite, self.hidden, self._first = [], [], None, None
        if self.cache is not None:
            cache, self.cache = self.cache, None
            self._shared.pool.release(cache, keep)


def plan_visuals(shared: Shared, request: Request) -> tuple[VisualToken, ...]:
    """
    Fix grid, kept units and key of each visual of a request.

    :raises EngineError: BAD_REQUEST.
    """
    limits = (shared.options.min_pixels, shared.info.max_pixels)
    return tuple(plan_visual(v, request, shared.options.selector, limits,
                             shared.model.config.vision.factor) for v in request.visuals)
