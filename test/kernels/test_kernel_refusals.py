"""Bad input is refused with its numbers, before a byte is read or written."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from kernel_frames import frame_of

from qwen_vl_ros.engine.patches import pillow_patches, smart_resize
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.loader import KernelError
from qwen_vl_ros.kernels.patches import Patcher, _target, describe

pytestmark = pytest.mark.usefixtures('built')


@pytest.fixture
def call(built):
    """Return a function that hands descriptions to the C interface as they are."""
    patcher = Patcher()

    def run(frame, target, handle=patcher._handle):
        message = ctypes.create_string_buffer(256)
        code = built.qwen_vl_cpu_patches(
            handle, frame and ctypes.byref(frame), target and ctypes.byref(target), message, 256)
        return code, message.value.decode()

    yield run
    patcher.close()


def described(encoding='rgb8', width=60, height=50, padding=0):
    frame = frame_of(encoding, width, height, padding)
    native, held = describe(frame)
    out = np.full((8, 588), 9, np.uint8)
    return native, _target(out, 56, 28), (frame, held, out)


def change(thing, field, value):
    if '.' in field:
        setattr(thing.plane[int(field[5])], field[7:], value)
    else:
        setattr(thing, field, value)


@pytest.mark.parametrize('encoding,field,value,code,words', [
    ('rgb8', 'plane0.data', None, 1, 'plane 0 of the rgb8 frame is a null pointer'),
    ('nv12', 'plane1.data', None, 1, 'plane 1 of the nv12 frame is a null pointer'),
    ('rgb8', 'encoding', 9, 2, 'encoding 9 is not one of 0 to 8'),
    ('rgb8', 'encoding', -1, 2, 'encoding -1'),
    ('rgb8', 'width', 27, 3, '27x50 has a side outside 28 to 65535'),
    ('rgb8', 'height', 27, 3, '60x27 has a side outside 28 to 65535'),
    ('rgb8', 'height', 0, 3, '60x0'),
    ('rgb8', 'height', -50, 3, '60x-50'),
    ('rgb8', 'height', 12001, 3, '60x12001 is too narrow: sides may differ by a factor of 200'),
    ('rgb8', 'width', 65536, 3, '65536x50'),
    ('rgb8', 'plane0.step', 179, 4, r'step 179 of plane 0 is not within 180 \(a row of 60 pixels'),
    ('nv12', 'plane1.step', 59, 4, 'step 59 of plane 1 is not within 60'),
    ('yuyv', 'plane0.step', 119, 4, 'step 119 of plane 0 is not within 120'),
    ('rgb8', 'plane0.step', -180, 4, 'step -180'),
    ('rgb8', 'plane0.step', 1 << 40, 4, 'step 1099511627776'),
    ('rgb8', 'plane0.size', 8999, 5, '8999 bytes are too few for plane 0 of 60x50 rgb8 with step '
                                     '180: 9000 needed'),
    ('nv12', 'plane1.size', 1499, 5, '1499 bytes are too few for plane 1 .*: 1500 needed'),
    ('rgb8', 'plane0.data', 2 ** 64 - 9000, 5, '8999 bytes are too few'),
    ('rgb8', 'planes', 0, 6, r'rgb8 has 1 plane\(s\), 0 were given'),
    ('nv12', 'planes', 1, 6, r'nv12 has 2 plane\(s\), 1 were given'),
])
def test_frames(call, encoding, field, value, code, words):
    frame, target, (_, _, out) = described(encoding)
    change(frame, field, value)
    found, message = call(frame, target)
    assert found == code
    with pytest.raises(KernelError, match=words):
        raise KernelError(message, found)
    assert (out == 9).all()


@pytest.mark.parametrize('field,value,code,words', [
    ('data', None, 1, 'the patches are a null pointer'),
    ('size', 8 * 588 - 1, 8, '4703 bytes are too few for the 8 patches of 28x56: 4704 needed'),
    ('height', 57, 8, '28x57: sides must be multiples of 28'),
    ('width', 0, 8, '0x56: sides must be multiples of 28'),
    ('width', 65548, 8, '65548x56'),
    ('patch_stride', 587, 8, 'strides of 587 bytes a patch and 196 a channel'),
    ('channel_stride', 195, 8, 'strides of 588 bytes a patch and 195 a channel'),
    ('patch_stride', 1 << 62, 8, 'strides of 4611686018427387904'),
    ('resampler', 2, 12, 'resampler 2 is not one of 0 and 1'),
])
def test_patches(call, field, value, code, words):
    frame, target, (_, _, out) = described()
    change(target, field, value)
    found, message = call(frame, target)
    assert found == code
    assert words in message
    assert (out == 9).all()


def test_overlaps(call):
    frame, target, (_, _, out) = described('nv12')
    frame.plane[1].data = frame.plane[0].data + 2999
    frame.plane[1].size = 1500
    assert call(frame, target) == (
        7, 'the planes of the 60x50 nv12 frame overlap: plane 1 starts 2999 bytes after plane 0, '
           'which is 3000 bytes long')
    frame, target, _held = described()
    target.data = frame.plane[0].data + 8999
    assert call(frame, target) == (7, 'the patches overlap plane 0 of the frame')
    assert (out == 9).all()


def test_null_pointers(call, built):
    frame, target, _held = described()
    assert call(frame, target, None) == (1, 'the handle is a null pointer')
    assert call(None, target) == (1, 'the frame is a null pointer')
    assert call(frame, None) == (1, 'the patches are a null pointer')
    assert built.qwen_vl_cpu_patches(None, None, None, None, 0) == 1
    assert built.qwen_vl_cpu_isa(None) == -1
    assert built.qwen_vl_cpu_scratch_bytes(None) == 0
    built.qwen_vl_cpu_close(None)


@pytest.mark.parametrize('arguments,words', [
    ({'threads': 0}, '0 threads: 1 to 64'),
    ({'threads': 65}, '65 threads'),
    ({'threads': 2 ** 32 + 1}, '4294967297 threads: 1 to 64 are possible'),
    ({'cpus': (2 ** 32,)}, 'cpu 4294967296 is not within 0 and 1023'),
    ({'cpus': (0, 5000)}, 'cpu 5000 is not within 0 and 1023'),
    ({'isa': 'sve'}, "instruction set 'sve' is not one of scalar"),
    ({'resampler': 'opencv'}, "resampler 'opencv' is not one of pillow12"),
])
def test_patchers(arguments, words):
    with pytest.raises(KernelError, match=words):
        Patcher(**arguments)


@pytest.mark.parametrize('arguments,words', [
    ({'threads': 1.5}, 'threads must be an integer, got 1.5'),
    ({'threads': None}, 'threads must be an integer, got None'),
    ({'cpus': ('0',)}, "a cpu must be an integer, got '0'"),
])
def test_patchers_of_other_types(arguments, words):
    with pytest.raises(TypeError, match=words):
        Patcher(**arguments)


@pytest.mark.parametrize('height,width,words', [
    (2 ** 31, 28, '28x2147483648: sides must be multiples of 28 from 28 to 65535'),
    (2 ** 32 + 28, 28, '28x4294967324: sides'),
    (-28, 28, '28x-28: sides'),
    (0, 0, '0x0: sides'),
    (56, 57, '57x56: sides'),
    (28, 28 * 401, '11228x28 is too narrow: its sides may differ by a factor of 400 at most'),
])
def test_sizes_are_checked_before_memory_is_taken(height, width, words):
    for out in (None, np.empty((8, 588), np.uint8)):
        with pytest.raises(KernelError, match=words) as caught:
            Patcher().patches(frame_of('rgb8', 60, 50), height, width, out)
        assert caught.value.code == 8


def test_the_narrowest_frame_fits_the_limit_of_its_resized_picture():
    """A frame within 200:1 may be resized to one beyond it, as transformers does."""
    frame = frame_of('rgb8', 41, 8200)
    height, width = smart_resize(8200, 41, 3136, 1 << 20)
    assert (height, width) == (8204, 28)
    expected = pillow_patches([frame], (1, height // 14, width // 14))
    assert np.array_equal(Patcher().patches(frame, height, width), expected)


@pytest.mark.parametrize('change,words', [
    ({'frame': None}, 'expected a Frame, got NoneType'),
    ({'frame': 'front'}, 'expected a Frame, got str'),
    ({'height': 56.0}, 'height must be an integer, got 56.0'),
    ({'width': None}, 'width must be an integer, got None'),
    ({'width': '28'}, "width must be an integer, got '28'"),
    ({'out': 'here'}, 'out must be a numpy array, got str'),
    ({'out': 1.5}, 'out must be a numpy array, got float'),
])
def test_arguments_of_other_types(change, words):
    arguments = {'frame': frame_of('rgb8', 60, 50), 'height': 56, 'width': 28, **change}
    with pytest.raises(TypeError, match=words):
        Patcher().patches(**arguments)


def test_an_odd_width_needs_room_for_its_last_pair_of_chroma():
    with pytest.raises(ValueError, match=r'step 641 is shorter than a row of 642 bytes \(641 pix'):
        Frame(np.zeros(642 * 720, np.uint8), 'nv12', 641, 480, 641)
    with pytest.raises(ValueError, match=r'462239 bytes are too few .*: 462240 needed'):
        Frame(np.zeros(642 * 720 - 1, np.uint8), 'nv21', 641, 480, 642)
    frame = Frame(np.zeros(642 * 720, np.uint8), 'nv12', 641, 480, 642)
    assert Patcher().patches(frame, 28, 28).shape == (4, 588)


def test_an_instruction_set_of_another_processor():
    from qwen_vl_ros.kernels.patches import ISAS, available_isas
    absent = next(isa for isa in ISAS if isa not in available_isas())
    with pytest.raises(KernelError, match='is not available'):
        Patcher(isa=absent)


@pytest.mark.parametrize('out,words', [
    (np.empty((8, 587), np.uint8), r'\[8, 588\] or \[8, 3, 196\], got uint8 \[8, 587\]'),
    (np.empty((8, 588), np.int8), 'got int8'),
    (np.empty((588, 8), np.uint8).T, 'the last axis must be contiguous'),
    (np.empty((8, 588), np.uint8)[::-1], 'the last axis must be contiguous'),
    (np.broadcast_to(np.uint8(0), (8, 588)), 'writeable'),
])
def test_arrays_to_write_into(out, words):
    with pytest.raises(KernelError, match=words):
        Patcher().patches(frame_of('rgb8', 60, 50), 56, 28, out)


def test_a_closed_patcher():
    patcher = Patcher()
    patcher.close()
    patcher.close()
    with pytest.raises(KernelError, match='handle is a null pointer'):
        patcher.patches(frame_of('rgb8', 60, 50), 28, 28)


def test_python_sees_the_code():
    with pytest.raises(KernelError, match='20x50 has a side outside') as caught:
        Patcher().patches(frame_of('rgb8', 20, 50), 28, 28)
    assert caught.value.code == 3
