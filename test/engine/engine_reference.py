"""transformers' own forward pass on the same request: the oracle."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from qwen_vl_ros.engine.types import Request, Visual

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil as PilProcessor,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
except ImportError:  # where they were before transformers 5
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
        Qwen2VLImageProcessor as PilProcessor,
    )
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

__all__ = ['Reference', 'smart_resize']


class Reference:
    """
    transformers' model with tokenizer and image processor, float32 on the CPU.

    :param folder: a checkpoint.
    :param pixels: least and most pixels of a resized picture.
    """

    def __init__(self, folder: Path, pixels: tuple[int, int] = (3136, 1003520)) -> None:
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = PilProcessor(
            size={'shortest_edge': pixels[0], 'longest_edge': pixels[1]})

    def pixels(self, visual: Visual) -> tuple[torch.Tensor, list[int]]:
        """Return normalised float patches [n, 1176] and the grid of a still or clip."""
        frames = [frame.rgb() for frame in visual.frames]
        if len(frames) == 1:
            out = self._process([frames[0]])
            return out['pixel_values'], out['image_grid_thw'][0].tolist()
        if len(frames) % 2:
            frames.append(frames[-1])
        out = self._process(frames)
        _, h, w = out['image_grid_thw'][0].tolist()
        # Each still repeats its frame; a pair takes its halves from two of them.
        values = out['pixel_values'].view(len(frames), h * w, 3, 2, 14 * 14)
        pairs = torch.stack((values[0::2, :, :, 0], values[1::2, :, :, 0]), dim=3)
        return pairs.reshape(-1, 1176), [len(frames) // 2, h, w]

    def _process(self, frames: list[np.ndarray]) -> dict[str, torch.Tensor]:
        # Told where the channels are: left to guess, it takes a 1x1 picture's row for them.
        return self.processor(
            images=frames, return_tensors='pt', input_data_format='channels_last')

    def inputs(self, request: Request) -> dict[str, torch.Tensor]:
        """Return the keywords of the model's forward pass for a request of one turn."""
        messages = []
        if request.system_prompt is not None:
            messages.append({'role': 'system', 'content': request.system_prompt})
        clips = [len(v.frames) > 1 for v in request.visuals]
        messages.append({'role': 'user', 'content': [
            *({'type': 'video' if clip else 'image'} for clip in clips),
            {'type': 'text', 'text': request.question}]})
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True)
        made: dict[str, list] = {'image': [], 'video': []}
        for visual, clip in zip(request.visuals, clips):
            kind = 'video' if clip else 'image'
            values, grid = self.pixels(visual)
            made[kind].append((values, grid))
            text = text.replace(
                f'<|{kind}_pad|>', '<|seen|>' * (np.prod(grid) // 4), 1)
            text = text.replace('<|seen|>', f'<|{kind}_done|>')
        text = text.replace('_done|>', '_pad|>')
        ids = self.tokenizer(text, return_tensors='pt').input_ids
        config = self.model.config
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        out = {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}
        if made['image']:
            out['pixel_values'] = torch.cat([v for v, _ in made['image']])
            out['image_grid_thw'] = torch.tensor([g for _, g in made['image']])
        if made['video']:
            out['pixel_values_videos'] = torch.cat([v for v, _ in made['video']])
            out['video_grid_thw'] = torch.tensor([g for _, g in made['video']])
        if request.visuals:
            out['mm_token_type_ids'] = kinds
        return self.wants(out)

    def wants(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the inputs that this release's forward pass takes."""
        known = signature(self.model.forward).parameters
        return {name: value for name, value in inputs.items() if name in known}

    @torch.no_grad()
    def merged(self, visual: Visual) -> torch.Tensor:
        """Return the merged tokens [units, width] of a still or clip."""
        values, grid = self.pixels(visual)
        out = self.model.model.visual(values, grid_thw=torch.tensor([grid]))
        return out if isinstance(out, torch.Tensor) else out.pooler_output

    @torch.no_grad()
    def logits(self, request: Request) -> torch.Tensor:
        """Return logits [n, vocab] at every prompt position."""
        return self.model(**self.inputs(request)).logits[0]

    @torch.no_grad()
    def positions(self, request: Request) -> np.ndarray:
        """Return M-RoPE positions [3, n]."""
        inputs = self.inputs(request)
        if not request.visuals:
            return np.broadcast_to(
                np.arange(inputs['input_ids'].shape[1]), (3, inputs['input_ids'].shape[1]))
        index = self.model.model.get_rope_index
        ids, _ = index(**{k: v for k, v in inputs.items() if k in signature(index).parameters})
        return ids[:, 0].numpy()

    @torch.no_grad()
    def generate(self, request: Request, count: int) -> list[int]:
        """Return ``count`` greedy tokens, end tokens not stopping."""
        inputs = self.inputs(request)
        out = self.model.generate(
            **inputs, max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=1 << 30)  # no such token
        return out[0, inputs['input_ids'].shape[1]:].tolist()
