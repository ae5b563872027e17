"""A client for tests that talks to the node as any other process does: over DDS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from qwen_vl_msgs.action import AnswerQuestion
from qwen_vl_msgs.srv import Ask
from rcl_interfaces.msg import Parameter as ParameterMsg
from rcl_interfaces.srv import GetParameters, SetParameters, SetParametersAtomically
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter

HERE = Path(__file__).parent

#: Generous, for a loaded machine; a test that passes never waits that long.
PATIENCE_S = 20.0


def wait_for(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> object:
    """Return the first true value of ``condition``; fails when there is none in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f'not true within {timeout_s} s')


class Program:
    """A child process whose output is kept."""

    def __init__(self, *command: str, **env: str) -> None:
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, '-u', *command], cwd=HERE, env={**os.environ, **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return ''.join(self._lines)

    def says(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until the output holds ``text``."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: text in self.output or self.process.poll() is not None, timeout_s)
        assert text in self.output, self.output
        return self.output

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(2)
        return code

    def end(self, number: int = signal.SIGINT) -> tuple[int, float]:
        """Send a signal; return exit code and seconds until the end."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.wait(), time.monotonic() - started

    def kill(self) -> None:
        """End it in good order: others would go on talking to a killed one."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Client:
    """A ROS node of the test, spun in a thread."""

    def __init__(self, target: str = '/qwen_vl') -> None:
        self.target = target
        self.node = rclpy.create_node(f'client_{os.getpid()}_{time.monotonic_ns()}')
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._ending = self._acquainted = False
        self._clients: dict[str, object] = {}
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()
        self._diagnostics: dict[str, object] = {}
        self._received: list[tuple[float, object]] = []
        self.node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, 50)
        self._actions = ActionClient(self.node, AnswerQuestion, f'{target}/answer_question')

    def _spin(self) -> None:
        while not self._ending:
            self._executor.spin_once(timeout_sec=0.1)

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._actions.destroy()
        self.node.destroy_node()

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self._received.append((time.monotonic(), message))
        for status in message.status:
            self._diagnostics[status.name] = status

    @property
    def diagnostics_times(self) -> list[float]:
        return [when for when, _ in self._received]

    def status(self, name: str):
        """Return (level, message, values) of the newest status of that name, or None."""
        status = self._diagnostics.get(f'qwen_vl: {name}')
        if status is None:
            return None
        return status.level[0], status.message, {v.key: v.value for v in status.values}

    def await_status(self, name: str, test: Callable, timeout_s: float = PATIENCE_S):
        """Return the first status of that name for which ``test(level, message, values)``."""
        def look():
            found = self.status(name)
            return found if found is not None and test(*found) else None
        try:
            return wait_for(look, timeout_s)
        except AssertionError:
            raise AssertionError(f'{name}: {self.status(name)}') from None

    def collect(self, kind: type, topic: str, depth: int = 100) -> list:
        """Return a list that fills with the messages of a topic."""
        found: list = []
        self.node.create_subscription(kind, topic, found.append, depth)
        wait_for(lambda: self.node.count_publishers(self._absolute(topic)))
        return found

    def _absolute(self, topic: str) -> str:
        return topic if topic.startswith('/') else f'/{topic}'

    def future(self, kind: type, name: str, request):
        """Call a service; return the future."""
        if name not in self._clients:
            self._clients[name] = self.node.create_client(kind, name)
            assert self._clients[name].wait_for_service(PATIENCE_S), f'no service {name}'
            # A response is lost where the server has not seen this client yet.
            time.sleep(0.1)
        assert self._clients[name].wait_for_service(PATIENCE_S), f'no service {name}'
        return self._clients[name].call_async(request)

    def call(self, kind: type, name: str, request, timeout_s: float = PATIENCE_S):
        """Call a service and return its response."""
        future = self.future(kind, name, request)
        wait_for(future.done, timeout_s)
        return future.result()

    def ask(self, question: str, timeout_s: float = PATIENCE_S, **fields):
        return self.call(Ask, f'{self.target}/ask',
                         Ask.Request(question=question, **fields), timeout_s)

    def send_goal(self, question: str, feedback: list | None = None, **fields):
        """Send a goal; return its handle once it is accepted."""
        assert self._actions.wait_for_server(PATIENCE_S)
        if not self._acquainted:
            # Feedback is lost where the server has not seen this client's subscription yet.
            time.sleep(0.3)
            self._acquainted = True
        goal = AnswerQuestion.Goal(question=question, **fields)
        future = self._actions.send_goal_async(
            goal, feedback_callback=None if feedback is None else (
                lambda message: feedback.append((time.monotonic(), message.feedback))))
        wait_for(future.done)
        assert future.result().accepted
        return future.result()

    def result(self, handle, timeout_s: float = PATIENCE_S):
        """Return (status, result) of a goal."""
        future = handle.get_result_async()
        wait_for(future.done, timeout_s)
        return future.result().status, future.result().result

    def change_state(self, name: str) -> bool:
        number = getattr(Transition, f'TRANSITION_{name.upper()}')
        return self.call(ChangeState, f'{self.target}/change_state',
                         ChangeState.Request(transition=Transition(id=number))).success

    def state(self) -> str:
        return self.call(
            GetState, f'{self.target}/get_state', GetState.Request()).current_state.label

    def set(self, atomically: bool = False, **values):
        """Set parameters (``__`` stands for a dot); return the results."""
        parameters: list[ParameterMsg] = [
            Parameter(name.replace('__', '.'), value=value).to_parameter_msg()
            for name, value in values.items()]
        if atomically:
            return self.call(SetParametersAtomically, f'{self.target}/set_parameters_atomically',
                             SetParametersAtomically.Request(parameters=parameters)).result
        return self.call(SetParameters, f'{self.target}/set_parameters',
                         SetParameters.Request(parameters=parameters)).results

    def get(self, *names: str):
        return self.call(GetParameters, f'{self.target}/get_parameters',
                         GetParameters.Request(names=list(names))).values
