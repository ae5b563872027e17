"""Rules of the house that source text can be held against."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NODE = sorted((ROOT / 'qwen_vl_ros' / 'node').glob('*.py'))
WAITING = {'spin_until_future_complete', 'spin', 'sleep', 'wait_for_service', 'wait_for_server'}


@pytest.mark.parametrize('path', NODE, ids=lambda path: path.name)
def test_no_callback_waits(path):
    """No call that waits for another callback; main.py alone may wait for a signal."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
            assert name not in WAITING, f'{path.name}:{node.lineno} waits in {name}'
            # client.call(request) waits for the response on the thread that would bring it.
            assert name != 'call', f'{path.name}:{node.lineno}: use call_async'


def test_only_the_node_imports_rclpy():
    for path in (ROOT / 'qwen_vl_ros').rglob('*.py'):
        if path.parent.name == 'node':
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module or ''] if isinstance(node, ast.ImportFrom) else [])
            assert not any(name.split('.')[0] == 'rclpy' for name in names), path
