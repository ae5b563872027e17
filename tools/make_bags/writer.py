"""Writes one camera's pictures as a rosbag2 recording: raw, JPEG and CameraInfo topics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from rosbags.interfaces import (
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

#: Pictures with their header stamps: nanoseconds and uint8 [H, W, 3] RGB.
Frames = Iterable[tuple[int, np.ndarray]]

#: A message is recorded so long after its stamp, as behind a real driver.
RECORDING_DELAY_NS = 8_000_000

STORAGES = {'mcap': StoragePlugin.MCAP, 'sqlite3': StoragePlugin.SQLITE3}


def sensor_qos() -> Qos:
    """Return the profile that camera drivers publish with: best effort, keep last 5."""
    forever = QosTime(9223372036, 854775807)
    return Qos(QosHistory.KEEP_LAST, 5, QosReliability.BEST_EFFORT, QosDurability.VOLATILE,
               forever, forever, QosLiveliness.AUTOMATIC, forever, False)


class CameraBag:
    """
    A bag with the topics of one or several cameras; use it in a ``with`` statement.

    :param path: folder to make; it must not exist.
    :param storage: a key of :data:`STORAGES`.
    """

    def __init__(self, path: Path, storage: str = 'mcap') -> None:
        self._store = get_typestore(Stores.ROS2_HUMBLE)
        # Version 8 is the older one that rosbags writes.
        self._writer = Writer(path, version=8, storage_plugin=STORAGES[storage])
        self._connections: dict[str, Any] = {}

    def __enter__(self) -> CameraBag:
        self._writer.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, topic: str, time_ns: int, message: Any) -> None:
        """Write one message of any standard type, recorded at ``time_ns``."""
        kind = message.__msgtype__
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(
                topic, kind, typestore=self._store, offered_qos_profiles=[sensor_qos()])
        self._writer.write(self._connections[topic], time_ns,
                           self._store.serialize_cdr(message, kind))

    def message(self, kind: str, **fields: Any) -> Any:
        """Make a message, ``kind`` as in ``'sensor_msgs/msg/Image'``."""
        return self._store.types[kind](**fields)

    def header(self, stamp_ns: int, frame_id: str) -> Any:
        """Make a ``std_msgs/Header``."""
        stamp = self.message(
            'builtin_interfaces/msg/Time', sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
        return self.message('std_msgs/msg/Header', stamp=stamp, frame_id=frame_id)

    def add_picture(
        self, camera: str, stamp_ns: int, rgb: np.ndarray, *, raw: bool = True, jpeg: bool = True,
        quality: int = 90, field_of_view: float = 1.2,
    ) -> None:
        """
        Write one picture to ``CAMERA/image_raw``, its ``/compressed`` and ``CAMERA/camera_info``.

        :param camera: base of the topics, as in ``'/camera/front'``.
        :param rgb: uint8 [H, W, 3].
        :param field_of_view: horizontal, radians; for CameraInfo.
        """
        height, width = rgb.shape[:2]
        frame_id = camera.strip('/').replace('/', '_') + '_optical_frame'
        header = self.header(stamp_ns, frame_id)
        time_ns = stamp_ns + RECORDING_DELAY_NS
        rgb = np.ascontiguousarray(rgb)
        self.add(f'{camera}/camera_info', time_ns,
                 self._camera_info(header, width, height, field_of_view))
        if raw:
            self.add(f'{camera}/image_raw', time_ns, self.message(
                'sensor_msgs/msg/Image', header=header, height=height, width=width,
                encoding='rgb8', is_bigendian=0, step=width * 3, data=rgb.reshape(-1)))
        if jpeg:
            data = simplejpeg.encode_jpeg(rgb, quality, colorsubsampling='420')
            self.add(f'{camera}/image_raw/compressed', time_ns, self.message(
                'sensor_msgs/msg/CompressedImage', header=header,
                format='rgb8; jpeg compressed bgr8', data=np.frombuffer(data, np.uint8)))

    def _camera_info(self, header: Any, width: int, height: int, field_of_view: float) -> Any:
        focal = width / 2 / math.tan(field_of_view / 2)
        k = np.array([focal, 0, width / 2, 0, focal, height / 2, 0, 0, 1.0])
        p = np.array([focal, 0, width / 2, 0, 0, focal, height / 2, 0, 0, 0, 1.0, 0])
        roi = self.message('sensor_msgs/msg/RegionOfInterest', x_offset=0, y_offset=0, height=0,
                           width=0, do_rectify=False)
        return self.message(
            'sensor_msgs/msg/CameraInfo', header=header, height=height, width=width,
            distortion_model='plumb_bob', d=np.zeros(5), k=k, r=np.eye(3).reshape(-1), p=p,
            binning_x=0, binning_y=0, roi=roi)


def write_bag(
    path: Path, frames: Frames, *, storage: str = 'mcap', camera: str = '/camera/front',
    **picture: Any,
) -> int:
    """
    Write a bag of one camera.

    :param path: folder to make.
    :param frames: pictures in order of their stamps.
    :param picture: ``raw``, ``jpeg``, ``quality``, ``field_of_view`` of
        :meth:`CameraBag.add_picture`.
    :return: the number of pictures.
    """
    count = 0
    with CameraBag(path, storage) as bag:
        for stamp_ns, rgb in frames:
            bag.add_picture(camera, stamp_ns, rgb, **picture)
            count += 1
    return count
