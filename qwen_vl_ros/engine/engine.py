"""What a caller holds: load a model, ask, close."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import qwen_vl_ros
from qwen_vl_ros.engine.checkpoint import Checkpoint, find_folder, load_checkpoint
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.constrain import Constraints
from qwen_vl_ros.engine.cuda_decoder import make_decoder
from qwen_vl_ros.engine.device import give_back, is_out_of_memory, pick_device, pick_dtype
from qwen_vl_ros.engine.errors import EngineError, ErrorCode, one_line
from qwen_vl_ros.engine.hand_over import make_hand_over
from qwen_vl_ros.engine.kv_cache import CachePool, KVCache
from qwen_vl_ros.engine.lanes import Mark
from qwen_vl_ros.engine.model import Model, Placed
from qwen_vl_ros.engine.options import ModelInfo, Options, cache_count, check_options
from qwen_vl_ros.engine.packing import pack_weights
from qwen_vl_ros.engine.prompt import Prompt, PromptBuilder, Turn, VisualToken
from qwen_vl_ros.engine.quantize import KINDS, quantize_language
from qwen_vl_ros.engine.quantize_vision import quantize_vision
from qwen_vl_ros.engine.running import VISION_QUANTIZATION, Running, plan_visuals
from qwen_vl_ros.engine.sessions import Sessions
from qwen_vl_ros.engine.stages import DeviceClock, FeatureCache
from qwen_vl_ros.engine.tensorrt import choose_engine
from qwen_vl_ros.engine.types import Event, Request, Stage, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline

if TYPE_CHECKING:
    from qwen_vl_ros.engine.schedule import Scheduler

class Engine:
    """
    A loaded model. :meth:`answer` takes one request at a time, which its caller sees to;
    :class:`~qwen_vl_ros.engine.schedule.Scheduler` runs several beside each other.

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
        device = next(iter(checkpoint.tensors.values())).device
        self.model = Model(checkpoint, options.preprocess, make_hand_over(options, device))
        quantize_language(self.model.language, quantization)
        pack_weights(self.model)
        self.model.decoder = make_decoder(self.model.language)
        self.vision_engine, vision_quantization = self._choose_vision()
        self.constraints = Constraints(
            checkpoint.tokenizer, checkpoint.config.language.vocab, self.end_tokens)
        self.sessions = Sessions()
        self.features = FeatureCache()
        self.pool = CachePool(
            checkpoint.config.language, options.max_context, self.model.device, self.model.dtype,
            cache_count(options, KVCache.bytes_for(
                checkpoint.config.language, options.max_context, self.model.element_size)))
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
            load_time_s=time.monotonic() - started,
            approximate=tuple(name for name, kind in (
                ('quantization', quantization), (VISION_QUANTIZATION, vision_quantization))
                if kind != 'none'))
        # A selector that asks the model, for its words or its gradients.
        bind = getattr(options.selector, 'bind', None)
        if bind is not None:
            bind(self)
        give_back(self.model.device)

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
        cache = KVCache.bytes_for(config.language, max_context, size)
        checkpoint = load_checkpoint(folder, where, kind, cache * cache_count(options, cache))
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
        self.check_open()
        run = Running(self, request, timeline or Timeline(request.request_id), cancelled)
        try:
            yield from self._answer(run)
        except Exception as error:
            reason, spoiled = self.explain(error, request)
            if spoiled:
                run.close(keep=False)
                self.drop_caches()
            raise reason from error
        finally:
            run.close()

    def scheduler(self, max_sequences: int, **options: Any) -> Scheduler:
        """
        Return what answers several requests beside each other, not started yet.

        :param max_sequences: at a time; no more than there are caches.
        :param options: further ones of :class:`ScheduleOptions`.
        :raises EngineError: BAD_REQUEST for options out of range.
        """
        from qwen_vl_ros.engine.schedule import ScheduleOptions, Scheduler

        return Scheduler(self, ScheduleOptions(max_sequences, **options))

    def check_open(self) -> None:
        """:raises EngineError: INACTIVE when it has been closed."""
        if self._closed:
            raise EngineError(ErrorCode.INACTIVE, 'the engine is closed')

    def explain(
        self, error: Exception, request: Request | None = None,
    ) -> tuple[EngineError, bool]:
        """
        Return an error under its code, and whether it leaves rows that cannot be trusted.

        :param request: that ended with it.
        """
        if isinstance(error, EngineError):
            return error, error.code == ErrorCode.NUMERICAL
        if is_out_of_memory(error):
            visuals = len(request.visuals) if request is not None else 0
            return EngineError(
                ErrorCode.OUT_OF_MEMORY,
                f'out of memory with {visuals} visuals: {one_line(error)}'), True
        return EngineError(
            ErrorCode.UNKNOWN,
            f'the answer failed: {type(error).__name__}: {one_line(error)}'), True

    def warm_up(self, sizes: Sequence[tuple[int, int]] = ((640, 480),),
                keep_ratio: float = 1.0) -> None:
        """
        Answer once for each picture size, so that the first real request finds all set up.

        :param sizes: (width, height) of the cameras.
        :param keep_ratio: below 1: answer with that share of the tokens as well, chosen by the
            engine's selector; what that records is made too.
        :raises EngineError: what a real request would raise.
        """
        for width, height in sizes:
            grey = Frame.from_rgb(np.full((height, width, 3), 128, np.uint8))
            for ratio in sorted({1.0, keep_ratio}, reverse=True):
                for _ in self.answer(Request('?', (Visual((grey,)),), max_new_tokens=2,
                                             keep_ratio=ratio)):
                    pass
        self.forget()
        # What was chosen and captured needed more than answers do, and on another stream.
        give_back(self.model.device)

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
        visuals = plan_visuals(self, request)
        prompt = self.prompts.build((Turn(request.question, visuals),), request.system_prompt)
        features = [(span, self.model.encode(v, timeline, clock)[0])
                    for span, v in zip(prompt.spans, visuals)]
        return visuals, prompt, features

    def forget(self) -> None:
        """Empty the caches of prefixes and pictures; their memory is kept."""
        self.features.clear()
        self.pool.rewind()

    def reset_sessions(self) -> None:
        """Forget all conversations."""
        self.sessions.clear()

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

    def _choose_vision(self) -> tuple[str, str]:
        """Let the encoder run as the options say; return what it runs in, and its quantization."""
        options, vision = self.options, self.model.vision
        chosen = choose_engine(
            vision, options.vision_engine, options.max_pixels,
            'int8' if options.vision_quantization == 'int8' else 'fp16')
        if chosen == 'tensorrt':
            return chosen, options.vision_quantization
        return chosen, quantize_vision(vision, options.vision_quantization).name

    def _within(self, max_pixels: int) -> int:
        """Return the limit, lowered to the largest picture that the checkpoint was made for."""
        limit = min(max_pixels, self.model.config.pixel_limit or max_pixels)
        return max(limit, self.options.min_pixels)

    def close(self) -> None:
        """Give back weights and caches; later requests are refused."""
        if not self._closed:
            self._closed = True
            self.sessions.clear()
            self.drop_caches()
            del self.model

    def _answer(self, run: Running) -> Iterator[Event]:
        """Drive a request through its stages, one after the other."""
        state = run.generated
        self._begin(run)
        if run.looks:
            yield Stage('vision')
        while (look := run.to_encode) is not None and not state.reason:
            state.reason = run.stop()
            if not state.reason:
                run.encode(look, run.patches(look))
        if not state.reason:
            yield Stage('prefill')
        last: Mark | None = None
        while run.prefilled < run.prompt.ids.size and not state.reason:
            state.reason = run.stop()
            if not state.reason:
                run.prefill(self.options.prefill_chunk)
                # A GPU has one chunk to do beside the one at hand: a cancel waits for no more.
                if last is not None:
                    last.wait()
                last = Mark.here(self.model.device)
        if not state.reason:
            yield Stage('decode')
            yield from self._decode(run)
        yield run.answer()

    def _begin(self, run: Running) -> None:
        """Plan and open; a GPU encodes the first picture while its content is hashed."""
        early = run.lay_out()
        clock = DeviceClock(run.timeline, self.model.device)
        encoded = None
        if early is not None and self.model.runs_ahead and not run.stop():
            encoded = self.model.encode(early, run.timeline, clock)
        run.plan()
        run.open(clock)
        if encoded is not None:
            run.adopt(*encoded)

    def _decode(self, run: Running) -> Iterator[Event]:
        """Choose tokens until the answer ends, yielding the text that became final."""
        state = run.generated
        last: int | None = None
        while not state.reason:
            state.reason = run.stop()
            if state.reason:
                break
            if last is None:
                choice = run.first_choice()
            else:
                slot = run.admit(last) if run.slot is None else run.slot
                allowed = run.allowed(last)
                choice = self.model.step(
                    {slot: (run.clock, run.prefilled)},
                    {} if allowed is None else {slot: allowed})[slot]
            last = choice.token
            delta = run.accept(choice)
            if delta is not None:
                yield delta
        delta = run.end()
        if delta is not None:
            yield delta

    def drop_caches(self) -> None:
        """Give back the memory of all caches that no running request holds."""
        self.pool.forget()
        self.features.clear()
        give_back(self.model.device)
