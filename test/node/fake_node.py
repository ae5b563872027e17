"""The node as a program, with the fake engine."""

import sys

from fake_engine import FakeEngine

from qwen_vl_ros.node.main import main

if __name__ == '__main__':
    sys.exit(main(load=FakeEngine.load))
