"""``qwen_vl replay``: the same answers every time, key frames, bad frames, the report."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from conftest import START_NS, frames

from qwen_vl_ros.cli.bag import Bag
from qwen_vl_ros.cli.main import main
from qwen_vl_ros.cli.replay import Ask, Counts, Plan, replay
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Answer, Done
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.pipeline import AskOptions
from tools.make_bags.writer import CameraBag

RAW, JPEG = '/camera/front/image_raw', '/camera/front/image_raw/compressed'


class Echo:
    """Stands for an engine where only the pictures that arrive matter."""

    def __init__(self):
        self.requests = []

    def answer(self, request, timeline=None, cancelled=lambda: False):
        self.requests.append(request)
        timeline = timeline or Timeline()
        with timeline.stage('encode'):
            pass
        yield Done(Answer('seen', 'stop', (1,), 1.0, 4, 4, 9, timeline))


def run_plan(path, plan, topics=()):
    engine, counts = Echo(), Counts()
    with Bag(path) as bag:
        exchanges = list(replay(bag, engine, bag.choose(topics), plan, AskOptions(), counts))
    return engine, counts, exchanges


def ask(**more):
    return (Ask('What?', **more),)


@pytest.mark.parametrize('rate, expected', [
    (30, list(range(30))), (15, list(range(0, 30, 2))), (10, list(range(0, 30, 3))),
    (1, [0]), (2, [0, 15]), (1000, list(range(30))), (4, [0, 8, 15, 23])])
def test_key_frames_of_a_rate(bags, rate, expected):
    engine, counts, _ = run_plan(bags['mcap'], Plan(ask(), rate=rate))
    stamps = [s for s, _ in frames()]
    assert [r.visuals[0].frames[0].stamp_ns for r in engine.requests] == [
        stamps[i] for i in expected]
    assert counts.key_frames == len(expected)


def test_start_limit_and_clip(bags):
    stamps = [s for s, _ in frames()]
    engine, _, _ = run_plan(
        bags['sqlite3'], Plan(ask(num_frames=4), rate=10, start_s=0.5, limit=2))
    got = [[f.stamp_ns for f in r.visuals[0].frames] for r in engine.requests]
    assert got == [stamps[15:16], stamps[15:19]]


def test_two_cameras_wait_for_each_other(tmp_path):
    with CameraBag(tmp_path / 'bag') as bag:
        for i, (stamp_ns, rgb) in enumerate(frames(12)):
            bag.add_picture('/left', stamp_ns, rgb, jpeg=False)
            if i >= 6:
                bag.add_picture('/right', stamp_ns - 1_000_000, rgb, raw=False)
    engine, _, exchanges = run_plan(
        tmp_path / 'bag', Plan(ask(), rate=15), ['/left/image_raw', '/right/image_raw/compressed'])
    stamps = [s for s, _ in frames(12)]
    assert [tuple(v.frames[0].stamp_ns for v in r.visuals) for r in engine.requests] == [
        (stamps[i], stamps[i] - 1_000_000) for i in (6, 8, 10)]
    assert [f.camera for f in exchanges[0].frames] == [
        '/left/image_raw', '/right/image_raw/compressed']


def test_bad_frames_are_counted_and_the_last_good_one_stays(tmp_path):
    with CameraBag(tmp_path / 'bag') as bag:
        for i, (stamp_ns, rgb) in enumerate(frames(9)):
            if i in (3, 4):
                header = bag.header(stamp_ns, 'optical')
                bag.add('/c/image_raw/compressed', stamp_ns + 8_000_000, bag.message(
                    'sensor_msgs/msg/CompressedImage', header=header, format='jpeg',
                    data=np.frombuffer(b'\xff\xd8\xff cut', np.uint8)))
            else:
                bag.add_picture('/c', stamp_ns, rgb, raw=False)
    engine, counts, exchanges = run_plan(tmp_path / 'bag', Plan(ask(), rate=30))
    stamps = [s for s, _ in frames(9)]
    assert [r.visuals[0].frames[0].stamp_ns for r in engine.requests] == [
        stamps[i] for i in (0, 1, 2, 2, 2, 5, 6, 7, 8)]
    assert counts.rejected == {'/c/image_raw/compressed': 2}
    assert 'JPEG of 7 bytes' in counts.last_reason
    assert all(e.answer for e in exchanges)


def test_no_good_frame_and_stale_frame_are_answers_with_a_code(tmp_path):
    with CameraBag(tmp_path / 'bag') as bag:
        for i in range(3):
            time_ns = START_NS + i * 10**9
            header = bag.header(START_NS - 5 * 10**9, 'optical')
            bag.add('/c', time_ns, bag.message(
                'sensor_msgs/msg/Image', header=header, height=2, width=2,
                encoding='rgb8' if i else 'secret', is_bigendian=0, step=6,
                data=np.zeros(12, np.uint8)))
    _, _, exchanges = run_plan(tmp_path / 'bag', Plan(ask(), max_age_s=6.5))
    assert [e.error_code for e in exchanges] == ['NO_IMAGE', '', 'STALE_IMAGE']
    assert "'secret'" in exchanges[0].error and '7.00 s old' in exchanges[2].error


def test_odd_stamps_are_aged_from_reception_and_repeated_unchanged(tmp_path):
    with CameraBag(tmp_path / 'bag') as bag:
        for i in range(3):
            bag.add('/c', START_NS + i * 10**9, bag.message(
                'sensor_msgs/msg/Image', header=bag.header(0, 'optical'), height=2, width=2,
                encoding='rgb8', is_bigendian=0, step=6, data=np.zeros(12, np.uint8)))
    _, _, exchanges = run_plan(tmp_path / 'bag', Plan(ask(), max_age_s=0.5))
    assert [e.error_code for e in exchanges] == ['', '', '']
    assert exchanges[0].frames[0].stamp_ns == 0


def test_questions_at_moments(bags):
    plan = Plan((Ask('late', at_s=0.5, num_frames=3), Ask('early', at_s=0.05), Ask('now', at_s=0),
                 Ask('never', at_s=5)), rate=30)
    engine, counts, exchanges = run_plan(bags['mcap'], plan)
    stamps = [s for s, _ in frames()]
    assert [(r.question, [f.stamp_ns for f in r.visuals[0].frames]) for r in engine.requests] == [
        ('now', stamps[0:1]), ('early', stamps[2:3]), ('late', stamps[13:16])]
    assert counts.key_frames == 3 and len(exchanges) == 3


def test_reading_stops_when_all_is_asked(bags):
    _, counts, _ = run_plan(bags['mcap'], Plan((Ask('now', at_s=0.1),), rate=30))
    assert counts.messages == 4


def answers(report):
    return [(e['time_ns'], e['question'], e['text'], e['confidence'], e['output_tokens'])
            for e in report['exchanges']]


def run_json(capsys, *argv):
    code = main(['replay', *map(str, argv), '--json'])
    return code, json.loads(capsys.readouterr().out)


def test_same_bag_same_answers(bags, quick, capsys):
    argv = ['-q', 'What does the camera see?', '-q', 'And now?', '--rate', '4', *quick]
    code, first = run_json(capsys, bags['mcap'], *argv)
    assert code == 0 and len(first['exchanges']) == 8
    assert len({e['text'] for e in first['exchanges']}) > 1
    _, again = run_json(capsys, bags['mcap'], *argv)
    assert answers(again) == answers(first)
    _, sqlite = run_json(capsys, bags['sqlite3'], *argv)
    assert answers(sqlite) == answers(first)
    assert first['summary']['answered'] == first['summary']['questions'] == 8
    age = next(r for r in first['stages'] if r['stage'] == 'image_age')
    assert age['mean_ms'] == age['max_ms'] == 8.0
    assert {r['stage'] for r in first['stages']} >= {
        'decode_message', 'patches', 'encode', 'prefill', 'first_token', 'token'}


def test_seeded_sampling_is_the_same_every_time(bags, quick, capsys):
    argv = ['-q', 'What?', '--rate', '2', *quick, '--temperature', '1.5', '--seed', '3']
    first = answers(run_json(capsys, bags['mcap'], *argv)[1])
    assert answers(run_json(capsys, bags['mcap'], *argv)[1]) == first


def test_answers_are_those_of_the_engine_alone(bags, checkpoint, quick, capsys):
    from qwen_vl_ros.engine.types import Request, Visual
    from qwen_vl_ros.frame import Frame

    _, report = run_json(capsys, bags['mcap'], '-q', 'What?', '--limit', '1', *quick)
    engine = Engine.load(str(checkpoint), device='cpu', min_pixels=784)
    _, rgb = next(iter(frames()))
    done = list(engine.answer(Request('What?', (Visual((Frame.from_rgb(rgb),)),),
                                      max_new_tokens=4)))[-1]
    assert report['exchanges'][0]['text'] == done.answer.text


def test_text_output_and_report(bags, quick, capsys, tmp_path):
    out = tmp_path / 'report'
    code = main(['replay', str(bags['mcap']), '-q', 'Where is <the> "box" & why?', '--rate', '2',
                 '--report', str(out), *quick])
    text = capsys.readouterr().out
    assert code == 0
    assert '2 of 2 questions answered' in text and re.search(r'^encode +2 ', text, re.M)
    report = json.loads((out / 'report.json').read_text())
    assert report['kind'] == 'measured' and report['format'] == 'qwen_vl_ros.report'
    assert report['source'] == {
        'bag': 'mcap', 'duration_s': 0.967, 'topics': [RAW], 'messages': 30, 'key_frames': 2,
        'damaged_messages': 0, 'rejected_frames': 0, 'last_reason': ''}
    assert report['exchanges'][1]['frames'][0]['stamp_ns'] == START_NS + 500_000_000
    page = (out / 'report.html').read_text()
    assert page.count('data:image/jpeg;base64,') == 2
    assert 'Where is &lt;the&gt; &quot;box&quot; &amp; why?' in page and '<the>' not in page
    assert '<svg' in page and '<title>encode ' in page
    # One file: nothing is loaded from anywhere.
    assert not re.search(r'(?:src|href)="(?!data:)|url\(|<script|@import', page)


def test_questions_file_with_known_answers(bags, quick, capsys, tmp_path):
    path = tmp_path / 'asked.json'
    path.write_text(json.dumps(['Everywhere?', {'question': 'Once?', 'at': 0.4, 'frames': 2,
                                                'expected': 'surely not this'}]))
    code, report = run_json(capsys, bags['mcap'], '--questions', path, '--rate', '3', *quick)
    assert code == 0
    asked = [(round((e['time_ns'] - START_NS) / 1e9, 1), e['question'])
             for e in report['exchanges']]
    assert asked == [(0.0, 'Everywhere?'), (0.3, 'Everywhere?'), (0.7, 'Everywhere?'),
                     (0.7, 'Once?')]
    assert report['summary']['with_known_answer'] == 1 and report['summary']['correct'] == 0
    right = report['exchanges'][3]['text']
    path.write_text(json.dumps([{'question': 'Once?', 'at': 0.4, 'frames': 2,
                                 'expected': f' {right.upper()}. '}]))
    main(['replay', str(bags['mcap']), '--questions', str(path), '--rate', '3', *quick])
    assert '1 of 1 right' in capsys.readouterr().out


@pytest.mark.parametrize('content, expected', [
    ('[', 'does not hold JSON'), ('{}', 'JSON list'), ('[3]', 'entry 1: expected a text'),
    ('["a", {"question": 3}]', 'entry 2'), ('[{"question": "a", "att": 1}]', "key 'att'"),
    ('[{"question": "a", "at": "x"}]', "'at' is 'x'"), ('[" "]', 'empty'), ('[]', 'nothing to'),
    ('[{"question": "a", "frames": 0}]', "'frames' is 0"),
    ('[{"question": "a", "expected": 3}]', "'expected' is 3")])
def test_bad_questions_file(bags, quick, capsys, tmp_path, content, expected):
    path = tmp_path / 'asked.json'
    path.write_text(content)
    assert main(['replay', str(bags['mcap']), '--questions', str(path), *quick]) == 2
    err = capsys.readouterr().err
    assert expected in err and len(err.strip().splitlines()) == 1


def test_compare(bags, quick, capsys, tmp_path):
    base = [str(bags['mcap']), '-q', 'What?', '--rate', '2', *quick]
    assert main(['replay', *base, '--report', str(tmp_path / 'a')]) == 0
    assert main(['replay', *base, '-q', 'More?', '--seed', '7', '--temperature', '2',
                 '--report', str(tmp_path / 'b'), '--compare', str(tmp_path / 'a')]) == 0
    assert 'questions are in one run only' in capsys.readouterr().out
    assert main(['compare', str(tmp_path / 'a'), str(tmp_path / 'a' / 'report.json')]) == 0
    assert '2 of 2 answers are the same' in capsys.readouterr().out
    assert main(['compare', str(tmp_path / 'a'), str(tmp_path / 'b'), '--json']) == 0
    result = json.loads(capsys.readouterr().out)
    assert result['matched'] == 2 and result['unmatched'] == 2
    assert len(result['different']) == 2 - result['same']
    assert {r['name'] for r in result['stages']} >= {'encode', 'prefill'}


def test_damage_in_the_middle_of_a_bag(bags, quick, capsys, tmp_path):
    folder = shutil.copytree(bags['sqlite3'], tmp_path / 'bag')
    path = next(folder.glob('*.db3'))
    data = bytearray(path.read_bytes())
    data[len(data) // 2:] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    code = main(['replay', str(folder), '-q', 'What?', '--rate', '2', *quick])
    err = capsys.readouterr().err
    assert code == 2 and 'cannot be read' in err and 'Traceback' not in err
