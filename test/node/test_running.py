"""One node that runs through: live parameters, standing question, a busy engine, sim time."""

import itertools
import signal
import threading
import time
from pathlib import Path

import pytest
from builtin_interfaces.msg import Time
from harness import wait_for
from qwen_vl_msgs.msg import Answer, AnswerChunk
from qwen_vl_msgs.srv import Ask
from rcl_interfaces.srv import ListParameters
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image
from std_srvs.srv import SetBool, Trigger

from qwen_vl_ros.node.parameters import Settings

pytestmark = pytest.mark.ros
CODES = Ask.Response


def test_live_parameters_change_and_bad_ones_change_nothing(node, client):
    before = client.get('generation.max_new_tokens', 'max_image_age_s')
    bad = [
        ({'generation__max_new_tokens': 'many'}, 'Wrong parameter type'),
        ({'generation__max_new_tokens': 0}, 'max_new_tokens'),
        ({'generation__max_new_tokens': 10**9}, 'max_new_tokens'),
        ({'max_image_age_s': 'long'}, 'max_image_age_s must be a number'),
        ({'max_image_age_s': -1.0}, 'max_image_age_s'),
        ({'max_image_age_s': float('nan')}, 'max_image_age_s'),
        ({'image_qos': 'FAST'}, 'image_qos'),
        ({'no_such_parameter': 1}, 'undeclared parameter'),
        ({'queue__size': 9}, 'queue.size can be changed only while the node is not active'),
        ({'model__path': '/x'}, 'model.path can be changed only while the node is unconfigured'),
    ]
    for values, words in bad:
        result, = client.set(**values)
        assert not result.successful and words in result.reason, (values, result.reason)
    result = client.set(atomically=True, generation__max_new_tokens=5, max_image_age_s=-3.0)
    assert not result.successful and 'max_image_age_s' in result.reason
    assert client.get('generation.max_new_tokens', 'max_image_age_s') == before
    assert client.set(generation__max_new_tokens=2)[0].successful
    response = client.ask('words=9')
    assert response.answer.text == 'w0 w1' and response.answer.finish_reason == 'length'
    assert client.set(generation__max_new_tokens=64)[0].successful
    # A whole number is good enough for a float.
    assert client.set(max_image_age_s=2)[0].successful


def test_the_executor_stays_awake_during_a_long_answer(node, client):
    clock = client.node.create_publisher(Clock, '/clock', 10)
    ending = threading.Event()

    def tick():
        while not ending.wait(0.005):
            now = time.time()
            clock.publish(Clock(clock=Time(sec=int(now), nanosec=int(now % 1 * 1e9))))

    ticking = threading.Thread(target=tick)
    ticking.start()
    assert client.set(use_sim_time=True)[0].successful
    handle = client.send_goal('words=1000 delay=0.02')
    started = time.monotonic()
    while time.monotonic() < started + 5:
        asked = time.monotonic()
        client.get('queue.size')
        assert time.monotonic() - asked < 1.0
        time.sleep(0.3)
    asked = time.monotonic()
    wait_for(handle.cancel_goal_async().done)
    client.result(handle)
    assert time.monotonic() - asked < 1.0
    times = [when for when in client.diagnostics_times if when > started]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) >= 3 and all(0.8 < gap < 1.2 for gap in gaps), gaps
    ending.set()
    ticking.join()
    assert client.set(use_sim_time=False)[0].successful


def test_standing_question_waits_for_others_and_can_be_paused(node, client):
    answers = client.collect(Answer, '/qwen_vl/answer')
    assert client.set(continuous__question='words=2', continuous__rate_hz=20.0)[0].successful
    assert client.call(SetBool, '/qwen_vl/enable', SetBool.Request(data=True)).success
    wait_for(lambda: len(answers) > 5)
    assert {answer.question for answer in answers} == {'words=2'}
    assert len({answer.header.stamp.nanosec for answer in answers}) == len(answers)
    assert client.ask('words=5').answer.text == 'w0 w1 w2 w3 w4'
    assert client.call(SetBool, '/qwen_vl/enable', SetBool.Request(data=False)).success
    time.sleep(0.3)
    count = len(answers)
    time.sleep(0.5)
    assert len(answers) == count


def test_the_overlay_is_drawn_for_listeners_only(node, client):
    assert client.ask('words=2').error_code == CODES.NONE
    pictures = client.collect(Image, '/qwen_vl/overlay', 1)
    jpegs = client.collect(CompressedImage, '/qwen_vl/overlay/compressed', 1)
    answer = wait_for(lambda: (found := client.ask('words=2').answer) and pictures and found)
    picture = pictures[-1]
    assert (picture.width, picture.height, picture.encoding) == (64, 48, 'bgr8')
    assert picture.header.frame_id == answer.header.frame_id == 'test_lens'
    assert picture.header.stamp.sec > 0 and max(picture.data) == 255
    wait_for(lambda: jpegs)
    assert bytes(jpegs[0].data[:3]) == b'\xff\xd8\xff'
    assert client.set(overlay__enable=False)[0].successful
    client.ask('words=1')
    time.sleep(0.2)
    count = len(pictures)
    client.ask('words=1')
    time.sleep(0.2)
    assert len(pictures) == count
    assert client.set(overlay__enable=True)[0].successful


def test_the_example_client_streams_and_tells_errors(node, programs):
    example = Path(__file__).parents[2] / 'examples' / 'ask_client.py'
    assert len(example.read_text().splitlines()) < 40
    asking = programs(example, 'words=4')
    assert asking.wait() == 0 and asking.output.endswith('w0 w1 w2 w3\n')
    asking = programs(example, 'what?', 'rear')
    assert asking.wait() == CODES.BAD_REQUEST and "no camera 'rear'" in asking.output


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_example_client_quietly(node, programs, client, number):
    example = Path(__file__).parents[2] / 'examples' / 'ask_client.py'
    chunks = client.collect(AnswerChunk, '/qwen_vl/answer_stream')
    asking = programs(example, 'words=60 delay=0.1')
    wait_for(lambda: len(chunks) > 2)
    code, _ = asking.end(number)
    assert code == 130 and 'Traceback' not in asking.output, asking.output
    wait_for(lambda: chunks[-1].done)


def test_sessions_can_be_reset(node, client):
    assert client.call(Trigger, '/qwen_vl/reset_session', Trigger.Request()).success
    assert client.ask('words=1').error_code == CODES.NONE


def test_parameter_list_has_no_foreign_names(node, client):
    names = client.call(ListParameters, '/qwen_vl/list_parameters',
                        ListParameters.Request()).result.names
    ours = {spec.metadata['name'] for spec in Settings.table()}
    assert set(names) - ours <= {'use_sim_time', 'start_type_description_service'}
