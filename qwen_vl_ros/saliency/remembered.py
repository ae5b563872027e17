"""What is remembered of a camera between its frames, and how it follows the picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_vl_ros.frame import Frame
from qwen_vl_ros.saliency.motion import MotionSignal, move_map, shifted, turned


@dataclass
class Camera:
    """
    What is remembered of one camera; all maps are of ``frame``.

    :param frame: the newest that was chosen from or told of.
    :param signal: what was last kept.
    :param question: that ``cam`` is about.
    :param cam: [rows, columns], from 0, what the last answer leaned on; 0 where nothing is known.
    """

    frame: Frame
    signal: MotionSignal
    question: str
    cam: np.ndarray
    #: Focus of the encoder's attention, [rows, columns].
    focus: np.ndarray | None = None
    #: Map of a generic prompt [rows, columns]; answers that were reflected on and units that the
    #: picture moved since it was taken.
    usual: np.ndarray | None = None
    usual_answers: int = 0
    usual_moved: float = 0.0
    #: The frame that was chosen from last, and how the picture had moved since ``frame``.
    chosen: Frame | None = None
    shift: tuple[float, float] = (0.0, 0.0)
    #: Answers since one was reflected on; ``None`` before the first.
    answers: int | None = None

    def follow(self, frame: Frame, rows: int, columns: int) -> None:
        """Move what is known to a later frame of the camera."""
        if self.chosen is not frame:
            self.shift = turned(self.frame, frame, rows, columns)
        if any(self.shift):
            self.cam = shifted(self.cam, self.shift)
            if self.focus is not None:
                self.focus = move_map(self.focus, self.shift)
            if self.usual is not None:
                # Nothing is known of what comes in: it is as usual as the rest.
                self.usual = shifted(self.usual, self.shift, float(self.usual.mean()))
                self.usual_moved += sum(map(abs, self.shift))
        self.frame, self.chosen, self.shift = frame, None, (0.0, 0.0)
