"""Environment of all tests: ROS finds the interfaces, and talks to nobody else."""

import fcntl
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

from qwen_vl_ros.share import use_large_data_profile

os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)
#: As in the Makefile: before torch is loaded, or it does not count.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')


def _own_domain():
    """Return a domain that no other run on this machine has; it is locked while we live."""
    for step in range(100):
        number = 1 + (os.getpid() + step) % 100
        path = Path(tempfile.gettempdir()) / f'qwen_vl_ros_test_domain_{number}'
        lock = os.open(path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number
        except OSError:
            os.close(lock)
    raise RuntimeError('100 test runs are under way; no ROS domain is left')


#: Two runs on one machine must not hear each other.
os.environ['ROS_DOMAIN_ID'] = str(_own_domain())
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
