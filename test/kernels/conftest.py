"""Without built libraries there is nothing to test here; ``make test`` builds them first."""

from __future__ import annotations

import pytest

from qwen_vl_ros.kernels.loader import KernelError, library


@pytest.fixture(scope='session')
def built():
    """Skip where the CPU library is missing."""
    try:
        return library('qwen_vl_cpu')
    except (FileNotFoundError, KernelError) as error:
        pytest.skip(str(error))
