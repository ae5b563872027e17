"""Where the engine runs: device and dtype by name, free memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from qwen_vl_ros.engine.errors import CheckpointError, EngineError, ErrorCode
from qwen_vl_ros.kernels.loader import KernelError

#: ``QWEN_VL_NO_MEMORY`` of the native libraries.
NO_MEMORY = 11

MEMINFO = Path('/proc/meminfo')

DTYPES = {
    'float32': torch.float32,
    'bfloat16': torch.bfloat16,
    'float16': torch.float16,
}


def pick_device(name: str) -> torch.device:
    """
    Return the device called ``name``; ``auto`` is CUDA where it works, else the CPU.

    :raises CheckpointError: ``cuda`` asked for and not usable; there is no silent CPU.
    """
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    kind = name.split(':')[0]
    if kind not in ('cpu', 'cuda'):
        raise EngineError(
            ErrorCode.BAD_REQUEST, f"device '{name}' is not one of auto, cpu, cuda, cuda:N")
    if kind == 'cuda' and not torch.cuda.is_available():
        build = f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU only'
        raise CheckpointError(
            f"device '{name}' asked for, but torch {torch.__version__} (build: {build}) finds no "
            'usable GPU; install the CUDA wheel for this board or choose device cpu')
    device = torch.device(name)
    if kind == 'cuda' and device.index is None:
        device = torch.device('cuda', torch.cuda.current_device())
    if kind == 'cuda' and device.index >= torch.cuda.device_count():
        raise CheckpointError(
            f"device '{name}' asked for, but there are {torch.cuda.device_count()} GPUs")
    return device


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one for a block: libraries and events go by it."""
    return torch.cuda.device(device) if device.type == 'cuda' else nullcontext()


def give_back(device: torch.device) -> None:
    """Let other programs, and other streams, have the memory of a GPU that nothing holds."""
    if device.type == 'cuda':
        torch.cuda.empty_cache()


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """
    Return the dtype called ``name``; ``auto`` is float32 on a CPU, bfloat16 on a GPU that has it.

    float16 is never chosen by itself: activations of Qwen2-VL come near its largest number. Asked
    for, it runs with fused attention only, whose scores and softmax are float32 inside, and every
    step's logits are checked for finite values.
    """
    if name == 'auto':
        if device.type == 'cuda' and torch.cuda.is_bf16_supported():
            return torch.bfloat16
        return torch.float32
    if name not in DTYPES:
        raise EngineError(
            ErrorCode.BAD_REQUEST, f"dtype '{name}' is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def memory_available(device: torch.device) -> int | None:
    """
    Return the bytes that can be allocated now, or ``None`` where that is unknown.

    On a board with shared memory the CUDA figure and MemAvailable both bound it; on a discrete
    GPU the host's MemAvailable says nothing about the card.
    """
    available = None
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith('MemAvailable:'):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        available = None
    if device.type != 'cuda':
        return available
    free = torch.cuda.mem_get_info(device)[0]
    integrated = getattr(torch.cuda.get_device_properties(device), 'is_integrated', 0)
    if integrated and available is not None:
        # The kernel's page cache counts as used in the CUDA figure but can be given back.
        return available
    return free


def is_out_of_memory(error: BaseException) -> bool:
    """Tell an allocation that failed from other errors; CPU allocators raise RuntimeError."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    if isinstance(error, KernelError) and error.code == NO_MEMORY:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in (
        'out of memory', 'not enough memory', "can't allocate", 'status_alloc_failed'))
