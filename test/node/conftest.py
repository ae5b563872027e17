"""Fixtures: the node as a process, cameras as processes, and a client."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip('rclpy', reason='rclpy is not installed')

import rclpy
from harness import Client, Program


@pytest.fixture(scope='session')
def ros():
    rclpy.init()
    yield
    rclpy.shutdown()


def _started(running):
    """Yield a function that starts a Python program; all end with the fixture."""
    def start(*command, **env):
        running.append(Program(*map(str, command), **env))
        return running[-1]

    yield start
    for program in running:
        program.kill()


def _node_starter(programs):
    def start(script='fake_node.py', wait='ready for questions', **parameters):
        arguments = ['--ros-args']
        for name, value in parameters.items():
            arguments += ['-p', f"{name.replace('__', '.')}:={value}"]
        program = programs(script, *arguments)
        if wait:
            program.says(wait)
        return program

    return start


@pytest.fixture
def programs():
    """Return a function that starts a Python program; it ends with the test."""
    yield from _started([])


@pytest.fixture
def start_node(programs):
    """Return a function that starts the node with parameters (``__`` for a dot)."""
    return _node_starter(programs)


@pytest.fixture
def client(ros):
    made = Client()
    yield made
    made.close()


@pytest.fixture(scope='module')
def standing(ros):
    """Start a node and a 64x48 camera at 30 Hz once for all tests of a file."""
    running = []
    for programs in _started(running):
        programs('publish_frames.py', 64, 48, 30, 0, 'BEST_EFFORT')
        program = _node_starter(programs)()
        client = Client()
        client.await_status('camera topic status',
                            lambda level, message, values: int(values['frames_received']) > 0)
        client.close()
        yield program


@pytest.fixture
def node(standing):
    """Return the standing node, which a test must leave idle and with its own parameters."""
    yield standing
    assert standing.process.poll() is None, standing.output
