"""Stages as events of ros2_tracing, where its library is there."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

from qwen_vl_ros.measure.export import ExportError, Finished


class Tracepoints:
    """
    Stages as ros2_tracing's callback events, so that its tools show them beside the callbacks.

    ROS has no tracepoints for Python programs; the library's own for callbacks are called with one
    made-up callback a stage, whose symbol is the stage's name. Questions in the same stage at the
    same time have a callback each, so that every start meets its own end; those events have no
    room for the id of a question.

    :param library: the loaded libtracetools, or what stands in for it.
    :raises ExportError: where there is none, or it was built without LTTng.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or _tracetools()
        if not self._library.ros_trace_compile_status():
            raise ExportError('libtracetools was built without LTTng: no tracepoints')
        # The address of a buffer is a callback's identity; it only has to be ours.
        self._free: dict[str, list[ctypes.Array[ctypes.c_char]]] = {}
        self._inside: dict[str, tuple[str, ctypes.Array[ctypes.c_char]]] = {}
        self._lock = threading.Lock()

    def entered(self, request_id: str, stage: str) -> None:
        """Mark the end of the stage before and the start of this one."""
        with self._lock:
            before, callback = self._inside.pop(request_id, ('', None))
            if callback is not None:
                self._library.ros_trace_callback_end(_address(callback))
                self._free[before].append(callback)
            if stage:
                callback = self._callback(stage)
                self._inside[request_id] = stage, callback
                self._library.ros_trace_callback_start(
                    _address(callback), ctypes.c_bool(False))

    def finished(self, question: Finished) -> None:
        """Do nothing: the end of the last stage was marked when it was."""

    def close(self) -> None:
        """Mark the ends of open stages."""
        for request_id in tuple(self._inside):
            self.entered(request_id, '')

    def _callback(self, stage: str) -> ctypes.Array[ctypes.c_char]:
        """Return a callback of the stage that is not running, a new one if need be."""
        free = self._free.setdefault(stage, [])
        if free:
            return free.pop()
        made = ctypes.create_string_buffer(1)
        self._library.ros_trace_rclcpp_callback_register(
            _address(made), ctypes.c_char_p(f'qwen_vl {stage}'.encode()))
        return made


def _address(callback: ctypes.Array[ctypes.c_char]) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(callback))


def _tracetools() -> Any:
    folders = [Path(part) / 'lib' for name in ('AMENT_PREFIX_PATH', 'CMAKE_PREFIX_PATH')
               for part in os.environ.get(name, '').split(os.pathsep) if part]
    for path in (*(f / 'libtracetools.so' for f in folders),
                 Path(sys.prefix) / 'lib' / 'libtracetools.so', 'libtracetools.so'):
        try:
            library = ctypes.CDLL(str(path))
            library.ros_trace_compile_status.restype = ctypes.c_bool
            return library
        except (OSError, AttributeError):
            continue
    raise ExportError('libtracetools is not on this machine: no tracepoints')
