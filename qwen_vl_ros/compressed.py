"""JPEG, PNG and WebP files to pixels; checked before a decoder may allocate or complain."""

from __future__ import annotations

import struct
import zlib

import cv2
import numpy as np

#: Larger pictures are refused by their header (8192x8192; 200 MB as RGB).
MAX_PIXELS = 1 << 26

#: Above :data:`CHECK_RATIO_PIXELS` a file must hold at least one byte for so many pixels; deflate
#: reaches about 1032 bytes a byte, JPEG about 256 pixels.
MAX_PIXELS_PER_BYTE = 4096
CHECK_RATIO_PIXELS = 1 << 22

#: What libjpeg calls corrupt though every pixel is there.
HARMLESS = ('extraneous bytes', 'ICC marker')

PNG = b'\x89PNG\r\n\x1a\n'

#: Size of the ConfigHeader (int32 and two float32) before a compressedDepth payload.
DEPTH_HEADER = 12


class FrameError(ValueError):
    """
    A picture that cannot be used.

    :param reason: one sentence: what was found, what was expected.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def split_depth_header(
    format: str, flat: np.ndarray,
) -> tuple[tuple[float, float] | None, np.ndarray]:
    """
    Take the header off a compressedDepth payload.

    :param format: the message's format string.
    :param flat: uint8, the message's data.
    :return: the quantisation parameters A and B where the header holds usable ones, and the file.
    :raises FrameError: when the format says compressedDepth and no PNG is there.
    """
    if bytes(flat[:8]) == PNG:
        return None, flat
    if bytes(flat[DEPTH_HEADER:DEPTH_HEADER + 8]) == PNG:
        a, b = struct.unpack('<ff', bytes(flat[4:DEPTH_HEADER]))
        usable = np.isfinite(a) and np.isfinite(b) and a > 0
        return ((a, b) if usable else None), flat[DEPTH_HEADER:]
    if 'compresseddepth' in format.lower():
        raise FrameError(
            f"no PNG in {flat.size} bytes of '{format[:40]}': expected one at byte 0 or after "
            f'a header of {DEPTH_HEADER} bytes, found {_first_bytes(flat)}')
    return None, flat


def decode_jpeg(flat: np.ndarray) -> np.ndarray:
    """
    Decode a JPEG file with libjpeg-turbo.

    Bytes too many before a marker, as many webcams send, and broken colour profiles are accepted;
    everything else that libjpeg calls corrupt, a cut file first of all, is not.

    :param flat: uint8, the file.
    :return: uint8 [H, W, 3] RGB, or [H, W] for a grey file.
    :raises FrameError: as said above.
    """
    data = flat.data
    try:
        try:
            pixels = _jpeg(data, strict=True)
        except ValueError as error:
            if not any(words in str(error) for words in HARMLESS):
                raise
            pixels = _decode_cleaned(_without_junk(flat.tobytes()))
    except FrameError:
        raise
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:
        raise FrameError(f'JPEG of {flat.size} bytes cannot be decoded: {error}') from None
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def decode_other(format: str, flat: np.ndarray) -> np.ndarray:
    """
    Decode a PNG or WebP file with OpenCV.

    :param format: the message's format string, for the error's text.
    :param flat: uint8, the file.
    :return: uint8 or uint16: [H, W], [H, W, 3] BGR or [H, W, 4] BGRA.
    :raises FrameError: when it is neither, or damaged.
    """
    head = bytes(flat[:16])
    if head[:8] == PNG:
        kind = 'PNG'
        width, height, flat = _check_png(flat)
    elif head[:4] == b'RIFF' and head[8:12] == b'WEBP':
        kind = 'WebP'
        width, height = _check_webp(flat)
    else:
        raise FrameError(
            f"format '{format[:40]}' with {flat.size} bytes that start with "
            f'{_first_bytes(flat)} is no JPEG, PNG or WebP file')
    _check_pixels(kind, width, height, flat.size)
    try:
        # UNCHANGED keeps 16 bit and is the one mode that leaves EXIF orientation alone.
        pixels = cv2.imdecode(flat, cv2.IMREAD_UNCHANGED)
    except (cv2.error, MemoryError):
        pixels = None
    if pixels is None or pixels.dtype not in (np.uint8, np.uint16):
        raise FrameError(f'{kind} of {width}x{height} pixels cannot be decoded')
    if pixels.ndim == 3 and pixels.shape[2] < 3:
        return np.ascontiguousarray(pixels[:, :, 0])
    return pixels


def _decode_cleaned(data: bytes) -> np.ndarray:
    """Decode a file whose head is clean; what may still be there is junk behind a scan."""
    try:
        return _jpeg(memoryview(data), strict=True)
    except ValueError as error:
        if 'extraneous bytes' not in str(error) or not _has_end_of_image(data):
            raise
        return _jpeg(memoryview(data), strict=False)


def _jpeg(data: memoryview, *, strict: bool) -> np.ndarray:
    """Decode to [H, W, 1 or 3]; lenient decoding passes over what libjpeg can repair."""
    import simplejpeg  # where no compressed picture comes in, nothing but this misses it

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError:
        raise ValueError('no complete header of a known colour space') from None
    _check_pixels('JPEG', width, height, len(data))
    wanted = 'GRAY' if space.lower() == 'gray' else 'RGB'
    return simplejpeg.decode_jpeg(data, wanted, strict=strict)


def _without_junk(data: bytes) -> bytes:
    """
    Drop what the pixels do not need before the first scan (ITU-T T.81 annex B).

    That is bytes of no segment, comments, and application data but JFIF's and Adobe's, which say
    how to read the colours.
    """
    out, at = [data[:2]], 2
    while True:
        at = data.find(b'\xff', at)
        while 0 <= at < len(data) - 1 and data[at + 1] == 0xff:
            at += 1
        if not 0 <= at < len(data) - 4:
            return data
        if data[at + 1] == 0xda:
            return b''.join([*out, data[at:]])
        end = at + 2 + int.from_bytes(data[at + 2:at + 4], 'big')
        marker = data[at + 1]
        if not marker:
            at += 2
            continue
        if marker in (0xe0, 0xee) or not (0xe0 <= marker <= 0xef or marker == 0xfe):
            out.append(data[at:end])
        at = end


def _first_bytes(flat: np.ndarray) -> str:
    return bytes(flat[:8]).hex(' ') or 'nothing'


def _check_pixels(kind: str, width: int, height: int, size: int) -> None:
    pixels = width * height
    if width < 1 or height < 1:
        raise FrameError(f'{kind} announces {width}x{height} pixels')
    if pixels > MAX_PIXELS:
        raise FrameError(
            f'{kind} announces {width}x{height} pixels; at most {MAX_PIXELS} are decoded')
    if pixels > CHECK_RATIO_PIXELS and pixels > size * MAX_PIXELS_PER_BYTE:
        raise FrameError(f'{kind} announces {width}x{height} pixels in {size} bytes')


def _has_end_of_image(data: bytes) -> bool:
    """Say whether the last scan is followed by an end-of-image marker."""
    return data.rfind(b'\xff\xd9') > data.rfind(b'\xff\xda')


def _check_png(flat: np.ndarray) -> tuple[int, int, np.ndarray]:
    """
    Walk the chunks of a PNG file (ISO/IEC 15948 section 5) up to IEND.

    :return: width, height, and the file without its ancillary chunks: colour profiles, gamma and
        transparency change nothing here, and libpng complains about odd ones on stderr.
    :raises FrameError: for a cut file or a wrong check sum.
    """
    view = flat.data
    size, at = flat.size, 8
    width = height = 0
    critical = [PNG]
    while True:
        if at + 12 > size:
            raise FrameError(f'PNG is cut after {size} bytes: no IEND chunk')
        length, = struct.unpack('>I', view[at:at + 4])
        kind = bytes(view[at + 4:at + 8])
        if at + 12 + length > size:
            raise FrameError(
                f'PNG is cut after {size} bytes: chunk {kind!r} at {at} has {length} bytes')
        body_end = at + 8 + length
        if zlib.crc32(view[at + 4:body_end]) != struct.unpack(
                '>I', view[body_end:body_end + 4])[0]:
            raise FrameError(f'PNG chunk {kind!r} at byte {at} has a wrong check sum')
        if at == 8:
            if kind != b'IHDR' or length != 13:
                raise FrameError(f'PNG starts with chunk {kind!r}, expected IHDR')
            width, height = struct.unpack('>II', view[at + 8:at + 16])
        if not kind[0] & 0x20:
            critical.append(bytes(view[at:body_end + 4]))
        if kind == b'IEND':
            return width, height, np.frombuffer(b''.join(critical), np.uint8)
        at = body_end + 4


def _check_webp(flat: np.ndarray) -> tuple[int, int]:
    """
    Read a WebP file's size from its first chunk (RFC 9649 section 2).

    :return: width and height.
    :raises FrameError: when the file is cut or of no known kind.
    """
    head = bytes(flat[:30])
    riff = int.from_bytes(head[4:8], 'little') + 8
    if riff > flat.size:
        raise FrameError(f'WebP is cut after {flat.size} of {riff} bytes')
    if len(head) == 30 and head[12:16] == b'VP8X':
        return (int.from_bytes(head[24:27], 'little') + 1,
                int.from_bytes(head[27:30], 'little') + 1)
    if len(head) >= 25 and head[12:16] == b'VP8L':
        bits = int.from_bytes(head[21:25], 'little')
        return (bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1
    if len(head) == 30 and head[12:16] == b'VP8 ':
        return (int.from_bytes(head[26:28], 'little') & 0x3fff,
                int.from_bytes(head[28:30], 'little') & 0x3fff)
    raise FrameError(f'WebP starts with chunk {head[12:16]!r}, expected VP8, VP8L or VP8X')
