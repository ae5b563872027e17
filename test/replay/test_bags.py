"""Reading and making recordings: forms of a bag, damaged ones, stamps and rates."""

from __future__ import annotations

import shutil

import cv2
import numpy as np
import pytest
from conftest import START_NS, frames

from qwen_vl_ros.cli.bag import Bag, BagError
from qwen_vl_ros.pipeline import frame_from_message
from tools.make_bags import clip
from tools.make_bags.writer import CameraBag, write_bag

RAW, JPEG = '/camera/front/image_raw', '/camera/front/image_raw/compressed'


def storage_file(folder):
    return next(f for f in folder.iterdir() if f.suffix in ('.mcap', '.db3'))


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
@pytest.mark.parametrize('form', ['folder', 'file', 'folder without metadata', 'renamed file'])
def test_every_form_gives_the_same_messages(bags, tmp_path, storage, form):
    path = bags[storage]
    if form == 'file':
        path = storage_file(path)
    elif form == 'folder without metadata':
        path = tmp_path / 'moved'
        path.mkdir()
        shutil.copy(storage_file(bags[storage]), path)
    elif form == 'renamed file':
        source = storage_file(path)
        path = shutil.copy(source, tmp_path / f'other name{source.suffix}')
    with Bag(path) as bag:
        assert [(t.name, t.compressed, t.count) for t in bag.image_topics] == [
            (RAW, False, 30), (JPEG, True, 30)]
        assert bag.duration_s == pytest.approx(29 / 30, abs=1e-6)
        messages = list(bag.messages(bag.choose([RAW])))
    assert len(messages) == 30
    for (topic, time_ns, message), (stamp_ns, rgb) in zip(messages, frames()):
        assert topic == RAW and time_ns - stamp_ns == 8_000_000
        frame = frame_from_message(message, camera='front')
        assert (frame.stamp_ns, frame.frame_id) == (stamp_ns, 'camera_front_optical_frame')
        assert np.array_equal(frame.rgb(), rgb)


def test_compressed_topic_and_camera_info(bags):
    with Bag(bags['mcap']) as bag:
        assert bag.topics['/camera/front/camera_info'] == 'sensor_msgs/msg/CameraInfo'
        assert bag.image_topics[0].reliability == 'best_effort'
        _, _, message = next(bag.messages(bag.choose([JPEG])))
    _, rgb = next(iter(frames()))
    error = np.abs(frame_from_message(message).rgb().astype(int) - rgb)
    assert error.mean() < 6
    assert message.format == 'rgb8; jpeg compressed bgr8'


def test_choose(bags):
    with Bag(bags['mcap']) as bag:
        assert [t.name for t in bag.choose()] == [RAW]
        assert [t.name for t in bag.choose([JPEG, RAW])] == [JPEG, RAW]
        with pytest.raises(BagError, match=f"no image topic '/nothing'; it has: {RAW}"):
            bag.choose(['/nothing'])
        with pytest.raises(BagError, match=r"camera_info' \(it is of type sensor_msgs"):
            bag.choose(['/camera/front/camera_info'])


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
@pytest.mark.parametrize('keep', [0.0, 0.001, 0.5, 0.95])
def test_truncated(bags, tmp_path, storage, keep):
    source = storage_file(bags[storage])
    path = tmp_path / source.name
    data = source.read_bytes()
    path.write_bytes(data[:int(len(data) * keep)])
    with pytest.raises(BagError) as caught, Bag(path) as bag:
        assert len(list(bag.messages(bag.image_topics))) == 60
    assert str(path) in str(caught.value) and 'cut off' in str(caught.value)


@pytest.mark.parametrize('content', [b'', b'hello', bytes(4096)])
@pytest.mark.parametrize('name', ['x.mcap', 'x.db3'])
def test_no_bag_at_all(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BagError, match='cannot be read'):
        Bag(path)


def test_damaged_metadata(bags, tmp_path):
    folder = shutil.copytree(bags['mcap'], tmp_path / 'bag')
    (folder / 'metadata.yaml').write_text('rosbag2_bagfile_information: {version: [}')
    with pytest.raises(BagError, match='cannot be read'):
        Bag(folder)


def test_paths_that_are_no_bag(tmp_path):
    with pytest.raises(BagError, match='does not exist'):
        Bag(tmp_path / 'absent')
    with pytest.raises(BagError, match=r'neither metadata\.yaml'):
        Bag(tmp_path)
    (tmp_path / 'a.txt').write_text('x')
    with pytest.raises(BagError, match='no rosbag2 file'):
        Bag(tmp_path / 'a.txt')
    (tmp_path / 'a.mcap').write_text('x')
    (tmp_path / 'b.mcap').write_text('x')
    with pytest.raises(BagError, match='2 storage files; name one'):
        Bag(tmp_path)


def test_message_that_is_none(tmp_path):
    path = tmp_path / 'bag'
    with CameraBag(path) as bag:
        stamp_ns, rgb = next(iter(frames()))
        bag.add_picture('/c', stamp_ns, rgb, jpeg=False)
        connection = bag._connections['/c/image_raw']
        bag._writer.write(connection, stamp_ns + 10**8, b'\0\1\0\0\xff\xff\xff')
    with Bag(path) as bag:
        messages = [m for _, _, m in bag.messages(bag.image_topics)]
    assert messages[0] is not None and messages[1] is None


def test_bag_without_pictures(tmp_path):
    path = tmp_path / 'bag'
    with CameraBag(path) as bag:
        bag.add('/chatter', START_NS, bag.message('std_msgs/msg/String', data='hello'))
    with Bag(path) as bag, pytest.raises(BagError, match='no image topic; it has: /chatter'):
        bag.choose()


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
def test_topics_without_messages(tmp_path, storage):
    kind = 'sensor_msgs/msg/Image'
    with CameraBag(tmp_path / 'bag', storage) as bag:
        bag._writer.add_connection('/empty', kind, typestore=bag._store)
    with Bag(tmp_path / 'bag') as opened:
        assert opened.duration_s == 0
        for names in ((), ('/empty',)):
            with pytest.raises(BagError, match="no message on '/empty'"):
                opened.choose(names)


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
@pytest.mark.parametrize('mode', ['FILE', 'MESSAGE'])
def test_zstd_compressed_recording(tmp_path, storage, mode):
    from rosbags.rosbag2.enums import CompressionFormat, CompressionMode

    bag = CameraBag(tmp_path / 'bag', storage)
    bag._writer.set_compression(CompressionMode[mode], CompressionFormat.ZSTD)
    with bag:
        for stamp_ns, rgb in frames(3):
            bag.add_picture('/c', stamp_ns, rgb, jpeg=False)
    with Bag(tmp_path / 'bag') as opened:
        messages = [m for _, _, m in opened.messages(opened.choose())]
    assert [frame_from_message(m).stamp_ns for m in messages] == [s for s, _ in frames(3)]
    assert np.array_equal(frame_from_message(messages[2]).rgb(), list(frames(3))[2][1])


def test_clip_at_thirty_hertz(tmp_path):
    path = tmp_path / 'clip.avi'
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*'MJPG'), 10, (64, 48))
    assert writer.isOpened()
    for i in range(10):
        writer.write(np.full((48, 64, 3), 20 * i, np.uint8))
    writer.release()
    got = list(clip.frames(path, start_ns=START_NS))
    assert len(got) == 30
    assert [s - START_NS for s, _ in got[:4]] == [0, 33333333, 66666667, 100000000]
    levels = [round(rgb.mean() / 20) for _, rgb in got]
    assert levels == [i // 3 for i in range(30)]
    assert len(list(clip.frames(path, start_ns=0, seconds=0.5))) == 15
    with pytest.raises(ValueError, match='no video'):
        list(clip.frames(tmp_path / 'absent.avi', start_ns=0))


def test_existing_bag_is_not_overwritten(bags):
    from rosbags.rosbag2.errors import WriterError

    with pytest.raises(WriterError):
        write_bag(bags['mcap'], frames(1))
