"""Pictures of a recorded camera clip, brought to the rate of a robot's camera."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np


def frames(
    clip: Path, *, rate: float = 30.0, start_ns: int, seconds: float | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """
    Read a clip at a steady rate; between two of its own frames the older one is shown.

    :param clip: a file that OpenCV reads: mp4, avi.
    :param rate: pictures a second.
    :param start_ns: stamp of the first picture.
    :param seconds: at most so much of it; ``None`` is all.
    :return: stamp in nanoseconds and uint8 [H, W, 3] RGB.
    :raises ValueError: when the file is no clip.
    """
    video = cv2.VideoCapture(str(clip))
    try:
        own_rate = video.get(cv2.CAP_PROP_FPS)
        if not video.isOpened() or own_rate <= 0:
            raise ValueError(f'{clip} is no video that OpenCV can read')
        shown, picture = -1, None
        tick = 0
        while seconds is None or tick < seconds * rate:
            wanted = int(tick / rate * own_rate + 1e-6)
            while shown < wanted:
                good, bgr = video.read()
                if not good:
                    return
                picture = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
                shown += 1
            assert picture is not None
            yield start_ns + round(tick * 1e9 / rate), picture
            tick += 1
    finally:
        video.release()
