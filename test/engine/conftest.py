"""Random checkpoints, made once a session, and the engines and reference models on them."""

from __future__ import annotations

import os

os.environ.setdefault('HF_HUB_OFFLINE', '1')

import qwen_vl_ros.engine  # noqa: F401, I001 - before torch (how idle threads wait)

import numpy as np
import pytest
import torch
from engine_checkpoints import SHAPES, make_checkpoint
from engine_reference import Reference

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.frame import Frame

torch.set_num_threads(2)


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
    """Return shape name to checkpoint folder."""
    root = tmp_path_factory.mktemp('checkpoints')
    return {shape: make_checkpoint(root / shape, shape) for shape in SHAPES}


@pytest.fixture(scope='session')
def engines(folders):
    """Return shape name to float32 engine without repetition guard."""
    return {shape: Engine.load(str(folder), device='cpu', repetition_window=0)
            for shape, folder in folders.items()}


@pytest.fixture(scope='session')
def crowd(folders):
    """Return a float32 engine with caches for four sequences."""
    return Engine.load(str(folders['small']), device='cpu', repetition_window=0, max_context=1024,
                       max_sequences=4, prefill_chunk=64)


@pytest.fixture(scope='session')
def references(folders):
    """Return shape name to transformers' model of the same weights."""
    return {shape: Reference(folder) for shape, folder in folders.items()}


@pytest.fixture
def engine(engines):
    """Return an engine of the first shape, with nothing remembered."""
    engine = engines['small']
    engine.reset_sessions()
    engine.forget()
    return engine


@pytest.fixture
def reference(references):
    """Return the reference of the first shape."""
    return references['small']


@pytest.fixture
def picture():
    """Return a function that makes a smooth random frame of a size."""
    def make(width: int, height: int, seed: int = 0) -> Frame:
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3))
        rgb = np.repeat(np.repeat(coarse, 8, 0), 8, 1)[:height, :width]
        return Frame.from_rgb((rgb + rng.integers(0, 9, rgb.shape)).clip(0, 255).astype(np.uint8))

    return make
