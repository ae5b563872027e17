"""Face of the CPU kernel: a camera's buffer to uint8 patches in one pass."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.loader import KernelError, library, optional

PATCH = 14
FEATURES = 3 * PATCH * PATCH

#: Sides of a frame that the kernel takes, in pixels, and the longest over the shortest.
MIN_SIDE, MAX_SIDE, MAX_ASPECT = 28, 65535, 200

#: Of a resized picture: a frame of 41x8200 becomes 28x8204, and rounding the short side down to a
#: unit can nearly double what the frame had.
MAX_RESIZED_ASPECT = 2 * MAX_ASPECT

#: What libqwen_vl_cpu takes; ctypes would cut larger numbers to 32 bits without a word.
MAX_THREADS, MAX_CPU = 64, 1023

#: In the order of ``qwen_vl_encoding``.
ENCODINGS = ('rgb8', 'bgr8', 'rgba8', 'bgra8', 'mono8', 'nv12', 'nv21', 'yuyv', 'uyvy')

#: In the order of ``qwen_vl_isa``.
ISAS = ('scalar', 'avx2', 'avx512', 'neon')

#: In the order of ``qwen_vl_resampler``: up to Pillow 12 rows are resampled before columns; Pillow
#: 13 takes columns first where that is less work, as with 640x480 -> 644x476. A rounding to bytes
#: lies between the passes, so that the order shows.
RESAMPLERS = ('pillow12', 'pillow13')

#: ``QWEN_VL_BAD_OUTPUT``.
BAD_OUTPUT = 8

_MESSAGE = 256
_SYSTEM = Path('/sys/devices/system/cpu')


class Plane(ctypes.Structure):
    """``qwen_vl_plane``."""

    _fields_ = (('data', ctypes.c_void_p), ('size', ctypes.c_uint64), ('step', ctypes.c_int64))


class NativeFrame(ctypes.Structure):
    """``qwen_vl_frame``."""

    _fields_ = (('encoding', ctypes.c_int32), ('width', ctypes.c_int32),
                ('height', ctypes.c_int32), ('planes', ctypes.c_int32), ('plane', Plane * 2))


class NativePatches(ctypes.Structure):
    """``qwen_vl_patches``."""

    _fields_ = (('data', ctypes.c_void_p), ('size', ctypes.c_uint64),
                ('height', ctypes.c_int32), ('width', ctypes.c_int32),
                ('resampler', ctypes.c_int32), ('reserved', ctypes.c_int32),
                ('patch_stride', ctypes.c_int64), ('channel_stride', ctypes.c_int64))


class Patcher:
    """
    Threads and scratch memory of the CPU kernel; calls from several threads wait for each other.

    :param threads: 1 to 64.
    :param cpus: cores that the threads are pinned to, see :func:`cluster`; the calling thread
        then only waits. Without any, it is one of the threads.
    :param isa: one of :data:`ISAS`, or ``None`` for the fastest that this machine has.
    :param resampler: one of :data:`RESAMPLERS`, or ``None`` for that of the installed Pillow.
    :raises FileNotFoundError: when the library has not been built.
    :raises KernelError: when it cannot be used here, or a number is out of its range.
    :raises TypeError: for threads or cores that are no integers.
    """

    def __init__(
        self, threads: int = 1, cpus: Sequence[int] = (), isa: str | None = None,
        resampler: str | None = None,
    ) -> None:
        self._library = _declare(library('qwen_vl_cpu'))
        if isa is not None and isa not in ISAS:
            raise KernelError(f"instruction set '{isa}' is not one of {', '.join(ISAS)}")
        self.resampler = resampler or installed_resampler()
        if self.resampler not in RESAMPLERS:
            raise KernelError(
                f"resampler '{resampler}' is not one of {', '.join(RESAMPLERS)}")
        threads = _integer('threads', threads)
        if not 1 <= threads <= MAX_THREADS:
            raise KernelError(f'{threads} threads: 1 to {MAX_THREADS} are possible')
        cpus = [_integer('a cpu', cpu) for cpu in cpus]
        for cpu in cpus:
            if not 0 <= cpu <= MAX_CPU:
                raise KernelError(f'cpu {cpu} is not within 0 and {MAX_CPU}')
        handle = ctypes.c_void_p()
        message = ctypes.create_string_buffer(_MESSAGE)
        pinned = (ctypes.c_int32 * len(cpus))(*cpus)
        _check(self._library.qwen_vl_cpu_open(
            threads, pinned, len(cpus), -1 if isa is None else ISAS.index(isa),
            ctypes.byref(handle), message, _MESSAGE), message)
        self._handle: ctypes.c_void_p | None = handle
        self.threads = threads
        self.isa = ISAS[self._library.qwen_vl_cpu_isa(handle)]

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes that are held beside frame and patches."""
        return int(self._library.qwen_vl_cpu_scratch_bytes(self._handle))

    def patches(
        self, frame: Frame, height: int, width: int, out: np.ndarray | None = None,
    ) -> np.ndarray:
        """
        Resize a frame as Pillow does and cut it into patches in unit order.

        :param height: of the resized picture, a multiple of 28; ``width`` alike.
        :param out: uint8 [N, 588] to write into, or [N, 3, 196], one frame of the pairs
            [N, 3, 2, 196] of a clip; in both the last axis must be contiguous.
        :return: uint8 [N, 588] with N = height / 14 * width / 14, or ``out``.
        :raises KernelError: for numbers that cannot be, before any of the memory is touched.
        :raises TypeError: for a frame, size or array that is none.
        """
        if not isinstance(frame, Frame):
            raise TypeError(f'expected a Frame, got {type(frame).__name__}')
        height, width = _integer('height', height), _integer('width', width)
        _check_resized(height, width)
        if out is None:
            out = np.empty((height // PATCH * (width // PATCH), FEATURES), np.uint8)
        target = _target(out, height, width)
        target.resampler = RESAMPLERS.index(self.resampler)
        message = ctypes.create_string_buffer(_MESSAGE)
        source, held = describe(frame)
        _check(self._library.qwen_vl_cpu_patches(
            self._handle, ctypes.byref(source), ctypes.byref(target), message,
            _MESSAGE), message)
        del held
        return out

    def close(self) -> None:
        """End the threads and free the memory; the patcher cannot be used after it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.qwen_vl_cpu_close(handle)

    def __del__(self) -> None:
        if getattr(self, '_handle', None) is not None:
            self.close()


def describe(frame: Frame) -> tuple[NativeFrame, np.ndarray]:
    """
    Describe a frame's buffer to the kernels.

    :return: the description, and the memory that has to live as long as it.
    """
    data = frame.data
    address, step = data.ctypes.data, frame.step
    planes = [Plane(address, data.size, step)]
    if frame.encoding in ('nv12', 'nv21'):
        luma = step * frame.height
        planes.append(Plane(address + luma, max(data.size - luma, 0), step))
        planes[0].size = luma
    native = NativeFrame(ENCODINGS.index(frame.encoding), frame.width, frame.height, len(planes))
    for i, plane in enumerate(planes):
        native.plane[i] = plane
    return native, data


def accepts(frame: Frame) -> bool:
    """Say whether the kernel takes frames of this size."""
    low, high = sorted((frame.width, frame.height))
    return low >= MIN_SIDE and high <= min(MAX_SIDE, MAX_ASPECT * low)


@cache
def installed_resampler() -> str:
    """Return whose bytes transformers' Pillow processor would give on this machine."""
    import PIL

    return RESAMPLERS[int(PIL.__version__.split('.')[0]) >= 13]


def cluster(threads: int) -> tuple[int, ...]:
    """
    Return cores that share a cache, for ``cpus`` of :class:`Patcher`.

    On an Orin the cores of one cluster share their level-3 cache; rows that two threads both
    read then stay inside it.

    :param threads: how many are wanted; fewer come where no cluster has so many.
    """
    allowed = sorted(os.sched_getaffinity(0))
    groups = [_shared(cpu) & set(allowed) for cpu in allowed]
    largest = max(groups, key=len, default=set())
    # The last cores: interrupts land on the first ones.
    return tuple(sorted(largest)[-threads:])


def _shared(cpu: int) -> set[int]:
    for name in ('cache/index3/shared_cpu_list', 'topology/cluster_cpus_list',
                 'topology/core_siblings_list'):
        try:
            text = (_SYSTEM / f'cpu{cpu}' / name).read_text().strip()
        except OSError:
            continue
        cpus: set[int] = set()
        for part in text.split(','):
            first, _, last = part.partition('-')
            cpus.update(range(int(first), int(last or first) + 1))
        return cpus
    return {cpu}


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that the library was built with and this machine runs."""
    bits = _declare(library('qwen_vl_cpu')).qwen_vl_cpu_isas()
    return tuple(name for i, name in enumerate(ISAS) if bits >> i & 1)


@cache
def default_patcher() -> Patcher | None:
    """
    Return the patcher that the engine uses, or ``None`` (one line in the log) without kernels.

    It has up to four threads, half of the cores at most: the other half is the robot's.
    """
    if optional('qwen_vl_cpu', 'Pillow, which gives the same bytes and is slower,') is None:
        return None
    return Patcher(threads=max(1, min(4, len(os.sched_getaffinity(0)) // 2)))


# Threads do not survive a fork; a child opens its own.
os.register_at_fork(after_in_child=default_patcher.cache_clear)


def _check(code: int, message: ctypes.Array[ctypes.c_char]) -> None:
    if code:
        raise KernelError(message.value.decode(errors='replace'), code)


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f'{name} must be an integer, got {value!r}') from None


def _check_resized(height: int, width: int) -> None:
    low, high = sorted((height, width))
    if low < MIN_SIDE or high > MAX_SIDE or height % MIN_SIDE or width % MIN_SIDE:
        raise KernelError(
            f'a resized picture of {width}x{height}: sides must be multiples of {MIN_SIDE} from '
            f'{MIN_SIDE} to {MAX_SIDE}', BAD_OUTPUT)
    if high > MAX_RESIZED_ASPECT * low:
        raise KernelError(
            f'a resized picture of {width}x{height} is too narrow: its sides may differ by a '
            f'factor of {MAX_RESIZED_ASPECT} at most', BAD_OUTPUT)


def _target(out: np.ndarray, height: int, width: int) -> NativePatches:
    if not isinstance(out, np.ndarray):
        raise TypeError(f'out must be a numpy array, got {type(out).__name__}')
    count = height // PATCH * (width // PATCH)
    shapes = ((count, FEATURES), (count, 3, PATCH * PATCH))
    if out.dtype != np.uint8 or out.shape not in shapes or not out.flags.writeable:
        raise KernelError(
            f'patches of {width}x{height} need a writeable uint8 array {list(shapes[0])} or '
            f'{list(shapes[1])}, got {out.dtype} {list(out.shape)}')
    if out.strides[-1] != 1 or any(s < 0 for s in out.strides):
        raise KernelError(f'strides of {out.strides} bytes: the last axis must be contiguous')
    channel = PATCH * PATCH if out.ndim == 2 else out.strides[1]
    size = out.strides[0] * (count - 1) + 2 * channel + PATCH * PATCH
    return NativePatches(
        out.ctypes.data, size, height, width, 0, 0, out.strides[0], channel)


@cache
def _declare(native: ctypes.CDLL) -> ctypes.CDLL:
    text, size = ctypes.c_char_p, ctypes.c_size_t
    native.qwen_vl_cpu_open.argtypes = (
        ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, text,
        size)
    native.qwen_vl_cpu_patches.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, text, size)
    native.qwen_vl_cpu_isa.argtypes = (ctypes.c_void_p,)
    native.qwen_vl_cpu_scratch_bytes.argtypes = (ctypes.c_void_p,)
    native.qwen_vl_cpu_scratch_bytes.restype = ctypes.c_uint64
    native.qwen_vl_cpu_close.argtypes = (ctypes.c_void_p,)
    native.qwen_vl_cpu_close.restype = None
    return native
