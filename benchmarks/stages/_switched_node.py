"""
The node, with exports that SIGUSR1 switches on and SIGUSR2 off: one process, both variants.

:data:`~benchmarks.stages._node.SHAPE` in the environment lets it answer with random weights of an
official shape on a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from benchmarks.stages._node import SHAPE
from qwen_vl_ros.measure.export import Exports
from qwen_vl_ros.node import publish
from qwen_vl_ros.node.main import load_engine, main
from qwen_vl_ros.node.parameters import Settings


class Switched:
    """
    Exports that hear nothing while they are off, as those of a node that has none.

    :param exports: told while they are on.
    """

    def __init__(self, exports: Exports) -> None:
        self._all, self._none = exports, Exports(())
        self._now = exports
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, '_now', self._all))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, '_now', self._none))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


def load(settings: Settings) -> Any:
    """Return the engine that the environment asks for."""
    shape = os.environ.get(SHAPE, '')
    if not shape:
        return load_engine(settings)
    from benchmarks.stages._engines import timed_engine

    engine = timed_engine(shape, max_sequences=settings.scheduler_max_sequences)
    engine.warm_up()
    return engine


if __name__ == '__main__':
    opened = publish.open_exports
    publish.open_exports = lambda **more: Switched(opened(**more))  # type: ignore[assignment]
    sys.exit(main(load=load))
