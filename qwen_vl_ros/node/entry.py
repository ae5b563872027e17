"""
What ``qwen_vl_node`` starts: signals end it cleanly from the first moment on.

Importing rclpy takes a third of a second. A Ctrl-C in that time would end in a traceback from the
middle of an import; until the node has handlers of its own, a signal just ends the process.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run the node; 130 for a signal before it is up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(130))
    from qwen_vl_ros.node.main import main as run

    return run()


if __name__ == '__main__':
    sys.exit(main())
