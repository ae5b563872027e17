"""A running node with a camera and a client, and windows of its answers in turns."""

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

from benchmarks.records import ROOT, CannotRun

#: Seconds for a node to load its model, and for an answer.
START_S, ANSWER_S = 60.0, 30.0

#: Environment variable of the node: 2b or 7b; its own model where it is empty.
SHAPE = 'QWEN_VL_BENCHMARK_SHAPE'

#: Of the camera's pictures.
SIZE = (320, 240)


class Node:
    """
    A node, a camera and a client.

    :param parameters: of the node.
    :param env: environment variables beside our own.
    :param rate_hz: of the camera, whose pictures are all new.
    :raises CannotRun: without rclpy, or when the node does not become ready.
    """

    def __init__(self, parameters: dict[str, object], env: dict[str, str], rate_hz: float) -> None:
        try:
            import rclpy
            from qwen_vl_msgs.srv import Ask
            from rclpy.executors import SingleThreadedExecutor
            from sensor_msgs.msg import Image
        except ImportError as error:
            raise CannotRun(f'the running node needs ROS 2: {error}') from error
        from qwen_vl_ros.share import use_large_data_profile

        # A domain of our own: nobody else's nodes hear or disturb this one.
        os.environ['ROS_DOMAIN_ID'] = str(1 + os.getpid() % 100)
        use_large_data_profile()
        self.output: list[str] = []
        self._ask, self._image = Ask, Image
        rclpy.init()
        self._rclpy = rclpy
        self._node = rclpy.create_node('benchmark')
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        self._ending = threading.Event()
        self._publisher = self._node.create_publisher(Image, 'camera/image_raw', 5)
        self._random = np.random.default_rng(0)
        self._node.create_timer(1 / rate_hz, self._publish)
        self._spinning = threading.Thread(target=self._spin, daemon=True)
        self._spinning.start()
        words = [sys.executable, '-u', '-m', 'benchmarks.stages._switched_node', '--ros-args']
        for key, value in parameters.items():
            words += ['-p', f'{key}:={value}']
        self._process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        self._client = self._node.create_client(Ask, 'qwen_vl/ask')
        end = time.monotonic() + START_S
        while not (self._client.wait_for_service(0.2) and self._ready()):
            if time.monotonic() > end or self._process.poll() is not None:
                said = ''.join(self.output[-3:])
                self.close()
                raise CannotRun(f'the node does not become ready: {said}')

    def _ready(self) -> bool:
        with suppress(RuntimeError):
            self.ask(1)
            return True
        time.sleep(0.2)
        return False

    def ask(self, tokens: int) -> None:
        """
        Ask and wait for the answer.

        :raises RuntimeError: when the node refuses or does not answer.
        """
        done = threading.Event()
        future = self._client.call_async(self._ask.Request(
            question='what colour is the largest thing ?', max_new_tokens=tokens))
        future.add_done_callback(lambda future: done.set())
        if not done.wait(ANSWER_S):
            raise RuntimeError('the node does not answer')
        if future.result().error_code != self._ask.Response.NONE:
            raise RuntimeError(future.result().error_msg)

    def switch(self, on: bool) -> None:
        """Switch the exports."""
        self._process.send_signal(signal.SIGUSR1 if on else signal.SIGUSR2)

    def spent(self) -> float:
        """Return the processor seconds that the node's process has used, all threads."""
        fields = Path(f'/proc/{self._process.pid}/stat').read_text().rpartition(')')[2]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')

    def close(self) -> None:
        """End all."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._ending.set()
        self._spinning.join(2)
        self._executor.shutdown()
        self._node.destroy_node()
        self._rclpy.shutdown()

    def _publish(self) -> None:
        width, height = SIZE
        message = self._image(width=width, height=height, step=width * 3, encoding='rgb8')
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.data.frombytes(
            self._random.integers(0, 256, height * width * 3, dtype=np.uint8).tobytes())
        self._publisher.publish(message)

    def _spin(self) -> None:
        while not self._ending.is_set():
            with suppress(Exception):
                self._executor.spin_once(timeout_sec=0.1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)


def windows(
    work: Callable[[bool], object], count: int, between: Callable[[bool], object],
    meters: dict[str, Callable[[], float]],
) -> dict[str, dict[bool, list[float]]]:
    """
    Do a thing with something on and off, in turns that change places at random.

    What disturbs the machine so falls on either.

    :param work: done once a window, told whether it is on.
    :param between: switches; not counted.
    :param meters: what is read before and after each window.
    :return: the difference of each meter in each window.
    """
    order = random.Random(0)
    out: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in meters}
    for _ in range(count):
        for on in order.choice(((True, False), (False, True))):
            between(on)
            before = {name: meter() for name, meter in meters.items()}
            work(on)
            for name, meter in meters.items():
                out[name][on].append(meter() - before[name])
    return out


def interval(on: list[float], off: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """
    Return the median of on / off over the pairs of windows, and its 95 % interval.

    :param draws: of the bootstrap over the pairs.
    """
    logs = [math.log(a / b) for a, b in zip(on, off)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(draws))
    low, high = medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))]
    return math.exp(statistics.median(logs)), math.exp(low), math.exp(high)
