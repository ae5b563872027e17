"""Error codes of an answer, the same numbers as in ``qwen_vl_msgs/action/AnswerQuestion``."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Why a question got no (complete) answer; values are part of the ROS interface."""

    NONE = 0
    QUEUE_FULL = 1
    INACTIVE = 2
    UNKNOWN = 100
    NO_IMAGE = 101
    STALE_IMAGE = 102
    BAD_ENCODING = 103
    PROMPT_TOO_LONG = 104
    BAD_SCHEMA = 105
    DEADLINE = 106
    CANCELLED = 107
    OUT_OF_MEMORY = 108
    NUMERICAL = 109
    BAD_REQUEST = 110


class EngineError(Exception):
    """
    A request or a load that failed for a reason with a name.

    :param code: what a ROS client gets as ``error_code``.
    :param message: one sentence for a person: what was found, what was expected.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class CheckpointError(EngineError):
    """A model folder that cannot be used; the message names the path and what was expected."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNKNOWN, message)


def one_line(error: object) -> str:
    """Return an error's text without line breaks, or its type where it has none."""
    return ' '.join(str(error).split()) or type(error).__name__
