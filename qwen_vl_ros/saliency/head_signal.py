"""The light head as a signal: frames and a question in, a map out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.costs import Cost
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import spend
from qwen_vl_ros.saliency import costs
from qwen_vl_ros.saliency.head import SaliencyHead, channels
from qwen_vl_ros.saliency.head_int8 import Int8Head, available
from qwen_vl_ros.saliency.head_recorded import RecordedHead, Source, held_against
from qwen_vl_ros.saliency.samples import rgb_samples
from qwen_vl_ros.saliency.selectors import FILE

if TYPE_CHECKING:
    from qwen_vl_ros.engine.engine import Engine

#: What :data:`weights.HEAD_DTYPES` name.
DTYPES = {'auto': None, 'float32': torch.float32, 'float16': torch.float16,
          'bfloat16': torch.bfloat16, 'int8': torch.int8}

#: Questions that are remembered; the one asked longest ago goes first.
QUESTIONS = 64
#: Shapes of frames and grids whose nets stay recorded; the one used longest ago goes first.
SHAPES = 12

Key = tuple[int, int, int, str, int, int]


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
                         'tools/distil_head makes one, gradient and contrast need none')
    return path


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
        self._questions: OrderedDict[str, list[int]] = OrderedDict()
        self._words: dict[str, Tensor] = {}
        self._costs: dict[tuple[int, int, int, int], Cost] = {}
        #: Recorded nets by slices, rows, columns and kind of frames (encoding, width and height);
        #: empty on a CPU.
        self.graphs: OrderedDict[Key, RecordedHead] = OrderedDict()
        # Questions may be planned on several threads; a recorded net has one set of buffers.
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model: str | Path, file: str | Path = '', dtype: str = 'auto') -> HeadSignal:
        """
        Read the head of a checkpoint.

        :param dtype: one of :data:`DTYPES`.
        :raises ValueError: another dtype; see :func:`head_file`, :meth:`SaliencyHead.load` and
            the class.
        """
        if dtype not in DTYPES:
            raise ValueError(f"the head's dtype '{dtype}' is not one of {', '.join(DTYPES)}")
        return cls(SaliencyHead.load(head_file(model, file)), DTYPES[dtype])

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
        self._questions.clear()
        self._words.clear()
        self._costs.clear()
        self.graphs.clear()

    def __call__(self, frames: Sequence[Frame], rows: int, columns: int, question: str
                 ) -> np.ndarray:
        """
        Return a map of every slice, float32 [T, rows, columns].

        :param frames: one for each temporal slice, oldest first.
        :raises RuntimeError: before :meth:`bind`.
        """
        if self._engine is None:
            raise RuntimeError('the saliency head was not bound to an engine')
        with self._lock:
            ids = self._ids(question)
            if self._engine.model.device.type == 'cuda':
                return self._on_gpu(frames, rows, columns, ids)
            return self._on_cpu(frames, rows, columns, question, ids)

    @torch.inference_mode()
    def _on_cpu(self, frames: Sequence[Frame], rows: int, columns: int, question: str,
                ids: list[int]) -> np.ndarray:
        self._spend(frames, rows, columns, 0 if question in self._words else len(ids))
        samples = np.stack([rgb_samples(f, rows, columns) for f in frames])
        newest = torch.from_numpy(samples).permute(0, 3, 1, 2)
        given = channels(newest, held_against(newest)).to(self._dtype)
        words = self._summary(question, ids).expand(len(frames), -1)
        return self._net(given, words).float().numpy()

    def _on_gpu(self, frames: Sequence[Frame], rows: int, columns: int, ids: list[int]
                ) -> np.ndarray:
        assert self._engine is not None
        kinds = {(f.encoding, f.width, f.height) for f in frames}
        if len(kinds) > 1:
            # Cameras do not change their encoding within a clip; somebody put one together.
            frames = [Frame.from_rgb(rgb_samples(f, rows, columns)) for f in frames]
            kinds = {(f.encoding, f.width, f.height) for f in frames}
        key = (len(frames), rows, columns, *kinds.pop())
        net = self.graphs.get(key)
        if net is None:
            while len(self.graphs) >= SHAPES:
                self.graphs.popitem(last=False)
            with torch.cuda.device(self._engine.model.device), torch.inference_mode():
                net = self.graphs[key] = RecordedHead(
                    self.head, self._engine.model.language.embed, *key[:3], Source.of(frames[0]))
        self.graphs.move_to_end(key)
        self._spend(frames, rows, columns, 0 if net.knows(ids) else len(ids))
        return net.run(frames, ids)

    def _spend(self, frames: Sequence[Frame], rows: int, columns: int, words: int) -> None:
        """Tell what a map takes; counting a net's weights anew takes longer than launching it."""
        key = (len(frames), rows, columns, words)
        if key not in self._costs:
            self._costs[key] = costs.head(self.head, *key)
        spend(**self._costs[key])
        spend(bytes_read=costs.frame_bytes(frames))

    def _ids(self, question: str) -> list[int]:
        """Return a question's tokens; those of the questions asked last are kept."""
        if question not in self._questions:
            assert self._engine is not None
            found = self._engine.tokenizer(question or ' ', add_special_tokens=False)
            self._questions[question] = found['input_ids']
            while len(self._questions) > QUESTIONS:
                self._words.pop(self._questions.popitem(last=False)[0], None)
        self._questions.move_to_end(question)
        return self._questions[question]

    def _summary(self, question: str, ids: list[int]) -> Tensor:
        """Return the question as the plain net takes it, [1, 2 * width]."""
        if question not in self._words:
            assert self._engine is not None
            index = torch.tensor([ids])
            embedded = self._engine.model.language.embed(index).to(self._dtype)
            self._words[question] = self.head.words(
                embedded, torch.ones_like(index, dtype=torch.bool))
        return self._words[question]
