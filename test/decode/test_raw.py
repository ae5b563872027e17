"""Raw sensor_msgs/Image encodings: colours, row steps, lengths (field cases A2 to A12, A19)."""

from __future__ import annotations

import array
import tracemalloc

import numpy as np
import pytest

from qwen_vl_ros.decode import SUPPORTED, FrameError, decode_image, tone_map
from qwen_vl_ros.frame import ENCODINGS

#: Saturated colours whose order no wrong reading keeps.
PATCHES = {'red': (255, 0, 0), 'green': (0, 255, 0), 'blue': (0, 0, 255)}


def yuv(rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    """BT.601 limited range by the book (ITU-R BT.601-7), in floating point."""
    r, g, b = (c / 255 for c in rgb)
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return (round(16 + 219 * y), round(128 + 224 * (b - y) / 1.772),
            round(128 + 224 * (r - y) / 1.402))


def picture(width: int, height: int) -> np.ndarray:
    """Three vertical bands, red, green and blue, as YUV444 uint8 [H, W, 3]."""
    out = np.empty((height, width, 3), np.uint8)
    for i, rgb in enumerate(PATCHES.values()):
        out[:, width * i // 3:width * (i + 1) // 3] = yuv(rgb)
    return out


def encode(name: str, yuv444: np.ndarray, step: int) -> bytes:
    """Lay out YUV444 as a camera would; chroma of even positions, padding of 0xAB."""
    height, width = yuv444.shape[:2]
    y, u, v = (yuv444[..., i] for i in range(3))
    if name in ('uyvy', 'yuv422', 'yuyv', 'yuv422_yuy2'):
        rows = np.full((height, step), 0xab, np.uint8)
        luma, chroma = (1, 0) if name in ('uyvy', 'yuv422') else (0, 1)
        pairs = (width + 1) // 2
        rows[:, luma:width * 2:2] = y
        rows[:, chroma:pairs * 4:4] = u[:, ::2]
        rows[:, chroma + 2:pairs * 4:4] = v[:, ::2]
        return rows.tobytes()
    luma_rows = np.full((height, step), 0xab, np.uint8)
    luma_rows[:, :width] = y
    if name == 'nv24':
        chroma_rows = np.full((height, step * 2), 0xab, np.uint8)
        chroma_rows[:, 0:width * 2:2] = u
        chroma_rows[:, 1:width * 2:2] = v
    else:
        pairs = (width + 1) // 2
        chroma_rows = np.full(((height + 1) // 2, step), 0xab, np.uint8)
        first, second = (u, v) if name == 'nv12' else (v, u)
        chroma_rows[:, 0:pairs * 2:2] = first[::2, ::2]
        chroma_rows[:, 1:pairs * 2:2] = second[::2, ::2]
    return luma_rows.tobytes() + chroma_rows.tobytes()


def band_error(rgb: np.ndarray) -> int:
    """Return the largest difference to the three colours, two pixels off the edges."""
    width = rgb.shape[1]
    worst = 0
    for i, colour in enumerate(PATCHES.values()):
        band = rgb[:, width * i // 3 + 2:width * (i + 1) // 3 - 2].astype(int)
        worst = max(worst, int(np.abs(band - colour).max()))
    return worst


@pytest.mark.parametrize('name', ['uyvy', 'yuv422', 'yuyv', 'yuv422_yuy2'])
def test_a2_both_names_of_both_orders(name):
    data = encode(name, picture(60, 8), 120)
    assert band_error(decode_image(name, 60, 8, 120, 0, data).rgb()) <= 6
    wrong = 'yuyv' if name in ('uyvy', 'yuv422') else 'uyvy'
    assert band_error(decode_image(wrong, 60, 8, 120, 0, data).rgb()) > 6


@pytest.mark.parametrize('name', ['nv12', 'nv21', 'nv24'])
@pytest.mark.parametrize('padding', [0, 4])
def test_a4_planar_yuv(name, padding):
    step = 60 + padding
    data = encode(name, picture(60, 8), step)
    assert len(data) == step * 8 * (3 if name == 'nv24' else 1.5)
    assert band_error(decode_image(name, 60, 8, step, 0, data).rgb()) <= 6
    for bad in (data[:-step], data + bytes(1), data[:60 * 8]):
        with pytest.raises(FrameError, match=f'{len(bad)} bytes do not fit'):
            decode_image(name, 60, 8, step, 0, bad)


def test_a4_nv12_read_as_nv21_is_wrong():
    data = encode('nv12', picture(60, 8), 60)
    assert band_error(decode_image('nv21', 60, 8, 60, 0, data).rgb()) > 100


@pytest.mark.parametrize('name, width, height', [
    ('yuv422_yuy2', 641, 480), ('uyvy', 1, 1), ('nv12', 640, 481), ('nv21', 641, 481),
    ('nv24', 641, 481), ('nv12', 1, 1)])
def test_a6_odd_sizes_round_chroma_up(name, width, height):
    step = (width + 1) // 2 * (4 if name in ('yuv422_yuy2', 'uyvy') else 2)
    grey = np.full((height, width, 3), (126, 128, 128), np.uint8)
    rgb = decode_image(name, width, height, step, 0, encode(name, grey, step)).rgb()
    assert rgb.shape == (height, width, 3)
    assert np.ptp(rgb) == 0 and rgb[0, 0, 0] == 128


def test_a6_odd_width_without_room_for_chroma_is_rejected():
    with pytest.raises(FrameError, match='step 641 is shorter than a row of 642'):
        decode_image('nv12', 641, 480, 641, 0, bytes(641 * 720))
    with pytest.raises(FrameError, match='step 1282 is shorter than a row of 1284'):
        decode_image('yuyv', 641, 480, 1282, 0, bytes(1282 * 480))


@pytest.mark.parametrize('name, pixel_bytes', [
    ('rgb8', 3), ('bgr8', 3), ('rgba8', 4), ('bgra8', 4), ('mono8', 1), ('yuv422', 2),
    ('mono16', 2), ('16UC1', 2), ('32FC1', 4), ('rgb16', 6), ('bayer_rggb8', 1),
    ('bayer_gbrg16', 2)])
def test_a7_padded_rows(name, pixel_bytes):
    width, height = 640, 48
    row = width * pixel_bytes
    rng = np.random.default_rng(7)
    tight = rng.integers(1, 120, (height, row), np.uint8)
    padded = np.full((height, row + 64), 255, np.uint8)
    padded[:, :row] = tight
    a = decode_image(name, width, height, row, 0, tight.tobytes()).rgb()
    b = decode_image(name, width, height, row + 64, 0, padded.tobytes()).rgb()
    assert np.array_equal(a, b)
    cut = padded.tobytes()[:-64]
    assert np.array_equal(decode_image(name, width, height, row + 64, 0, cut).rgb(), a)


@pytest.mark.parametrize('width, height, step, size', [
    (0, 0, 0, 0), (0, 5, 0, 15), (5, 0, 15, 15), (5, 5, 15, 0), (65535, 65535, 65535 * 3, 100),
    (2**32 - 1, 2**32 - 1, 2**32 - 1, 100), (4, 4, 0, 48), (4, 4, 12, 39), (4, 4, 12, 49)])
@pytest.mark.parametrize('name', ['rgb8', 'mono16', 'bayer_rggb8', 'nv12', 'nv24', '32FC1'])
def test_a9_empty_and_lying_sizes(name, width, height, step, size):
    data = bytes(size)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode_image(name, width, height, step, 0, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize('name', ['', 'yuv420', '8UC2', '32FC3', 'jpeg', 'x' * 10_000, 'rgb8\n?'])
def test_a3_unknown_encoding_is_named(name):
    with pytest.raises(FrameError) as caught:
        decode_image(name, 4, 4, 16, 0, bytes(64))
    assert name[:40] in caught.value.reason and 'rgb8' in caught.value.reason
    assert len(caught.value.reason) < 800


@pytest.mark.parametrize('big', [0, 1])
def test_a11_sixteen_bit_halves(big):
    values = np.full((48, 64), 2500, '>u2' if big else '<u2')
    values[:, 32:] = 5000
    for name in ('16UC1', 'mono16'):
        grey = decode_image(name, 64, 48, 128, big, values.tobytes()).rgb()[..., 0]
        assert int(grey[0, 63]) - int(grey[0, 0]) > 127
        assert np.ptp(grey[:, :32]) == 0 and np.ptp(grey[:, 32:]) == 0


def test_a11_byte_order_matters():
    values = np.arange(64 * 48, dtype='>u2').reshape(48, 64)
    right = decode_image('mono16', 64, 48, 128, 1, values.tobytes()).rgb()
    assert np.array_equal(
        right, decode_image('mono16', 64, 48, 128, 0, values.astype('<u2').tobytes()).rgb())
    assert not np.array_equal(
        right, decode_image('mono16', 64, 48, 128, 0, values.tobytes()).rgb())


def depth_with_gaps() -> np.ndarray:
    """Float depth as a robot's stereo camera sends it: half of it missing, a few far pixels."""
    depth = np.linspace(0.4, 4.0, 640 * 480, dtype=np.float32).reshape(480, 640)
    rng = np.random.default_rng(3)
    depth[rng.random(depth.shape) < 0.51] = np.nan
    depth[5, 5:9] = 79.0
    depth[6, 5], depth[6, 6] = np.inf, -np.inf
    return depth


def test_a12_float_depth_uses_the_grey_range():
    depth = depth_with_gaps()
    grey = decode_image('32FC1', 640, 480, 2560, 0, depth.tobytes()).rgb()[..., 0]
    finite = grey[np.isfinite(depth)]
    low, high = np.percentile(finite, (5, 95))
    assert high - low > 128 and len(np.unique(finite)) > 128
    assert (grey[np.isnan(depth)] == 0).all()
    assert grey[6, 5] == 255 and grey[6, 6] == 0
    swapped = decode_image('32FC1', 640, 480, 2560, 1, depth.astype('>f4').tobytes())
    assert np.array_equal(swapped.rgb()[..., 0], grey)


@pytest.mark.parametrize('fill', [np.nan, np.inf, -np.inf])
def test_a12_nothing_finite_is_rejected(fill):
    data = np.full((4, 4), fill, np.float32).tobytes()
    with pytest.raises(FrameError, match='finite'):
        decode_image('32FC1', 4, 4, 16, 0, data)


def test_depth_of_zeros_is_no_measurement_but_black_mono16_is_a_picture():
    with pytest.raises(FrameError):
        decode_image('16UC1', 4, 4, 8, 0, bytes(32))
    assert not decode_image('mono16', 4, 4, 8, 0, bytes(32)).rgb().any()


def test_tone_map_extremes():
    assert (tone_map(np.full((3, 3), 7.0)) == 128).all()
    wide = tone_map(np.array([[-1e308, 0.0, 1.0, 1e308]]))
    assert wide.tolist() == [[0, 0, 255, 255]]
    rare = np.zeros((100, 100), np.int32)
    rare[0, 0] = 9
    assert tone_map(rare)[0, 0] == 255


@pytest.mark.parametrize('name, first', [
    ('rggb', 'r'), ('bggr', 'b'), ('gbrg', 'g'), ('grbg', 'g')])
@pytest.mark.parametrize('bits', [8, 16])
def test_bayer_patterns_keep_red_red(name, first, bits):
    full = 255 if bits == 8 else 4095
    for colour, channel in (('r', 0), ('g', 1), ('b', 2)):
        mosaic = np.zeros((32, 32), np.uint8 if bits == 8 else np.uint16)
        for i, letter in enumerate(name):
            if letter == colour:
                mosaic[i // 2::2, i % 2::2] = full
        assert (mosaic[0, 0] == full) == (first == colour)
        rgb = decode_image(
            f'bayer_{name}{bits}', 32, 32, 32 * bits // 8, 0, mosaic.tobytes()).rgb()
        inner = rgb[8:24, 8:24].reshape(-1, 3).mean(0)
        assert inner[channel] > 250 and inner.sum() - inner[channel] < 5


@pytest.mark.parametrize('name', ['rgba8', 'bgra8', 'rgba16', 'bgra16', '8UC4', '16UC4'])
def test_a19_alpha_is_dropped(name):
    deep = '16' in name
    pixels = np.zeros((4, 4, 4), np.uint16 if deep else np.uint8)
    full = 65535 if deep else 255
    pixels[..., 0 if name.startswith('rgba') else 2] = full
    size = pixels.itemsize * 16
    clear = decode_image(name, 4, 4, size, 0, pixels.tobytes()).rgb()
    pixels[..., 3] = full
    opaque = decode_image(name, 4, 4, size, 0, pixels.tobytes()).rgb()
    assert np.array_equal(clear, opaque)
    assert (opaque == (255, 0, 0)).all()


@pytest.mark.parametrize('name', ['rgb16', 'bgr16', '16UC3'])
@pytest.mark.parametrize('big', [0, 1])
def test_sixteen_bit_colour(name, big):
    pixels = np.zeros((4, 4, 3), '>u2' if big else '<u2')
    pixels[..., 0 if name == 'rgb16' else 2] = 4080
    rgb = decode_image(name, 4, 4, 24, big, pixels.tobytes()).rgb()
    assert (rgb == (255, 0, 0)).all()


@pytest.mark.parametrize('name', sorted(ENCODINGS))
def test_camera_encodings_are_views_of_the_message(name):
    buffer = array.array('B', bytes(48 * 16 * 2))
    rows = 16 * 3 // 2 if name in ('nv12', 'nv21') else 16
    part = memoryview(buffer)[:48 * rows]
    frame = decode_image(name.upper(), 8, 16, 48, 1, part, stamp_ns=5, frame_id='optical',
                         camera='front', received_ns=9)
    assert np.shares_memory(frame.data, np.frombuffer(buffer, np.uint8))
    assert (frame.stamp_ns, frame.frame_id, frame.camera, frame.received_ns) == (
        5, 'optical', 'front', 9)


def test_kinds_of_buffer():
    plain = bytes(range(48))
    want = decode_image('rgb8', 4, 4, 12, 0, plain).rgb()
    for data in (bytearray(plain), memoryview(plain), array.array('B', plain),
                 np.frombuffer(plain, np.uint8)):
        assert np.array_equal(decode_image('rgb8', 4, 4, 12, 0, data).rgb(), want)
    for bad in (None, 'text', [1, 2, 3], np.zeros((8, 96), np.uint8)[:, ::2]):
        with pytest.raises(FrameError, match='contiguous'):
            decode_image('rgb8', 4, 4, 12, 0, bad)


def test_supported_list_is_what_decodes():
    for name in SUPPORTED:
        height = {'nv12': 24, 'nv21': 24, 'nv24': 48}.get(name, 16)
        data = np.random.default_rng(1).integers(0, 255, 128 * height, np.uint8)
        assert decode_image(name, 16, 16, 128, 0, data).rgb().shape == (16, 16, 3)


@pytest.mark.parametrize('name', [
    'uyvy', 'yuv422', 'yuyv', 'yuv422_yuy2', 'bgr8', 'rgba8', 'bgra8', 'mono8', 'bayer_rggb8',
    'bayer_bggr8', 'bayer_gbrg8', 'bayer_grbg8'])
def test_same_bytes_as_rosbags_image(name):
    """An independent reading of the same names; OpenCV beneath it."""
    image = pytest.importorskip('rosbags.image', reason='rosbags-image is not installed')
    from rosbags.typesys import Stores, get_typestore

    kind = get_typestore(Stores.ROS2_HUMBLE).types['sensor_msgs/msg/Image']
    bytes_a_pixel = {'bgr8': 3, 'rgba8': 4, 'bgra8': 4, 'mono8': 1}.get(
        name, 1 if name.startswith('bayer') else 2)
    data = np.random.default_rng(5).integers(0, 256, 64 * 48 * bytes_a_pixel, np.uint8)
    message = kind(header=None, height=48, width=64, encoding=name, is_bigendian=0,
                   step=64 * bytes_a_pixel, data=data)
    want = image.message_to_cvimage(message, 'rgb8')
    got = decode_image(name, 64, 48, 64 * bytes_a_pixel, 0, data).rgb()
    assert np.array_equal(got, want)
