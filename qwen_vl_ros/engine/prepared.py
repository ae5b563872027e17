"""A visual between camera and encoder: what was made of its frames, and what that took."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_vl_ros.engine.patches import Grid
from qwen_vl_ros.frame import Frame


@dataclass(frozen=True)
class Profile:
    """
    What a way costs for one picture, milliseconds, medians.

    :param cpu_ms: work of the CPU.
    :param transfer_ms: from the host's memory to the device's.
    :param gpu_ms: work of the device.
    """

    cpu_ms: float
    transfer_ms: float
    gpu_ms: float

    @property
    def total_ms(self) -> float:
        """Return the latency: the parts follow each other."""
        return self.cpu_ms + self.transfer_ms + self.gpu_ms

    def __str__(self) -> str:
        """Return the sum and its parts."""
        return (f'{self.total_ms:.3f} ms = CPU {self.cpu_ms:.3f} + transfer '
                f'{self.transfer_ms:.3f} + GPU {self.gpu_ms:.3f}')


@dataclass(frozen=True)
class Half:
    """
    W0 x of a frame.

    :param values: float32 [n, width].
    :param made: reached on the device when they are there; ``None`` on a CPU.
    """

    values: Tensor
    made: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the values for use on the current stream, which waits for them."""
        if self.made is not None:
            stream = torch.cuda.current_stream(self.values.device)
            stream.wait_event(self.made)
            self.values.record_stream(stream)
        return self.values


@dataclass
class Picture:
    """
    A frame on its way.

    :param memory: uint8, patches [n, 588] (way ``cpu``) or the camera's buffer (way ``gpu``);
        ``None`` where only ``older`` is needed.
    :param older: W0 x, where it is known already.
    """

    frame: Frame
    way: str
    memory: Tensor | None
    older: Half | None = None


@dataclass
class Prepared:
    """
    What :meth:`Offload.prepare` made of a visual.

    :param pictures: one for a still, 2t for a clip; a repeated last frame is the same object.
    :param features: bytes of a patch, or of a pair of patches.
    :param bytes_read: by the CPU, and ``bytes_written``; patches or the pinned copy of a frame.
    """

    pictures: list[Picture]
    grid: Grid
    features: int
    bytes_read: int
    bytes_written: int

    def of_slices(self, first: int, end: int | None) -> list[Picture]:
        """Return the pictures of slices from ``first`` to before ``end`` (all)."""
        if len(self.pictures) == 1:
            return self.pictures
        return self.pictures[2 * first:None if end is None else 2 * end]
