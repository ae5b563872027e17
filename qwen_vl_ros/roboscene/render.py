"""Face of the native renderer: scenes to pictures, on the CPU or on CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from qwen_vl_ros.kernels.loader import library
from qwen_vl_ros.roboscene.geometry import HEIGHT, WIDTH
from qwen_vl_ros.roboscene.layout import pack
from qwen_vl_ros.roboscene.scene import Scene

if TYPE_CHECKING:
    import torch

_DATA = Path(__file__).parent / 'data'


@cache
def assets() -> tuple[np.ndarray, np.ndarray]:
    """
    Load textures and digits.

    :return: (grey uint8 [6, 128, 128], coverage uint8 [10, 28, 20]).
    """
    bank = cv2.imread(str(_DATA / 'textures.png'), cv2.IMREAD_GRAYSCALE)
    glyphs = cv2.imread(str(_DATA / 'digits.png'), cv2.IMREAD_GRAYSCALE)
    if bank is None or glyphs is None:
        raise FileNotFoundError(f'textures.png and digits.png are missing in {_DATA}')
    return (np.ascontiguousarray(bank.reshape(-1, 128, 128)),
            np.ascontiguousarray(glyphs.reshape(10, 28, 20)))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def render_packed(env: np.ndarray, objects: np.ndarray, *, threads: int = 1, ids: bool = False
                  ) -> tuple[np.ndarray, np.ndarray | None]:
    """
    Render packed scenes on the CPU.

    :param env: float32 [N, 40] from :func:`layout.pack`.
    :param objects: float32 [N, 12, 24].
    :param threads: pictures drawn at the same time.
    :param ids: also return which thing each pixel shows.
    :return: (uint8 [N, 336, 448, 3] RGB, uint8 [N, 336, 448] index of the thing + 1 or 0).
    :raises FileNotFoundError: when the native library has not been built.
    """
    env = np.ascontiguousarray(env, np.float32)
    objects = np.ascontiguousarray(objects, np.float32)
    if env.ndim != 2 or env.shape[1] != 40 or objects.shape != (len(env), 12, 24):
        raise ValueError(f'expected [N, 40] and [N, 12, 24], got {list(env.shape)} and '
                         f'{list(objects.shape)}')
    bank, glyphs = assets()
    rgb = np.empty((len(env), HEIGHT, WIDTH, 3), np.uint8)
    shown = np.empty((len(env), HEIGHT, WIDTH), np.uint8) if ids else None
    library('qwen_vl_roboscene').roboscene_render_cpu(
        _pointer(env), _pointer(objects), _pointer(bank), _pointer(glyphs), len(env),
        max(1, threads), _pointer(rgb), None if shown is None else _pointer(shown))
    return rgb, shown


def render(scenes: Sequence[Scene], *, threads: int = 1) -> np.ndarray:
    """Render scenes on the CPU to uint8 [N, 336, 448, 3] RGB."""
    packed = [pack(s) for s in scenes]
    return render_packed(np.stack([p[0] for p in packed]), np.stack([p[1] for p in packed]),
                         threads=threads)[0]


def render_ids(scene: Scene) -> np.ndarray:
    """Return which thing each pixel shows: uint8 [336, 448], index + 1, 0 is the room."""
    env, objects = pack(scene)
    shown = render_packed(env[None], objects[None], ids=True)[1]
    assert shown is not None
    return shown[0]


def render_cuda(env: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
    """
    Render packed scenes on the current CUDA device and stream.

    :param env: float32 [N, 40] on the device.
    :param objects: float32 [N, 12, 24] on the device.
    :return: uint8 [N, 336, 448, 3] on the device.
    """
    import torch
    bank, glyphs = _device_assets(env.device.index or 0)
    n = env.shape[0]
    scratch = torch.empty((n, HEIGHT, WIDTH, 3), dtype=torch.float32, device=env.device)
    rgb = torch.empty((n, HEIGHT, WIDTH, 3), dtype=torch.uint8, device=env.device)
    code = library('qwen_vl_roboscene_cuda').roboscene_render_cuda(
        *(ctypes.c_void_p(t.contiguous().data_ptr()) for t in (env, objects, bank, glyphs)), n,
        ctypes.c_void_p(scratch.data_ptr()), ctypes.c_void_p(rgb.data_ptr()), None,
        ctypes.c_void_p(torch.cuda.current_stream(env.device).cuda_stream))
    if code:
        raise RuntimeError(f'roboscene_render_cuda failed with CUDA error {code}')
    return rgb


@cache
def _device_assets(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    bank, glyphs = assets()
    device = torch.device('cuda', index)
    return torch.from_numpy(bank).to(device), torch.from_numpy(glyphs).to(device)
