"""Launch files, where the machine's ROS has ``launch``; the settings they name, everywhere."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qwen_vl_ros.node.parameters import Settings
from qwen_vl_ros.share import share

ROOT = Path(__file__).parents[2]
LAUNCH = pytest.mark.skipif(
    importlib.util.find_spec('launch_ros') is None,
    reason='launch_ros comes with a ROS installation only, not from PyPI')


def description(name):
    spec = importlib.util.spec_from_file_location('launched', ROOT / 'launch' / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate_launch_description()


@LAUNCH
@pytest.mark.parametrize('name', ['orin.launch.py', 'desktop.launch.py', 'replay.launch.py'])
def test_every_argument_is_described(name):
    from launch.actions import DeclareLaunchArgument
    arguments = [entity for entity in description(name).entities
                 if isinstance(entity, DeclareLaunchArgument)]
    assert len(arguments) >= 12
    assert all(len(argument.description) > 10 for argument in arguments)
    required = [argument.name for argument in arguments if argument.default_value is None]
    assert required == (['bag'] if name == 'replay.launch.py' else [])


@LAUNCH
def test_arguments_become_parameters(monkeypatch):
    from launch import LaunchContext
    from launch.actions import DeclareLaunchArgument, OpaqueFunction

    from qwen_vl_ros.node import launching
    monkeypatch.setattr(launching, 'Node', SimpleNamespace)
    context = LaunchContext()
    context.launch_configurations.update({
        'cameras': '/front, side=/cam/image', 'model_path': '/models/x', 'bag': '/data/drive',
        'namespace': 'robot', 'overlay': 'false', 'log_level': 'debug', 'use_usb_cam': 'true'})
    entities = description('orin.launch.py').entities
    for entity in entities:
        if isinstance(entity, DeclareLaunchArgument):
            entity.execute(context)
    function, = [entity for entity in entities if isinstance(entity, OpaqueFunction)]
    node, camera, player = function.execute(context)
    assert node.executable == 'qwen_vl_node' and node.namespace == 'robot'
    assert node.arguments[-1] == 'robot.qwen_vl:=debug'
    assert node.parameters[-1] == {
        'cameras': ['/front', 'side=/cam/image'], 'model.path': '/models/x',
        'use_sim_time': True, 'autostart': True, 'overlay.enable': False}
    assert camera.namespace == 'robot/front'
    assert '/data/drive' in [part.perform(context) for part, in player.cmd]


@pytest.mark.parametrize('name', ['orin.yaml', 'desktop.yaml'])
def test_shipped_settings_are_valid(name):
    values = yaml.safe_load((ROOT / 'config' / name).read_text())['/**']['ros__parameters']
    known = {spec.metadata['name'] for spec in Settings.table()}
    assert set(values) <= known
    Settings.of(values)


def test_foxglove_layout_shows_documented_topics():
    text = (ROOT / 'config' / 'foxglove_layout.json').read_text()
    json.loads(text)
    page = (ROOT / 'docs' / 'interfaces.md').read_text()
    for topic in ('overlay/compressed', 'metrics', 'answer_text', 'question'):
        assert f'/qwen_vl/{topic}' in text and f'`~/{topic}`' in page


def test_what_is_not_shipped_is_named():
    with pytest.raises(FileNotFoundError) as caught:
        share('config', 'no_such.yaml')
    assert 'config/no_such.yaml is in none of' in str(caught.value)
    assert share('config', 'fastdds.xml').exists()
