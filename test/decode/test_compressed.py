"""CompressedImage: the bytes decide, not the format string (field cases A1, A5, A11 to A19)."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest
import simplejpeg

from qwen_vl_ros.compressed import MAX_PIXELS
from qwen_vl_ros.decode import FrameError, decode_compressed, decode_image


def colours(width: int = 96, height: int = 64) -> np.ndarray:
    """Smooth RGB picture, red left, blue right."""
    rgb = np.zeros((height, width, 3), np.uint8)
    ramp = np.linspace(0, 255, width).astype(np.uint8)
    rgb[..., 0], rgb[..., 2] = ramp[::-1], ramp
    rgb[: height // 2, :, 1] = 90
    return rgb


def jpeg(rgb: np.ndarray | None = None) -> bytes:
    return simplejpeg.encode_jpeg(colours() if rgb is None else rgb, 95, colorsubsampling='444')


def encoded(extension: str, bgr: np.ndarray) -> bytes:
    return cv2.imencode(extension, bgr)[1].tobytes()


def segments(data: bytes) -> list[tuple[int, int, int]]:
    """Marker, start and end of each segment up to the first scan."""
    out, at = [], 2
    while True:
        end = at + 2 + int.from_bytes(data[at + 2:at + 4], 'big')
        out.append((data[at + 1], at, end))
        if data[at + 1] == 0xda:
            return out
        at = end


def start_of(data: bytes, marker: int) -> int:
    return next(a for m, a, _ in segments(data) if m == marker)


def same(frame, rgb: np.ndarray, within: int = 12) -> bool:
    return (frame.rgb().shape == rgb.shape
            and np.abs(frame.rgb().astype(int) - rgb).max() <= within)


def test_a1_grey_jpeg_that_claims_to_be_yuyv():
    grey = np.tile(np.linspace(0, 255, 640).astype(np.uint8), (480, 1))
    data = simplejpeg.encode_jpeg(grey[:, :, None], 95, 'GRAY')
    rgb = decode_compressed('yuv422_yuy2; jpeg compressed mono8', data).rgb()
    assert rgb.shape == (480, 640, 3)
    assert np.abs(rgb.astype(int) - grey[:, :, None]).max() <= 6


@pytest.mark.parametrize('format', [
    'jpeg', 'rgb8; jpeg compressed bgr8', 'bgra8; jpeg compressed bgr8', '', 'png',
    'rgb8; jpeg compressed; bgr8', '16UC1; png compressed ', 'bayer_rggb8; jpeg compressed bgr8',
    'nv12', 'мусор; \x00', 'x' * 100_000])
def test_a14_same_bytes_same_colours(format):
    assert same(decode_compressed(format, jpeg()), colours())


def test_a14_bayer_mosaic_in_a_grey_jpeg_is_demosaiced():
    mosaic = np.zeros((64, 64), np.uint8)
    mosaic[::2, ::2] = 255
    data = simplejpeg.encode_jpeg(mosaic[:, :, None], 100, 'GRAY')
    inner = decode_compressed('bayer_rggb8; jpeg compressed ', data).rgb()[8:56, 8:56]
    assert inner[..., 0].min() > 240 and inner[..., 1:].max() < 15


@pytest.mark.parametrize(
    'data', [b'', b'\0', bytes(1000), b'GIF89a' + bytes(50), b'BM' + bytes(90)])
def test_a5_no_picture_names_format_and_first_bytes(data):
    with pytest.raises(FrameError) as caught:
        decode_compressed('nv12', data)
    assert "'nv12'" in caught.value.reason
    if data:
        assert data[:8].hex(' ') in caught.value.reason


def test_a11_sixteen_bit_png_equals_raw():
    values = np.full((48, 64), 2500, np.uint16)
    values[:, 32:] = 5000
    raw = decode_image('16UC1', 64, 48, 128, 0, values.tobytes()).rgb()
    png = decode_compressed('16UC1; png compressed ', encoded('.png', values)).rgb()
    assert np.array_equal(raw, png)
    assert int(png[0, 63, 0]) - int(png[0, 0, 0]) > 127


def test_a13_compressed_depth_with_and_without_header():
    values = np.full((48, 64), 700, np.uint16)
    values[:, 32:] = 1400
    png = encoded('.png', values)
    header = struct.pack('<iff', 0, 0.0, 0.0)
    plain = decode_compressed('16UC1; compressedDepth png', png).rgb()
    assert int(plain[0, 63, 0]) - int(plain[0, 0, 0]) > 127
    assert np.array_equal(decode_compressed('16UC1; compressedDepth', header + png).rgb(), plain)
    for cut in range(1, 12):
        with pytest.raises(FrameError, match='compressedDepth'):
            decode_compressed('16UC1; compressedDepth png', header[:cut])
    for cut in (12, 15, 19, 25, 12 + len(png) - 1):
        with pytest.raises(FrameError):
            decode_compressed('16UC1; compressedDepth png', (header + png)[:cut])
    with pytest.raises(FrameError, match='compressedDepth rvl'):
        decode_compressed('16UC1; compressedDepth rvl', header + bytes(60))


@pytest.mark.parametrize('with_header', [True, False])
def test_a13_inverse_depth_is_undone(with_header):
    # The transport's own formula with its defaults, Z = 100 and 10 m at most.
    a = 100.0 * 101.0
    b = 1.0 - a / 10.0
    depth = np.tile(np.linspace(1.0, 4.0, 64, dtype=np.float32), (48, 1))
    depth[:4] = np.nan
    with np.errstate(invalid='ignore'):
        quantised = np.where(np.isnan(depth), 0, a / depth + b).astype(np.uint16)
    data = encoded('.png', quantised)
    if with_header:
        data = struct.pack('<iff', 0, a, b) + data
    got = decode_compressed('32FC1; compressedDepth', data).rgb()[..., 0]
    want = decode_image('32FC1', 64, 48, 256, 0, depth.tobytes()).rgb()[..., 0]
    assert np.abs(got.astype(int) - want).max() <= 3
    assert got[10, 0] == 0 and got[10, -1] == 255


@pytest.mark.parametrize('junk', [b'\0\0\0', b'abc', b'\xff\xff', b'\0' * 500])
@pytest.mark.parametrize('marker', [0xdb, 0xc0, 0xc4, 0xda, 0xd9])
def test_a17_bytes_before_a_marker(junk, marker):
    good = jpeg()
    at = len(good) - 2 if marker == 0xd9 else start_of(good, marker)
    assert same(decode_compressed('jpeg', good[:at] + junk + good[at:]), colours())


def test_a17_avi_header_and_bytes_after_the_end():
    good = jpeg()
    avi = b'\xff\xe0\x00\x10AVI1' + bytes(10)
    assert same(decode_compressed('', good[:2] + avi + good[2:] + bytes(4096)), colours())


def test_broken_colour_profile_is_no_reason():
    good = jpeg()
    at = start_of(good, 0xda)
    body = b'ICC_PROFILE\0\xff\xff nonsense'
    profile = b'\xff\xe2' + struct.pack('>H', len(body) + 2) + body
    assert same(decode_compressed('', good[:at] + profile + good[at:]), colours())


def test_junk_in_the_head_does_not_hide_damage_in_the_scan():
    good = jpeg()
    at = start_of(good, 0xdb)
    half = good[:len(good) // 2] + b'\xff\xd9'
    with pytest.raises(FrameError, match='premature end'):
        decode_compressed('', half[:at] + b'abc' + half[at:])


def test_a17_no_huffman_tables():
    good = jpeg()
    cut = b'\xff\xd8' + b''.join(good[a:b] for m, a, b in segments(good) if m != 0xc4)
    motion = cut + good[segments(good)[-1][2]:]
    assert len(motion) < len(good) - 300
    assert same(decode_compressed('jpeg', motion), colours())


def test_cut_jpeg_is_never_a_half_grey_picture():
    good = jpeg()
    at = start_of(good, 0xdb)
    size = len(good)
    for cut in (3, 10, 20, 100, start_of(good, 0xda), size // 2, size - 2, size - 1):
        for data in (good[:cut], good[:at] + b'abc' + good[at:max(at, cut)]):
            with pytest.raises(FrameError):
                decode_compressed('jpeg', data)
    with pytest.raises(FrameError, match='premature end'):
        decode_compressed('jpeg', good[:len(good) // 2] + b'\xff\xd9')


@pytest.mark.parametrize('extension', ['.png', '.webp', '.jpg'])
@pytest.mark.parametrize('cut', [0.02, 0.3, 0.7, 0.98])
def test_cut_files(extension, cut):
    rng = np.random.default_rng(2)
    data = encoded(extension, rng.integers(0, 255, (64, 96, 3), np.uint8))
    with pytest.raises(FrameError):
        decode_compressed('', data[:max(1, int(len(data) * cut))])


def test_flipped_bit_in_png_is_found():
    data = bytearray(encoded('.png', colours()))
    data[len(data) // 2] ^= 1
    with pytest.raises(FrameError, match='check sum'):
        decode_compressed('png', bytes(data))


def exif(orientation: int) -> bytes:
    """Exif block (CIPA DC-008): little-endian TIFF with the tag 0x0112 alone."""
    return b'Exif\0\0II*\0\x08\0\0\0\x01\0' + struct.pack(
        '<HHIHH', 0x0112, 3, 1, orientation, 0) + bytes(4)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))


@pytest.mark.parametrize('orientation', range(1, 9))
def test_a18_orientation_is_ignored_everywhere(orientation):
    block = exif(orientation)
    good = jpeg()
    tagged = good[:2] + b'\xff\xe1' + struct.pack('>H', len(block) + 2) + block + good[2:]
    assert np.array_equal(decode_compressed('', tagged).rgb(), decode_compressed('', good).rgb())

    png = encoded('.png', colours()[..., ::-1])
    tagged = png[:33] + png_chunk(b'eXIf', block[6:]) + png[33:]
    assert np.array_equal(decode_compressed('', tagged).rgb(), colours())

    simple = encoded('.webp', colours()[..., ::-1])
    body = (b'WEBPVP8X' + struct.pack('<II', 10, 0x08) + (95).to_bytes(3, 'little')
            + (63).to_bytes(3, 'little') + simple[12:]
            + b'EXIF' + struct.pack('<I', len(block[6:])) + block[6:])
    tagged = b'RIFF' + struct.pack('<I', len(body)) + body
    assert np.array_equal(decode_compressed('', tagged).rgb(), decode_compressed('', simple).rgb())


def test_a18_the_tag_in_that_test_would_turn_a_decoder_that_minds_it():
    block = exif(6)
    good = jpeg()
    tagged = good[:2] + b'\xff\xe1' + struct.pack('>H', len(block) + 2) + block + good[2:]
    turned = cv2.imdecode(np.frombuffer(tagged, np.uint8), cv2.IMREAD_COLOR)
    assert turned.shape == (96, 64, 3)


@pytest.mark.parametrize('extension', ['.png', '.webp'])
def test_a19_alpha_in_files(extension):
    bgra = np.zeros((16, 16, 4), np.uint8)
    bgra[..., 2] = 255
    bgra[..., 3] = 255
    opaque = decode_compressed('', encoded(extension, bgra)).rgb()
    bgra[:8, :, 3] = 0
    if extension == '.webp':
        flags = [cv2.IMWRITE_WEBP_QUALITY, 101]
        data = cv2.imencode(extension, bgra, flags)[1].tobytes()
    else:
        data = encoded(extension, bgra)
    clear = decode_compressed('', data).rgb()
    assert np.abs(opaque.astype(int) - (255, 0, 0)).max() <= 1
    assert np.array_equal(clear[8:], opaque[8:])
    if extension == '.png':
        assert np.array_equal(clear, opaque)


def test_png_kinds():
    rgb = colours()
    assert np.array_equal(decode_compressed('', encoded('.png', rgb[..., ::-1])).rgb(), rgb)
    deep = rgb[..., ::-1].astype(np.uint16) * 257
    assert np.array_equal(decode_compressed('', encoded('.png', deep)).rgb(), rgb)
    grey = np.ascontiguousarray(rgb[..., 0])
    assert np.array_equal(
        decode_compressed('mono8; png compressed', encoded('.png', grey)).rgb()[..., 1], grey)
    # Grey with alpha (colour type 4), made by hand: OpenCV writes none.
    rows = b''.join(b'\0' + bytes([10 * y, 0] * 5) for y in range(4))
    png = (b'\x89PNG\r\n\x1a\n' + png_chunk(b'IHDR', struct.pack('>IIBBBBB', 5, 4, 8, 4, 0, 0, 0))
           + png_chunk(b'IDAT', zlib.compress(rows)) + png_chunk(b'IEND', b''))
    assert decode_compressed('', png).rgb()[:, 0, 0].tolist() == [0, 10, 20, 30]


def lying_files() -> dict[str, bytes]:
    good = bytearray(jpeg())
    at = start_of(bytes(good), 0xc0)
    good[at + 5:at + 9] = b'\xff\xdc\xff\xdc'
    png = b'\x89PNG\r\n\x1a\n' + png_chunk(
        b'IHDR', struct.pack('>IIBBBBB', 65535, 65535, 8, 2, 0, 0, 0)
    ) + png_chunk(b'IDAT', zlib.compress(bytes(100))) + png_chunk(b'IEND', b'')
    body = b'WEBPVP8X' + struct.pack('<II', 10, 0) + b'\xff\xff\xff' * 2
    webp = b'RIFF' + struct.pack('<I', len(body)) + body
    body = b'WEBPVP8L' + struct.pack('<I', 5) + b'\x2f\xff\xff\xff\x0f' + bytes(20)
    lossless = b'RIFF' + struct.pack('<I', len(body)) + body
    return {'jpeg': bytes(good), 'png': png, 'webp': webp, 'lossless': lossless}


@pytest.mark.parametrize('kind', ['jpeg', 'png', 'webp', 'lossless'])
def test_a9_announced_size_is_not_allocated(kind):
    data = lying_files()[kind]
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(FrameError, match='announces'):
            decode_compressed('', data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 1


def test_zero_sizes_in_headers():
    png = b'\x89PNG\r\n\x1a\n' + png_chunk(
        b'IHDR', struct.pack('>IIBBBBB', 0, 5, 8, 2, 0, 0, 0)) + png_chunk(b'IEND', b'')
    with pytest.raises(FrameError, match='announces 0x5'):
        decode_compressed('', png)
    assert MAX_PIXELS >= 4000 * 3000


def test_a17_stderr_is_not_flooded(capfd):
    good = jpeg()
    at = start_of(good, 0xdb)
    png = encoded('.png', colours()[..., ::-1])
    webp = encoded('.webp', colours()[..., ::-1])
    extras = b''.join(png_chunk(k, b'nonsense') for k in (b'iCCP', b'gAMA', b'tRNS', b'zTXt'))
    for data in (good[:at] + b'abc' + good[at:], png[:33] + extras + png[33:]):
        for _ in range(20):
            assert same(decode_compressed('', data), colours())
    for data in (good[:900], png[:-20], webp[:-20], good[:len(good) // 2] + b'\xff\xd9'):
        for _ in range(20):
            with pytest.raises(FrameError):
                decode_compressed('', data)
    out, err = capfd.readouterr()
    assert not out and not err


def test_valid_chunks_around_a_broken_deflate_stream():
    for stream in (b'no zlib stream', zlib.compress(bytes(50))):
        png = b'\x89PNG\r\n\x1a\n' + b''.join((
            png_chunk(b'IHDR', struct.pack('>IIBBBBB', 8, 8, 8, 2, 0, 0, 0)),
            png_chunk(b'IDAT', stream), png_chunk(b'IEND', b'')))
        with pytest.raises(FrameError, match='PNG of 8x8 pixels cannot be decoded'):
            decode_compressed('', png)


def test_origin_is_kept():
    frame = decode_compressed('', jpeg(), stamp_ns=3, frame_id='optical', camera='rear',
                              received_ns=4)
    assert (frame.stamp_ns, frame.frame_id, frame.camera, frame.received_ns) == (
        3, 'optical', 'rear', 4)
