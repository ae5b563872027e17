"""A small recording, drawn here, and a checkpoint of random weights to ask about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault('HF_HUB_OFFLINE', '1')
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / 'engine'))

import numpy as np
import pytest
import torch
from engine_checkpoints import make_checkpoint

from tools.make_bags.writer import write_bag

torch.set_num_threads(1)

START_NS = 1_700_000_000 * 10**9


def frames(count: int = 30, width: int = 64, height: int = 48, rate: float = 30.0):
    """Draw a square that moves over a ramp."""
    ramp = np.linspace(0, 255, width).astype(np.uint8)
    for i in range(count):
        rgb = np.zeros((height, width, 3), np.uint8)
        rgb[..., 1] = ramp
        x = 2 * i % (width - 16)
        rgb[8:24, x:x + 16] = (220, 30, 30)
        yield START_NS + round(i * 1e9 / rate), rgb


@pytest.fixture(scope='session')
def checkpoint(tmp_path_factory):
    """Return the folder of a random checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp('replay') / 'random')


@pytest.fixture(scope='session')
def bags(tmp_path_factory):
    """Return storage name to bag folder: one second at 30 Hz, raw and JPEG."""
    root = tmp_path_factory.mktemp('bags')
    for storage in ('mcap', 'sqlite3'):
        assert write_bag(root / storage, frames(), storage=storage) == 30
    return {storage: root / storage for storage in ('mcap', 'sqlite3')}


@pytest.fixture
def quick(checkpoint):
    """Return the arguments that keep a run small."""
    return ['--model', str(checkpoint), '--max-new-tokens', '4', '--threads', '1',
            '--device', 'cpu', '--min-pixels', '784']
