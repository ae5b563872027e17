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


@pytest.fixture
def programs():
    """Return a function that starts a Python program; all end with the test."""
    running = []

    def start(*command, **env):
        running.append(Program(*map(str, command), **env))
        return running[-1]

    yield start
    for program in running:
        program.kill()


@pytest.fixture
def start_node(programs):
    """Return a function that starts the node with parameters (``__`` for a dot)."""
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
def client(ros):
    made = Client()
    yield made
    made.close()
