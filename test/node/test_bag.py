"""
The main job over DDS: a player process, the node with the real engine, a client process.

What the node answers has to be what the replay, which reads the same bag in code, answers.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from builtin_interfaces.msg import Duration
from harness import PATIENCE_S, wait_for
from qwen_vl_msgs.action import AnswerQuestion
from sensor_msgs.msg import Image

pytestmark = pytest.mark.ros
ROOT = Path(__file__).parents[2]
TOPIC = '/camera/front/image_raw'

#: Questions asked of the many in the bag, evenly chosen: one machine, two cores.
ASKED = 12


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    folder = tmp_path_factory.mktemp('played') / 'scenes'
    subprocess.run([sys.executable, '-m', 'tools.make_bags', str(folder), '--seed', '3'],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope='module')
def asked(bag):
    """Return the questions to ask in the order of the bag, a clip among them if there is one."""
    questions = json.loads((bag / 'questions.json').read_text())
    clips = [q for q in questions if q['frames'] > 1][:1]
    stills = [q for q in questions if q['frames'] == 1 and q['expected']]
    chosen = stills[::max(1, len(stills) // (ASKED - len(clips)))][:ASKED - len(clips)] + clips
    return sorted(chosen, key=lambda q: q['at'])


@pytest.fixture(scope='module')
def replayed(bag, asked, tmp_path_factory):
    """Return the replay's answers."""
    folder = tmp_path_factory.mktemp('report')
    questions = folder / 'questions.json'
    questions.write_text(json.dumps(asked))
    subprocess.run(
        [sys.executable, '-m', 'qwen_vl_ros.cli.main', 'replay', str(bag), '--questions',
         str(questions), '--model', str(ROOT / 'models/tiny'), '--device', 'cpu', '--rate', '30',
         '--report', str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((folder / 'report.json').read_text())
    return [exchange['text'] for exchange in report['exchanges']]


def test_the_node_answers_about_a_played_bag_as_the_replay_does(
        programs, client, bag, asked, replayed):
    node = programs(
        '-m', 'qwen_vl_ros.node.main', '--ros-args', '-p', f'model.path:={ROOT}/models/tiny',
        '-p', 'model.device:=cpu', '-p', 'use_sim_time:=true', '-p', 'clip.length:=8',
        '-p', f"cameras:=['front={TOPIC}']")
    node.says('ready for questions', 120)
    player = programs('play_bag.py', bag, TOPIC)
    player.says('ready')
    stamp, right, said = '', 0, []
    for question in asked:
        before, new = player.output.count('at '), question['at'] != stamp
        if new:
            stamp = question['at']
            player.process.stdin.write(f'{stamp}\n')
            player.process.stdin.flush()
            wait_for(lambda seen=before: player.output.count('at ') > seen, PATIENCE_S)
        feedback = []
        handle = client.send_goal(
            question['question'], feedback, num_frames=question['frames'],
            deadline=Duration(sec=60))
        _, result = client.result(handle, 60)
        assert result.error_code == AnswerQuestion.Result.NONE, result.error_msg
        answer = result.answer
        header = answer.header.stamp
        assert f'{header.sec}.{header.nanosec:09d}' == player.output.split()[-1]
        wait_for(lambda parts=feedback, text=answer.text: (
            ''.join(f.delta for _, f in parts) == text))
        metrics = answer.metrics
        assert metrics.prefill > 0 and metrics.time_to_first_token > 0
        assert metrics.vision > 0 or not new  # a picture is encoded once
        assert metrics.total >= metrics.time_to_first_token and metrics.vision_tokens_in > 0
        said.append(answer.text)
        right += answer.text.strip(' .').lower() == str(question['expected']).lower()
    saliency = client.collect(Image, '/qwen_vl/saliency', 1)
    time.sleep(0.5)
    result = client.result(client.send_goal(asked[-1]['question'], keep_ratio=0.5), 60)[1]
    kept = result.answer.metrics.vision_tokens_kept / result.answer.metrics.vision_tokens_in
    assert 0.45 < kept < 0.55
    wait_for(lambda: saliency)
    shown = np.frombuffer(saliency[0].data, np.uint8)
    assert set(shown) == {64, 255} and (saliency[0].width, saliency[0].height) == (448, 336)
    assert abs((shown == 255).mean() - kept) < 0.02
    assert said == replayed
    assert right >= len(asked) // 2, list(zip(asked, said))
    assert 'Traceback' not in node.output
