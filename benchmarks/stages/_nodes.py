"""Two running nodes side by side: which of them gives more answers a second."""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.records import CannotRun

#: Seconds for a node to load its model, and for an answer.
START_S, ANSWER_S = 60.0, 30.0

#: Of the camera.
SIZE = (320, 240)


class Nodes:
    """
    Nodes named after their variants, one camera for all, and a client.

    :param variants: ROS parameters of each, and environment variables.
    :raises CannotRun: without rclpy, or when a node does not become ready.
    """

    def __init__(self, variants: dict[str, tuple[dict[str, object], dict[str, str]]]) -> None:
        try:
            import rclpy
            from qwen_vl_msgs.srv import Ask
            from rclpy.executors import SingleThreadedExecutor
            from sensor_msgs.msg import Image
        except ImportError as error:
            raise CannotRun(f'the running node needs ROS 2: {error}') from error
        from qwen_vl_ros.share import use_large_data_profile

        # A domain of our own: nobody else's nodes hear or disturb these.
        os.environ['ROS_DOMAIN_ID'] = str(1 + os.getpid() % 100)
        use_large_data_profile()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.output: dict[str, list[str]] = {name: [] for name in variants}
        self._ask, self._image = Ask, Image
        rclpy.init()
        self._rclpy = rclpy
        self._node = rclpy.create_node('benchmark')
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        self._ending = threading.Event()
        self._publisher = self._node.create_publisher(Image, 'camera/image_raw', 5)
        self._random = np.random.default_rng(0)
        self._node.create_timer(0.1, self._publish)
        self._spinning = threading.Thread(target=self._spin, daemon=True)
        self._spinning.start()
        for name, (parameters, env) in variants.items():
            words = [sys.executable, '-u', '-m', 'qwen_vl_ros.node.main', '--ros-args', '-r',
                     f'__node:={name}']
            for key, value in parameters.items():
                words += ['-p', f'{key}:={value}']
            self._processes[name] = subprocess.Popen(
                words, env={**os.environ, **env}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True)
            threading.Thread(target=self._read, args=(name,), daemon=True).start()
        self._clients = {name: self._node.create_client(Ask, f'{name}/ask') for name in variants}
        end = time.monotonic() + START_S
        for name, client in self._clients.items():
            while not (client.wait_for_service(0.2) and self._answers(name)):
                if time.monotonic() > end or self._processes[name].poll() is not None:
                    said = ''.join(self.output[name][-3:])
                    self.close()
                    raise CannotRun(f'the node {name} does not become ready: {said}')

    def _answers(self, name: str) -> bool:
        with suppress(RuntimeError):
            self.ask(name, 1)
            return True
        time.sleep(0.2)
        return False

    def ask(self, name: str, tokens: int) -> None:
        """
        Ask a node and wait for its answer.

        :raises RuntimeError: when it refuses or does not answer.
        """
        done = threading.Event()
        future = self._clients[name].call_async(self._ask.Request(
            question='what colour is the largest thing ?', max_new_tokens=tokens))
        future.add_done_callback(lambda future: done.set())
        if not done.wait(ANSWER_S):
            raise RuntimeError(f'{name} does not answer')
        if future.result().error_code != self._ask.Response.NONE:
            raise RuntimeError(future.result().error_msg)

    def spent(self, name: str) -> float:
        """Return the processor seconds that a node's process has used, all threads."""
        fields = Path(f'/proc/{self._processes[name].pid}/stat').read_text().rpartition(')')[2]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')

    def close(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.send_signal(signal.SIGINT)
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._ending.set()
        self._spinning.join(2)
        self._executor.shutdown()
        self._node.destroy_node()
        self._rclpy.shutdown()

    def _publish(self) -> None:
        width, height = SIZE
        message = self._image(width=width, height=height, step=width * 3, encoding='rgb8')
        message.header.stamp = self._node.get_clock().now().to_msg()
        # A new picture each time: nothing is reused.
        message.data.frombytes(
            self._random.integers(0, 256, height * width * 3, dtype=np.uint8).tobytes())
        self._publisher.publish(message)

    def _spin(self) -> None:
        while not self._ending.is_set():
            with suppress(Exception):
                self._executor.spin_once(timeout_sec=0.1)

    def _read(self, name: str) -> None:
        stdout = self._processes[name].stdout
        assert stdout is not None
        for line in stdout:
            self.output[name].append(line)


def compare(
    ask: Callable[[str], None], spent: Callable[[str], float], first: str, second: str,
    windows: int, answers: int, beside: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """
    Time windows of answers of two nodes in turns.

    Turns change places at random, so that what disturbs the machine falls on either.

    :param ask: has one answer given by the node of that name.
    :param spent: processor seconds of that node so far.
    :param beside: called once a pair, between windows.
    :return: ``seconds`` and ``processor`` seconds of each window by node.
    """
    order = random.Random(0)
    out: dict[str, dict[str, list[float]]] = {
        kind: {first: [], second: []} for kind in ('seconds', 'processor')}
    for _ in range(windows):
        names = [first, second]
        order.shuffle(names)
        for name in names:
            before, started = spent(name), time.perf_counter()
            for _ in range(answers):
                ask(name)
            out['seconds'][name].append(time.perf_counter() - started)
            out['processor'][name].append(spent(name) - before)
        beside()
    return out


def interval(first: list[float], second: list[float], draws: int = 2000) -> tuple[float, ...]:
    """
    Return the median of first / second over the pairs, and the ends of its 95 % interval.

    :param draws: of the bootstrap over the pairs.
    """
    logs = [math.log(a / b) for a, b in zip(first, second)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(draws))
    ends = medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))]
    return tuple(math.exp(x) for x in (statistics.median(logs), *ends))
