"""Queue, worker and core without ROS communication: order, refusals, faults, frames."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeEngine
from harness import wait_for

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Delta, Stage
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.perception import Perception
from qwen_vl_ros.node.requests import Job, Outcome, Question, Queued, Requests

NOW = 1_700_000_000 * 10**9


class Events(list):
    """A listener that keeps what it is told."""

    def __call__(self, job, event):
        self.append(event)

    @property
    def outcome(self):
        return self[-1] if self and isinstance(self[-1], Outcome) else None


def image(number, encoding='rgb8'):
    return SimpleNamespace(
        header=SimpleNamespace(
            stamp=SimpleNamespace(sec=NOW // 10**9, nanosec=number), frame_id='lens'),
        encoding=encoding, width=8, height=8, step=24, is_bigendian=0,
        data=np.full(192, number, np.uint8))


def core(engine=None, **settings):
    return Perception(engine or FakeEngine(), Settings(**settings), lambda: NOW)


def ask(perception, text, **fields):
    """Run a question on this thread, as a replay would; return outcome and events."""
    events = Events()
    job = Job(Question(text, **fields), events)
    return perception.answer(job), events, job


def test_the_core_answers_without_threads_and_without_dds():
    perception = core()
    perception.receive('camera', image(1))
    perception.receive('camera', image(2))
    outcome, events, job = ask(perception, 'what?', question_id='q1')
    assert outcome.answer.text == '8x8:2' and outcome.code == ErrorCode.NONE
    assert [e.name for e in events if isinstance(e, Stage)] == ['vision', 'prefill', 'decode']
    assert ''.join(e.text for e in events if isinstance(e, Delta)) == outcome.answer.text
    assert job.frames[0].stamp_ns == NOW + 2 and job.frames[0].frame_id == 'lens'
    assert {'image_age', 'decode_message', 'encode'} <= {s.name for s in job.timeline.spans}
    request = perception.engine.requests[0]
    assert request.request_id == 'q1' and request.keep_ratio == 1.0


def test_settings_shape_the_request(tmp_path):
    template = tmp_path / 'template.txt'
    template.write_text('In one word: {question}')
    perception = core(
        prompt_template_file=str(template), prompt_system='You are a robot.', pruning_enable=True,
        pruning_keep_ratio=0.25, pruning_min_units=1, generation_max_new_tokens=7,
        vision_max_pixels=784 * 100)
    perception.receive('camera', image(1))
    ask(perception, 'what {question}?')
    request = perception.engine.requests[0]
    assert request.question == 'In one word: what {question}?'
    assert request.system_prompt == 'You are a robot.' and request.max_new_tokens == 7
    assert request.keep_ratio == 0.25
    # 8x8 pixels are scaled up to 3136: four tokens, of which three are to stay.
    perception.settings = Settings(
        pruning_enable=True, pruning_keep_ratio=0.25, pruning_min_units=3)
    ask(perception, 'what?')
    assert perception.engine.requests[1].keep_ratio == 0.75
    ask(perception, 'what?', options={'keep_ratio': 0.9, 'system_prompt': 'Other.'})
    assert perception.engine.requests[2].keep_ratio == 0.9
    assert perception.engine.requests[2].system_prompt == 'Other.'


def test_live_pixel_limits_reach_the_engine():
    perception = core()
    perception.receive('camera', image(1))
    for limit in (7840, 78400):
        perception.settings = Settings(vision_max_pixels=limit)
        ask(perception, 'what?')
        assert perception.engine.info.max_pixels == limit


def test_sessions_are_forgotten_before_the_next_question():
    perception = core()
    perception.receive('camera', image(1))
    ask(perception, 'what?')
    perception.forget_sessions()
    assert perception.engine.resets == 0
    ask(perception, 'what?')
    ask(perception, 'what?')
    assert perception.engine.resets == 1


def test_questions_are_answered_in_order_and_others_before_the_standing_one():
    order, gate = [], threading.Event()

    def answer(job):
        gate.wait()
        order.append(job.question.text)
        return Outcome(ErrorCode.NONE)

    requests = Requests(answer, 4)
    requests.start()
    for text, source in [('first', 'topic'), ('standing', 'continuous'), ('second', 'topic'),
                         ('third', 'action')]:
        requests.submit(Job(Question(text, source=source), Events()))
        if text == 'first':
            wait_for(lambda: requests.busy)
    with pytest.raises(EngineError):
        requests.submit(Job(Question('another standing', source='continuous'), Events()))
    gate.set()
    wait_for(lambda: len(order) == 4)
    assert order == ['first', 'second', 'third', 'standing']
    assert requests.stop(Outcome(ErrorCode.INACTIVE))


def test_questions_that_come_at_once_fill_the_places_and_the_queue():
    class Held:
        """Has four places and takes nothing up before it may."""

        places, ready = 4, False

        def room(self, job):
            return self.ready

        def run(self, job, ended):
            ended(Outcome(ErrorCode.NONE))

    requests, listeners, codes = Requests(lambda job: None, 4), [], []
    requests.runner = Held()
    requests.start()
    for _ in range(10):
        listeners.append(Events())
        try:
            requests.submit(Job(Question('x'), listeners[-1]))
        except EngineError as error:
            codes.append(error.code)
    assert codes == [ErrorCode.QUEUE_FULL] * 2
    requests.runner.ready = True
    wait_for(lambda: all(isinstance(e[-1], Outcome) for e in listeners[:8]))
    assert requests.stop(Outcome(ErrorCode.INACTIVE))


def test_exactly_one_outcome_whatever_happens():
    """Many threads submit, cancel and stop; every job ends once and nothing comes after."""
    requests = Requests(lambda job: Outcome(ErrorCode.NONE), 3)
    requests.start()
    jobs = []

    def client(number):
        generator = np.random.default_rng(number)
        for _ in range(100):
            events = Events()
            job = Job(Question('x', deadline_s=float(generator.choice([0.0, 0.01, 10]))), events)
            try:
                requests.submit(job)
            except EngineError as error:
                assert error.code == ErrorCode.QUEUE_FULL
                time.sleep(0.001)
                continue
            jobs.append(events)
            if generator.random() < 0.3:
                requests.cancel(job)
            requests.tick()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests.stop(Outcome(ErrorCode.INACTIVE))
    assert len(jobs) > 10
    for events in jobs:
        assert events.outcome is not None
        assert sum(isinstance(event, Outcome) for event in events) == 1


def test_a_listener_that_raises_harms_nobody():
    def listener(job, event):
        raise OSError('the network has gone')

    requests = Requests(lambda job: job.tell(Delta('x', 1)) or Outcome(ErrorCode.NONE), 4)
    requests.start()
    bad = Job(Question('x'), listener)
    requests.submit(bad)
    good = Events()
    requests.submit(Job(Question('y'), good))
    wait_for(lambda: good.outcome)
    assert good.outcome.code == ErrorCode.NONE and bad.ended and bad.listener_errors >= 2
    requests.stop(Outcome(ErrorCode.INACTIVE))


def test_stopping_while_the_engine_is_stuck_answers_and_refuses_a_restart():
    release = threading.Event()
    requests = Requests(lambda job: release.wait() and Outcome(ErrorCode.NONE), 4)
    requests.start()
    running, waiting = Events(), Events()
    requests.submit(Job(Question('x'), running))
    wait_for(lambda: requests.busy)
    requests.submit(Job(Question('y'), waiting))
    assert isinstance(waiting[0], Queued) and waiting[0].position == 1
    assert not requests.stop(Outcome(ErrorCode.INACTIVE, 'stopped'), 0.05)
    assert running.outcome.code == waiting.outcome.code == ErrorCode.INACTIVE
    with pytest.raises(RuntimeError):
        requests.start()
    release.set()
    wait_for(lambda: not requests.busy)
    requests.start()
    again = Events()
    requests.submit(Job(Question('z'), again))
    wait_for(lambda: again.outcome)
    requests.stop(Outcome(ErrorCode.INACTIVE))
    assert sum(isinstance(event, Outcome) for event in running) == 1


def test_a_timed_out_answer_stops_computing():
    perception = core()
    perception.receive('camera', image(1))
    perception.requests.start()
    events = Events()
    job = Job(Question('words=1000 delay=0.02', deadline_s=0.1), events)
    perception.requests.submit(job)
    wait_for(lambda: events.outcome)
    assert events.outcome.code == ErrorCode.DEADLINE
    assert events.outcome.answer.finish_reason == 'deadline'
    wait_for(lambda: not perception.requests.busy, 1.0)
    assert perception.stop()


def test_idle_time_is_used_to_look_at_the_cameras():
    perception = core()
    perception.start()
    perception.receive('camera', image(1, encoding='rgb9'))
    started = time.monotonic()
    wait_for(lambda: perception.store.counts('camera').rejected == 1, 5.0)
    assert time.monotonic() - started < 3.0
    perception.stop()


@pytest.mark.parametrize('values, words', [
    ({'vision.min_pixels': 10_000, 'vision.max_pixels': 5000}, 'vision.min_pixels 10000 is above'),
    ({'continuous.num_frames': 9}, 'continuous.num_frames 9 is above clip.length 4'),
    ({'continuous.enable': True, 'continuous.question': ' '}, 'continuous.question'),
    ({'cameras': ['=']}, "'=' is neither NAME nor NAME=TOPIC"),
    ({'cameras': ['a='],}, "'a=' is neither NAME nor NAME=TOPIC"),
    ({'generation.temperature': True}, 'generation.temperature must be a number, got True'),
    ({'model.dtype': 'int8', 'queue.size': 0}, 'queue.size must be from 1 to 64'),
])
def test_settings_are_validated_as_a_whole(values, words):
    with pytest.raises(ValueError) as caught:
        Settings.of(values)
    assert words in str(caught.value)


def test_template_files_are_checked(tmp_path):
    bad = tmp_path / 'bad.txt'
    bad.write_text('no place for it')
    for path, words in [(bad, 'must hold {question} once'), (tmp_path / 'none', 'cannot be read')]:
        with pytest.raises(ValueError) as caught:
            core(prompt_template_file=str(path))
        assert words in str(caught.value)
