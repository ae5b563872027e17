"""Finds the native libraries, and says once which of them are missing."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

#: What kernels/include/qwen_vl_kernels.h calls QWEN_VL_ABI_VERSION.
ABI_VERSION = 1

#: Of libraries that count for themselves: QWEN_VL_ENCODER_ABI_VERSION, QWEN_VL_DECODE_ABI_VERSION.
ABI_VERSIONS = {'qwen_vl_encoder': 2, 'qwen_vl_decode': 2}

#: Folder to look in first, for libraries that were built elsewhere.
VARIABLE = 'QWEN_VL_KERNELS'

#: Where ``make kernels``, ``colcon build`` and ``pip install`` put them.
FOLDER = Path(__file__).parent / 'lib'

LOG = logging.getLogger('qwen_vl_ros.kernels')


class KernelError(RuntimeError):
    """
    A native library is missing, was built for another version, or refused its input.

    :param code: ``qwen_vl_status`` of a refusal; 0 for a library that could not be used.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def folders() -> list[Path]:
    """Return the folders that are searched, in order."""
    chosen = os.environ.get(VARIABLE)
    return [Path(chosen), FOLDER] if chosen else [FOLDER]


@cache
def library(name: str) -> ctypes.CDLL:
    """
    Load a library.

    :param name: its stem, such as ``qwen_vl_cpu``.
    :raises FileNotFoundError: where no folder has it.
    :raises KernelError: where it cannot be loaded or has another ABI version.
    """
    file = f'lib{name}.so'
    path = next((f / file for f in folders() if (f / file).exists()), None)
    if path is None:
        where = ' or '.join(map(str, folders()))
        raise FileNotFoundError(f"{file} is not in {where}: build it with 'make kernels'")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f'{path} cannot be loaded: {error}') from error
    version = getattr(found, 'qwen_vl_abi_version', None)
    wanted = ABI_VERSIONS.get(name, ABI_VERSION)
    if version is not None and version() != wanted:
        raise KernelError(f'{path} has ABI version {version()}, {wanted} is needed: '
                          "build it again with 'make kernels'")
    return found


@cache
def optional(name: str, instead: str) -> ctypes.CDLL | None:
    """
    Load a library that there is a replacement for; without it, one line goes to the log.

    :param instead: what is used in its place, for the log.
    """
    try:
        return library(name)
    except (FileNotFoundError, KernelError) as error:
        LOG.warning('%s; %s is used instead', error, instead)
        return None


def built() -> list[str]:
    """Return the file names of the libraries that are there."""
    return sorted({path.name for folder in folders() for path in folder.glob('libqwen_vl_*.so')})
