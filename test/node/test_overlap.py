"""Several questions beside each other through the node's core, on the shipped model."""

from __future__ import annotations

import json
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from harness import wait_for

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Delta, Stage
from qwen_vl_ros.node.continuous import ContinuousMode
from qwen_vl_ros.node.diagnostics import approximate, pipeline_status
from qwen_vl_ros.node.messages import answer_message
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.node.perception import Perception
from qwen_vl_ros.node.requests import Job, Outcome, Question
from qwen_vl_ros.share import share
from qwen_vl_ros.standing import Standing

NOW = 1_700_000_000 * 10**9


def image(number):
    stamp = SimpleNamespace(sec=NOW // 10**9, nanosec=number)
    return SimpleNamespace(
        header=SimpleNamespace(stamp=stamp, frame_id='lens'), encoding='rgb8', width=112,
        height=84, step=336, is_bigendian=0,
        data=np.random.default_rng(number).integers(0, 256, 28224, np.uint8))


class Events(list):
    """A listener that keeps what it is told, and the thread that told it."""

    def __call__(self, job, event):
        self.append(event)
        self.thread = threading.current_thread().name

    @property
    def outcome(self):
        return self[-1] if self and isinstance(self[-1], Outcome) else None


@pytest.fixture(scope='module')
def engine():
    return Engine.load(str(share('models', 'tiny')), device='cpu', max_context=512,
                       max_sequences=4, repetition_window=0)


@pytest.fixture
def perception(engine):
    """Return the core with two cameras, taking questions."""
    engine.forget()
    engine.reset_sessions()
    made = Perception(engine, Settings(cameras=('a', 'b')), lambda: NOW)
    made.start()
    for number, camera in enumerate('ab'):
        made.receive(camera, image(number))
    yield made
    assert made.stop()
    assert not made.requests.busy and not engine.pool._in_use


def ask(perception, text, **fields):
    events = Events()
    job = Job(Question(text, **fields), events)
    perception.requests.submit(job)
    return job, events


def alone(perception, text, **fields):
    """Return the answer of a question that has the engine to itself."""
    events = Events()
    return perception.answer(Job(Question(text, **fields), events)).answer


def test_questions_about_two_cameras_run_beside_each_other(engine):
    core = Perception(engine, Settings(cameras=('a', 'b')), lambda: NOW)
    for number, camera in enumerate('ab'):
        core.receive(camera, image(number))
    words = 'what colour is the largest thing ?'
    expected = [alone(core, words, cameras=(c,)).token_ids for c in 'ab']
    core.start()
    for number, camera in enumerate('ab'):
        core.receive(camera, image(number))
    found = [ask(core, words, cameras=(c,), question_id=c) for c in 'abab']
    wait_for(lambda: all(events.outcome for _, events in found), 60)
    for (job, events), ids in zip(found, expected * 2):
        assert events.outcome.code == ErrorCode.NONE
        assert events.outcome.answer.token_ids == ids
        assert [e.name for e in events if isinstance(e, Stage)][-1] == 'decode'
        assert ''.join(e.text for e in events if isinstance(e, Delta)) == (
            events.outcome.answer.text)
        assert {'queue', 'decode_message', 'image_age'} <= {s.name for s in job.timeline.spans}
        assert events.thread == 'tell'
    values = pipeline_status(core.overlap)[2]
    assert values['max_sequences'] == 4 and values['under_way'] == 0
    assert 0 <= values['bubble_share'] < 1 and values['bubble_ms_per_answer'] > 0
    assert core.stop()
    assert math.isnan(pipeline_status(None)[2]['bubble_share'])


def test_cancel_and_deadline_end_one_question_alone(perception):
    long = {'max_new_tokens': 400, 'json_schema': json.dumps(
        {'type': 'array', 'items': {'type': 'string'}, 'minItems': 100})}
    stays, left = ask(perception, 'what is there ?'), ask(perception, 'x', options=long)
    late = ask(perception, 'x', options=long, deadline_s=0.3)
    wait_for(lambda: any(isinstance(e, Stage) and e.name == 'decode' for e in left[1]), 60)
    perception.requests.cancel(left[0])
    wait_for(lambda: left[1].outcome and stays[1].outcome and late[1].outcome, 60)
    assert left[1].outcome.code == ErrorCode.CANCELLED
    assert late[1].outcome.code == ErrorCode.DEADLINE
    assert stays[1].outcome.code == ErrorCode.NONE


def test_a_question_that_fails_harms_no_other(perception):
    bad = ask(perception, 'what ?', cameras=('c',))
    stale = ask(perception, 'what ?', options={'json_schema': '{'})
    good = ask(perception, 'what ?')
    wait_for(lambda: bad[1].outcome and stale[1].outcome and good[1].outcome, 60)
    assert bad[1].outcome.code == ErrorCode.BAD_REQUEST
    assert "there is no camera 'c'" in bad[1].outcome.message
    assert stale[1].outcome.code == ErrorCode.BAD_SCHEMA
    assert good[1].outcome.code == ErrorCode.NONE


def test_a_stop_ends_what_runs_and_what_waits(engine):
    core = Perception(engine, Settings(cameras=('a',), queue_size=8), lambda: NOW)
    core.start()
    core.receive('a', image(0))
    found = [ask(core, f'number {i}') for i in range(8)]
    wait_for(lambda: core.requests.busy)
    assert core.stop('gone', timeout_s=30)
    assert all(events.outcome is not None for _, events in found)
    assert found[-1][1].outcome == Outcome(ErrorCode.INACTIVE, 'gone')
    with pytest.raises(EngineError):
        ask(core, 'late')
    core.start()
    core.receive('a', image(0))
    again = ask(core, 'again')
    wait_for(lambda: again[1].outcome, 60)
    assert again[1].outcome.code == ErrorCode.NONE
    assert core.stop(timeout_s=30)


def test_turns_of_a_session_are_not_mixed(perception):
    first = ask(perception, 'what is there ?', options={'session_id': 's'})
    second = ask(perception, 'and left of it ?', options={'session_id': 's'})
    wait_for(lambda: first[1].outcome and second[1].outcome, 60)
    alone_tokens = alone(perception, 'and left of it ?').prompt_tokens
    assert second[1].outcome.answer.prompt_tokens > alone_tokens


def test_continuous_mode_takes_cameras_in_turn_and_stays_one_frame_ahead(perception):
    asked = []
    settings = Settings(cameras=('a', 'b'), continuous_enable=True, continuous_cameras='all',
                        continuous_question='what is there ?')

    def start(make, watch):
        job = Job(make(str(len(asked))), watch)
        asked.append((job, watch))
        return job

    mode = ContinuousMode(start, print)
    mode.tick(settings, perception)
    assert [job.question.cameras for job, _ in asked] == [('a',), ('b',)]
    assert {job.question.source for job, _ in asked} == {'continuous'}
    mode.tick(settings, perception)
    assert len(asked) == 2  # neither has come to decoding
    job, watch = asked[0]
    watch(job, Stage('decode'))
    mode.tick(settings, perception)
    assert [j.question.cameras for j, _ in asked[2:]] == [('a',)]
    watch(job, Outcome(ErrorCode.NONE))
    mode.tick(settings, perception)
    assert len(asked) == 3
    # One that is refused is asked again the next time.
    fails = ContinuousMode(lambda make, watch: (_ for _ in ()).throw(
        EngineError(ErrorCode.QUEUE_FULL, 'full')), asked.append)
    fails.tick(settings, perception)
    fails.tick(settings, perception)
    assert asked[3:] == ['standing question put off: full'] * 4


def test_without_overlap_the_standing_question_waits_for_an_idle_engine(engine):
    core = Perception(engine, Settings(cameras=('a',), scheduler_overlap=False,
                                       continuous_enable=True), lambda: NOW)
    core.start()
    core.receive('a', image(0))
    assert core.overlap is None
    asked = []
    mode = ContinuousMode(lambda make, watch: asked.append(make('x')), print)
    core.requests._running.append('somebody')
    mode.tick(core.settings, core)
    assert not asked
    core.requests._running.clear()
    mode.tick(core.settings, core)
    assert asked[0].cameras == ('a',)
    _job, events = ask(core, 'what ?')
    wait_for(lambda: events.outcome, 60)
    assert events.thread == 'engine' and core.stop()


def test_cameras_that_are_due_together_take_turns_where_there_is_one_place(engine):
    core = Perception(engine, Settings(
        cameras=('a', 'b'), scheduler_overlap=False, continuous_enable=True,
        continuous_cameras='all'), lambda: NOW)
    core.start()
    asked, woken = [], []

    def start(make, watch):
        job = Job(make('x'), watch)
        asked.append((job, watch))
        core.requests._running.append(job)
        return job

    mode = ContinuousMode(start, print, lambda: woken.append(True))
    for round_ in range(3):
        for number, camera in enumerate('ab'):
            core.receive(camera, image(10 * round_ + number))
        mode.tick(core.settings, core)
        for _ in 'ab':  # the place of one is the other's, within the same period
            job, watch = asked[-1]
            core.store.select(job.question.cameras, now_ns=NOW, now_received_ns=0)
            core.requests._running.remove(job)
            watch(job, Outcome(ErrorCode.NONE))
            mode.pump(core.settings, core)
    assert [job.question.cameras for job, _ in asked] == [('a',), ('b',)] * 3
    assert len(woken) == 6 and core.stop()


def test_cameras_may_be_named_while_questions_are_taken(perception):
    assert perception.requests.standing == 1
    ContinuousMode(lambda make, watch: Job(make('x'), watch), print).tick(
        Settings(cameras=('a', 'b'), continuous_enable=True, continuous_cameras='all'),
        perception)
    assert perception.requests.standing == 2


@pytest.mark.parametrize('given, names', [('', ('a',)), ('all', ('a', 'b')), ('b', ('b',)),
                                          (' b, /a ,b', ('b', 'a'))])
def test_cameras_of_the_standing_question(given, names):
    assert Settings(cameras=('a', 'b'), continuous_cameras=given).standing_cameras() == names


def test_an_unknown_camera_is_refused_by_name():
    with pytest.raises(ValueError, match=r"continuous.cameras: there is no camera 'c'"):
        Settings.of({'cameras': ['a', 'b'], 'continuous.cameras': 'a,c'})


def test_micro_batches_below_one_are_labelled(engine):
    core = Perception(engine, Settings(
        cameras=('a',), scheduler_micro_batch=0.5, pruning_min_units=1), lambda: NOW)
    core.start()
    core.receive('a', image(0))
    names = approximate(engine.info, core.settings, core.overlap)
    assert pipeline_status(core.overlap, names)[2]['approximate'] == 'micro_batch'
    job, events = ask(core, 'what ?', options={'keep_ratio': 0.5})
    wait_for(lambda: events.outcome, 60)
    message = answer_message(job, events.outcome)
    assert list(message.approximate) == ['micro_batch', 'keep_ratio']
    started = time.monotonic()
    assert core.stop() and time.monotonic() - started < 5


def test_a_camera_is_one_frame_ahead():
    turns = Standing(('a', 'b'), ahead=1)
    assert [turns.next() for _ in range(3)] == ['a', 'b', None]
    turns.decoding('b')
    assert turns.next(['a']) is None and turns.next() == 'b'
    turns.decoding('b')
    assert turns.next() is None  # two of b are being decoded
    turns.ended('b', True)
    assert turns.next() == 'b'
    turns.ended('a', False)
    turns.ended('a', False)  # told twice
    assert turns.next() == 'a' and turns.next() is None
    strict = Standing(('a',), ahead=0)
    assert strict.next() == 'a'
    strict.decoding('a')
    assert strict.next() is None
    strict.ended('a', True)
    assert strict.next() == 'a'
