"""Camera subscriptions: QoS that fits the publisher, rates and losses, and what is wrong."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rclpy.node import Node
from rclpy.qos import (
    DurabilityPolicy,
    HistoryPolicy,
    QoSProfile,
    ReliabilityPolicy,
    qos_policy_name_from_kind,
)
from sensor_msgs.msg import CompressedImage, Image

try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import SubscriptionEventCallbacks

#: Rates and losses are those of the last so many nanoseconds.
WINDOW_NS = 5 * 10**9

#: How close to a whole number of periods a gap has to be to be counted as lost frames.
MULTIPLE = 0.3

#: Messages that the middleware holds while the executor is busy; the newest wins in the end.
DEPTH = 5


def sensor_qos(reliable: bool, latched: bool = False) -> QoSProfile:
    """Return a keep-last profile for pictures."""
    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST, depth=DEPTH,
        reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE)


@dataclass(frozen=True)
class Rates:
    """
    What arrived within the last seconds.

    :param node_hz: by the clock of this process.
    :param message_hz: by the stamps; NaN where they do not advance.
    :param lost: share of frames that the stamps show as sent but that did not arrive.
    :param delay_ms: from stamp to reception of the newest frame; NaN where its stamp is odd.
    """

    node_hz: float
    message_hz: float
    lost: float
    delay_ms: float


class RateWindow:
    """Arrivals of the last seconds."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[int, int, float]] = deque()

    def add(self, received_ns: int, stamp_ns: int, delay_ms: float) -> None:
        """Note an arrival: monotonic clock, header stamp, delay."""
        self._arrivals.append((received_ns, stamp_ns, delay_ms))
        self._forget(received_ns)

    def _forget(self, now_ns: int) -> None:
        while self._arrivals and self._arrivals[0][0] < now_ns - WINDOW_NS:
            self._arrivals.popleft()

    def rates(self, now_ns: int) -> Rates:
        """Return the rates of the seconds before ``now_ns`` (monotonic clock)."""
        self._forget(now_ns)
        arrivals = tuple(self._arrivals)
        if len(arrivals) < 2:
            return Rates(0.0, float('nan'), 0.0, arrivals[-1][2] if arrivals else float('nan'))
        spent = arrivals[-1][0] - arrivals[0][0]
        gaps = [later[1] - earlier[1] for earlier, later in itertools.pairwise(arrivals)]
        stamped = sum(gaps)
        advancing = min(gaps) > 0
        return Rates(
            (len(arrivals) - 1) / spent * 1e9 if spent else 0.0,
            (len(arrivals) - 1) / stamped * 1e9 if advancing else float('nan'),
            _lost_share(gaps) if advancing else 0.0, arrivals[-1][2])


def _lost_share(gaps: list[int]) -> float:
    """
    Return the share of frames missing between stamps.

    The shortest quarter of the gaps shows the camera's own period; a gap of n periods lacks n - 1
    frames. Only gaps close to a whole number of periods count: a camera that stutters has others.
    """
    if len(gaps) < 4:
        return 0.0
    period = statistics.median(sorted(gaps)[:max(1, len(gaps) // 4)])
    counts = [(round(gap / period), gap / period) for gap in gaps]
    missing = sum(whole - 1 for whole, exact in counts
                  if whole > 1 and abs(exact - whole) < MULTIPLE)
    return missing / (missing + len(gaps) + 1)


class CameraInput:
    """
    One camera's subscription.

    :param node: owns the subscription.
    :param name: as configured.
    :param topic: base topic, relative or absolute; remapping applies to it before a transport is
        appended, as image_transport does.
    :param transport: ``raw`` or ``compressed``.
    :param qos: ``AUTO``, ``SENSOR_DATA`` or ``DEFAULT``.
    :param receive: called with every message.
    """

    def __init__(self, node: Node, name: str, topic: str, transport: str, qos: str,
                 receive: Callable[[str, Any], None]) -> None:
        self._node = node
        self.name = name
        base = node.resolve_topic_name(topic)
        compressed = base.endswith(('/compressed', '/compressedDepth'))
        if transport == 'compressed' and not compressed:
            base, compressed = f'{base}/compressed', True
        self.topic = base
        self._type = CompressedImage if compressed else Image
        self._auto = qos == 'AUTO'
        self._receive = receive
        self._window = RateWindow()
        self.last_received_ns = time.monotonic_ns()
        self.received = 0
        self.incompatible = ''
        self._since_subscribing = 0
        self._reliable, self._latched = qos == 'DEFAULT', False
        self._subscription: Any = None
        self._publishers: tuple[str, ...] = ()
        self.match()
        if self._subscription is None:
            self._subscribe(self._reliable, self._latched)

    def _subscribe(self, reliable: bool, latched: bool) -> None:
        self.destroy()
        self._reliable, self._latched = reliable, latched
        self.incompatible, self._since_subscribing = '', 0
        self._subscription = self._node.create_subscription(
            self._type, self.topic, self._on_message, sensor_qos(reliable, latched),
            event_callbacks=SubscriptionEventCallbacks(incompatible_qos=self._on_incompatible))

    def destroy(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            self._node.destroy_subscription(self._subscription)
            self._subscription = None

    def match(self) -> None:
        """
        Look at the topic's publishers and, with AUTO, subscribe as they publish.

        Best effort receives from both kinds, so that is the start. Reliable is better for large
        pictures; it is taken when every publisher offers it and changing costs nothing (no frame
        yet) or helps (frames are being lost). It is left as soon as one publisher lacks it.
        """
        infos = self._node.get_publishers_info_by_topic(self.topic)
        self._publishers = tuple(
            f'{info.qos_profile.reliability.name} {info.qos_profile.durability.name}'
            for info in infos)
        if not self._auto or not infos:
            return
        reliable = all(i.qos_profile.reliability == ReliabilityPolicy.RELIABLE for i in infos)
        latched = all(
            i.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL for i in infos)
        wrong = (self._reliable and not reliable) or (self._latched and not latched)
        better = (reliable, latched) != (self._reliable, self._latched)
        helps = not self._since_subscribing or self.rates().lost > 0.05
        if wrong or (better and helps):
            self._subscribe(reliable, latched)

    def rates(self) -> Rates:
        """Return rates and losses of the last seconds."""
        return self._window.rates(time.monotonic_ns())

    @property
    def publishers(self) -> tuple[str, ...]:
        """Return reliability and durability of each publisher, as of the last :meth:`match`."""
        return self._publishers

    @property
    def has_publisher(self) -> bool:
        """Say whether anybody publishes on the topic."""
        return bool(self._publishers)

    def silent_s(self) -> float:
        """Return the seconds since the last frame (or since subscribing first)."""
        return (time.monotonic_ns() - self.last_received_ns) / 1e9

    def _on_message(self, message: Any) -> None:
        now_ns = time.monotonic_ns()
        self.received += 1
        self._since_subscribing += 1
        self.last_received_ns = now_ns
        stamp = message.header.stamp
        stamp_ns = stamp.sec * 10**9 + stamp.nanosec
        delay_ms = (self._node.get_clock().now().nanoseconds - stamp_ns) / 1e6
        self._window.add(now_ns, stamp_ns, delay_ms if stamp_ns else float('nan'))
        try:
            self._receive(self.name, message)
        except Exception as error:
            self._node.get_logger().error(
                f"camera '{self.name}': {type(error).__name__}: {error}",
                throttle_duration_sec=10.0)

    def _on_incompatible(self, event: Any) -> None:
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        self.incompatible = policy.removesuffix('_QOS_POLICY')
        self._node.get_logger().error(
            f"camera '{self.name}': a publisher on {self.topic} offers another "
            f'{self.incompatible} than image_qos asks for; no frame of its will come. '
            'image_qos AUTO fits every publisher.')
