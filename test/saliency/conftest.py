"""The shipped model as tests of choosing ask it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.saliency.selectors import make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


@pytest.fixture(scope='module')
def choosing_engine():
    """Return an engine on the CPU that drops tokens by saliency."""
    loaded = Engine.load(str(TINY), device='cpu', selector=make_selector('saliency'))
    yield loaded
    loaded.close()
