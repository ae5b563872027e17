"""
Files of built engines and timings: never loaded unless they are exactly what was asked for.

A file begins with one line of JSON that names what it was built from and the sha256 of what
follows; its own name is a digest of the same. A file of another TensorRT, GPU, model, precision or
grid has another name; one under the right name whose line or bytes do not fit, or that other users
could have written, is passed over and replaced.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

LOG = logging.getLogger('qwen_vl_ros.engine')

MAGIC = 'qwen_vl_ros tensorrt 1'

#: The longest first line that is read.
MOST_HEADER = 4096


@dataclass(frozen=True)
class Key:
    """
    What an engine was built from.

    :param library: flavour and version, such as 'tensorrt_rtx 1.7.1.116'.
    :param gpu: name, compute capability and the CUDA release of torch's build.
    :param model: digest of the encoder's weights and shape.
    :param precision: fp16 or int8.
    :param grid: least, usual and most patches of a slice.
    :param network: version of the network that was built.
    """

    library: str
    gpu: str
    model: str
    precision: str
    grid: tuple[int, int, int]
    network: int

    @property
    def digest(self) -> str:
        """Return the sha256 of all fields."""
        text = json.dumps([MAGIC, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> Path:
    """Return where engines are kept: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get('XDG_CACHE_HOME') or str(Path.home() / '.cache')
    return Path(base) / 'qwen_vl_ros' / 'tensorrt'


def _others_write(found: os.stat_result) -> bool:
    """Tell whether somebody else may write a file or folder."""
    return found.st_uid not in (os.getuid(), 0) or bool(found.st_mode & 0o022)


class Store:
    """
    A folder of engines or timings.

    :param folder: made at the first write.
    :param suffix: of the files.
    """

    def __init__(self, folder: Path, suffix: str = 'engine') -> None:
        self.folder = folder
        self.suffix = suffix

    def path(self, key: Key) -> Path:
        """Return the file of a key."""
        return self.folder / f'{key.digest}.{self.suffix}'

    def read(self, key: Key) -> bytes | None:
        """Return what was stored under a key, or ``None`` with a line in the log why not."""
        path = self.path(key)
        try:
            # What is looked at is what is read, whatever comes into its place meanwhile.
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, 'rb') as file:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    return self._refuse(path, 'it is not a plain file')
                if any(_others_write(place) for place in (found, self.folder.stat())):
                    return self._refuse(path, 'other users could have written it')
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._refuse(path, 'it is not a plain file' if error.errno == errno.ELOOP
                                else str(error.strerror))
        line, _, body = data.partition(b'\n')
        if len(line) > MOST_HEADER or line != self._header(key, body):
            return self._refuse(path, 'its header does not fit its content or this machine')
        return body

    def write(self, key: Key, body: bytes) -> None:
        """Store something under a key; a full disk or a read-only folder is told to the log."""
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.folder)  # mode 0600
            try:
                with os.fdopen(handle, 'wb') as file:
                    file.write(self._header(key, body) + b'\n' + body)
                os.replace(name, path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            LOG.warning('%s cannot be kept: %s', path, error.strerror)

    @staticmethod
    def _header(key: Key, body: bytes) -> bytes:
        fields = {'magic': MAGIC, **asdict(key), 'sha256': hashlib.sha256(body).hexdigest()}
        return json.dumps(fields, sort_keys=True).encode()

    @staticmethod
    def _refuse(path: Path, why: str) -> None:
        LOG.warning('%s is not used and will be made again: %s', path, why)
