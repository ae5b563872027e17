"""Reading rosbag2 recordings without ROS: folders, single .mcap and .db3 files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE = 'sensor_msgs/msg/Image'
COMPRESSED = 'sensor_msgs/msg/CompressedImage'
SUFFIXES = ('.mcap', '.db3')


class BagError(Exception):
    """A recording that cannot be read; the message names the file and what was expected."""


@dataclass(frozen=True)
class ImageTopic:
    """
    A topic that carries pictures.

    :param name: as recorded.
    :param compressed: whether its type is CompressedImage.
    :param count: messages in the bag.
    :param reliability: offered by the recorded publisher; ``''`` where the bag does not say.
    """

    name: str
    compressed: bool
    count: int
    reliability: str = ''


def find_storage(path: Path) -> Path:
    """
    Return what rosbags can open: the folder, or the one storage file that is meant.

    :param path: a bag folder, a folder without metadata.yaml but with one storage file, or a file.
    :raises BagError: when there is nothing to open.
    """
    if not path.exists():
        raise BagError(f'{path} does not exist; expected a rosbag2 folder, .mcap or .db3 file')
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise BagError(f'{path} is no rosbag2 file; expected one that ends in .mcap or .db3')
        return path
    if (path / 'metadata.yaml').exists():
        return path
    files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES)
    if not files:
        raise BagError(f'{path} holds neither metadata.yaml nor a .mcap or .db3 file')
    if len(files) > 1:
        raise BagError(
            f'{path} holds no metadata.yaml and {len(files)} storage files; name one of them, '
            f"for example '{files[0]}'")
    return files[0]


class Bag:
    """
    An open recording; use it in a ``with`` statement.

    :param path: see :func:`find_storage`.
    :raises BagError: when it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        from rosbags.rosbag2 import Reader
        from rosbags.typesys import Stores, get_typestore

        self.path = Path(path)
        storage = find_storage(self.path)
        # The two image types are the same in every ROS 2 release.
        self._store = get_typestore(Stores.ROS2_HUMBLE)
        try:
            self._reader = Reader(storage)
            self._reader.open()
        except Exception as error:
            raise BagError(self._why(storage, error)) from error

    def __enter__(self) -> Bag:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        with suppress(Exception):
            self._reader.close()

    @staticmethod
    def _why(storage: Path, error: Exception) -> str:
        text = str(error).strip().rstrip('.') or type(error).__name__
        return (f'{storage} cannot be read ({text}); it is damaged, or its recording was cut off. '
                "'ros2 bag reindex' or 'mcap recover' may repair it")

    @property
    def start_ns(self) -> int:
        """Return the time of the first message, nanoseconds."""
        return self._reader.start_time

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first to the last message."""
        return max(0, self._reader.duration - 1) / 1e9

    @property
    def topics(self) -> dict[str, str]:
        """Return every topic with its type."""
        return {c.topic: c.msgtype for c in self._reader.connections}

    @property
    def image_topics(self) -> tuple[ImageTopic, ...]:
        """Return the topics that carry pictures, by name."""
        found: dict[str, ImageTopic] = {}
        for connection in self._reader.connections:
            if connection.msgtype not in (IMAGE, COMPRESSED):
                continue
            count = connection.msgcount
            if connection.topic in found:
                count += found[connection.topic].count
            profiles = getattr(connection.ext, 'offered_qos_profiles', [])
            reliability = profiles[0].reliability.name.lower() if profiles else ''
            # A bag recorded by rosbag2 names one profile a publisher.
            found[connection.topic] = ImageTopic(
                connection.topic, connection.msgtype == COMPRESSED, count, reliability)
        return tuple(found[name] for name in sorted(found))

    def choose(self, names: Sequence[str] = ()) -> tuple[ImageTopic, ...]:
        """
        Return the topics to look at, in the order asked for.

        :param names: topics; none chooses the first raw one, or the first compressed one.
        :raises BagError: for a topic that is absent, carries no pictures or has no message.
        """
        images = {t.name: t for t in self.image_topics}
        if not images:
            raise BagError(f'{self.path} has no image topic; it has: '
                           + (', '.join(sorted(self.topics)) or 'no topic at all'))
        names = names or [min(images, key=lambda n: (
            not images[n].count, images[n].compressed, n))]
        for name in names:
            if name not in images:
                kind = f" (it is of type {self.topics[name]})" if name in self.topics else ''
                raise BagError(f"{self.path} has no image topic '{name}'{kind}; it has: "
                               + ', '.join(images))
            if not images[name].count:
                raise BagError(f"{self.path} has no message on '{name}'")
        return tuple(images[name] for name in names)

    def messages(
        self, topics: Sequence[ImageTopic], start_ns: int | None = None,
        stop_ns: int | None = None,
    ) -> Iterator[tuple[str, int, Any]]:
        """
        Read the pictures of some topics in the order of recording.

        :param start_ns: earliest time of recording.
        :param stop_ns: time of recording to stop before.
        :return: topic, time of recording in nanoseconds, and the message; ``None`` in place of a
            message whose bytes are no message of that type.
        :raises BagError: where the file turns out to be damaged.
        """
        names = {t.name for t in topics}
        wanted = [c for c in self._reader.connections if c.topic in names]
        messages = self._reader.messages(wanted, start_ns, stop_ns)
        while True:
            try:
                connection, time_ns, raw = next(messages)
            except StopIteration:
                return
            except (Exception, sqlite3.Error) as error:
                raise BagError(self._why(self.path, error)) from error
            try:
                message = self._store.deserialize_cdr(raw, connection.msgtype)
            except Exception:
                # rosbags lets struct, numpy and assertion errors of broken CDR through.
                message = None
            yield connection.topic, time_ns, message
