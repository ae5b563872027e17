"""Face of the CUDA kernels: frames and patches to patches and embeddings, on the device."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.loader import KernelError, library
from qwen_vl_ros.kernels.patches import (
    FEATURES,
    PATCH,
    RESAMPLERS,
    NativeFrame,
    NativePatches,
    describe,
    installed_resampler,
)

#: In the order of ``qwen_vl_dtype``.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: What weights are padded to: QWEN_VL_WIDTH_STEP and QWEN_VL_FEATURES_STEP.
WIDTH_STEP, FEATURES_STEP = 256, 32

_MESSAGE = 256


class NativeProjection(ctypes.Structure):
    """``qwen_vl_projection``."""

    _fields_ = (('weight', ctypes.c_void_p), ('bias', ctypes.c_void_p), ('dtype', ctypes.c_int32),
                ('out_dtype', ctypes.c_int32), ('width', ctypes.c_int32),
                ('features', ctypes.c_int32), ('scale', ctypes.c_float),
                ('reserved', ctypes.c_int32))


@dataclass(frozen=True)
class Projection:
    """
    The patch embedding with folded normalisation, laid out for the kernel.

    :param weight: bfloat16 or float16 [width padded to 256, features padded to 32].
    :param bias: float32 [width padded to 256] or ``None``.
    :param width: of an embedding; a multiple of 8.
    :param features: 588 for a still, 1176 for a pair of frames.
    :param scale: of the products, before the bias; a power of two.
    """

    weight: Tensor
    bias: Tensor | None
    width: int
    features: int
    scale: float = 1.0

    @classmethod
    def make(cls, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> Projection:
        """
        Lay out folded weights.

        :param weight: [width, features] as :func:`qwen_vl_ros.engine.vision.fold_still` gives.
        :param bias: [width] or ``None``.
        :param scale: what the weights were divided by.
        """
        width, features = weight.shape
        more = -width % WIDTH_STEP
        padded = F.pad(weight, (0, -features % FEATURES_STEP, 0, more)).contiguous()
        return cls(padded, None if bias is None else F.pad(bias.float(), (0, more)).contiguous(),
                   width, features, scale)


def project_plain(
    patches: Tensor, projection: Projection, units: Tensor | None = None,
    addend: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:
    """
    Do what :meth:`CudaKernels.project` does in plain torch, on any device.

    In the weights' dtype, but in float32 where something is added or scaled or the result is
    wanted so: a half of a pair that is rounded twice would err more than the pair's own product.
    """
    if units is not None:
        patches = patches.reshape(-1, 4, patches.shape[1])[units.long()].flatten(0, 1)
    weight = projection.weight[:projection.width, :projection.features]
    dtype = dtype or weight.dtype
    if addend is not None or dtype == torch.float32 or projection.scale != 1.0:
        weight = weight.float()
    out = F.linear(patches.to(weight.dtype) - 128, weight)
    if projection.scale != 1.0:
        out *= projection.scale
    if projection.bias is not None:
        out += projection.bias[:projection.width]
    if addend is not None:
        out += addend
    return out.to(dtype)


class CudaKernels:
    """
    Resampling tables on one device, and the kernels that use them.

    Everything runs in the current stream of that device and returns when it is launched. A size is
    to be used once before it is captured in a graph.

    :param device: where pixels, patches and weights lie.
    :param native: the library; ``None`` loads libqwen_vl_cuda.
    :param resampler: as for :class:`~qwen_vl_ros.kernels.patches.Patcher`.
    :raises FileNotFoundError: when the library has not been built.
    :raises KernelError: when it was not built for this device.
    """

    def __init__(
        self, device: str | torch.device = 'cuda', native: ctypes.CDLL | None = None,
        resampler: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.resampler = resampler or installed_resampler()
        self._library = _declare(library('qwen_vl_cuda') if native is None else native)
        handle = ctypes.c_void_p()
        self._call('open', ctypes.byref(handle))
        self._handle: ctypes.c_void_p | None = handle

    def patches(
        self, frame: Frame, pixels: Tensor, height: int, width: int, out: Tensor | None = None,
    ) -> Tensor:
        """
        Resize a frame as Pillow does and cut it into patches in unit order.

        :param frame: its layout.
        :param pixels: its buffer, uint8 [*], on the device or in pinned memory.
        :param height: of the resized picture, a multiple of 28; ``width`` alike.
        :param out: uint8 [N, 588], or [N, 3, 196] with strides (see
            :meth:`~qwen_vl_ros.kernels.patches.Patcher.patches`), on the device.
        :return: uint8 [N, 588], or ``out``.
        """
        count = height // PATCH * (width // PATCH)
        if out is None:
            out = torch.empty((count, FEATURES), dtype=torch.uint8, device=self.device)
        if out.dtype != torch.uint8 or tuple(out.shape) not in (
                (count, FEATURES), (count, 3, PATCH * PATCH)) or out.stride(-1) != 1:
            raise KernelError(f'patches of {width}x{height} need uint8 [{count}, {FEATURES}] or '
                              f'[{count}, 3, {PATCH * PATCH}], got {out.dtype} {list(out.shape)}')
        self._on_device(out)
        channel = out.stride(1) if out.dim() == 3 else PATCH * PATCH
        target = self._target(height, width)
        target.data, target.patch_stride = out.data_ptr(), out.stride(0)
        target.channel_stride = channel
        target.size = out.stride(0) * (count - 1) + 2 * channel + PATCH * PATCH
        self._call('patches', ctypes.byref(self._frame(frame, pixels)), ctypes.byref(target),
                   self._stream())
        return out

    def project(
        self, patches: Tensor, projection: Projection, units: Tensor | None = None,
        addend: Tensor | None = None, dtype: torch.dtype | None = None,
    ) -> Tensor:
        """
        Project patches, kept units only.

        :param patches: uint8 [N, features], N a multiple of 4.
        :param units: int32 [U], units to keep in the order of the output; ``None`` keeps all.
        :param addend: float32 [4U, width] to add: the older half of a pair, projected before.
        :param dtype: of the output; ``None`` takes the weights'.
        :return: [4U, width].
        """
        if patches.dtype != torch.uint8 or patches.dim() != 2 or patches.shape[0] % 4 or (
                patches.shape[1] != projection.features) or not patches.is_contiguous():
            raise KernelError(f'expected contiguous uint8 [4 * units, {projection.features}], got '
                              f'{patches.dtype} {list(patches.shape)}')
        count = patches.shape[0] // 4 if units is None else units.numel()
        out = self._embeddings(count, projection, dtype)
        if addend is not None and (addend.dtype != torch.float32 or not addend.is_contiguous()
                                   or addend.shape != out.shape):
            raise KernelError(f'expected float32 {list(out.shape)} to add, got {addend.dtype} '
                              f'{list(addend.shape)}')
        self._on_device(patches, projection.weight, *(t for t in (units, addend) if t is not None))
        self._call('project', ctypes.byref(_native(projection, out)), _address(patches),
                   self._units(units), count, _address(addend), _address(out), self._stream())
        return out

    def embed(
        self, frame: Frame, pixels: Tensor, height: int, width: int, projection: Projection,
        units: Tensor | None = None, dtype: torch.dtype | None = None,
    ) -> Tensor:
        """
        Take a still frame to embeddings in one launch; parameters as for the two methods above.

        :return: [4U, width].
        """
        count = (height // 28) * (width // 28) if units is None else units.numel()
        out = self._embeddings(count, projection, dtype)
        self._on_device(projection.weight, *(() if units is None else (units,)))
        target = self._target(height, width)
        self._call('embed', ctypes.byref(self._frame(frame, pixels)), ctypes.byref(target),
                   ctypes.byref(_native(projection, out)), self._units(units), count,
                   _address(out), self._stream())
        return out

    def close(self) -> None:
        """Free the tables; the object cannot be used after it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.qwen_vl_cuda_close(handle)

    def __del__(self) -> None:
        if getattr(self, '_handle', None) is not None:
            self.close()

    def _call(self, name: str, *arguments: object) -> None:
        message = ctypes.create_string_buffer(_MESSAGE)
        first = () if name == 'open' else (self._handle,)
        # The library works on the current device, which need not be this one.
        with torch.cuda.device(self.device) if self.device.type == 'cuda' else nullcontext():
            code = getattr(self._library, f'qwen_vl_cuda_{name}')(
                *first, *arguments, message, _MESSAGE)
        if code:
            raise KernelError(message.value.decode(errors='replace'), code)

    def _stream(self) -> ctypes.c_void_p:
        if self.device.type != 'cuda':
            return ctypes.c_void_p()
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _frame(self, frame: Frame, pixels: Tensor) -> NativeFrame:
        if pixels.dtype != torch.uint8 or pixels.numel() != frame.data.size:
            raise KernelError(f'a frame of {frame.data.size} bytes, pixels of {pixels.numel()} '
                              f'{pixels.dtype}')
        if not pixels.is_pinned():
            self._on_device(pixels)
        native, _ = describe(frame)
        for i in range(native.planes):
            native.plane[i].data = pixels.data_ptr() + (frame.step * frame.height if i else 0)
        return native

    def _target(self, height: int, width: int) -> NativePatches:
        return NativePatches(height=height, width=width,
                             resampler=RESAMPLERS.index(self.resampler))

    def _embeddings(
        self, count: int, projection: Projection, dtype: torch.dtype | None,
    ) -> Tensor:
        return torch.empty((4 * count, projection.width), dtype=dtype or projection.weight.dtype,
                           device=self.device)

    def _units(self, units: Tensor | None) -> ctypes.c_void_p:
        if units is not None and (units.dtype != torch.int32 or not units.is_contiguous()):
            raise KernelError(f'expected contiguous int32 units, got {units.dtype}')
        return _address(units)

    def _on_device(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != self.device.type:
                raise KernelError(f'a tensor on {tensor.device}, kernels on {self.device}')


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _native(projection: Projection, out: Tensor) -> NativeProjection:
    bias = projection.bias
    return NativeProjection(
        projection.weight.data_ptr(), None if bias is None else bias.data_ptr(),
        DTYPES.index(projection.weight.dtype), DTYPES.index(out.dtype), projection.width,
        projection.features, projection.scale, 0)


def _declare(native: ctypes.CDLL) -> ctypes.CDLL:
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    native.qwen_vl_cuda_open.argtypes = (pointer, text, size)
    native.qwen_vl_cuda_patches.argtypes = (pointer, pointer, pointer, pointer, text, size)
    native.qwen_vl_cuda_project.argtypes = (
        pointer, pointer, pointer, pointer, ctypes.c_int64, pointer, pointer, pointer, text, size)
    native.qwen_vl_cuda_embed.argtypes = (
        pointer, pointer, pointer, pointer, pointer, ctypes.c_int64, pointer, pointer, text, size)
    native.qwen_vl_cuda_close.argtypes = (pointer,)
    native.qwen_vl_cuda_close.restype = None
    return native
