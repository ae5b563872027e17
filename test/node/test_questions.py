"""Asking the node from another process: service, action, topic, cancel, flood, deadline."""

import math
import re
import time

import pytest
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration
from harness import wait_for
from qwen_vl_msgs.action import AnswerQuestion
from qwen_vl_msgs.msg import Answer, AnswerChunk, InferenceMetrics, ModelInfo
from qwen_vl_msgs.srv import Ask
from sensor_msgs.msg import Image
from std_msgs.msg import String

pytestmark = pytest.mark.ros
CODES = Ask.Response


def test_service_answers_about_the_newest_picture(node, client):
    response = client.ask('what is it?')
    assert response.error_code == CODES.NONE, response.error_msg
    answer = response.answer
    assert answer.text.startswith('64x48:') and answer.finish_reason == 'stop'
    assert answer.question == 'what is it?' and answer.camera == 'camera'
    assert answer.header.frame_id == 'test_lens' and answer.header.stamp.sec > 0
    assert answer.metrics.total > 0 and answer.metrics.image_age < 2000
    assert answer.metrics.vision_tokens_in == 10 and answer.metrics.output_tokens == 1
    assert math.isnan(answer.metrics.bandwidth_utilization)


def test_action_streams_deltas_that_join_to_the_answer(node, client):
    feedback = []
    handle = client.send_goal('words=8 delay=0.02', feedback)
    status, result = client.result(handle)
    assert status == GoalStatus.STATUS_SUCCEEDED and result.error_code == CODES.NONE
    wait_for(lambda: ''.join(f.delta for _, f in feedback) == result.answer.text)
    assert result.answer.text == 'w0 w1 w2 w3 w4 w5 w6 w7'
    stages = [f.stage for _, f in feedback if not f.delta]
    assert stages == [AnswerQuestion.Feedback.QUEUED, AnswerQuestion.Feedback.VISION,
                      AnswerQuestion.Feedback.PREFILL, AnswerQuestion.Feedback.DECODE]
    # Streamed, not handed over in one piece at the end: 7 delays of 20 ms lie between.
    times = [when for when, f in feedback if f.delta]
    assert times[-1] - times[0] > 0.1
    assert [f.tokens for _, f in feedback if f.delta] == list(range(1, 9))


def test_cancel_takes_effect_within_one_token(node, client):
    feedback = []
    handle = client.send_goal('words=1000 delay=0.3', feedback)
    wait_for(lambda: any(f.delta for _, f in feedback))
    seen = sum(bool(f.delta) for _, f in feedback)
    wait_for(handle.cancel_goal_async().done)
    status, result = client.result(handle, 2.0)
    assert status == GoalStatus.STATUS_CANCELED
    assert result.error_code == CODES.CANCELLED and result.answer.finish_reason == 'cancelled'
    assert len(result.answer.text.split()) <= seen + 1
    assert client.ask('words=1').error_code == CODES.NONE


def test_a_waiting_goal_can_be_cancelled_at_once(node, client):
    long = client.send_goal('words=1000 delay=0.05')
    waiting = client.send_goal('words=1')
    wait_for(waiting.cancel_goal_async().done)
    status, result = client.result(waiting, 2.0)
    assert status == GoalStatus.STATUS_CANCELED and result.error_code == CODES.CANCELLED
    wait_for(long.cancel_goal_async().done)
    assert client.result(long)[0] == GoalStatus.STATUS_CANCELED


def test_a_flood_gets_queue_full_at_once_and_by_name(node, client):
    running = client.send_goal('words=1000 delay=0.05')
    futures = [client.future(Ask, '/qwen_vl/ask', Ask.Request(question='words=1'))
               for _ in range(4)]
    client.await_status('inference', lambda level, message, values: values['queue_depth'] == '4')
    started = time.monotonic()
    refused = client.ask('words=1')
    assert time.monotonic() - started < 1.0
    assert refused.error_code == CODES.QUEUE_FULL and 'queue.size' in refused.error_msg
    goal = client.send_goal('words=1')
    status, result = client.result(goal)
    assert status == GoalStatus.STATUS_ABORTED and result.error_code == CODES.QUEUE_FULL
    wait_for(running.cancel_goal_async().done)
    for future in futures:
        wait_for(future.done)
        assert future.result().error_code == CODES.NONE


def test_queue_positions_are_told(node, client):
    running = client.send_goal('words=1000 delay=0.05')
    feedback = []
    waiting = client.send_goal('words=1')
    last = client.send_goal('words=1', feedback)
    wait_for(lambda: [f.queue_position for _, f in feedback] == [2])
    wait_for(running.cancel_goal_async().done)
    client.result(waiting)
    assert client.result(last)[1].error_code == CODES.NONE
    wait_for(lambda: 1 in [f.queue_position for _, f in feedback])


def test_deadlines_hold_while_waiting_running_and_stuck(node, client):
    soon = Duration(sec=0, nanosec=400_000_000)
    slow = client.ask('words=1000 delay=0.05', deadline=soon)
    assert slow.error_code == CODES.DEADLINE and slow.answer.finish_reason == 'deadline'
    assert slow.answer.text.startswith('w0 w1')
    running = client.send_goal('words=1 stuck=3')
    started = time.monotonic()
    waiting = client.ask('words=1', deadline=soon)
    assert waiting.error_code == CODES.DEADLINE and time.monotonic() - started < 2.0
    assert client.result(running)[1].error_code == CODES.NONE
    started = time.monotonic()
    stuck = client.ask('words=1 stuck=3', deadline=soon)
    assert stuck.error_code == CODES.DEADLINE and time.monotonic() - started < 2.5
    assert client.ask('words=1').error_code == CODES.NONE


def test_two_clients_at_once_both_get_an_answer(node, client):
    futures = [client.future(Ask, '/qwen_vl/ask', Ask.Request(question='words=3 delay=0.1'))
               for _ in range(2)]
    for future in futures:
        wait_for(future.done, 5.0)
        assert future.result().answer.text == 'w0 w1 w2'


@pytest.mark.parametrize('order, code, words', [
    ('raise=boom', CODES.UNKNOWN, 'RuntimeError: boom'),
    ('raise=MemoryError', CODES.OUT_OF_MEMORY, 'out of memory'),
    ('code=NUMERICAL', CODES.NUMERICAL, 'as ordered'),
    ('code=PROMPT_TOO_LONG', CODES.PROMPT_TOO_LONG, 'as ordered'),
])
def test_a_failing_engine_ends_its_question_alone(node, client, order, code, words):
    response = client.ask(order, timeout_s=2.0)
    assert response.error_code == code and words in response.error_msg
    assert response.answer.text == ''
    assert client.ask('words=1').error_code == CODES.NONE


def test_the_log_has_a_line_with_the_id_for_every_answer_and_failure(node, client):
    for order, wanted in (('words=1', r'INFO.* request (\S+): NONE in [0-9.]+ ms'),
                          ('raise=lightning', r'WARN.* request (\S+): UNKNOWN .*lightning')):
        before = len(node.output)
        answer = client.ask(order, timeout_s=2.0).answer
        found = wait_for(lambda b=before, w=wanted: re.findall(w, node.output[b:]))
        assert len(found) == 1 and found[0] == answer.question_id


def test_bad_requests_are_named(node, client):
    for fields, words in [
            ({'question': '  '}, 'question is empty'),
            ({'question': 'x', 'temperature': math.nan}, 'temperature'),
            ({'question': 'x', 'keep_ratio': 3.0}, 'keep_ratio is 3.0'),
            ({'question': 'x', 'deadline': Duration(sec=-1)}, 'deadline'),
            ({'question': 'x', 'deadline': Duration(sec=4000)}, 'deadline'),
            ({'question': 'x', 'num_frames': 99}, 'num_frames is 99'),
            ({'question': 'x', 'keep_ratio': -1.0}, 'keep_ratio is -1.0'),
            ({'question': 'x', 'cameras': ['rear']}, "no camera 'rear'")]:
        handle = client.send_goal(**fields)
        status, result = client.result(handle)
        assert status == GoalStatus.STATUS_ABORTED
        assert result.error_code == CODES.BAD_REQUEST and words in result.error_msg


def test_pictures_can_come_with_the_question(node, client):
    good = Image(width=2, height=2, step=6, encoding='rgb8', data=bytes([7] * 12))
    good.header.frame_id = 'mine'
    _, result = client.result(client.send_goal('what?', images=[good]))
    assert result.answer.text == '2x2:7' and result.answer.header.frame_id == 'mine'
    assert result.answer.camera == ''
    bad = Image(width=2, height=2, step=6, encoding='rgb9', data=bytes(12))
    _, result = client.result(client.send_goal('what?', images=[good, bad]))
    assert result.error_code == CODES.BAD_ENCODING and 'rgb9' in result.error_msg
    assert 'picture 1' in result.error_msg


def test_clips_are_the_newest_frames(node, client):
    def clip():
        return client.result(client.send_goal('what?', num_frames=3))[1].answer.text.split()

    words = wait_for(lambda: found if len(found := clip()) == 3 else None)
    numbers = [int(word.split(':')[1]) for word in words]
    assert [(later - numbers[0]) % 256 for later in numbers] == [0, 1, 2]


def test_topic_question_and_everything_that_is_published(node, client):
    answers = client.collect(Answer, '/qwen_vl/answer')
    texts = client.collect(String, '/qwen_vl/answer_text')
    chunks = client.collect(AnswerChunk, '/qwen_vl/answer_stream')
    metrics = client.collect(InferenceMetrics, '/qwen_vl/metrics')
    publisher = client.node.create_publisher(String, '/qwen_vl/question', 10)
    wait_for(lambda: publisher.get_subscription_count() == 1)
    publisher.publish(String(data='words=4'))
    wait_for(lambda: answers and texts and metrics and chunks and chunks[-1].done)
    assert answers[0].text == texts[0].data == 'w0 w1 w2 w3'
    assert ''.join(chunk.delta for chunk in chunks) == answers[0].text
    assert [chunk.seq_no for chunk in chunks] == list(range(5))
    assert {chunk.question_id for chunk in chunks} == {answers[0].question_id}
    assert metrics[0].output_tokens == 4
    assert [(s.name, s.calls) for s in metrics[0].stages if s.name != 'image_age'] == [
        ('queue', 1), ('decode_message', 1), ('encode', 1), ('prefill', 1), ('first_token', 1),
        ('token', 3)]
    assert metrics[0].stages[-1].bytes_read == 3000
    publisher.publish(String(data='code=NUMERICAL'))
    wait_for(lambda: len(answers) == 2)
    assert answers[1].finish_reason == 'numerical' and answers[1].text == ''
    assert len(texts) == 1


def test_model_info_reaches_late_comers(node, client):
    from rclpy.qos import DurabilityPolicy, QoSProfile
    found = []
    client.node.create_subscription(
        ModelInfo, '/qwen_vl/model_info', found.append,
        QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL))
    wait_for(lambda: found)
    assert found[0].name == 'fake' and found[0].weight_bytes == 1000
