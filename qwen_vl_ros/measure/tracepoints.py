"""Stages as events of ros2_tracing, where its library is there."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from qwen_vl_ros.measure.export import ExportError, Finished


class Tracepoints:
    """
    Stages as ros2_tracing's callback events, so that its tools show them beside the callbacks.

    ROS has no tracepoints for Python programs; the library's own for callbacks are called with one
    made-up callback a stage, whose symbol is the stage's name.

    :param library: the loaded libtracetools, or what stands in for it.
    :raises ExportError: where there is none, or it was built without LTTng.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or _tracetools()
        if not self._library.ros_trace_compile_status():
            raise ExportError('libtracetools was built without LTTng: no tracepoints')
        # The address of a buffer is a callback's identity; it only has to be ours.
        self._stages: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._inside = ''

    def entered(self, request_id: str, stage: str) -> None:
        """Mark the end of the stage before and the start of this one."""
        del request_id
        if self._inside:
            self._library.ros_trace_callback_end(self._address(self._inside))
        self._inside = stage
        if stage:
            self._library.ros_trace_callback_start(
                self._address(stage), ctypes.c_bool(False))

    def finished(self, question: Finished) -> None:
        """Do nothing: the end of the last stage was marked when it was."""

    def close(self) -> None:
        """Mark the end of an open stage."""
        self.entered('', '')

    def _address(self, stage: str) -> ctypes.c_void_p:
        if stage not in self._stages:
            self._stages[stage] = ctypes.create_string_buffer(1)
            self._library.ros_trace_rclcpp_callback_register(
                ctypes.c_void_p(ctypes.addressof(self._stages[stage])),
                ctypes.c_char_p(f'qwen_vl {stage}'.encode()))
        return ctypes.c_void_p(ctypes.addressof(self._stages[stage]))


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
