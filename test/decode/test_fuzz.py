"""Whatever the bytes: a Frame that can be looked at, or a FrameError. Nothing else."""

from __future__ import annotations

import cv2
import numpy as np
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen_vl_ros.decode import SUPPORTED, FrameError, decode_compressed, decode_image
from qwen_vl_ros.frame import Frame

RGB = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
FILES = [
    simplejpeg.encode_jpeg(RGB, 80),
    simplejpeg.encode_jpeg(np.ascontiguousarray(RGB[:, :, :1]), 80, 'GRAY'),
    *(cv2.imencode(e, p)[1].tobytes() for e, p in (
        ('.png', RGB), ('.png', RGB[..., 0].astype(np.uint16) * 200), ('.webp', RGB),
        ('.jpg', RGB))),
]
FORMATS = ['', 'jpeg', 'rgb8; jpeg compressed bgr8', 'bayer_rggb8; jpeg compressed ',
           '16UC1; compressedDepth png', '32FC1; compressedDepth', 'mono16; png compressed']


def usable(frame: Frame) -> None:
    assert isinstance(frame, Frame)
    rgb = frame.rgb()
    assert rgb.shape == (frame.height, frame.width, 3) and rgb.dtype == np.uint8


sizes = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.sampled_from(SUPPORTED), st.text(max_size=12)), sizes, sizes, sizes,
       st.booleans(), st.binary(max_size=2000))
def test_raw_of_any_numbers(encoding, width, height, step, big, data):
    try:
        usable(decode_image(encoding, width, height, step, big, data))
    except FrameError as error:
        assert error.reason


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SUPPORTED), st.integers(1, 17), st.integers(1, 17), st.integers(0, 9),
       st.booleans(), st.randoms(use_true_random=False))
def test_raw_of_fitting_length(encoding, width, height, padding, big, random):
    step = width * 8 + 2 + padding
    rows = {'nv12': height + (height + 1) // 2, 'nv21': height + (height + 1) // 2,
            'nv24': height * 3}.get(encoding, height)
    data = random.randbytes(step * rows)
    try:
        usable(decode_image(encoding, width, height, step, big, data))
    except FrameError as error:
        # Random bits may hold no finite number, and one row has no Bayer pattern.
        assert 'finite' in error.reason or 'Bayer' in error.reason


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FORMATS), st.binary(max_size=300), st.sampled_from([
    b'', b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n', b'RIFF\x10\0\0\0WEBPVP8 ',
    b'RIFF\x10\0\0\0WEBPVP8L']))
@example('', b'\xff\xd8\xff\xff', b'')
def test_compressed_noise(format, data, head):
    try:
        usable(decode_compressed(format, head + data))
    except FrameError as error:
        assert error.reason


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(FILES), st.sampled_from(FORMATS),
       st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=6), st.booleans()),
                max_size=4), st.floats(0, 1.2))
def test_compressed_damaged(data, format, edits, keep):
    data = bytearray(data)
    for where, new, insert in edits:
        at = int(where * len(data))
        data[at:at if insert else at + len(new)] = new
    data = bytes(data[:int(keep * len(data))])
    try:
        usable(decode_compressed(format, data))
    except FrameError as error:
        assert error.reason
