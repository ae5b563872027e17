"""Environment of all tests: ROS finds the interfaces, and talks to nobody else."""

import importlib.util
import os
import sys

import pytest

from qwen_vl_ros.share import use_large_data_profile

os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)
#: As in the Makefile: before torch is loaded, or it does not count.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
#: Another domain for every run: two runs on one machine do not hear each other.
os.environ['ROS_DOMAIN_ID'] = str(1 + os.getpid() % 100)
use_large_data_profile()


def pytest_collection_modifyitems(items):
    """Skip tests marked ``ros`` and ``gpu`` where that is missing, and say so."""
    missing = {}
    if importlib.util.find_spec('rclpy') is None:
        missing['ros'] = pytest.mark.skip(reason='rclpy is not installed')
    if any('gpu' in item.keywords for item in items):
        import torch
        if not torch.cuda.is_available():
            missing['gpu'] = pytest.mark.skip(reason='torch finds no CUDA device')
    for item in items:
        for name, mark in missing.items():
            if name in item.keywords:
                item.add_marker(mark)
