"""What a caller holds: load a model, ask, close."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qwen_vl_ros
from qwen_vl_ros.engine.checkpoint import Checkpoint, find_folder, load_checkpoint
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.constrain import Constraint, Constraints
from qwen_vl_ros.engine.device import is_out_of_memory, pick_device, pick_dtype
from qwen_vl_ros.engine.errors import EngineError, ErrorCode, one_line
from qwen_vl_ros.engine.generate import Choice, Generated, Sampling, choose, generate
from qwen_vl_ros.engine.kv_cache import CachePool, KVCache
from qwen_vl_ros.engine.model import Model, Placed
from qwen_vl_ros.engine.options import ModelInfo, Options, check_options
from qwen_vl_ros.engine.prompt import Prompt, PromptBuilder, Turn, VisualToken
from qwen_vl_ros.engine.quantize import KINDS, quantize_language
from qwen_vl_ros.engine.request import check_request, plan_visual
from qwen_vl_ros.engine.sessions import Sessions, without_repeats
from qwen_vl_ros.engine.stages import DeviceClock, FeatureCache
from qwen_vl_ros.engine.text import TextStream
from qwen_vl_ros.engine.types import Answer, Delta, Done, Event, Request, Stage, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline

#: (content key, features, all finite) of a visual encoded for the request in progress.
Fresh = tuple[int, Tensor, Tensor]


class Engine:
    """
    A loaded model that answers one request at a time; its caller sees to that.

    :param checkpoint: its tensors are taken over.
    :param options: limits and habits.
    :param quantization: of the decoder's matrices, one of :data:`quantize.KINDS`.
    :param started: monotonic clock when loading began; seconds.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: Options, quantization: str = 'none',
        started: float | None = None,
    ) -> None:
        started = time.monotonic() if started is None else started
        self.options = options
        self.tokenizer = checkpoint.tokenizer
        self.prompts = PromptBuilder(
            checkpoint.tokenizer, checkpoint.chat_template, checkpoint.config)
        vocabulary = checkpoint.tokenizer.get_vocab()
        #: Ids that end an answer: those of the config and both that Qwen's template knows.
        self.end_tokens = frozenset(checkpoint.config.eos_tokens) | {
            vocabulary[t] for t in ('<|im_end|>', '<|endoftext|>') if t in vocabulary}
        self.model = Model(checkpoint)
        quantize_language(self.model.language, quantization)
        self._constraints = Constraints(
            checkpoint.tokenizer, checkpoint.config.language.vocab, self.end_tokens)
        self._text = TextStream(checkpoint.tokenizer)
        self._sessions = Sessions()
        self._features = FeatureCache()
        self._pool = CachePool(
            checkpoint.config.language, options.max_context, self.model.device, self.model.dtype,
            options.cache_slots)
        self._closed = False
        form = checkpoint.config.quant
        self.info = ModelInfo(
            name=checkpoint.name, revision=checkpoint.revision,
            dtype=str(self.model.dtype).removeprefix('torch.'),
            quantization=form.name if form else quantization, device=str(self.model.device),
            weight_bytes=self.model.language.weight_bytes,
            vision_weight_bytes=self.model.vision.weight_bytes, min_pixels=options.min_pixels,
            max_pixels=self._within(options.max_pixels), max_context=options.max_context,
            image_processor='pillow bicubic', engine_version=qwen_vl_ros.__version__,
            load_time_s=time.monotonic() - started)

    @classmethod
    def load(
        cls, path: str, device: str = 'auto', dtype: str = 'auto', quantization: str = 'none',
        max_context: int = 4096, min_pixels: int = 56 * 56, max_pixels: int = 1280 * 28 * 28,
        allow_download: bool = False, **more: Any,
    ) -> Engine:
        """
        Load a Hugging Face Qwen2-VL folder.

        :param path: the folder, or ``owner/name`` of a model on the hub.
        :param device: auto, cpu, cuda or cuda:N; cuda never falls back to the CPU.
        :param dtype: auto, float32, bfloat16 or float16.
        :param quantization: none, int8 or int4: of the decoder's matrices (see quantize.py).
        :param max_pixels: of a resized picture; a lower limit in the checkpoint's own
            ``preprocessor_config.json`` wins, ``info.max_pixels`` tells which.
        :param allow_download: fetch ``owner/name`` if it is not on this machine.
        :param more: further fields of :class:`Options`.
        :raises CheckpointError: one sentence with the path and what was expected.
        :raises EngineError: BAD_REQUEST for options out of range.
        """
        started = time.monotonic()
        if quantization not in KINDS:
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f"quantization '{quantization}' is not one of {', '.join(KINDS)}")
        options = Options(max_context, min_pixels, max_pixels, **more)
        where = pick_device(device)
        kind = pick_dtype(dtype, where)
        folder = find_folder(path, allow_download)
        config = load_config(folder)
        check_options(options, config.vision.factor, config.language.max_positions)
        size = torch.empty(0, dtype=kind).element_size()
        cache = options.cache_slots * KVCache.bytes_for(config.language, max_context, size)
        checkpoint = load_checkpoint(folder, where, kind, cache)
        return cls(checkpoint, options, quantization, started)

    def answer(
        self, request: Request, timeline: Timeline | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """
        Answer one request, yielding stages, text as it becomes final, and the whole at the end.

        A request that is cancelled or runs out of time ends with :class:`Done` as well: with the
        text so far (maybe none) and ``finish_reason`` 'cancelled' or 'deadline'.

        :param timeline: made when the request was submitted; its start counts for the deadline.
        :param cancelled: polled between pictures, between prefill chunks and before every token.
        :raises EngineError: any other failure; the next request works.
        """
        if self._closed:
            raise EngineError(ErrorCode.INACTIVE, 'the engine is closed')
        try:
            yield from self._answer(request, timeline or Timeline(request.request_id), cancelled)
        except EngineError as error:
            if error.code == ErrorCode.NUMERICAL:
                self._drop_caches()
            raise
        except Exception as error:
            self._drop_caches()
            if is_out_of_memory(error):
                raise EngineError(
                    ErrorCode.OUT_OF_MEMORY,
                    f'out of memory with {len(request.visuals)} visuals: '
                    f'{one_line(error)}') from error
            raise EngineError(
                ErrorCode.UNKNOWN,
                f'the answer failed: {type(error).__name__}: {one_line(error)}') from error

    def warm_up(self, sizes: Sequence[tuple[int, int]] = ((640, 480),)) -> None:
        """
        Answer once for each picture size, so that the first real request finds all set up.

        :param sizes: (width, height) of the cameras.
        :raises EngineError: what a real request would raise.
        """
        for width, height in sizes:
            grey = Frame.from_rgb(np.full((height, width, 3), 128, np.uint8))
            for _ in self.answer(Request('?', (Visual((grey,)),), max_new_tokens=2)):
                pass
        self.forget()

    def trace(self, request: Request) -> tuple[Prompt, Tensor]:
        """
        Return a request's prompt and the logits [n, vocab] at each of its positions.

        For evaluation and comparison: nothing is cached, streamed or remembered.
        """
        _, prompt, features = self.look(request)
        return prompt, self.model.all_logits(prompt, features)

    def look(self, request: Request) -> tuple[tuple[VisualToken, ...], Prompt, list[Placed]]:
        """
        Plan and encode a request's visuals and build its prompt, without answering.

        :return: the planned visuals, the prompt, and each visual's place in it with its merged
            tokens. Nothing is cached or remembered.
        """
        timeline = Timeline(request.request_id)
        clock = DeviceClock(timeline, self.model.device)
        visuals = self._plan(request)
        prompt = self.prompts.build((Turn(request.question, visuals),), request.system_prompt)
        features = [(span, self.model.encode(v, timeline, clock)[0])
                    for span, v in zip(prompt.spans, visuals)]
        return visuals, prompt, features

    def forget(self) -> None:
        """Empty the caches of prefixes and pictures; their memory is kept."""
        self._features.clear()
        self._pool.rewind()

    def reset_sessions(self) -> None:
        """Forget all conversations."""
        self._sessions.clear()

    def set_pixels(self, min_pixels: int, max_pixels: int) -> None:
        """
        Change the limits of resized pictures, from the next request on.

        :raises EngineError: BAD_REQUEST, and nothing has changed.
        """
        options = replace(self.options, min_pixels=min_pixels, max_pixels=max_pixels)
        config = self.model.config
        check_options(options, config.vision.factor, config.language.max_positions)
        self.options = options
        self.info = replace(
            self.info, min_pixels=min_pixels, max_pixels=self._within(max_pixels))

    def _within(self, max_pixels: int) -> int:
        """Return the limit, lowered to the largest picture that the checkpoint was made for."""
        limit = min(max_pixels, self.model.config.pixel_limit or max_pixels)
        return max(limit, self.options.min_pixels)

    def close(self) -> None:
        """Give back weights and caches; later requests are refused."""
        if not self._closed:
            self._closed = True
            self._sessions.clear()
            self._drop_caches()
            del self.model

    def _answer(
        self, request: Request, timeline: Timeline, cancelled: Callable[[], bool],
    ) -> Iterator[Event]:
        options = self.options
        check_request(request, self.prompts)
        constraint = self._constraints.compile(request.json_schema)
        stop = _stopper(timeline, request.deadline_s, cancelled)
        clock = DeviceClock(timeline, self.model.device)
        with timeline.stage('select'):
            visuals = self._plan(request)
        turns, prompt = self._fit(request, Turn(request.question, visuals))
        shown = [v for turn in turns for v in turn.visuals]
        cache, reused = self._pool.acquire(prompt.names)
        state = Generated()
        features: list[Placed] = []
        fresh: list[Fresh] = []
        needed = [(span, v) for span, v in zip(prompt.spans, shown)
                  if span[1] > max(span[0], reused)]
        if needed:
            yield Stage('vision')
        for span, visual in needed:
            state.reason = state.reason or stop()
            if not state.reason:
                features.append((span, self._features_of(visual, timeline, clock, fresh)))
        hidden: Tensor | None = None
        if not state.reason:
            yield Stage('prefill')
            x = self.model.embed(prompt, reused, features)
            for chunk in x.split(options.prefill_chunk):
                state.reason = state.reason or stop()
                if not state.reason:
                    hidden = self.model.prefill(prompt, chunk, cache.length, cache, clock)
        text: list[str] = []
        if not state.reason and hidden is not None:
            yield Stage('decode')
            chooser = self._chooser(request, prompt, cache, hidden, fresh, constraint, clock)
            self._text.reset()
            for ids in generate(
                    chooser, state, end_tokens=self.end_tokens, stop=stop,
                    most=min(request.max_new_tokens, options.max_context - prompt.ids.size),
                    repetition_window=options.repetition_window):
                text.append(''.join(self._text.push(token) for token in ids))
                if text[-1]:
                    yield Delta(text[-1], len(state.ids))
            text.append(self._text.finish())
            if text[-1]:
                yield Delta(text[-1], len(state.ids))
        said = ''.join(text)
        if state.reason in ('stop', 'length') and self.prompts.is_plain(said):
            self._sessions.store(
                request.session_id, (*turns[:-1], replace(turns[-1], answer=said)))
        yield Done(Answer(
            said, state.reason, tuple(state.ids), state.confidence,
            sum(v.total for v in shown), sum(v.kept for v in shown), prompt.ids.size, timeline,
            state.margin, tuple(v.unit_map for v in visuals)))

    def _plan(self, request: Request) -> tuple[VisualToken, ...]:
        limits = (self.options.min_pixels, self.info.max_pixels)
        return tuple(
            plan_visual(v, request, self.options.selector, limits,
                        self.model.config.vision.factor)
            for v in request.visuals)

    def _fit(self, request: Request, turn: Turn) -> tuple[tuple[Turn, ...], Prompt]:
        """
        Return the turns to show and their prompt; old turns go first, the question never.

        :raises EngineError: PROMPT_TOO_LONG when the question alone does not fit.
        """
        history = self._sessions.history(request.session_id)
        limit = self.options.max_context
        for drop in range(len(history) + 1):
            turns = without_repeats((*history[drop:], turn))
            prompt = self.prompts.build(turns, request.system_prompt)
            room = request.max_new_tokens if drop < len(history) else 1
            if prompt.ids.size + room <= limit:
                return turns, prompt
        visual = sum(end - start for start, end in prompt.spans)
        raise EngineError(
            ErrorCode.PROMPT_TOO_LONG,
            f'the prompt has {prompt.ids.size} tokens ({visual} of them visual), the context '
            f'holds {limit} with at least one for the answer')

    def _features_of(
        self, visual: VisualToken, timeline: Timeline, clock: DeviceClock,
        fresh: list[Fresh],
    ) -> Tensor:
        """
        Return a visual's merged tokens [kept, width], from the cache or the encoder.

        :param fresh: gets (key, features, all finite) of what was computed.
        """
        cached = self._features.get(visual.key)
        if cached is not None:
            return cached
        features, finite = self.model.encode(visual, timeline, clock)
        fresh.append((visual.key, features, finite))
        return features

    def _chooser(
        self, request: Request, prompt: Prompt, cache: KVCache, hidden: Tensor,
        fresh: list[Fresh], constraint: Constraint | None, clock: DeviceClock,
    ) -> Callable[[int | None], Choice]:
        """Return the function that computes the next token of this request."""
        sampling = Sampling(request.temperature, request.top_k, request.top_p)
        generator = None
        if sampling.temperature > 0:
            generator = torch.Generator(self.model.device).manual_seed(request.seed)

        def next_choice(last: int | None) -> Choice:
            allowed = None
            if constraint is not None:
                allowed = constraint.advance(last).to(self.model.device)

            def pick(logits: Tensor) -> Choice:
                return choose(logits, sampling, generator, allowed)

            if last is None:
                choice = self.model.first_token(hidden, pick, clock)
                self._keep_features(fresh)
                return choice
            return self.model.next_token(last, prompt, cache, pick, clock)

        return next_choice

    def _keep_features(self, fresh: list[Fresh]) -> None:
        """
        Put computed features into the cache.

        :raises EngineError: NUMERICAL for a picture whose features are not finite.
        """
        for key, features, finite in fresh:
            if not bool(finite):
                raise EngineError(
                    ErrorCode.NUMERICAL,
                    'numerical failure: the encoder gave features that are not finite; '
                    'use bfloat16 or float32')
            self._features.put(key, features)

    def _drop_caches(self) -> None:
        self._pool.forget()
        self._features.clear()
        if self.model.device.type == 'cuda':
            torch.cuda.empty_cache()


def _stopper(
    timeline: Timeline, deadline_s: float | None, cancelled: Callable[[], bool],
) -> Callable[[], str]:
    """Return a function that gives 'cancelled', 'deadline' or ''."""
    end_ns = None if deadline_s is None else timeline.start_ns + int(deadline_s * 1e9)

    def stop() -> str:
        if cancelled():
            return 'cancelled'
        if end_ns is not None and time.monotonic_ns() >= end_ns:
            return 'deadline'
        return ''

    return stop
