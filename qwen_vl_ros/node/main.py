"""The program ``qwen_vl_node``: start, life cycle by itself, clean end on a signal."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from qwen_vl_ros.engine.errors import one_line
from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.share import share, use_large_data_profile

#: What is left running after so many seconds is left behind.
END_S = 2.0

#: Seconds that askers of questions under way have to be told how they ended, and in which the
#: responses leave that the executor has made by then.
TELL_S, LEAVE_S = 1.0, 0.2


class Ended(BaseException):
    """SIGINT or SIGTERM arrived while the main thread was at work."""


class RosLog(logging.Handler):
    """Hands what the package logs to ROS."""

    def __init__(self, logger: Any) -> None:
        super().__init__(logging.INFO)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record at ROS's level of the same name."""
        text = self.format(record)
        # rclpy ties a place in the code to one level: three places, not one.
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        else:
            self._logger.info(text)


def load_engine(settings: Settings) -> Any:
    """
    Load the engine that the settings name and warm it up.

    :raises EngineError: one sentence: path, what was found, what was expected.
    """
    from qwen_vl_ros.engine.engine import Engine
    from qwen_vl_ros.saliency.region import parse_region
    from qwen_vl_ros.saliency.selectors import make_selector
    from qwen_vl_ros.saliency.weights import parse_weights

    model = settings.model_path or str(share('models', 'tiny'))
    engine = Engine.load(
        model, device=settings.model_device,
        dtype=settings.model_dtype, quantization=settings.model_quantization,
        max_context=settings.model_max_context, min_pixels=settings.vision_min_pixels,
        max_pixels=settings.vision_max_pixels, allow_download=settings.model_allow_download,
        selector=make_selector(
            settings.pruning_selector, model=model, head=settings.pruning_head_file,
            always=parse_region(settings.pruning_keep_region),
            weights=parse_weights(settings.pruning_weights, settings.pruning_selector),
            gradient_layers=settings.pruning_gradient_layers,
            generic_every=settings.pruning_generic_every,
            head_dtype=settings.pruning_head_dtype),
        preprocess=settings.preprocess_device, vision_engine=settings.vision_engine,
        vision_quantization=settings.vision_quantization,
        max_sequences=settings.scheduler_max_sequences,
        cache_bytes=settings.scheduler_cache_mb * 10**6)
    engine.warm_up([(640, 480)], settings.pruning_keep_ratio if settings.pruning_enable else 1.0)
    return engine


def usage() -> str:
    """Return what ``--help`` prints: how to set parameters, and which there are."""
    lines = ['usage: qwen_vl_node [--ros-args -p NAME:=VALUE ... --params-file FILE -r FROM:=TO]',
             '', 'The lifecycle node qwen_vl answers questions about camera topics until SIGINT.',
             '', 'parameters (default):']
    for spec in Settings.table():
        default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
        lines.append(f"  {spec.metadata['name']} ({default!r})\n      {spec.metadata['text']}")
    return '\n'.join(lines)


def main(args: Sequence[str] | None = None, load: Any = load_engine) -> int:
    """
    Run the node until SIGINT or SIGTERM.

    :param args: ROS arguments, ``sys.argv`` where ``None``.
    :param load: makes the engine from settings.
    :return: 0 after a signal, 1 for parameters that cannot be used.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not {'-h', '--help'}.isdisjoint(words):
        print(usage())
        return 0
    use_large_data_profile()
    import rclpy
    from rclpy.exceptions import ParameterException
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.signals import SignalHandlerOptions

    from qwen_vl_ros.node.guard import guard_services
    from qwen_vl_ros.node.node import QwenVlNode

    ending, told = threading.Event(), threading.Event()

    def on_signal(number: int, stack: Any) -> None:
        first = not ending.is_set()
        ending.set()
        if first and threading.current_thread() is threading.main_thread():
            raise Ended

    try:
        rclpy.init(args=None if args is None else list(args),
                   signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:  # a params file or remap that rcl cannot read
        print(f'qwen_vl: the ROS arguments cannot be used: {one_line(error)}', file=sys.stderr)
        return 1
    try:
        node = QwenVlNode(load)
    except (ParameterException, ValueError) as error:
        print(f'qwen_vl: the parameters cannot be used: {error}', file=sys.stderr)
        rclpy.shutdown()
        return 1
    handler = RosLog(node.get_logger())
    package = logging.getLogger('qwen_vl_ros')
    package.addHandler(handler)
    # What was chosen and measured is said once, at INFO.
    package.setLevel(logging.INFO)
    logger = node.get_logger()
    guard_services(node, lambda name, error: logger.warning(
        f'{name} refused a request: {type(error).__name__}: {one_line(error)}',
        throttle_duration_sec=1.0))
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    spinning = threading.Thread(
        target=_spin, args=(executor, node.get_logger(), told), name='executor', daemon=True)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        spinning.start()
        if node.settings.autostart:
            _autostart(node)
        while not ending.wait(3600.0):
            pass
    except Ended:
        pass
    parts = [node, executor]
    del node, executor, handler
    _end(parts, spinning, told, rclpy.shutdown)
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would wait for (or crash in) a thread that is still inside the engine.
    os._exit(0)


def _autostart(node: Any) -> None:
    from rclpy.lifecycle import TransitionCallbackReturn

    if node.trigger_configure() == TransitionCallbackReturn.SUCCESS:
        node.trigger_activate()


def _spin(executor: Any, logger: Any, told: threading.Event) -> None:
    """Run callbacks; an exception in one is logged and the next is run."""
    while not told.is_set():
        try:
            executor.spin_once(timeout_sec=0.5)
        except Exception as error:
            if not told.is_set():
                logger.error(f'a callback failed: {type(error).__name__}: {error}',
                             throttle_duration_sec=1.0)


def _end(parts: list[Any], spinning: threading.Thread, told: threading.Event,
         shutdown: Any) -> None:
    """
    Close everything in order; a thread that does not come home does not hold the process.

    :param parts: node and executor; emptied here, so that nothing keeps them alive: others only
        learn that the node has gone when its last reference is.
    :param told: ends ``spinning``: set when askers of questions under way have been answered.
    """
    finished = threading.Event()

    def close() -> None:
        node, executor = parts
        parts.clear()
        node.end_questions()
        patience = time.monotonic() + TELL_S
        while node.asking and spinning.is_alive() and time.monotonic() < patience:
            told.wait(0.01)
        told.wait(LEAVE_S)
        told.set()
        executor.wake()
        spinning.join(END_S)
        node.close()
        executor.remove_node(node)
        executor.shutdown(timeout_sec=0.5)
        node.destroy_node()
        del node, executor
        gc.collect()
        shutdown()
        finished.set()

    threading.Thread(target=close, name='close', daemon=True).start()
    finished.wait(TELL_S + 2 * END_S)


if __name__ == '__main__':
    sys.exit(main())
