"""The demo as ``make demo`` runs it, and the recording that it makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import START_NS

from qwen_vl_ros.cli.bag import Bag
from qwen_vl_ros.cli.replay import Counts, Plan, read_questions, replay
from qwen_vl_ros.engine.types import Answer, Done
from qwen_vl_ros.measure.report import build_report, write_report
from qwen_vl_ros.pipeline import AskOptions, frame_from_message
from tools import demo
from tools.make_bags import __main__ as make_bags
from tools.make_bags import scenes

ROOT = Path(__file__).parents[2]
TINY = ROOT / 'models' / 'tiny'


@pytest.fixture(scope='module', autouse=True)
def renderer():
    """Build the scene renderer where nobody has."""
    scenes.ready_renderer()


def run_demo(output, *more):
    return subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'demo.py'), '--output', str(output), *more],
        cwd=output, capture_output=True, text=True, timeout=300,
        env={**os.environ, 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'})


def test_shots_are_the_same_every_time_and_cover_all_families():
    first, again = scenes.draw_shots(seed=3), scenes.draw_shots(seed=3)
    assert first == again and scenes.draw_shots(seed=4) != first
    asked = {question.family for shot in first for question in shot.asked}
    assert asked == {*scenes.STILL, scenes.OPEN, 'change'}
    assert [shot.moving for shot in first] == [False] * 6 + [True] * 2


def test_frames_of_a_shot():
    shots = scenes.draw_shots(stills=1, moves=1)
    got = list(scenes.frames(shots, START_NS))
    assert len(got) == 30
    assert [s - START_NS for s, _ in got[:3]] == [0, 33333333, 66666667]
    pictures = [rgb.astype(int) for _, rgb in got]
    noise = np.abs(pictures[0] - pictures[1])
    assert 1 < noise.mean() < 2 and noise.max() == 2 * scenes.FLICKER
    # The thing moves where the clip of four frames has its middle.
    steps = [np.abs(a - b).max() for a, b in pairwise(pictures[15:])]
    assert int(np.argmax(steps)) == scenes.MOVED_AT - 1
    assert scenes.ASKED_AT - scenes.MOVED_AT == 1


def test_demo_answers_every_question(checkpoint, tmp_path):
    done = run_demo(tmp_path, '--model', str(checkpoint))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / 'report.json').read_text())
    asked = report['summary']['questions']
    assert asked > 30 and report['summary']['answered'] == asked
    right, known = report['summary']['correct'], report['summary']['with_known_answer']
    assert re.search(rf'^  all +{right} of {known}$', done.stdout, re.M)
    assert 'report.html' in done.stdout
    clips = [e for e in report['exchanges'] if 'moved' in e['question']]
    stills = [e for e in report['exchanges'] if 'number' in e['question']]
    assert clips[0]['vision_tokens_in'] == 2 * stills[0]['vision_tokens_in'] == 384
    bag = tmp_path / f'scenes_{demo.RECORDING}_0'
    with Bag(bag) as opened:
        messages = list(opened.messages(opened.choose([demo.TOPIC])))
    truth = json.loads((bag / 'questions.json').read_text())
    for exchange, row in zip(report['exchanges'], truth):
        assert exchange['question'] == row['question']
        index = round(row['at'] * 30)
        frame = frame_from_message(messages[index][2])
        assert exchange['frames'][0]['stamp_ns'] == frame.stamp_ns
    # A second run takes the recording that is there.
    before = (bag / 'metadata.yaml').stat().st_mtime_ns
    again = run_demo(tmp_path, '--model', str(checkpoint), '--compressed')
    assert again.returncode == 0 and 'rendering' not in again.stdout
    assert (bag / 'metadata.yaml').stat().st_mtime_ns == before


class Oracle:
    """Answers from the truth, by question and by the stamp of the newest picture."""

    def __init__(self, truth):
        self.truth = truth

    def answer(self, request, timeline, cancelled=lambda: False):
        key = (request.question, request.visuals[0].frames[-1].stamp_ns)
        yield Done(Answer(self.truth[key], 'stop', (1,), 1.0, 1, 1, 1, timeline))


def test_true_answers_are_counted_as_right(tmp_path, capsys):
    bag = demo.make_recording(tmp_path, seed=5)
    asks = read_questions(bag / 'questions.json', 1)
    start = make_bags.START_NS
    truth = {(a.text, start + round(round(a.at_s * 30) * 1e9 / 30)): a.expected or 'free words'
             for a in asks}
    assert len(truth) == len(asks)
    with Bag(bag) as opened:
        exchanges = list(replay(
            opened, Oracle(truth), opened.choose([demo.TOPIC]), Plan(tuple(asks), rate=30),
            AskOptions(), Counts()))
    report = build_report('Test', exchanges, model={}, source={})
    known = sum(a.expected is not None for a in asks)
    assert report['summary']['correct'] == report['summary']['with_known_answer'] == known > 30
    write_report(tmp_path, report, exchanges)
    demo.show_truth(tmp_path, bag)
    assert re.search(rf'^  all +{known} of {known}$', capsys.readouterr().out, re.M)


def test_demo_without_a_model_says_so(tmp_path):
    done = run_demo(tmp_path, '--model', str(tmp_path / 'absent'))
    assert done.returncode == 2
    assert str(tmp_path / 'absent') in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.skipif(not (TINY / 'config.json').exists(), reason='models/tiny is not in this tree')
def test_the_shipped_checkpoint_knows_the_answers(tmp_path):
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stderr
    total = json.loads((tmp_path / 'report.json').read_text())['summary']
    assert total['correct'] >= 0.8 * total['with_known_answer'], done.stdout
