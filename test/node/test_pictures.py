"""Pictures of answers: one for each picture of the question, for listeners alone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from builtin_interfaces.msg import Duration
from harness import wait_for
from qwen_vl_msgs.msg import Answer as AnswerMsg
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.engine.types import Answer
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.node.main import load_engine
from qwen_vl_ros.node.parameters import TOPIC, Settings
from qwen_vl_ros.node.perception import Perception
from qwen_vl_ros.node.pictures import DEPTH, Pictures, notes_of, topic_of
from qwen_vl_ros.node.publish import Publications
from qwen_vl_ros.node.requests import Job, Outcome, Question
from qwen_vl_ros.pipeline import frame_from_message
from qwen_vl_ros.saliency.roi import Window


class Topics:
    """A node whose publishers keep what they are given."""

    def __init__(self, *heard: str) -> None:
        self.heard = heard
        self.sent: dict[str, list] = {}
        self.depths: dict[str, object] = {}

    def create_publisher(self, kind, topic, qos):
        sent = self.sent.setdefault(topic, [])
        self.depths[topic] = qos

        def publish(message):
            assert isinstance(message, kind)
            sent.append(message)

        return SimpleNamespace(publish=publish, topic=topic,
                               get_subscription_count=lambda: int(topic in self.heard))

    def destroy_publisher(self, publisher):
        del self.depths[publisher.topic]


SETTINGS = Settings(model_device='cpu', scheduler_max_sequences=1, pruning_roi=0.25)
ALL = ('~/overlay', '~/overlay/compressed', '~/saliency')


def message(encoding, width, height, step, data, stamp, lens):
    """Return a sensor_msgs/Image by its field names."""
    header = Header(frame_id=lens)
    header.stamp.sec, header.stamp.nanosec = stamp
    return SimpleNamespace(header=header, encoding=encoding, width=width, height=height, step=step,
                           is_bigendian=0, data=np.asarray(data).view(np.uint8).reshape(-1))


def four_cameras() -> list[Frame]:
    """Return frames as four unlike cameras send them."""
    noise = np.random.default_rng(0).integers(0, 255, 320 * 240 * 3, np.uint8)
    depth = np.linspace(0.3, 9.0, 32 * 24, dtype=np.float32)
    jpeg = cv2.imencode('.jpg', noise.reshape(240, 320, 3))[1].tobytes()
    header = Header(frame_id='front')
    header.stamp.sec, header.stamp.nanosec = 7, 5
    sent = [CompressedImage(header=header, format='bgr8; jpeg compressed bgr8', data=jpeg),
            message('32FC1', 32, 24, 32 * 4, depth, (7, 4), 'depth'),
            message('mono8', 5, 3, 8, noise[:24], (0, 0), 'left'),
            message('nv12', 40, 20, 40, noise[:40 * 30], (6, 999_999_999), 'rear')]
    return [frame_from_message(m, camera=m.header.frame_id) for m in sent]


def asked(frames, text='what?') -> Job:
    job = Job(Question(text), lambda job, event: None)
    job.frames = tuple(frames)
    return job


def answer(*kept: np.ndarray, text: str = 'that') -> Answer:
    return Answer(text, 'stop', (1,), 0.5, 10, 8, 20, Timeline(), kept_slices=kept)


def pixels(sent) -> np.ndarray:
    shape = (sent.height, sent.width, 3) if sent.encoding == 'bgr8' else (sent.height, sent.width)
    assert sent.step == sent.width * (3 if sent.encoding == 'bgr8' else 1)
    return np.array(sent.data, np.uint8).reshape(shape)


def test_every_picture_of_the_question_is_shown_with_its_own_header():
    topics, frames = Topics(*ALL), four_cameras()
    kept = [np.ones((1, 4, 6), bool) for _ in frames]
    for number, mask in enumerate(kept):
        mask[0, 0, number] = False  # another one in each
    Pictures(topics).show(asked(frames), answer(*kept))
    for topic, encoding in (('~/overlay', 'bgr8'), ('~/saliency', 'mono8')):
        sent = topics.sent[topic]
        assert [(m.width, m.height, m.encoding) for m in sent] == [
            (320, 240, encoding), (32, 24, encoding), (5, 3, encoding), (40, 20, encoding)]
        assert [m.header.frame_id for m in sent] == ['front', 'depth', 'left', 'rear']
        assert [(m.header.stamp.sec, m.header.stamp.nanosec) for m in sent] == [
            (7, 5), (7, 4), (0, 0), (6, 999_999_999)]
    for m, mask in zip(topics.sent['~/saliency'], kept):
        rows = (np.arange(m.height) * 4) // m.height
        columns = (np.arange(m.width) * 6) // m.width
        assert (pixels(m) == np.where(mask[0], 255, 64)[np.ix_(rows, columns)]).all()
    front = pixels(topics.sent['~/overlay'][0])
    assert (front[:60, :53] == frames[0].rgb()[:60, :53, ::-1] >> 2).all()
    jpegs = topics.sent['~/overlay/compressed']
    assert [m.format for m in jpegs] == ['bgr8; jpeg compressed bgr8'] * 4
    assert [cv2.imdecode(np.array(m.data, np.uint8), cv2.IMREAD_COLOR).shape for m in jpegs] == [
        (240, 320, 3), (24, 32, 3), (3, 5, 3), (20, 40, 3)]
    assert [m.header.frame_id for m in jpegs] == ['front', 'depth', 'left', 'rear']
    assert set(topics.depths.values()) == {DEPTH} and len(frames) < DEPTH


def test_a_clip_is_its_newest_slice_and_the_others_in_numbers():
    kept = np.zeros((3, 4, 6), bool)
    kept[0, :2], kept[1, 0, :3], kept[2, 3] = True, True, True
    topics, frames = Topics('~/saliency'), four_cameras()[:1]
    Pictures(topics).show(asked(frames), answer(kept))
    shown, = topics.sent['~/saliency']
    assert (pixels(shown)[180:] == 255).all() and (pixels(shown)[:180] == 64).all()
    assert notes_of(answer(kept), frames[0], 0, 1)[1] == (
        'front: 12 + 3 + 6 of 24 units of each slice')
    assert notes_of(answer(kept, kept[:1]), frames[0], 1, 4)[1] == 'front (2 of 4): 12 of 24 units'
    assert len(notes_of(answer(kept[:1]), frames[0], 0, 1)) == 1


@pytest.mark.parametrize('kept', [(), (np.ones((1, 4, 6), bool),)])
def test_where_nothing_was_dropped_all_of_the_picture_is_shown_as_kept(kept):
    topics = Topics('~/saliency', '~/overlay')
    frame = Frame.from_rgb(np.full((200, 300, 3), 90, np.uint8), frame_id='lens')
    Pictures(topics).show(asked([frame]), answer(*kept))
    assert (pixels(topics.sent['~/saliency'][0]) == 255).all()
    assert (pixels(topics.sent['~/overlay'][0])[:100] == 90).all()


def test_nothing_is_done_for_nobody(monkeypatch):
    frame = four_cameras()[0]
    job, said = asked([frame]), answer(np.ones((1, 4, 6), bool))
    monkeypatch.setattr(Frame, 'rgb', lambda self: pytest.fail('nobody asked for pixels'))
    topics = Topics('~/saliency')
    Pictures(topics).show(job, said)  # what was kept needs no pixels
    assert len(topics.sent['~/saliency']) == 1
    monkeypatch.setattr('qwen_vl_ros.node.pictures.kept_of', lambda *_: pytest.fail('unseen'))
    topics = Topics()
    Pictures(topics).show(job, said)
    assert not any(topics.sent.values())


def test_questions_without_pictures_or_answers_show_none():
    topics = Topics(*ALL)
    publications = Publications(topics, 1.0)
    Pictures(topics).show(asked([]), answer())
    job = asked(four_cameras())
    publications.event(job, Outcome(ErrorCode.STALE_IMAGE, 'old'), pictures=True)
    assert not any(topics.sent[topic] for topic in ALL)
    publications.event(asked(four_cameras()), Outcome(
        ErrorCode.DEADLINE, 'late', answer(text='th')), pictures=True)  # what there was
    assert len(topics.sent['~/saliency']) == 4
    publications.event(asked(four_cameras()), Outcome(ErrorCode.NONE, '', answer()),
                       pictures=False)
    assert len(topics.sent['~/saliency']) == 4


def test_a_picture_that_cannot_be_drawn_costs_none_of_the_others():
    topics, frames = Topics(*ALL), four_cameras()
    long = np.zeros((2, 70_000, 3), np.uint8)  # no JPEG is that wide
    frames.insert(1, Frame.from_rgb(long, frame_id='line'))
    job, publications = asked(frames), Publications(topics, 1.0)
    told = []
    publications._exports = SimpleNamespace(finished=told.append, close=lambda: None)
    with pytest.raises((ValueError, cv2.error)):
        publications.event(job, Outcome(ErrorCode.NONE, '', answer()), pictures=True)
    assert len(topics.sent['~/overlay']) == len(topics.sent['~/saliency']) == 5
    assert [m.header.frame_id for m in topics.sent['~/overlay/compressed']] == [
        'front', 'depth', 'left', 'rear']
    assert len(told) == 1 and [s.name for s in job.timeline.spans] == ['publish']
    assert len(topics.sent['~/answer']) == 1


def test_a_region_of_interest_is_shown_where_it_lies_in_the_whole_frame(monkeypatch):
    """The lower right quarter is cropped: neither crop nor overview has the frame's grid."""
    monkeypatch.setattr('qwen_vl_ros.saliency.answering.best_window',
                        lambda *_: Window(224, 168, 224, 168, 448, 336))
    perception = Perception(load_engine(SETTINGS), SETTINGS, lambda: 10**9)
    grey = np.full(448 * 336 * 3, 120, np.uint8)
    sent = message('rgb8', 448, 336, 448 * 3, grey, (1, 0), 'lens')
    perception.receive('camera', sent)
    job = Job(Question('Where is the red ball?'), lambda job, event: None)
    said = perception.answer(job).answer
    topics = Topics('~/overlay', '~/saliency')
    Pictures(topics).show(job, said)
    shown = pixels(topics.sent['~/saliency'][0])
    assert shown.shape == (336, 448) and (shown[168:, 224:] == 255).all()
    assert (shown[:168] == 64).all() and (shown[:, :224] == 64).all()
    drawn = pixels(topics.sent['~/overlay'][0])
    assert (drawn[:168] == 30).all() and (drawn[168:200, :224] == 30).all()
    assert (drawn[168:200, 224:] == 120).all()


def test_clips_of_two_cameras_show_what_was_kept_of_each():
    wanted = Settings(cameras=('front', 'rear'), model_device='cpu', scheduler_max_sequences=1,
                      pruning_enable=True, pruning_keep_ratio=0.3, pruning_min_units=1)
    perception = Perception(load_engine(wanted), wanted, lambda: 10**9)
    noise = np.random.default_rng(1)
    for stamp in range(4):
        for camera, width, height in (('front', 448, 336), ('rear', 224, 280)):
            rgb = noise.integers(0, 255, height * width * 3, np.uint8)
            perception.receive(camera, message('rgb8', width, height, width * 3, rgb, (1, stamp),
                                               f'{camera}_lens'))
    job = Job(Question('What is it?', cameras=('rear', 'front'), num_frames=4),
              lambda job, event: None)
    said = perception.answer(job).answer
    assert [kept.shape for kept in said.kept_slices] == [(2, 10, 8), (2, 12, 16)]
    assert sum(int(kept.sum()) for kept in said.kept_slices) == said.vision_tokens_kept
    topics = Topics('~/saliency')
    Pictures(topics).show(job, said)
    for sent, kept, lens in zip(topics.sent['~/saliency'], said.kept_slices,
                                ('rear_lens', 'front_lens')):
        assert (sent.header.frame_id, sent.header.stamp.nanosec) == (lens, 3)
        assert (pixels(sent)[14::28, 14::28] == np.where(kept[-1], 255, 64)).all()
    numbers = ' + '.join(str(int(part.sum())) for part in said.kept_slices[1])
    assert notes_of(said, job.frames[1], 1, 2)[1] == (
        f'front (2 of 2): {numbers} of 192 units of each slice')


def test_several_cameras_have_topics_of_their_own():
    topics, frames = Topics('~/rear/overlay', '~/left/saliency', '~/saliency'), four_cameras()
    pictures = Pictures(topics)
    pictures.serve(('front',))  # one alone is what ~/overlay shows
    assert sorted(topics.depths) == sorted(ALL)
    pictures.serve(('front', 'left', 'rear'))
    assert len(topics.depths) == 12
    pictures.show(asked(frames), answer())
    assert {topic: [m.header.frame_id for m in sent] for topic, sent in topics.sent.items() if sent
            } == {'~/saliency': ['front', 'depth', 'left', 'rear'],
                  '~/left/saliency': ['left'], '~/rear/overlay': ['rear']}
    pictures.serve(('left', 'depth'))
    assert {topic.split('/')[1] for topic in topics.depths if topic.count('/') > 1} - {
        'overlay'} == {'left', 'depth'}
    pictures.show(asked(frames), answer())
    assert len(topics.sent['~/left/saliency']) == 2 and len(topics.sent['~/rear/overlay']) == 1
    pictures.serve(())
    assert sorted(topics.depths) == sorted(ALL)


@pytest.mark.parametrize(('camera', 'topic'), [
    ('front', 'front'), ('arm/left', 'arm/left'), ('2', 'camera_2'), ('cam-1 b', 'cam_1_b'),
    ('Rückblick', 'R_ckblick'), ('后', '_'), ('a//1b', 'a/camera_1b')])
def test_a_camera_of_any_name_has_a_topic(camera, topic):
    assert topic_of(camera) == topic and TOPIC.fullmatch(f'~/{topic}/overlay')


@pytest.mark.ros
def test_listeners_of_a_running_node_get_each_camera(start_node, programs, client):
    start_node(cameras="['front','side']", max_image_age_s=0.0, clip__length=2)
    programs('publish_frames.py', 64, 48, 20, 60, 'BEST_EFFORT', 'front/image_raw')
    programs('publish_frames.py', 40, 30, 20, 60, 'RELIABLE', 'side/image_raw')
    for name in ('front', 'side'):
        client.await_status(f'{name} topic status',
                            lambda level, message, values: int(values['frames_received']) > 1)
    overlays = client.collect(Image, '/qwen_vl/overlay')
    jpegs = client.collect(CompressedImage, '/qwen_vl/overlay/compressed')
    kept = client.collect(Image, '/qwen_vl/saliency')
    answers = client.collect(AnswerMsg, '/qwen_vl/answer')
    front = client.collect(CompressedImage, '/qwen_vl/front/overlay/compressed')
    side = client.collect(Image, '/qwen_vl/side/saliency')
    wait_for(lambda: client.ask('words=1').answer.text and overlays and jpegs and kept)
    time.sleep(0.3)  # what was asked last is still on its way
    for found in (overlays, jpegs, kept, front, side):
        found.clear()
    _, result = client.result(client.send_goal('what?', cameras=['side', 'front'], num_frames=2))
    assert result.answer.text.split()[0].startswith('40x30')
    wait_for(lambda: len(overlays) == len(jpegs) == len(kept) == 2)
    assert [(m.width, m.height) for m in overlays] == [(40, 30), (64, 48)]
    assert [(m.width, m.height) for m in kept] == [(40, 30), (64, 48)]
    assert {bytes(m.data) for m in kept} == {b'\xff' * 1200, b'\xff' * 3072}
    stamps = [(m.header.stamp.sec, m.header.stamp.nanosec) for m in kept]
    assert stamps == [(m.header.stamp.sec, m.header.stamp.nanosec) for m in overlays]
    wait_for(lambda: len(front) == len(side) == 1)
    assert side[0] == kept[0] and front[0] == jpegs[1]
    assert stamps[0] != stamps[1] and (
        answers[-1].header.stamp.sec, answers[-1].header.stamp.nanosec) == max(stamps)
    # Both cameras are gone; the last pictures still answer, and an age that is asked for does not.
    for found in (overlays, kept):
        found.clear()
    client.await_status('side topic status', lambda level, message, values: level == 2)
    assert client.result(client.send_goal('what?', cameras=['side']))[1].error_code == 0
    wait_for(lambda: len(overlays) == len(kept) == 1)
    _, result = client.result(client.send_goal(
        'what?', cameras=['side'], max_image_age=Duration(nanosec=1)))
    assert result.error_code == result.STALE_IMAGE
    assert client.ask('words=1', camera='gone').error_code == result.BAD_REQUEST
    assert client.ask('words=1').error_code == 0
    wait_for(lambda: len(kept) == 2)
    assert [m.width for m in kept] == [40, 64]
    # One camera that is left needs no topics beside those of all.
    assert client.change_state('deactivate')
    assert client.set(cameras=['side'])[0].successful
    assert client.change_state('activate')
    wait_for(lambda: not client.node.count_publishers('/qwen_vl/side/saliency'))
    assert client.node.count_publishers('/qwen_vl/saliency') == 1
