"""Both halves of a model, with the stages that a request passes through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine import costs
from qwen_vl_ros.engine.checkpoint import Checkpoint
from qwen_vl_ros.engine.decoder import Decoder, TorchDecoder
from qwen_vl_ros.engine.device import current
from qwen_vl_ros.engine.generate import Choice, Sampling, choice_row
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.offload import Offload, Prepared
from qwen_vl_ros.engine.parts import Part, whole
from qwen_vl_ros.engine.prompt import Prompt, VisualToken
from qwen_vl_ros.engine.stages import DeviceClock, timed_step
from qwen_vl_ros.engine.vision import VisionEncoder
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.measure.transport import HandOver

#: First index of a visual in the kept prompt, one past its last, and its merged tokens.
Placed = tuple[tuple[int, int], Tensor]


class Model:
    """
    Encoder and decoder of one checkpoint.

    :param checkpoint: its tensors are taken over.
    :param preprocess: where pictures are made into patches: cpu, gpu or auto (see Offload).
    :param hand_over: from the encoder's device to the decoder's, where they are two.
    """

    def __init__(
        self, checkpoint: Checkpoint, preprocess: str = 'auto',
        hand_over: HandOver | None = None,
    ) -> None:
        self.config = checkpoint.config
        self.hand_over = hand_over
        if hand_over is not None:
            checkpoint.tensors.update({
                name: tensor.to(hand_over.source)
                for name, tensor in checkpoint.tensors.items() if name.startswith('visual.')})
        weight = checkpoint.tensors['visual.patch_embed.proj.weight']
        with current(weight.device):
            self.offload = Offload(weight, preprocess)
            self.vision = VisionEncoder(checkpoint.config.vision, checkpoint.tensors)
        with current(checkpoint.tensors['language.norm.weight'].device):
            self.language = LanguageModel(
                checkpoint.config.language, checkpoint.tensors, checkpoint.config.quant)
        #: Takes sequences from their first token on.
        self.decoder: Decoder = TorchDecoder(self.language)
        self.device, self.dtype = self.language.device, self.language.dtype
        self.element_size = self.language.embedding.element_size()
        #: The encoder is at work after its call has returned.
        self.runs_ahead = self.vision.device.type == 'cuda'

    @cached_property
    def read_bytes(self) -> tuple[int, int]:
        """Return the bytes of weights that a picture and a token read, from the first on."""
        return self.vision.weight_bytes, self.language.weight_bytes

    def patches(self, visual: VisualToken, timeline: Timeline) -> Prepared:
        """Do the CPU's part of a visual's preprocessing, on whatever thread; see Offload."""
        with timeline.stage('patches') as span:
            prepared = self.offload.prepare(visual.frames, visual.grid)
            span.bytes_read, span.bytes_written = prepared.bytes_read, prepared.bytes_written
        return prepared

    @torch.inference_mode()
    def encode_part(
        self, visual: VisualToken, prepared: Prepared, part: Part, clock: DeviceClock,
    ) -> tuple[Tensor, Tensor]:
        """
        Upload and encode a part of a visual.

        :param prepared: of the whole visual, by :meth:`patches`.
        :return: merged tokens [part's, width], and one bool on the device: all of them are finite.
            It is read where the first token is waited for anyway.
        """
        area = visual.grid[1] * visual.grid[2]
        slices = (part.first_slice, part.end_slice)
        clock = clock.beside(self.vision.device)
        sent = self.offload.upload_bytes(prepared, *slices)
        with clock.stage('upload', bytes_read=sent, bytes_written=sent):
            self.offload.upload(prepared, *slices)
        with clock.stage('encode', lambda: costs.encode_cost(
                self.config.vision, prepared.features,
                [4 * n for n in part.kept_per_slice(area // 4)], self.read_bytes[0],
                self.element_size)):
            x = self.offload.embed(prepared, part.units, *slices)
            units = None if part.units is None else torch.from_numpy(part.units)
            grid = (part.end_slice - part.first_slice, *visual.grid[1:])
            features = self.vision.encode(x, grid, units)
            if self.hand_over is not None:
                features = self.hand_over(features)
            return features, torch.isfinite(features).all()

    def encode(
        self, visual: VisualToken, timeline: Timeline, clock: DeviceClock,
    ) -> tuple[Tensor, Tensor]:
        """Preprocess, upload and encode a whole visual; see :meth:`encode_part`."""
        return self.encode_part(visual, self.patches(visual, timeline), whole(visual), clock)

    @torch.inference_mode()
    def embed(
        self, prompt: Prompt, start: int, features: Sequence[Placed], stop: int | None = None,
    ) -> Tensor:
        """
        Embed the prompt from index ``start`` on, visual tokens in their places.

        :param stop: one past the last index; ``None`` is the prompt's end.
        :return: [stop - start, width].
        """
        ids = prompt.ids[start:stop]
        x = self.language.embed(self._send(ids))
        for (first, end), merged in features:
            begin, last = max(first, start), min(end, start + ids.size)
            if begin < last:
                x[begin - start:last - start] = merged[begin - first:last - first]
        return x

    def _send(self, array: np.ndarray) -> Tensor:
        """Return an array on the device; the host does not wait for what the stream holds."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != 'cuda':
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    @torch.inference_mode()
    def prefill(
        self, prompt: Prompt, features: Sequence[Placed], start: int, stop: int, cache: KVCache,
        clock: DeviceClock,
    ) -> Tensor:
        """
        Embed and run a chunk of the prompt from index ``start``, which is the cache's length.

        :param features: merged tokens of what the chunk shows, with their places.
        :param stop: one past the chunk's last index.
        :return: the prompt's last hidden state [1, width]; none [0, width] where more follows.
        """
        with clock.stage('prefill', lambda: costs.decoder_cost(
                self.config.language, stop - start, start, 0, self.read_bytes[1],
                self.element_size)):
            x = self.embed(prompt, start, features, stop)
            positions = self._send(prompt.positions[:, start:stop])
            hidden = self.language.prefill(
                x, positions, cache, start, 1 if stop == prompt.ids.size else 0)
        cache.extend(prompt.names[start:stop])
        return hidden

    @torch.inference_mode()
    def first_token(
        self, hidden: Tensor, sampling: Sampling, generator: torch.Generator | None,
        allowed: Tensor | None, clock: DeviceClock,
    ) -> Tensor:
        """
        Choose the first token, without waiting for it.

        :param hidden: the prompt's last hidden state [1, width].
        :param generator: and ``sampling``, ``allowed``: as for
            :func:`~qwen_vl_ros.engine.generate.choice_row`.
        :return: what that function does, on the device.
        """
        head = self.language.head.nbytes
        flops = 2 * self.config.language.vocab * self.config.language.width
        with clock.stage('first_token', bytes_read=head, flops=flops):
            best = None
            if not sampling.temperature and allowed is None:
                best = self.language.best(hidden)
            if best is not None:
                return best
            return choice_row(self.language.logits(hidden)[0], sampling, generator, allowed)

    def step(
        self, rows: Mapping[int, tuple[DeviceClock, int]], allowed: Mapping[int, Tensor],
    ) -> dict[int, Choice]:
        """
        Run one token of every sequence that the decoder holds.

        :param rows: clock and cached positions of each, by slot. The weights are read once for
            all: each is charged its share of them.
        :param allowed: see :meth:`Decoder.step`.
        :return: choices by slot.
        """
        share = self.read_bytes[1] // len(rows)
        return timed_step(
            rows, lambda past: costs.decoder_cost(
                self.config.language, 1, past, 1, share, self.element_size),
            lambda: self.decoder.step(allowed))

    @torch.inference_mode()
    def all_logits(self, prompt: Prompt, features: Sequence[Placed]) -> Tensor:
        """Return logits [n, vocab] at every position of a prompt, without any cache."""
        cache = KVCache(self.config.language, prompt.ids.size, self.device, self.dtype)
        hidden = self.language.prefill(
            self.embed(prompt, 0, features), torch.from_numpy(prompt.positions).to(self.device),
            cache, 0)
        return self.language.logits(hidden)
