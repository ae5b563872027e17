"""
From frames to patch embeddings: on the CPU, on the GPU, or wherever it takes less time.

Two ways lead to the same embeddings::

    cpu   camera buffer --CPU kernel--> uint8 patches --upload--> projection
    gpu   camera buffer --upload (or in place)--> resize, patches and projection

In one launch patches stay in the multiprocessors. Where the device's cache holds them anyway, two
launches keep more multiprocessors busy.

:meth:`Offload.prepare` is the CPU's part of either and may be called from any thread, also while
the GPU answers about another picture; :meth:`Offload.upload` and :meth:`Offload.embed` belong to
the thread that runs the encoder.

A pair of frames (x0, x1) of a clip is embedded as W0 x0 + (W1 x1 + b). W0 x is computed when frame
x arrives, as the newer half of a pair, and kept: when x becomes the older half of another pair,
nothing of it is read again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.embedding import pair_projections, still_projection
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.patches import Grid, extract_patches
from qwen_vl_ros.engine.prepared import Half, Picture, Prepared, Profile
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.cuda import CudaKernels, Projection, project_plain
from qwen_vl_ros.kernels.loader import KernelError, optional
from qwen_vl_ros.kernels.patches import PATCH, accepts

LOG = logging.getLogger(__name__)

WAYS = ('cpu', 'gpu', 'auto')

#: Bytes of kept W0 x of all frames together: eight pictures of 640x480 at Qwen2-VL's width.
KEPT_BYTES = 64 << 20

#: Runs of a way that ``auto`` measures, after one that does not count.
RUNS = 5

#: Picture sizes whose choice is remembered.
SIZES = 64


class Offload:
    """
    Patches, upload and patch embedding of a model's visuals.

    :param kernel: of the patch embedding, [width, 3, 2, patch, patch], on the model's device and
        in its dtype; the kernels know patches of 14 pixels only.
    :param way: one of :data:`WAYS`; ``auto`` measures both for every new size of picture.
    :param kernels: of the device; ``None`` loads them where the device is a GPU, and says in the
        log when the plain form has to do instead.
    :raises EngineError: BAD_REQUEST for way ``gpu`` without a GPU.
    """

    def __init__(
        self, kernel: Tensor, way: str = 'auto', kernels: CudaKernels | None = None,
    ) -> None:
        self.device, self._dtype = kernel.device, kernel.dtype
        if way not in WAYS:
            raise EngineError(ErrorCode.BAD_REQUEST,
                              f"preprocess.device '{way}' is not one of {', '.join(WAYS)}")
        if way == 'gpu' and self.device.type != 'cuda' and kernels is None:
            raise EngineError(
                ErrorCode.BAD_REQUEST,
                f"preprocess.device is 'gpu' and the model runs on '{self.device}': pictures are "
                'made where the model is, or on the CPU')
        self.patch = kernel.shape[-1]
        self.kernels = kernels or _find_kernels(kernel)
        self.way = way if self.kernels is not None else 'cpu'
        #: Pinned memory is the GPU's own memory: a frame there is read in place, and once.
        self.unified = False
        self._cache_bytes = 0
        if self.device.type == 'cuda':
            properties = torch.cuda.get_device_properties(self.device)
            self.unified = bool(getattr(properties, 'is_integrated', 0))
            self._cache_bytes = getattr(properties, 'L2_cache_size', 0)
        weights = torch.float32 if self.kernels is None else torch.float16
        self._still = still_projection(kernel, weights)
        self._older, self._newer = pair_projections(kernel, weights)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, int, int], Half] = OrderedDict()
        self._choice: dict[tuple[int, int, int, int], str] = {}
        #: What was measured, by (width, height, rows, columns of patches) and way.
        self.profiles: dict[tuple[int, int, int, int], dict[str, Profile]] = {}

    def prepare(self, frames: Sequence[Frame], grid: Grid, way: str | None = None) -> Prepared:
        """
        Do the CPU's part; safe from any thread.

        :param frames: one frame (a still) or several (a clip; an odd one repeats its last frame).
        :param grid: (t, h, w) in patches.
        :param way: ``cpu`` or ``gpu`` instead of the chosen one.
        """
        way = way or self.choose(frames[0], grid)
        if way == 'gpu' and not all(map(accepts, frames)):
            way = 'cpu'
        pictures: list[Picture] = []
        read = written = 0
        for number, frame in enumerate(frames):
            older = None
            if len(frames) > 1 and number % 2 == 0:
                older = self._lookup(frame, grid)
            # The last frame of an odd clip is a newer half too: its own copy stands behind it.
            if older is not None and number + 1 < len(frames):
                pictures.append(Picture(frame, way, None, older))
                continue
            memory = self._memory(frame, grid, way)
            read += frame.data.size
            written += memory.nbytes
            pictures.append(Picture(frame, way, memory, older))
        if len(frames) > 1 and len(frames) % 2:
            pictures.append(pictures[-1])
        features = 3 * self.patch ** 2 * min(2, len(pictures))
        return Prepared(pictures, grid, features, read, written)

    def upload(self, prepared: Prepared, first: int = 0, end: int | None = None) -> None:
        """
        Bring what was prepared to the device, without waiting for it.

        :param first: temporal slice, and ``end``: one past the last; the others stay.
        """
        for picture in self._travelling(prepared, first, end):
            if picture.memory is not None:
                picture.memory = picture.memory.to(self.device, non_blocking=True)

    def upload_bytes(self, prepared: Prepared, first: int = 0, end: int | None = None) -> int:
        """Return the bytes that :meth:`upload` would send; 0 where they are read in place."""
        return sum(picture.memory.nbytes for picture in self._travelling(prepared, first, end)
                   if picture.memory is not None)

    def _travelling(self, prepared: Prepared, first: int, end: int | None) -> list[Picture]:
        """Return the pictures that a device cannot read where they are, each once."""
        if self.device.type != 'cuda':
            return []
        found = {id(p): p for p in prepared.of_slices(first, end)}
        return [p for p in found.values() if p.memory is not None and not p.memory.is_cuda
                and not (p.way == 'gpu' and self.unified)]

    @torch.inference_mode()
    def embed(
        self, prepared: Prepared, units: np.ndarray | None = None, first: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """
        Embed what was prepared and uploaded.

        :param units: int64, ascending indices of the units to keep, counted from the first slice;
            ``None`` keeps all.
        :param first: temporal slice, and ``end``: one past the last.
        :return: [4 * kept, width] in unit order, the encoder's dtype, on the device.
        """
        try:
            return self._embed(prepared, units, first, end)
        except KernelError as error:
            if prepared.pictures[0].way != 'gpu':
                raise
            # A reduction so strong that its taps do not fit into shared memory.
            LOG.info('%s; this picture takes the way over the CPU', error)
            frames = [picture.frame for picture in prepared.pictures]
            prepared = self.prepare(frames, prepared.grid, 'cpu')
            self.upload(prepared, first, end)
            return self._embed(prepared, units, first, end)

    def choose(self, frame: Frame, grid: Grid) -> str:
        """Return ``cpu`` or ``gpu`` for pictures of this size; ``auto`` measures a new one."""
        if self.way != 'auto':
            return self.way
        key = (frame.width, frame.height, grid[1], grid[2])
        if key not in self._choice:
            if not accepts(frame):
                return 'cpu'
            found = {way: self.measure(frame, grid, way) for way in ('cpu', 'gpu')}
            best = min(found, key=lambda way: found[way].total_ms)
            with self._lock:
                if len(self._choice) >= SIZES:
                    self._choice.clear()
                    self.profiles.clear()
                self._choice[key], self.profiles[key] = best, found
            LOG.info('preprocess.device auto takes %s for %dx%d %s: %s', best, frame.width,
                     frame.height, frame.encoding,
                     '; '.join(f'{way} {profile}' for way, profile in found.items()))
        return self._choice[key]

    def measure(self, frame: Frame, grid: Grid, way: str) -> Profile:
        """Time a still on a way, its parts one after the other."""
        grid = (1, *grid[1:])
        parts: list[list[float]] = [[], [], []]
        for run in range(RUNS + 1):
            prepared, spent = self._timed(lambda: self.prepare([frame], grid, way))
            times = [spent, *(self._timed(partial(step, prepared))[1]
                              for step in (self.upload, self.embed))]
            if run:
                for part, spent in zip(parts, times):
                    part.append(spent)
        return Profile(*map(median, parts))

    def forget(self) -> None:
        """Drop what is kept of older frames."""
        with self._lock:
            self._kept.clear()

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of kept W0 x."""
        with self._lock:
            return sum(half.values.nbytes for half in self._kept.values())

    def _timed(self, step: Callable[[], Any]) -> tuple[Any, float]:
        """Return a step's result and the milliseconds until it has ended on CPU and device."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
        started = time.perf_counter_ns()
        result = step()
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
        return result, (time.perf_counter_ns() - started) / 1e6

    def _memory(self, frame: Frame, grid: Grid, way: str) -> Tensor:
        """Return patches or pixels in host memory, pinned where a device takes them from there."""
        pinned = self.device.type == 'cuda'
        if way == 'gpu':
            # A copy: a camera's buffer is not pinned, and its next frame may overwrite it. By one
            # thread: torch's, of many, take ten times as long to start as the bytes take.
            pixels = torch.empty(frame.data.size, dtype=torch.uint8, pin_memory=pinned)
            np.copyto(pixels.numpy(), frame.data)
            return pixels
        out = torch.empty(
            (grid[1] * grid[2], 3 * self.patch ** 2), dtype=torch.uint8, pin_memory=pinned)
        extract_patches([frame], (1, *grid[1:]), self.patch, out.numpy())
        return out

    def _embed(
        self, prepared: Prepared, units: np.ndarray | None, first: int, end: int | None,
    ) -> Tensor:
        _, h, w = prepared.grid
        area = h * w // 4
        pictures = prepared.of_slices(first, end)
        if len(prepared.pictures) == 1:
            return self._project(pictures[0], prepared, self._still, self._chosen(units))
        for picture in pictures:
            # Both halves of a pair are made of the same patches.
            if picture.way == 'gpu' and picture.memory is not None and self.kernels is not None:
                picture.memory = self.kernels.patches(
                    picture.frame, picture.memory, h * PATCH, w * PATCH)
                picture.way = 'cpu'
        out = []
        for number in range(len(pictures) // 2):
            own = None
            if units is not None:
                low, high = np.searchsorted(units, (number * area, (number + 1) * area))
                if low == high:
                    continue
                own = self._chosen(units[low:high] - number * area)
            older, newer = pictures[2 * number:2 * number + 2]
            addend = self._older_half(older, prepared)
            if own is not None:
                addend = addend.reshape(area, 4, -1)[own.long()].flatten(0, 1)
            out.append(self._project(newer, prepared, self._newer, own, addend))
            self._older_half(newer, prepared)
        return torch.cat(out) if out else torch.zeros(
            0, self._newer.width, dtype=self._dtype, device=self.device)

    def _chosen(self, units: np.ndarray | None) -> Tensor | None:
        if units is None:
            return None
        chosen = torch.from_numpy(units.astype(np.int32))
        if self.device.type != 'cuda':
            return chosen
        # Pinned: otherwise the host would wait for all that the stream holds.
        return chosen.pin_memory().to(self.device, non_blocking=True)

    def _older_half(self, picture: Picture, prepared: Prepared) -> Tensor:
        """Return W0 x of a frame, float32 [n, width]; it is computed and kept at most once."""
        if picture.older is None:
            picture.older = self._lookup(picture.frame, prepared.grid)
        if picture.older is None:
            values = self._project(picture, prepared, self._older, dtype=torch.float32)
            made = None
            if values.is_cuda:
                made = torch.cuda.Event()
                made.record(torch.cuda.current_stream(self.device))
            picture.older = Half(values, made)
            self._keep(picture.frame, prepared.grid, picture.older)
        return picture.older.wait()

    def _project(
        self, picture: Picture, prepared: Prepared, projection: Projection,
        units: Tensor | None = None, addend: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        memory, dtype = picture.memory, dtype or self._dtype
        if memory is None:
            raise ValueError('the frame was prepared as an older half only')
        if units is not None and units.numel() == 0:
            return torch.zeros(0, projection.width, dtype=dtype, device=self.device)
        if picture.way == 'gpu' and self.kernels is not None:
            height, width = prepared.grid[1] * PATCH, prepared.grid[2] * PATCH
            # Frame, patches and weights, with room for as many bytes of embeddings.
            held = memory.nbytes + 3 * height * width + projection.weight.nbytes
            if 2 * held > self._cache_bytes:
                return self.kernels.embed(
                    picture.frame, memory, height, width, projection, units, dtype)
            memory = self.kernels.patches(picture.frame, memory, height, width)
        if self.kernels is not None:
            return self.kernels.project(memory, projection, units, addend, dtype)
        return project_plain(memory, projection, units, addend, dtype)

    def _lookup(self, frame: Frame, grid: Grid) -> Half | None:
        key = (frame.digest, *grid[1:])
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def _keep(self, frame: Frame, grid: Grid, older: Half) -> None:
        if older.values.nbytes > KEPT_BYTES:
            return
        with self._lock:
            self._kept[frame.digest, grid[1], grid[2]] = older
            while sum(half.values.nbytes for half in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)


def _find_kernels(kernel: Tensor) -> CudaKernels | None:
    """Return the kernels of a device that can use them, or ``None``."""
    if kernel.device.type != 'cuda' or kernel.shape[-1] != PATCH or kernel.shape[0] % 8 or (
            kernel.dtype == torch.float32):
        return None
    native = optional('qwen_vl_cuda', 'the way over the CPU and torch')
    if native is None:
        return None
    try:
        return CudaKernels(kernel.device, native)
    except KernelError as error:
        LOG.warning('%s; the way over the CPU and torch is used instead', error)
        return None
