"""
ROS image messages, raw and compressed, to :class:`~qwen_vl_ros.frame.Frame`.

Works on plain values (no ROS import). The encodings of :data:`qwen_vl_ros.frame.ENCODINGS` keep
the message's own buffer; everything else is converted to ``rgb8``, ``bgr8`` or ``mono8``:

* one channel of 16, 32 or 64 bit is tone mapped (:func:`tone_map`): depth, thermal, mono16;
* 16-bit colour and Bayer are shifted to 8 bit by the bits that the picture really uses;
* Bayer is demosaiced by OpenCV, NV24 by :func:`~qwen_vl_ros.frame.yuv_to_rgb`.

A compressed picture's size and channels come from its bytes; the format string only decides
what bytes cannot tell (a Bayer mosaic in a grey JPEG, quantised inverse depth in a PNG).
Orientation tags (EXIF) are ignored in every format: pixels stay as the sensor stored them, which
is what the camera's calibration describes.
"""

from __future__ import annotations

import re
from typing import Any

import cv2
import numpy as np

from qwen_vl_ros.compressed import (
    FrameError,
    decode_jpeg,
    decode_other,
    split_depth_header,
)
from qwen_vl_ros.frame import ENCODINGS, Frame, yuv_to_rgb

__all__ = ['SUPPORTED', 'FrameError', 'decode_compressed', 'decode_image', 'tone_map']

#: ROS names that mean one of Frame's encodings. ``yuv422`` is UYVY and ``yuv422_yuy2`` is YUYV
#: (sensor_msgs/image_encodings.hpp; newer releases add the plain names). OpenCV's ``8UC3`` says
#: nothing about colour and is read in OpenCV's own order.
ALIASES = {
    'yuv422': 'uyvy',
    'yuv422_yuy2': 'yuyv',
    '8uc1': 'mono8',
    '8uc3': 'bgr8',
    '8uc4': 'bgra8',
}

#: ROS names a Bayer pattern by its first row's pixels, OpenCV by those of the second row.
BAYER = {
    'rggb': cv2.COLOR_BayerBG2RGB,
    'bggr': cv2.COLOR_BayerRG2RGB,
    'gbrg': cv2.COLOR_BayerGR2RGB,
    'grbg': cv2.COLOR_BayerGB2RGB,
}

#: One channel, shown by tone mapping.
GREY = {
    'mono16': 'u2',
    '16uc1': 'u2',
    '16sc1': 'i2',
    '8sc1': 'i1',
    '32sc1': 'i4',
    '32fc1': 'f4',
    '64fc1': 'f8',
}

#: 16-bit colour: channels and the Frame encoding that it becomes.
COLOUR16 = {
    'rgb16': (3, 'rgb8'),
    'bgr16': (3, 'bgr8'),
    '16uc3': (3, 'bgr8'),
    'rgba16': (4, 'rgba8'),
    'bgra16': (4, 'bgra8'),
    '16uc4': (4, 'bgra8'),
}

#: Every encoding that :func:`decode_image` takes, in lower case.
SUPPORTED = (*ENCODINGS, *ALIASES, 'nv24', *(f'bayer_{p}{b}' for p in BAYER for b in (8, 16)),
             *GREY, *COLOUR16)

#: Quantisation that compressed_depth_image_transport uses by default (depth_quantization 100,
#: depth_max 10 m), for pictures that come without their header.
DEFAULT_DEPTH_QUANTISATION = (100.0 * 101.0, 1.0 - 100.0 * 101.0 / 10.0)

#: Values that :func:`tone_map` looks at for its range; more would only cost time.
TONE_SAMPLES = 1 << 17


def decode_image(
    encoding: str, width: int, height: int, step: int, is_bigendian: bool | int, data: Any, *,
    stamp_ns: int = 0, frame_id: str = '', camera: str = '', received_ns: int = 0,
) -> Frame:
    """
    Turn the fields of a ``sensor_msgs/Image`` into a Frame.

    :param encoding: the message's encoding, one of :data:`SUPPORTED` in any case.
    :param width: pixels.
    :param height: pixels.
    :param step: bytes from one row to the next; padding at the row's end is skipped.
    :param is_bigendian: byte order of multi-byte values; without meaning for 8-bit encodings.
    :param data: the bytes: ``bytes``, ``array.array('B')``, memoryview or contiguous numpy array.
        A Frame of an encoding that needs no conversion is a view of it.
    :param stamp_ns: see :class:`Frame`, as the following.
    :raises FrameError: when these values do not describe a picture; nothing of the announced
        size has been allocated then.
    """
    origin: dict[str, Any] = {
        'stamp_ns': stamp_ns, 'frame_id': frame_id, 'camera': camera, 'received_ns': received_ns}
    name = str(encoding).strip().lower()
    name = ALIASES.get(name, name)
    if name not in SUPPORTED:
        raise FrameError(
            f"encoding '{str(encoding)[:40]}' is not supported; expected one of "
            + ', '.join(SUPPORTED))
    flat = _flat(data)
    if width < 1 or height < 1:
        raise FrameError(f'a picture of {width}x{height} pixels holds nothing')
    if not flat.size:
        raise FrameError(f'the data of a {width}x{height} {name} picture is empty')
    _check_length(name, width, height, step, flat.size)
    if name in ENCODINGS:
        try:
            return Frame(flat, name, width, height, step, **origin)
        except ValueError as error:
            raise FrameError(str(error)) from None
    order = '>' if is_bigendian else '<'
    if name == 'nv24':
        return Frame.from_rgb(_nv24(flat, width, height, step), **origin)
    if name.startswith('bayer_'):
        deep = name.endswith('16')
        mosaic = _view(flat, (height, width), order + 'u2' if deep else 'u1', step)
        return Frame.from_rgb(_demosaic(mosaic, name[6:10]), **origin)
    if name in GREY:
        grey = _view(flat, (height, width), order + GREY[name], step)
        return _grey_frame(grey, zero_is_missing=name != 'mono16', origin=origin)
    channels, out = COLOUR16[name]
    pixels = _view(flat, (height, width, channels), order + 'u2', step)
    return _packed(_to_eight_bit(pixels), out, origin)


def decode_compressed(
    format: str, data: Any, *,
    stamp_ns: int = 0, frame_id: str = '', camera: str = '', received_ns: int = 0,
) -> Frame:
    """
    Turn the fields of a ``sensor_msgs/CompressedImage`` into a Frame.

    :param format: the message's format string; any text, also none.
    :param data: a JPEG, PNG or WebP file, or a compressedDepth payload (12 bytes and a PNG).
    :param stamp_ns: see :class:`Frame`, as the following.
    :raises FrameError: when the bytes are no such file, are cut, or announce more pixels than
        :data:`qwen_vl_ros.compressed.MAX_PIXELS`.
    """
    origin: dict[str, Any] = {
        'stamp_ns': stamp_ns, 'frame_id': frame_id, 'camera': camera, 'received_ns': received_ns}
    format = str(format)
    flat = _flat(data)
    if not flat.size:
        raise FrameError(f"compressed picture (format '{format[:40]}') is empty")
    source = format.split(';')[0].strip().lower()
    depth_params, flat = split_depth_header(format, flat)
    if bytes(flat[:3]) == b'\xff\xd8\xff':
        pixels = decode_jpeg(flat)
        colour = 'rgb8'
    else:
        pixels = decode_other(format, flat)
        colour = 'bgr8'
    if pixels.ndim == 3:
        if pixels.dtype == np.uint16:
            pixels = _to_eight_bit(pixels)
        return _packed(pixels, colour if pixels.shape[2] == 3 else 'bgra8', origin)
    bayer = re.match(r'bayer_(rggb|bggr|gbrg|grbg)', source)
    if bayer:
        return Frame.from_rgb(_demosaic(pixels, bayer.group(1)), **origin)
    if source == '32fc1' and pixels.dtype == np.uint16:
        pixels = _inverse_depth(pixels, depth_params or DEFAULT_DEPTH_QUANTISATION)
    if pixels.dtype == np.uint8:
        return _packed(pixels, 'mono8', origin)
    return _grey_frame(pixels, zero_is_missing=source != 'mono16', origin=origin)


def tone_map(values: np.ndarray, missing: np.ndarray | None = None) -> np.ndarray:
    """
    Show one channel of any range as 8-bit grey.

    The 1st and 99th percentile of the present values become 0 and 255, so that a few far pixels
    do not turn the rest black. NaN and missing values become 0, +inf 255 and -inf 0 (REP 117:
    out of range and too close). A picture of one single value becomes 128.

    :param values: [H, W], integer or float.
    :param missing: bool [H, W], pixels that hold no measurement.
    :return: uint8 [H, W].
    :raises FrameError: when no finite, present value is left.
    """
    if values.dtype.kind == 'f':
        # Over 3.4e38 counts as infinite, so that the range below stays finite.
        with np.errstate(over='ignore', invalid='ignore'):
            values = values.astype(np.float32).astype(np.float64)
    else:
        values = values.astype(np.float32 if values.dtype.itemsize < 4 else np.float64)
    present = np.isfinite(values)
    if missing is not None:
        present &= ~missing
    known = values[present]
    if not known.size:
        raise FrameError('no pixel holds a finite value')
    # An odd stride does not stay in one column of a picture of even width.
    low, high = np.percentile(known[::max(1, known.size // TONE_SAMPLES) | 1], (1, 99))
    if high <= low:
        low, high = float(known.min()), float(known.max())
    if high > low:
        scaled = (np.clip(values, low, high) - low) * (255.0 / (high - low))
    else:
        scaled = np.full_like(values, 128.0)
        scaled[np.isposinf(values)] = 255.0
        scaled[np.isneginf(values)] = 0.0
    scaled[np.isnan(values)] = 0.0
    if missing is not None:
        scaled[missing] = 0.0
    return np.rint(scaled).astype(np.uint8)


def _flat(data: Any) -> np.ndarray:
    """Return the message's bytes as a one-dimensional uint8 view."""
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError):
        if isinstance(data, (bytes, bytearray, memoryview, np.ndarray)) and not len(data):
            return np.empty(0, np.uint8)
        raise FrameError(
            f'data of type {type(data).__name__} is not one contiguous run of bytes') from None


def _check_length(name: str, width: int, height: int, step: int, size: int) -> None:
    """
    Hold width, height and step against the number of bytes.

    The last row may lack its padding; any other length means that the sender and we do not
    speak of the same picture.
    """
    rows, chroma = height, 0
    if name in ('yuyv', 'uyvy'):
        row = (width + 1) // 2 * 4
    elif name in ('nv12', 'nv21'):
        # Chroma rows have the luma's step and (width + 1) // 2 pairs.
        row, chroma = width, (width + 1) // 2 * 2
        rows += (height + 1) // 2
    elif name == 'nv24':
        row, rows = width, height * 3
    elif name in ENCODINGS:
        row = width * ENCODINGS[name]
    elif name in COLOUR16:
        row = width * 2 * COLOUR16[name][0]
    elif name in GREY:
        row = width * int(GREY[name][1])
    else:
        row = width * (2 if name.endswith('16') else 1)
    row = max(row, chroma)
    if step < row:
        raise FrameError(
            f'step {step} is shorter than a row of {row} bytes ({width} pixels of {name})')
    if not step * (rows - 1) + row <= size <= step * rows:
        raise FrameError(
            f'{size} bytes do not fit {width}x{height} {name} with step {step}: '
            f'expected {step * rows}')


def _view(flat: np.ndarray, shape: tuple[int, ...], dtype: str, step: int) -> np.ndarray:
    """Return rows that are ``step`` bytes apart as an array; numpy checks the bounds."""
    kind = np.dtype(dtype)
    strides = (step, kind.itemsize) if len(shape) == 2 else (
        step, kind.itemsize * shape[2], kind.itemsize)
    return np.ndarray(shape, kind, flat, 0, strides)


def _packed(pixels: np.ndarray, encoding: str, origin: dict[str, Any]) -> Frame:
    height, width = pixels.shape[:2]
    flat = np.ascontiguousarray(pixels).reshape(-1)
    return Frame(flat, encoding, width, height, flat.size // height, **origin)


def _grey_frame(values: np.ndarray, *, zero_is_missing: bool, origin: dict[str, Any]) -> Frame:
    """
    Tone map integers or floats; zero never counts for the range of an integer picture.

    REP 118: a depth of 0 in 16UC1 is 'no measurement'; in mono16 it is black.
    """
    if values.dtype.kind == 'f':
        return _packed(tone_map(values), 'mono8', origin)
    zero = values == 0
    if not zero_is_missing and zero.all():
        return _packed(np.zeros(values.shape, np.uint8), 'mono8', origin)
    return _packed(tone_map(values, zero), 'mono8', origin)


def _to_eight_bit(pixels: np.ndarray) -> np.ndarray:
    """Shift 16-bit pixels right, so that the largest one present just fits (8 to 16 bits used)."""
    used = max(8, int(pixels.max()).bit_length())
    return (pixels >> (used - 8)).astype(np.uint8)


def _demosaic(mosaic: np.ndarray, pattern: str) -> np.ndarray:
    """Return uint8 [H, W, 3] RGB of a uint8 or uint16 [H, W] Bayer mosaic."""
    if min(mosaic.shape) < 2:
        height, width = mosaic.shape
        raise FrameError(f'a Bayer picture needs 2x2 pixels, got {width}x{height}')
    eight = np.ascontiguousarray(
        mosaic if mosaic.dtype == np.uint8 else _to_eight_bit(mosaic))
    try:
        return cv2.cvtColor(eight, BAYER[pattern])
    except cv2.error as error:
        raise FrameError(f'OpenCV cannot demosaic {pattern}: {error.err}') from None


def _nv24(flat: np.ndarray, width: int, height: int, step: int) -> np.ndarray:
    luma = _view(flat, (height, width), 'u1', step)
    chroma = _view(flat[step * height:], (height, width, 2), 'u1', step * 2)
    return yuv_to_rgb(luma, chroma[..., 0], chroma[..., 1])


def _inverse_depth(quantised: np.ndarray, params: tuple[float, float]) -> np.ndarray:
    """
    Undo compressed_depth_image_transport's quantisation: depth = A / (q - B), 0 is NaN.

    :param quantised: uint16 [H, W].
    :param params: A and B.
    :return: float32 [H, W], metres.
    """
    a, b = params
    with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
        depth = (a / (quantised.astype(np.float64) - b)).astype(np.float32)
    depth[quantised == 0] = np.nan
    return depth
