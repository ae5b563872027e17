"""The encoder on a device of its own: how its tokens come to the decoder's."""

from __future__ import annotations

from pathlib import Path

import torch

from qwen_vl_ros.engine.device import pick_device
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.options import Options
from qwen_vl_ros.measure.interconnect import load_tuning
from qwen_vl_ros.measure.transport import HandOver


def make_hand_over(options: Options, target: torch.device) -> HandOver | None:
    """
    Return what takes merged tokens to the decoder, or ``None`` where both halves share a device.

    :param options: ``encoder_device``, and ``interconnect``: the tuning table to go by.
    :param target: the decoder's device.
    :raises EngineError: BAD_REQUEST for a file that holds no such table.
    :raises CheckpointError: for a device that is not there.
    """
    if not options.encoder_device:
        return None
    source = pick_device(options.encoder_device)
    if source == target:
        return None
    try:
        rows = load_tuning(Path(options.interconnect)) if options.interconnect else []
    except ValueError as error:
        raise EngineError(ErrorCode.BAD_REQUEST, str(error)) from None
    return HandOver(source, target, rows)
