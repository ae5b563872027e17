"""
From image messages to a request: what the node and the replay share.

No ROS import: messages are read by their field names, so those of rclpy and of the ``rosbags``
library both do. Clocks are passed in, so a bag gives the same requests on every run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen_vl_ros.decode import FrameError, decode_compressed, decode_image
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.frame import Frame

#: 2000-01-01 in nanoseconds since the epoch; an older stamp was never set, or in another unit.
YEAR_2000_NS = 946_684_800 * 10**9

#: Clocks of camera and host may differ by this much before a stamp counts as from the future.
FUTURE_NS = 10**9


def frame_from_message(message: Any, *, camera: str = '', received_ns: int = 0) -> Frame:
    """
    Decode a ``sensor_msgs/Image`` or ``sensor_msgs/CompressedImage``.

    :param message: told apart by the field ``format``, which only the latter has.
    :param camera: name of the camera as configured.
    :param received_ns: when it arrived, on the clock that :meth:`FrameStore.select` is given.
    :raises FrameError: when the message holds no usable picture.
    """
    stamp = message.header.stamp
    origin: dict[str, Any] = {
        'stamp_ns': stamp.sec * 10**9 + stamp.nanosec, 'frame_id': message.header.frame_id,
        'camera': camera, 'received_ns': received_ns}
    if hasattr(message, 'format'):
        return decode_compressed(message.format, message.data, **origin)
    return decode_image(message.encoding, message.width, message.height, message.step,
                        message.is_bigendian, message.data, **origin)


def odd_stamp(stamp_ns: int, now_ns: int) -> bool:
    """Say whether a stamp cannot be a time of capture: unset, before 2000, or in the future."""
    simulated = now_ns < YEAR_2000_NS
    return (stamp_ns <= 0 or (stamp_ns < YEAR_2000_NS and not simulated)
            or stamp_ns > now_ns + FUTURE_NS)


def age_ns(frame: Frame, now_ns: int, now_received_ns: int) -> int:
    """
    Return how old a picture is, nanoseconds; from reception where its stamp is odd.

    :param now_ns: ROS time (the bag's time in a replay).
    :param now_received_ns: now, on the clock of :attr:`Frame.received_ns`.
    """
    if odd_stamp(frame.stamp_ns, now_ns):
        return max(0, now_received_ns - frame.received_ns)
    return max(0, now_ns - frame.stamp_ns)


@dataclass(frozen=True)
class CameraCounts:
    """What became of a camera's messages; ``last_reason`` explains the newest rejection."""

    received: int = 0
    replaced: int = 0
    rejected: int = 0
    odd_stamps: int = 0
    last_reason: str = ''


class _Slot:
    """A message of a camera, decoded when somebody needs it."""

    def __init__(self, message: Any, camera: str, received_ns: int) -> None:
        self._message = message
        self._camera = camera
        self._received_ns = received_ns
        self._frame: Frame | None = None
        self._lock = threading.Lock()

    def frame(self) -> Frame:
        """:raises FrameError: as :func:`frame_from_message`."""
        with self._lock:
            if self._frame is None:
                self._frame = frame_from_message(
                    self._message, camera=self._camera, received_ns=self._received_ns)
                self._message = None
            return self._frame


class FrameStore:
    """
    The newest good frames of every camera. Safe to use from several threads.

    :param cameras: names in order; the first is asked when a question names none.
    :param history: frames kept a camera, for clips; 1 keeps the newest alone.
    """

    #: Messages kept undecoded at least, so that a bad one has good ones behind it.
    SPARE = 3

    def __init__(self, cameras: Sequence[str], history: int = 1) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, deque[_Slot]] = {
            c: deque(maxlen=max(history, self.SPARE)) for c in cameras}
        self._history = history
        self._good: dict[str, _Slot] = {}
        self._counts = {c: CameraCounts() for c in cameras}
        self._seen: dict[str, bool] = dict.fromkeys(cameras, True)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Return the cameras' names in order."""
        return tuple(self._slots)

    def offer(self, camera: str, message: Any, *, now_ns: int, received_ns: int,
              lazy: bool = False) -> Frame | None:
        """
        Keep a message; a bad one is counted and the last good frame stays.

        :param now_ns: ROS time, to tell odd stamps.
        :param received_ns: see :func:`frame_from_message`.
        :param lazy: decode (and perhaps reject) it only when a question or :meth:`newest` looks
            at it, so that a camera costs nothing while nobody asks.
        :return: the frame, or ``None`` when it was rejected (see :meth:`counts`) or is lazy.
        """
        slot = _Slot(message, camera, received_ns)
        frame = None
        if not lazy:
            try:
                frame = slot.frame()
            except FrameError as error:
                with self._lock:
                    self._count(camera, received=1)
                self._reject(camera, slot, error)
                return None
        stamp = message.header.stamp
        odd = odd_stamp(stamp.sec * 10**9 + stamp.nanosec, now_ns)
        with self._lock:
            self._count(camera, received=1, replaced=not self._seen[camera], odd_stamps=odd)
            self._slots[camera].append(slot)
            self._seen[camera] = False
        return frame

    def _count(self, camera: str, **more: int) -> None:
        old = self._counts[camera]
        self._counts[camera] = replace(
            old, **{name: getattr(old, name) + value for name, value in more.items()})

    def _reject(self, camera: str, slot: _Slot, error: FrameError) -> None:
        """Count a bad message once and forget it."""
        with self._lock:
            if slot in self._slots[camera]:
                self._slots[camera].remove(slot)
            self._counts[camera] = replace(
                self._counts[camera], rejected=self._counts[camera].rejected + 1,
                last_reason=error.reason)

    def _frames(self, camera: str, count: int) -> tuple[Frame, ...]:
        """Return up to ``count`` newest good frames, oldest first; decodes outside the lock."""
        with self._lock:
            slots = tuple(self._slots[camera])
            good = self._good.get(camera)
        frames: list[Frame] = []
        for slot in reversed(slots):
            try:
                frames.append(slot.frame())
            except FrameError as error:
                self._reject(camera, slot, error)
                continue
            if len(frames) == 1:
                with self._lock:
                    if self._slots[camera]:  # not after clear()
                        self._good[camera] = slot
            if len(frames) == count:
                break
        if not frames and good is not None:
            frames = [good.frame()]
        return tuple(reversed(frames))

    def counts(self, camera: str) -> CameraCounts:
        """Return the counters of one camera."""
        with self._lock:
            return self._counts[camera]

    def newest(self, camera: str) -> Frame | None:
        """Return the newest good frame without marking it as used."""
        frames = self._frames(camera, 1)
        return frames[0] if frames else None

    def is_new(self, camera: str) -> bool:
        """Say whether the newest message is one that no question has looked at."""
        with self._lock:
            return not self._seen[camera]

    def clear(self) -> None:
        """Forget all frames (not the counters)."""
        with self._lock:
            self._good.clear()
            for camera, slots in self._slots.items():
                slots.clear()
                self._seen[camera] = True

    def select(
        self, cameras: Sequence[str] = (), *, num_frames: int = 1, now_ns: int,
        now_received_ns: int, max_age_ns: int | None = None,
    ) -> tuple[Visual, ...]:
        """
        Choose what a question looks at.

        :param cameras: names; none means the first camera.
        :param num_frames: 1 for a still, more for a clip of the newest frames, oldest first;
            fewer where fewer have arrived.
        :param now_ns: ROS time.
        :param now_received_ns: now, on the clock of :attr:`Frame.received_ns`.
        :param max_age_ns: older newest frames are refused; ``None`` takes any.
        :raises EngineError: BAD_REQUEST for an unknown camera, NO_IMAGE, STALE_IMAGE.
        """
        # A camera may be asked for as it was configured ('/front') or as it is listed ('front').
        chosen = tuple(c if c in self._slots else c.strip('/') for c in cameras)
        chosen = chosen or self.cameras[:1]
        if not chosen:
            raise EngineError(ErrorCode.BAD_REQUEST, 'no camera is configured')
        visuals = []
        for camera in chosen:
            if camera not in self._slots:
                raise EngineError(
                    ErrorCode.BAD_REQUEST,
                    f"there is no camera '{camera}'; there are {', '.join(self._slots)}")
            frames = self._frames(camera, min(max(1, num_frames), self._history))
            if not frames:
                raise EngineError(ErrorCode.NO_IMAGE, self._why_no_image(camera))
            age = age_ns(frames[-1], now_ns, now_received_ns)
            if max_age_ns is not None and age > max_age_ns:
                raise EngineError(
                    ErrorCode.STALE_IMAGE,
                    f"the newest image of camera '{camera}' is {age / 1e9:.2f} s old; "
                    f'at most {max_age_ns / 1e9:.2f} s are allowed')
            visuals.append(Visual(frames))
            with self._lock:
                self._seen[camera] = True
        return tuple(visuals)

    def _why_no_image(self, camera: str) -> str:
        counts = self._counts[camera]
        if counts.rejected:
            return (f"camera '{camera}' has sent {counts.rejected} images and none was usable; "
                    f'the last one: {counts.last_reason}')
        return f"camera '{camera}' has sent no image yet"


@dataclass(frozen=True)
class AskOptions:
    """What every question of a node or a replay has in common; see :class:`Request`."""

    system_prompt: str | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    keep_ratio: float = 1.0
    deadline_s: float | None = None


def build_request(
    question: str, visuals: Sequence[Visual], options: AskOptions, **own: Any,
) -> Request:
    """
    Put a question together.

    :param question: the user's words; blank ones are refused.
    :param visuals: from :meth:`FrameStore.select`, or of the question's own pictures.
    :param options: defaults.
    :param own: fields of :class:`Request` that this question sets itself.
    :raises EngineError: BAD_REQUEST, with the field's name, for a value out of range.
    """
    fields: dict[str, Any] = {**vars(options), **own}
    if not question.strip():
        raise EngineError(ErrorCode.BAD_REQUEST, 'the question is empty')
    checks = (
        ('max_new_tokens', fields['max_new_tokens'] >= 1, 'at least 1'),
        ('temperature', 0 <= fields['temperature'] < float('inf'), 'finite and not negative'),
        ('top_p', 0 < fields['top_p'] <= 1, 'in (0, 1]'),
        ('top_k', fields['top_k'] >= 0, 'not negative'),
        ('keep_ratio', 0 < fields['keep_ratio'] <= 1, 'in (0, 1]'),
    )
    for name, good, expected in checks:
        if not good:
            raise EngineError(
                ErrorCode.BAD_REQUEST, f'{name} is {fields[name]}; expected {expected}')
    return Request(question=question, visuals=tuple(visuals), **fields)
