"""Engines to be timed: the shipped tiny model, or an official shape with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records import CannotRun
from benchmarks.stages._halves import random_model
from qwen_vl_ros.engine.checkpoint import Checkpoint, canonical, load_tokenizer
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.options import Options
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.roofline import SHAPES
from qwen_vl_ros.share import share


def timed_engine(shape: str | None, device: str = 'auto', dtype: str = 'auto',
                 **options: Any) -> Engine:
    """
    Return an engine whose answers have the number of tokens that is asked for.

    :param shape: 2b or 7b with random weights on the GPU; ``None`` is models/tiny.
    :param options: of :class:`Options`.
    """
    return timed_pair(shape, device, dtype, **options)[0]


def timed_pair(shape: str | None, device: str = 'auto', dtype: str = 'auto',
               **options: Any) -> tuple[Engine, Any]:
    """
    Return such an engine, and transformers' model over the same tensors.

    :param shape: ``None`` gives no model of transformers; it loads models/tiny by itself.
    """
    options = {'repetition_window': 0, **options}
    folder = share('models', 'tiny')
    theirs = None
    try:
        if shape is None:
            engine = Engine.load(str(folder), device=device, dtype=dtype, **options)
        else:
            checkpoint, theirs = random_checkpoint(shape, folder)
            engine = Engine(checkpoint, Options(**options))
    except EngineError as error:
        raise CannotRun(error.message) from error
    engine.end_tokens = frozenset()
    return engine, theirs


def random_checkpoint(
    shape: str, like: Path, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Checkpoint, Any]:
    """
    Return an official shape with random weights on the GPU; speed does not depend on values.

    :param like: a checkpoint whose tokenizer is taken; ids beyond its vocabulary read as its own.
    :return: for our engine, and transformers' model over the same tensors.
    :raises CannotRun: without a GPU.
    """
    if not torch.cuda.is_available():
        raise CannotRun('torch finds no CUDA device')
    device = torch.device('cuda', torch.cuda.current_device())
    wanted = SHAPES[shape]
    small = load_config(like)
    config = replace(small, vision=wanted.vision, language=wanted.language, tied=wanted.tied,
                     pixel_limit=None)
    tokenizer, template = load_tokenizer(like, small)
    spell, size = tokenizer.convert_ids_to_tokens, small.language.vocab
    words = [i for i in range(size) if spell(i) and i not in tokenizer.added_tokens_decoder]
    tokenizer.convert_ids_to_tokens = lambda i: spell(words[i % len(words)])
    model = random_model(wanted, dtype, device)
    for key in ('image_token', 'video_token', 'vision_start_token', 'vision_end_token'):
        setattr(model.config, f'{key}_id', getattr(small, key))
    tensors = {canonical(key): value for key, value in model.state_dict().items()}
    if wanted.tied:
        tensors.pop('lm_head.weight', None)
    return Checkpoint(config, tokenizer, template, tensors, f'random {shape}',
                      json.dumps({'shape': shape})), model


def picture(size: tuple[int, int], seed: int) -> np.ndarray:
    """Return a picture with large and small structure, another for each seed."""
    rng = np.random.default_rng(seed)
    width, height = size
    coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), np.uint8)
    return np.ascontiguousarray(np.repeat(np.repeat(coarse, 16, 0), 16, 1)[:height, :width])


class Camera:
    """
    Pictures of a size, none of them seen before.

    :param seed: another for each camera.
    """

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        self._pictures = [picture(size, 100 * seed + i) for i in range(6)]
        self._count = 0

    def frame(self) -> Frame:
        """Return the next frame."""
        rgb = self._pictures[self._count % len(self._pictures)].copy()
        self._count += 1
        rgb[0, :4] = np.frombuffer(self._count.to_bytes(12, 'little'), np.uint8).reshape(4, 3)
        return Frame.from_rgb(rgb)
