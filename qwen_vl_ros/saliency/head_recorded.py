"""
The light head on a GPU: folded for one question, recorded for one shape, one launch a picture.

Bytes of a frame go up and scores come down within the same CUDA graph, on a stream of its own, so
that choosing waits for nothing that the device does for other requests. Frames are shrunk on the
device: copying one takes less of the host than shrinking it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.cuda_direct import direct, mapped
from qwen_vl_ros.saliency.head import SAMPLES, SaliencyHead, channels, places
from qwen_vl_ros.saliency.samples import PACKED, odd, planes
from qwen_vl_ros.saliency.shrinking import Shrinking
from qwen_vl_ros.saliency.uploading import WAYS, Upload


def held_against(newest: Tensor) -> Tensor | None:
    """
    Return what each slice of a clip is compared with; ``None`` for a still.

    That is the slice before it; the first has the second.

    :param newest: [T, ...].
    """
    return torch.cat((newest[1:2], newest[:-1])) if len(newest) > 1 else None


class FoldedHead:
    """
    Scores units like :class:`SaliencyHead`, its plain twin, about one question and one grid.

    FiLM is a scale and a shift of a convolution's outputs, so it is multiplied into its weights;
    what the places add is the same for every picture; a still's difference channels are 0. The
    convolution whose windows are the units is one product of matrices: half of cuDNN's time.

    :param head: on the device, in the dtype to compute in.
    :param slices: pictures at a time.
    :param rows: of units; ``columns`` alike.
    :param fused: add and rectify within cuDNN's convolutions.
    :param order: which of the samples' channels are red, green and blue.
    """

    def __init__(self, head: SaliencyHead, slices: int, rows: int, columns: int,
                 fused: bool = False, order: Sequence[int] = (0, 1, 2)) -> None:
        self._head, self._fused, self._grid = head, fused, (slices, rows, columns)
        # Samples come centred but not scaled: 1/64 is exact in any of the dtypes.
        weight = head.first.weight / 64
        used = [order.index(c) for c in range(3)]
        if slices > 1:
            used += [3 + c for c in used]
        self._first = _last(weight[:, used])
        self._units = head.units.weight.permute(2, 3, 1, 0).flatten(0, 2).contiguous()
        assert head.units.bias is not None
        place = head.place(places(rows, columns, weight)) + head.units.bias[:, None, None]
        self._place = place.expand(slices, -1, -1, -1).permute(0, 2, 3, 1).flatten(0, 2)
        self._inner = [(w.clone(), b.clone()) for w, b in map(_weights, head.inner)]
        self._outer = [_weights(c) for c in head.outer]
        self._score = _last(head.score.weight)

    def ask(self, question: Tensor) -> None:
        """
        Take another question; the weights change in place.

        :param question: [1, 2 * width] of :meth:`SaliencyHead.words`.
        """
        films = self._head.film(question)[0].chunk(2 * len(self._inner))
        for i, ((weight, bias), conv) in enumerate(zip(self._inner, self._head.inner)):
            scale, shift = 1 + films[2 * i], films[2 * i + 1]
            own = _weights(conv)
            weight.copy_(own[0] * scale[:, None, None, None])
            bias.copy_(own[1] * scale + shift)

    def __call__(self, samples: Tensor, out: Tensor | None = None) -> Tensor:
        """
        Score the units of pictures.

        :param samples: [slices, 3 (a still) or 6, 7 * rows, 7 * columns] of :func:`channels`,
            times 64, channels last.
        :param out: takes the scores, in its own dtype.
        :return: [slices, rows, columns].
        """
        head = self._head
        x = self._conv(samples, self._first, head.first.bias, padding=1)
        x = self._to_units(x)
        for inner, outer in zip(self._inner, self._outer):
            y = self._conv(x, *inner, padding=1)
            x = self._conv(y, *outer, x, padding=1)
        assert head.score.bias is not None
        return torch.add(F.conv2d(x, self._score)[:, 0], head.score.bias, out=out)

    def _to_units(self, x: Tensor) -> Tensor:
        """Convolve samples to units, add what their places are and rectify."""
        slices, rows, columns = self._grid
        cells = x.permute(0, 2, 3, 1).reshape(slices, rows, SAMPLES, columns, SAMPLES, -1)
        y = torch.addmm(self._place, cells.transpose(2, 3).flatten(3).flatten(0, 2), self._units)
        return torch.relu_(y).view(slices, rows, columns, -1).permute(0, 3, 1, 2)

    def _conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None = None,
              padding: int = 0) -> Tensor:
        """Convolve, add and rectify."""
        if not self._fused:
            y = F.conv2d(x, weight, bias, padding=padding)
            return torch.relu_(y if add is None else y.add_(add))
        sizes = [1, 1], [padding] * 2, [1, 1], 1
        if add is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *sizes)
        return torch.cudnn_convolution_add_relu(x, weight, add, 1.0, bias, *sizes)


#: Tokens of a question up to which reading it is recorded as well.
WORDS = 64


@dataclass(frozen=True)
class Source:
    """
    What the pictures are, as a camera sends them.

    :param encoding: of the frames.
    :param shapes: of their planes, see :func:`samples.planes`.
    """

    encoding: str
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, frame: Frame) -> Source:
        """Return what a frame is; what cannot be taken as it is comes in RGB."""
        return cls('rgb8' if odd(frame) else frame.encoding,
                   tuple(p.shape for p in planes(frame)))

    def colours(self, small: Sequence[Tensor]) -> Tensor:
        """
        Make colours of the planes of a picture.

        :param small: each plane shrunk to the same size, [T, channels, h, w].
        :return: [T, 3, h, w], 0 to 255, packed colours in the order of :data:`samples.PACKED`.
        """
        first = small[0]
        if self.encoding in PACKED:
            return first[:, :3]
        if self.encoding == 'mono8':
            return first.expand(-1, 3, -1, -1)
        if self.encoding in ('yuyv', 'uyvy'):
            pair = (0, 1, 2, 3) if self.encoding == 'yuyv' else (1, 0, 3, 2)
            y0, blue, y1, red = (first[:, i].float() for i in pair)
            luma = (y0 + y1) / 2
        else:
            at = (0, 1) if self.encoding == 'nv12' else (1, 0)
            luma = first[:, 0].float()
            blue, red = (small[1][:, i].float() for i in at)
        # BT.601, limited range.
        y, u, v = 1.164 * (luma - 16), blue - 128, red - 128
        rgb = torch.stack((y + 1.596 * v, y - 0.391 * u - 0.813 * v, y + 2.018 * u), 1)
        return rgb.clamp(0, 255)


class RecordedHead:
    """
    A head on pictures of one shape, from bytes in host memory to scores there.

    :param head: on the GPU, in the dtype to compute in.
    :param embed: from token ids, int64, to embeddings of one more dimension.
    :param slices: pictures at a time; ``rows`` and ``columns``: of units.
    :param source: what the pictures are.
    """

    def __init__(self, head: SaliencyHead, embed: Callable[[Tensor], Tensor], slices: int,
                 rows: int, columns: int, source: Source) -> None:
        self._head, self._embed, self._source = head, embed, source
        self._grid = slices, rows, columns
        device, dtype = head.score.weight.device, head.score.weight.dtype
        self._sizes = [math.prod(shape) for shape in source.shapes]
        self._upload = Upload(source.shapes, slices, device)
        exact = torch.float32 if dtype == torch.float32 else torch.float16
        wanted = SAMPLES * rows, SAMPLES * columns
        self._shrink = [Shrinking(shape, wanted, exact, device) for shape in source.shapes]
        self._ids = torch.zeros((2, WORDS), dtype=torch.long, pin_memory=True)
        self._words = torch.zeros((2, WORDS), dtype=torch.long, device=device)
        self._scores = torch.zeros((slices, rows, columns), pin_memory=True)
        # The last kernel writes its scores into host memory itself.
        self._seen, self._result = mapped(self._scores, device), self._scores.numpy()
        self._asked: Sequence[int] | None = None
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._net = self._folded()
            self._reading, self._scoring = self._record(self._read), self._record(self._score)
        self._direct = direct(self._stream, self._scoring, self._reading)
        #: How bytes go up, one of :data:`uploading.WAYS`; chosen by the clock at the first frame.
        self.way: int | None = None

    def _folded(self) -> FoldedHead:
        """Return the net, fused where this cuDNN has what that takes."""
        for fused in (True, False):
            order = PACKED.get(self._source.encoding, (0, 1, 2))
            self._net = FoldedHead(self._head, *self._grid, fused, order)
            try:
                self._score()
            except RuntimeError:
                if not fused:
                    raise
            else:
                break
        return self._net

    def _record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        for _ in range(3):
            body()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be at work on the device; only this one is recorded.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode='thread_local'):
            body()
        return graph

    def _read(self) -> None:
        """Fold the net for the question in pinned memory."""
        self._words.copy_(self._ids, non_blocking=True)
        self._fold(self._words[:1], self._words[1:] > 0)

    def _fold(self, ids: Tensor, mask: Tensor) -> None:
        embedded = self._embed(ids).to(self._head.score.weight.dtype)
        self._net.ask(self._head.words(embedded, mask))

    def _score(self) -> None:
        """Score what is on the device."""
        parts = self._upload.pixels.split(self._sizes, 1)
        newest = self._source.colours([f(part) for f, part in zip(self._shrink, parts)])
        if self._grid[0] == 1:
            given = newest - 118
        else:
            given = channels(newest.float(), held_against(newest.float())) * 64
        self._net(_last(given.to(self._head.score.weight.dtype)), self._seen)

    def run(self, frames: Sequence[Frame], question: Sequence[int]) -> np.ndarray:
        """
        Score pictures; waits for the device's answer to them and for nothing else.

        :param frames: of the source, one for each slice.
        :param question: token ids; the same again are not read again.
        :return: float32 [slices, rows, columns].
        """
        at_once = self._direct is not None and self._direct[0].ready()
        if not self.knows(question):
            self._ask(question, at_once)
        if not at_once:
            return self._replayed(frames)
        if self.way is None:
            self.way = self._fastest(frames)
        return self._launched(frames, self.way)

    def _launched(self, frames: Sequence[Frame], way: int) -> np.ndarray:
        assert self._direct is not None
        stream, (scoring, _) = self._direct
        self._upload.send(frames, stream, way)
        stream.launch(scoring)
        stream.wait()
        return self._result.copy()

    def _fastest(self, frames: Sequence[Frame]) -> int:
        """Return the way up that takes least from frame to map."""
        def spent(way: int) -> float:
            begin = time.perf_counter()
            self._launched(frames, way)
            return time.perf_counter() - begin

        turns = [[spent(way) for way in WAYS] for _ in range(9)]
        return min(WAYS, key=lambda way: statistics.median(t[WAYS.index(way)] for t in turns))

    def _replayed(self, frames: Sequence[Frame]) -> np.ndarray:
        """Score through torch's own calls."""
        self._upload.stage(frames)
        with torch.cuda.stream(self._stream):
            self._upload.send_staged()
            self._scoring.replay()
            self._done.record()
        self._done.synchronize()
        return self._result.copy()

    def knows(self, question: Sequence[int]) -> bool:
        """Tell whether the weights are folded for a question."""
        return question == self._asked

    @torch.inference_mode()
    def _ask(self, question: Sequence[int], at_once: bool) -> None:
        """
        Fold the net for a question.

        :param at_once: the graph may be launched directly.
        """
        self._asked = None
        short = len(question) <= WORDS
        if short:
            staged = self._ids.numpy()
            staged[:] = 0
            staged[0, :len(question)] = question
            staged[1, :len(question)] = 1
        if short and at_once:
            assert self._direct is not None
            stream, (_, reading) = self._direct
            stream.launch(reading)
        else:
            with torch.cuda.stream(self._stream):
                if short:
                    self._reading.replay()
                else:
                    ids = torch.tensor([question], device=self._words.device)
                    self._fold(ids, torch.ones_like(ids, dtype=torch.bool))
        self._asked = question

    def replay_ms(self, count: int) -> list[float]:
        """Return the milliseconds of so many replays on the device, both copies included."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        with torch.cuda.stream(self._stream):
            for end in ends:
                self._upload.send_staged()
                self._scoring.replay()
                end.record()
        self._stream.synchronize()
        return [ends[i].elapsed_time(ends[i + 1]) for i in range(count)]


def _weights(conv: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution."""
    assert isinstance(conv, nn.Conv2d) and conv.bias is not None
    return _last(conv.weight), conv.bias


def _last(x: Tensor) -> Tensor:
    """Return a tensor with its channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)
