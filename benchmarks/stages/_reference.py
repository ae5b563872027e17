"""transformers' own model on the same picture and question: the baseline of whole answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen_vl_ros.measure.roofline import SHAPES

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil as PilProcessor,
    )
except ImportError:  # where it was before transformers 5
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
        Qwen2VLImageProcessor as PilProcessor,
    )


def compile_blocks(*blocks: Any) -> None:
    """
    Compile blocks of transformers' model one by one, at their next use.

    :param blocks: of one kind share their code where nothing but weights tells them apart; the
        decoder's layers know their number, and each is compiled for itself.
    """
    # What is above the limit would silently run uncompiled.
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 4 * len(blocks))
    for block in blocks:
        block.compile(dynamic=False)


class Reference:
    """
    The model with its Pillow image processor, as a program would call it.

    :param folder: a checkpoint.
    :param limits: least and most pixels of a resized picture.
    :param model: made already; then the folder gives the tokenizer alone.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype,
                 limits: tuple[int, int], model: Any = None) -> None:
        from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

        self.device = device
        if model is None:
            model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = PilProcessor(
            size={'shortest_edge': limits[0], 'longest_edge': limits[1]})

    def inputs(self, rgb: np.ndarray, question: str) -> dict[str, torch.Tensor]:
        """Return the keywords of the forward pass: a picture, then the question."""
        seen = self.processor(images=[rgb], return_tensors='pt',
                              input_data_format='channels_last')
        text = self.tokenizer.apply_chat_template(
            [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': question}]}],
            tokenize=False, add_generation_prompt=True)
        count = int(seen['image_grid_thw'][0].prod()) // 4
        ids = self.tokenizer(text.replace('<|image_pad|>', '<|image_pad|>' * count),
                             return_tensors='pt').input_ids
        out = {'input_ids': ids, 'attention_mask': torch.ones_like(ids),
               'pixel_values': seen['pixel_values'], 'image_grid_thw': seen['image_grid_thw']}
        # Releases from 5 on want to be told which tokens are the picture's.
        out['mm_token_type_ids'] = (ids == self.model.config.image_token_id).int()
        return {name: value.to(self.device) for name, value in out.items()}

    @torch.inference_mode()
    def answer(self, rgb: np.ndarray, question: str, tokens: int,
               static: bool = False) -> list[int]:
        """
        Answer greedily with exactly ``tokens`` tokens, picture processing included.

        :param static: with a static cache, for which transformers compiles the decode step.
        """
        inputs = self.inputs(rgb, question)
        more = {'cache_implementation': 'static'} if static else {}
        made = self.model.generate(**inputs, do_sample=False, min_new_tokens=tokens,
                                   max_new_tokens=tokens, **more)
        return made[0, inputs['input_ids'].shape[1]:].tolist()

    @torch.inference_mode()
    def encode(self, inputs: dict[str, Any]) -> None:
        """Run the encoder alone."""
        visual = getattr(self.model, 'visual', None) or self.model.model.visual
        pixels = inputs['pixel_values'].to(next(visual.parameters()).dtype)
        visual(pixels, grid_thw=inputs['image_grid_thw'])
        self.wait()

    @torch.inference_mode()
    def forward(self, inputs: dict[str, Any]) -> None:
        """Run encoder and prefill, logits of the last position."""
        self.model(**inputs, use_cache=True, logits_to_keep=1)
        self.wait()

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)


def random_checkpoint(folder: Path, shape: str, like: Path, device: torch.device) -> Path:
    """
    Write a checkpoint of an official shape with random weights in bfloat16; speed is the same.

    :param shape: 2b or 7b.
    :param like: a checkpoint whose tokenizer is taken.
    """
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    if (folder / 'config.json').exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    wanted = SHAPES[shape]
    text, vision = wanted.language, wanted.vision
    raw = json.loads((like / 'config.json').read_text())
    raw |= {'vocab_size': text.vocab, 'hidden_size': text.width, 'num_hidden_layers': text.layers,
            'intermediate_size': text.mlp_width, 'num_attention_heads': text.heads,
            'num_key_value_heads': text.kv_heads, 'rope_theta': text.theta,
            'tie_word_embeddings': wanted.tied, 'max_position_embeddings': text.max_positions,
            'rope_scaling': {'type': 'mrope', 'mrope_section': list(text.mrope_section)}}
    raw['vision_config'] |= {'depth': vision.depth, 'embed_dim': vision.width,
                             'num_heads': vision.heads, 'hidden_size': text.width}
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_dict(raw))
        finally:
            torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    for path in like.iterdir():
        if path.suffix in ('.json', '.txt') and path.name not in (
                'config.json', 'preprocessor_config.json', 'curve.json',
                'model.safetensors.index.json'):
            shutil.copy(path, folder / path.name)
    (folder / 'config.json').write_text(json.dumps(raw, indent=1))
    return folder
