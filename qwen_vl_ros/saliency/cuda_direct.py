"""
CUDA graphs and copies without what torch does around them.

``CUDAGraph.replay`` fills the random generators' seeds with two kernels of their own before each
launch, and a stream has to be made current first: five times what the launch itself takes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

_TO_DEVICE = 1


@cache
def runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; ``None`` where it is not found by name."""
    if torch.version.cuda is None:
        return None
    try:
        found = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    pointer = ctypes.c_void_p
    found.cudaGraphLaunch.argtypes = [pointer, pointer]
    found.cudaStreamSynchronize.argtypes = [pointer]
    found.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
    return found


class DirectStream:
    """
    A stream whose graphs are launched directly.

    Its calls return before the device has done them. They expect the stream's device to be the
    thread's current one, see :meth:`ready`.
    """

    def __init__(self, stream: torch.cuda.Stream, library: Any) -> None:
        self._stream, self._library = stream.cuda_stream, library
        self._device = stream.device.index

    def ready(self) -> bool:
        """Tell whether this thread may use it."""
        return torch.cuda.current_device() == self._device

    def launch(self, executable: int) -> None:
        """Launch what ``CUDAGraph.raw_cuda_graph_exec`` gave."""
        _check(self._library.cudaGraphLaunch(executable, self._stream))

    def upload(self, device: int, host: int, count: int) -> None:
        """
        Copy bytes to the device.

        :param host: address of pinned memory, or of any: the call then returns when it was read.
        """
        _check(self._library.cudaMemcpyAsync(device, host, count, _TO_DEVICE, self._stream))

    def wait(self) -> None:
        """Wait for all that was given to the stream."""
        _check(self._library.cudaStreamSynchronize(self._stream))


def direct(stream: torch.cuda.Stream, *graphs: torch.cuda.CUDAGraph
           ) -> tuple[DirectStream, list[int]] | None:
    """Return the stream and the graphs to launch in it; ``None`` where this torch has no way."""
    library = runtime()
    if library is None or not hasattr(torch.cuda.CUDAGraph, 'raw_cuda_graph_exec'):
        return None
    return DirectStream(stream, library), [g.raw_cuda_graph_exec() for g in graphs]


def _check(code: int) -> None:
    """:raises RuntimeError: where a call failed."""
    if code:
        raise RuntimeError(f'the CUDA runtime refused a call with code {code}')


class _Seen:
    """Host memory as the device sees it (unified addresses)."""

    def __init__(self, pinned: Tensor) -> None:
        self.memory = pinned
        self.__cuda_array_interface__ = {
            'shape': tuple(pinned.shape), 'typestr': pinned.numpy().dtype.str,
            'data': (pinned.data_ptr(), False), 'version': 2}


def mapped(pinned: Tensor, device: torch.device) -> Tensor:
    """Return pinned memory as a tensor of the device, whose kernels write into it."""
    return torch.as_tensor(_Seen(pinned), device=device)
