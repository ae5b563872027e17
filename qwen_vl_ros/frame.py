"""One camera picture as it travels from a ROS message to the encoder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

#: Encodings that the patch kernels read straight from a camera's buffer, with bytes per pixel of
#: the first plane. ROS names: ``yuyv`` is YUV 4:2:2 in the order Y U Y V, ``uyvy`` in U Y V Y.
ENCODINGS = {
    'rgb8': 3,
    'bgr8': 3,
    'rgba8': 4,
    'bgra8': 4,
    'mono8': 1,
    'nv12': 1,
    'nv21': 1,
    'yuyv': 2,
    'uyvy': 2,
}

#: Bytes of a frame that :attr:`Frame.glance` looks at.
GLANCED = 1000


@dataclass(frozen=True)
class Frame:
    """
    A picture with its origin.

    The buffer is kept as the camera sent it: no copy, no colour conversion. Converting is the
    patch kernel's work (or :meth:`rgb`'s, its plain twin).

    :param data: uint8, one-dimensional and contiguous, at least ``step * height`` bytes
        (``step * height * 3 / 2`` for nv12 and nv21).
    :param encoding: a key of :data:`ENCODINGS`.
    :param width: picture width in pixels.
    :param height: picture height in pixels.
    :param step: bytes from one row to the next, at least ``width`` times bytes per pixel; chroma
        comes in pairs, so that an odd width counts as the next even one in nv12, nv21, yuyv, uyvy.
    :param stamp_ns: header stamp of the source message, nanoseconds of ROS time.
    :param frame_id: header frame_id of the source message, unchanged.
    :param camera: name of the camera as configured.
    :param received_ns: monotonic clock at reception, nanoseconds (``time.monotonic_ns``).
    """

    data: np.ndarray
    encoding: str
    width: int
    height: int
    step: int
    stamp_ns: int = 0
    frame_id: str = ''
    camera: str = ''
    received_ns: int = 0

    def __post_init__(self) -> None:
        """:raises ValueError: when the numbers cannot describe a picture in ``data``."""
        if self.encoding not in ENCODINGS:
            raise ValueError(
                f"encoding '{self.encoding}' is not one of {', '.join(sorted(ENCODINGS))}")
        if self.width < 1 or self.height < 1:
            raise ValueError(f'a picture of {self.width}x{self.height} pixels holds nothing')
        columns = self.width
        if self.encoding in ('nv12', 'nv21', 'yuyv', 'uyvy'):
            columns += columns % 2
        row = columns * ENCODINGS[self.encoding]
        if self.step < row:
            raise ValueError(
                f'step {self.step} is shorter than a row of {row} bytes '
                f'({self.width} pixels of {self.encoding})')
        rows = self.height
        if self.encoding in ('nv12', 'nv21'):
            rows += (self.height + 1) // 2
        need = self.step * (rows - 1) + row
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise ValueError('data must be a one-dimensional uint8 array')
        if self.data.size < need:
            raise ValueError(
                f'{self.data.size} bytes are too few for {self.width}x{self.height} '
                f'{self.encoding} with step {self.step}: {need} needed')

    @classmethod
    def from_rgb(cls, rgb: np.ndarray, **origin: object) -> Frame:
        """
        Wrap an RGB picture.

        :param rgb: uint8 [H, W, 3].
        :param origin: ``stamp_ns``, ``frame_id``, ``camera``, ``received_ns``.
        """
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
            raise ValueError(f'expected uint8 [H, W, 3], got {rgb.dtype} {list(rgb.shape)}')
        height, width = rgb.shape[:2]
        flat = np.ascontiguousarray(rgb).reshape(-1)
        return cls(flat, 'rgb8', width, height, width * 3, **origin)  # type: ignore[arg-type]

    @cached_property
    def digest(self) -> bytes:
        """Return 16 bytes that stand for layout and content; computed once, 0.5 ms a megabyte."""
        layout = (self.encoding, self.width, self.height, self.step)
        # x86 and ARM have instructions for this one.
        digest = hashlib.sha256(repr(layout).encode())
        digest.update(np.ascontiguousarray(self.data).data)
        return digest.digest()[:16]

    @cached_property
    def glance(self) -> int:
        """Return a number that equal frames share and others hardly ever: of a few bytes alone."""
        layout = (self.encoding, self.width, self.height, self.step)
        sample = self.data[::max(1, self.data.size // GLANCED)]
        return hash((layout, sample.tobytes()))

    def rgb(self) -> np.ndarray:
        """
        Return the picture as uint8 [H, W, 3] RGB; a view where the buffer already is that.

        YUV is BT.601 limited range in the fixed-point form that the kernels use (see
        :func:`yuv_to_rgb`); alpha is dropped, never blended.
        """
        w, h, step = self.width, self.height, self.step
        if self.encoding in ('nv12', 'nv21'):
            return self._nv_rgb()
        bpp = ENCODINGS[self.encoding]
        row = (w + 1) // 2 * 4 if bpp == 2 else w * bpp
        rows = np.lib.stride_tricks.as_strided(
            self.data, (h, row), (step, 1), writeable=False)
        if bpp == 2:
            quad = rows.reshape(h, -1, 4)
            y0, u, y1, v = (0, 1, 2, 3) if self.encoding == 'yuyv' else (1, 0, 3, 2)
            luma = quad[:, :, [y0, y1]].reshape(h, -1)[:, :w]
            chroma = np.repeat(quad[:, :, [u, v]], 2, axis=1)[:, :w]
            return yuv_to_rgb(luma, chroma[..., 0], chroma[..., 1])
        if bpp == 1:
            return np.repeat(rows[:, :, None], 3, axis=2)
        pixels = np.lib.stride_tricks.as_strided(
            self.data, (h, w, bpp), (step, bpp, 1), writeable=False)
        if self.encoding in ('bgr8', 'bgra8'):
            return np.ascontiguousarray(pixels[:, :, 2::-1])
        return pixels[:, :, :3]

    def _nv_rgb(self) -> np.ndarray:
        w, h, step = self.width, self.height, self.step
        luma = np.lib.stride_tricks.as_strided(self.data, (h, w), (step, 1), writeable=False)
        ch, cw = (h + 1) // 2, (w + 1) // 2
        chroma = np.lib.stride_tricks.as_strided(
            self.data[step * h:], (ch, cw, 2), (step, 2, 1), writeable=False)
        chroma = np.repeat(np.repeat(chroma, 2, axis=0)[:h], 2, axis=1)[:, :w]
        u, v = (0, 1) if self.encoding == 'nv12' else (1, 0)
        return yuv_to_rgb(luma, chroma[..., u], chroma[..., v])


def yuv_to_rgb(y: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """
    Convert BT.601 limited-range YUV to RGB in 20-bit fixed point.

    The integers are OpenCV's ``ITUR_BT_601_*`` constants, so that a picture converted by
    ``cv2.cvtColor`` is the same byte for byte; chroma is repeated, not interpolated.

    :param y: uint8 luma, any shape.
    :param u: uint8 blue difference, same shape.
    :param v: uint8 red difference, same shape.
    :return: uint8, the shape of ``y`` with a last axis of 3 (R, G, B).
    """
    luma = np.maximum(y.astype(np.int32) - 16, 0) * 1220542
    cu = u.astype(np.int32) - 128
    cv = v.astype(np.int32) - 128
    half = 1 << 19
    out = np.empty((*y.shape, 3), np.uint8)
    for channel, chroma in enumerate((
            1673527 * cv, -852492 * cv - 409993 * cu, 2116026 * cu)):
        out[..., channel] = np.clip((luma + (chroma + half)) >> 20, 0, 255)
    return out
