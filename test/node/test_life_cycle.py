"""Life cycle, parameters, signals, clocks: the node as a process that others steer."""

import signal
import time

import pytest
from builtin_interfaces.msg import Duration, Time
from harness import HERE, wait_for
from qwen_vl_msgs.srv import Ask
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

pytestmark = pytest.mark.ros
CODES = Ask.Response
ERROR = 2


def test_states_and_what_they_refuse(start_node, programs, client):
    start_node(autostart='false', wait=None, diagnostic_updater__period=0.2)
    programs('publish_frames.py', 64, 48, 30, 0, 'BEST_EFFORT')
    client.await_status('model', lambda level, message, values: message == 'unconfigured')
    refused = client.ask('what?')
    assert refused.error_code == CODES.INACTIVE
    assert refused.error_msg == 'the node is unconfigured; activate it first'
    assert client.change_state('configure') and client.state() == 'inactive'
    assert client.ask('what?').error_code == CODES.INACTIVE
    assert client.node.count_subscribers('/camera/image_raw') == 0
    assert client.change_state('activate') and client.state() == 'active'
    wait_for(lambda: client.ask('what?').answer.text)
    running = client.send_goal('words=1000 delay=0.05')
    waiting = client.send_goal('words=1')
    assert client.change_state('deactivate') and client.state() == 'inactive'
    for handle in (running, waiting):
        result = client.result(handle)[1]
        assert result.error_code == CODES.INACTIVE and 'deactivated' in result.error_msg
    assert client.ask('what?').error_code == CODES.INACTIVE
    assert client.change_state('activate')
    # Nothing was kept from before, and new frames come.
    wait_for(lambda: client.ask('what?').answer.text)
    assert client.change_state('deactivate') and client.change_state('cleanup')
    assert client.state() == 'unconfigured'
    assert client.change_state('configure') and client.change_state('activate')
    wait_for(lambda: client.ask('what?').answer.text)


def test_failed_configuration_says_why_and_can_be_repeated(start_node, client):
    program = start_node(model__path='/missing/model', wait='configuration failed')
    assert program.output.count('\n') == 1
    assert 'configuration failed: /missing/model: no such folder' in program.output
    client.await_status('model', lambda level, message, values: (
        level == ERROR and message == '/missing/model: no such folder'))
    assert client.state() == 'unconfigured'
    assert not client.change_state('configure')
    assert client.set(model__path='')[0].successful
    assert client.change_state('configure') and client.change_state('activate')
    client.await_status('model', lambda level, message, values: message == 'active')


def test_the_real_engine_refuses_folders_that_it_cannot_use(programs, client, tmp_path):
    empty, foreign, cut = tmp_path / 'empty', tmp_path / 'foreign', tmp_path / 'cut'
    for folder in (empty, foreign, cut):
        folder.mkdir()
    (foreign / 'config.json').write_text('{"model_type": "llama", "architectures": ["Llama"]}')
    module = ('-m', 'qwen_vl_ros.node.main', '--ros-args', '-p')
    program = programs(*module, f'model.path:={tmp_path}/nowhere')
    program.says('configuration failed', 60)
    assert f'{tmp_path}/nowhere' in program.output
    for path, words in [(empty, 'config.json'), (foreign, 'llama')]:
        before = len(program.output)
        assert client.set(model__path=str(path))[0].successful
        assert not client.change_state('configure')
        wait_for(lambda start=before: 'configuration failed' in program.output[start:])
        said = program.output[before:]
        assert str(path) in said and words in said and said.count('\n') == 1
    before = len(program.output)
    assert client.set(model__device='cuda')[0].successful
    assert not client.change_state('configure')
    wait_for(lambda: 'configuration failed' in program.output[before:])
    assert client.state() == 'unconfigured' and 'Traceback' not in program.output


@pytest.mark.parametrize('name, value, words', [
    ('queue.size', 'many', 'queue.size'),
    ('queue.size', '0', 'queue.size'),
    ('max_image_age_s', 'long', 'max_image_age_s must be a number'),
    ('cameras', "['front','front']", "'front' comes twice"),
])
def test_bad_parameters_at_start_end_with_one_line(programs, tmp_path, name, value, words):
    file = tmp_path / 'parameters.yaml'
    file.write_text(f'qwen_vl:\n  ros__parameters:\n    {name}: {value}\n')
    program = programs('fake_node.py', '--ros-args', '--params-file', str(file))
    assert program.wait() == 1
    assert program.output.count('\n') == 1 and words in program.output, program.output


def test_help_names_the_parameters_and_ends(programs):
    program = programs('-m', 'qwen_vl_ros.node.main', '--help')
    assert program.wait() == 0
    assert 'usage: qwen_vl_node' in program.output and 'max_image_age_s (2.0)' in program.output


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_end_an_idle_and_a_busy_node(start_node, client, number):
    for question in (None, 'words=1000 delay=0.05', 'words=1 stuck=60'):
        program = start_node(max_image_age_s=0.0)
        if question:
            good = Image(width=2, height=2, step=6, encoding='rgb8', data=bytes(12))
            feedback = []
            client.send_goal(question, feedback, images=[good])
            wait_for(lambda found=feedback: len(found) > 2)
        code, seconds = program.end(number)
        assert code in (0, 130) and seconds < 15.0  # a stuck question would take 60
        assert 'Traceback' not in program.output and 'rror' not in program.output, program.output


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_every_goal_and_call_its_result(start_node, client, number):
    program = start_node(max_image_age_s=0.0)
    feedback, good = [], Image(width=2, height=2, step=6, encoding='rgb8', data=bytes(12))
    goals = [client.send_goal('words=1000 delay=0.05', feedback, images=[good])]
    goals += [client.send_goal('words=1', images=[good]) for _ in range(2)]
    results = [goal.get_result_async() for goal in goals]
    called = client.future(Ask, '/qwen_vl/ask', Ask.Request(question='words=1'))
    client.await_status('inference', lambda level, message, values: values['queue_depth'] == '3')
    wait_for(lambda: len(feedback) > 2)
    code, _ = program.end(number)
    assert code == 0 and 'Traceback' not in program.output, program.output
    wait_for(lambda: called.done() and all(result.done() for result in results), 5.0)
    for result in [called.result(), *(result.result().result for result in results)]:
        assert result.error_code == CODES.INACTIVE and 'shut down' in result.error_msg


def test_sigint_during_a_slow_load(programs):
    program = programs('-c', (
        f"import sys, time; sys.path.insert(0, '{HERE}')\n"
        'from fake_engine import FakeEngine\n'
        'from qwen_vl_ros.node.main import main\n'
        'def load(settings):\n'
        "    print('loading', flush=True); time.sleep(60); return FakeEngine()\n"
        'main(load=load)\n'))
    program.says('loading')
    code, seconds = program.end()
    assert code in (0, 130) and seconds < 15.0 and 'Traceback' not in program.output


def test_simulated_time_without_a_clock(start_node, programs, client):
    start_node(use_sim_time='true')
    programs('publish_frames.py', 64, 48, 30, 0, 'BEST_EFFORT')
    # ROS time stands at 0: ages count from reception, deadlines on the steady clock.
    wait_for(lambda: client.ask('what?').error_code == CODES.NONE)
    slow = client.ask(
        'words=1000 delay=0.05', deadline=Duration(nanosec=500_000_000), timeout_s=3.0)
    assert slow.error_code == CODES.DEADLINE


def test_ages_follow_simulated_time(start_node, client):
    start_node(use_sim_time='true', max_image_age_s=1.0)
    clock = client.node.create_publisher(Clock, '/clock', 10)
    camera = client.node.create_publisher(Image, '/camera/image_raw', 5)
    wait_for(lambda: camera.get_subscription_count() and clock.get_subscription_count())
    time.sleep(0.6)

    def at(seconds):
        for _ in range(5):
            clock.publish(Clock(clock=Time(sec=seconds)))
            time.sleep(0.1)

    at(100)
    picture = Image(width=8, height=8, step=24, encoding='rgb8', data=bytes(192))
    picture.header.stamp.sec = 100
    camera.publish(picture)
    wait_for(lambda: client.ask('what?').error_code == CODES.NONE)
    time.sleep(1.5)  # the bag pauses: the picture does not grow older
    assert client.ask('what?').error_code == CODES.NONE
    at(103)
    wait_for(lambda: client.ask('what?').error_code == CODES.STALE_IMAGE)
    assert '3.00 s old' in client.ask('what?').error_msg


def test_a_transition_that_is_not_possible_is_answered(node, client):
    from lifecycle_msgs.srv import ChangeState
    for number in (1, 99):  # configure while active; no such transition
        request = ChangeState.Request()
        request.transition.id = number
        assert not client.call(ChangeState, '/qwen_vl/change_state', request).success


def test_a_parameter_of_no_type_is_answered_with_the_reason(node, client):
    from rcl_interfaces.msg import Parameter, ParameterValue
    from rcl_interfaces.srv import SetParameters
    request = SetParameters.Request(parameters=[
        Parameter(name='queue.size', value=ParameterValue(type=200))])
    result, = client.call(SetParameters, '/qwen_vl/set_parameters', request).results
    assert not result.successful and '200' in result.reason


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_a_signal_before_the_node_is_up_ends_it_quietly(name):
    import subprocess
    import sys
    code = (
        'import os, signal, sys, types\n'
        "module = types.ModuleType('qwen_vl_ros.node.main')\n"
        f'module.main = lambda: (os.kill(os.getpid(), signal.{name}), signal.pause())\n'
        "sys.modules['qwen_vl_ros.node.main'] = module\n"
        'from qwen_vl_ros.node.entry import main\n'
        'main()\n')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (130, b'')
