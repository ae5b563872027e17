"""The light head as a signal: frames and a question in, a map out; one CUDA graph a shape."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.head import SAMPLES, SaliencyHead, channels
from qwen_vl_ros.saliency.head_int8 import Int8Head, available
from qwen_vl_ros.saliency.samples import planes, unit_samples
from qwen_vl_ros.saliency.selectors import FILE

if TYPE_CHECKING:
    from qwen_vl_ros.engine.engine import Engine

#: Questions whose summary is kept; the one asked longest ago goes first.
QUESTIONS = 64


def head_file(model: str | Path, file: str | Path = '') -> Path:
    """
    Find the head of a checkpoint.

    :param model: folder of the checkpoint.
    :param file: another place; '' looks beside the weights.
    :raises ValueError: when it is not there.
    """
    path = Path(file) if str(file) else Path(model) / FILE
    if not path.is_file():
        raise ValueError(f'{path} is missing: this checkpoint has no saliency head; '
                         'tools/distil_head makes one, selector saliency needs none')
    return path


def rgb_samples(frame: Frame, rows: int, columns: int) -> np.ndarray:
    """
    Return a frame at seven samples a unit in RGB, whatever its encoding.

    The picture is shrunk first, so that the conversion touches few pixels.

    :return: float32 [7 * rows, 7 * columns, 3], 0 to 255.
    """
    small = unit_samples(frame, rows, columns, SAMPLES)
    if small.shape[-1] == 1:
        return np.repeat(small, 3, axis=2)
    if len(planes(frame)) == 1:
        return small
    # Planes are Y, then U and V; BT.601, limited range. NV21 has its chroma the other way round.
    second, third = small[..., 1], small[..., 2]
    u, v = (third, second) if frame.encoding == 'nv21' else (second, third)
    y, u, v = 1.164 * (small[..., 0] - 16), u - 128, v - 128
    rgb = np.stack((y + 1.596 * v, y - 0.391 * u - 0.813 * v, y + 2.018 * u), axis=-1)
    return np.clip(rgb, 0, 255).astype(np.float32)


class HeadSignal:
    """
    Scores units with a distilled head; a signal for selectors.

    :param head: of the checkpoint that answers.
    :param dtype: the net computes in; ``None`` takes float16 on CUDA and float32 on a CPU.
        ``torch.int8`` is for a CPU: products of int8 matrices (see head_int8.py).
    :raises ValueError: int8 where this torch has no such product.
    """

    def __init__(self, head: SaliencyHead, dtype: torch.dtype | None = None) -> None:
        self.head = head
        self._net: Callable[[Tensor, Tensor], Tensor] = head
        self._int8 = dtype == torch.int8
        self._dtype = torch.float32 if self._int8 else dtype
        if self._int8 and not available():
            raise ValueError('this torch multiplies no int8 matrices on a CPU; use float32')
        self._engine: Engine | None = None
        self._words: OrderedDict[str, Tensor] = OrderedDict()
        #: Recorded nets by the shape of their input; empty on a CPU.
        self.graphs: dict[tuple[int, ...], _Graph] = {}
        # Questions may be planned on several threads; a recorded net has one set of buffers.
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model: str | Path, file: str | Path = '') -> HeadSignal:
        """
        Read the head of a checkpoint.

        :raises ValueError: see :func:`head_file` and :meth:`SaliencyHead.load`.
        """
        return cls(SaliencyHead.load(head_file(model, file)))

    def bind(self, engine: Engine) -> None:
        """
        Take the engine whose words the head reads; called by the engine itself.

        :raises ValueError: when the head was made for another width of embeddings.
        """
        width, made = engine.model.language.embedding.shape[1], self.head.shape['text_width']
        if width != made:
            raise ValueError(f'the saliency head reads embeddings of width {made}, the '
                             f'checkpoint has {width}')
        device = engine.model.device
        if self._dtype is None:
            self._dtype = torch.float16 if device.type == 'cuda' else torch.float32
        if self._int8 and device.type != 'cpu':
            raise ValueError(f'the saliency head in int8 is for a CPU, the model is on {device}')
        self.head = self.head.to(device, self._dtype)
        self._net = Int8Head(self.head) if self._int8 else self.head
        self._engine = engine
        self._words.clear()
        self.graphs.clear()

    @torch.inference_mode()
    def __call__(self, frames: Sequence[Frame], rows: int, columns: int, question: str
                 ) -> np.ndarray:
        """
        Return a map of every slice, float32 [T, rows, columns].

        :param frames: one for each temporal slice, oldest first.
        :raises RuntimeError: before :meth:`bind`.
        """
        if self._engine is None:
            raise RuntimeError('the saliency head was not bound to an engine')
        samples = np.stack([rgb_samples(f, rows, columns) for f in frames]).transpose(0, 3, 1, 2)
        newest = torch.from_numpy(np.ascontiguousarray(samples))
        other = None
        if len(frames) > 1:
            # Each slice is held against the one before it, the first against the second.
            order = [1, *range(len(frames) - 1)]
            other = newest[order]
        given = channels(newest, other)
        device = self._engine.model.device
        with self._lock:
            words = self._summary(question).expand(len(frames), -1)
            if device.type != 'cuda':
                return self._net(given.to(self._dtype), words).float().numpy()
            key = tuple(given.shape)
            if key not in self.graphs:
                self.graphs[key] = _Graph(self.head, given, words)
            return self.graphs[key].run(given, words)

    def _summary(self, question: str) -> Tensor:
        """Return the question as the net takes it, [1, 2 * width]."""
        if question in self._words:
            self._words.move_to_end(question)
            return self._words[question]
        assert self._engine is not None
        ids = self._engine.tokenizer(question or ' ', add_special_tokens=False)['input_ids']
        language = self._engine.model.language
        index = torch.tensor([ids], device=language.device)
        embedded = language.embed(index).to(self._dtype)
        words = self.head.words(embedded, torch.ones_like(index, dtype=torch.bool))
        self._words[question] = words
        while len(self._words) > QUESTIONS:
            self._words.popitem(last=False)
        return words


class _Graph:
    """The net on inputs of one shape, recorded once: a dozen small kernels cost one launch."""

    def __init__(self, head: SaliencyHead, given: Tensor, words: Tensor) -> None:
        self._given = torch.zeros(given.shape, dtype=words.dtype, device=words.device)
        self._words = words.clone()
        self._staged = torch.empty(given.shape, dtype=words.dtype, pin_memory=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                head(self._given, self._words)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may be at work on the device; only this one is recorded.
        with torch.cuda.graph(self._graph, capture_error_mode='thread_local'):
            self._out = head(self._given, self._words).float()

    def run(self, given: Tensor, words: Tensor) -> np.ndarray:
        """Return the scores on the host; waits for the device."""
        self._staged.copy_(given)
        self._given.copy_(self._staged, non_blocking=True)
        self._words.copy_(words, non_blocking=True)
        self._graph.replay()
        return self._out.cpu().numpy()

    def replay_ms(self, count: int) -> list[float]:
        """Return the milliseconds of so many replays on the device."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for end in ends:
            self._graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [ends[i].elapsed_time(ends[i + 1]) for i in range(count)]
