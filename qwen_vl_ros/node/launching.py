"""
What the launch files have in common; imports ``launch``, which a robot's ROS brings.

Nothing is installed or downloaded here: a robot starts without a network.
"""

from __future__ import annotations

import os
from typing import Any

from launch import LaunchContext, LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    OpaqueFunction,
    SetEnvironmentVariable,
    Shutdown,
)
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterFile

from qwen_vl_ros.share import share

#: Name, default, description. An empty default leaves the choice to the parameter file.
ARGUMENTS = (
    ('namespace', '', 'Namespace of the node and of relative camera names.'),
    ('params_file', '', 'Parameter file (YAML).'),
    ('model_path', '',
     'Folder of a Qwen2-VL checkpoint; overrides model.path. With neither, the small checkpoint '
     'of the package answers, which knows rendered scenes only.'),
    ('quantization', '', 'Overrides model.quantization.'),
    ('cameras', '', 'Comma-separated cameras, NAME or NAME=TOPIC; overrides cameras.'),
    ('image_transport', '', 'raw or compressed; overrides image_transport.'),
    ('use_sim_time', '',
     'Take time from /clock: true or false. Empty: true where a bag is played.'),
    ('autostart', 'true',
     'Configure and activate at start; else wait for the life cycle services.'),
    ('log_level', 'info', 'debug, info, warn, error or fatal.'),
    ('overlay', '', 'Publish ~/overlay where somebody listens: true or false; overrides '
                    'overlay.enable.'),
    ('use_usb_cam', 'false', 'Start usb_cam as the first camera (package usb_cam).'),
    ('bag', '', 'Play this recording in place of a camera.'),
    ('bag_rate', '1.0', 'Speed of the recording.'),
    ('rviz', 'false', 'Show the overlay in RViz (package rviz2).'),
)


def describe(**defaults: str | None) -> LaunchDescription:
    """
    Return a launch description with all arguments.

    :param defaults: other defaults than those in :data:`ARGUMENTS`; ``None`` makes an argument
        required.
    """
    declared = [
        DeclareLaunchArgument(name, default_value=defaults.get(name, default), description=text)
        for name, default, text in ARGUMENTS]
    profile = str(share('config', 'fastdds.xml'))
    names = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
    # For the camera drivers that this file starts as well: both ends need it.
    environment = [] if any(os.environ.get(name) for name in names) else [
        SetEnvironmentVariable(name, profile) for name in names]
    return LaunchDescription([*declared, *environment, OpaqueFunction(function=_actions)])


def _actions(context: LaunchContext) -> list[Any]:
    """Return the processes, given the arguments' values."""
    values = {name: LaunchConfiguration(name).perform(context) for name, _, _ in ARGUMENTS}
    simulated = values['use_sim_time'] or str(bool(values['bag'])).lower()
    own: dict[str, Any] = {
        'use_sim_time': simulated == 'true', 'autostart': values['autostart'] == 'true'}
    for argument, parameter in (
            ('model_path', 'model.path'), ('quantization', 'model.quantization'),
            ('image_transport', 'image_transport')):
        if values[argument]:
            own[parameter] = values[argument]
    cameras = [entry.strip() for entry in values['cameras'].split(',') if entry.strip()]
    if cameras:
        own['cameras'] = cameras
    if values['overlay']:
        own['overlay.enable'] = values['overlay'] == 'true'
    logger = '.'.join([*values['namespace'].strip('/').split('/'), 'qwen_vl']).lstrip('.')
    files = [ParameterFile(values['params_file'], allow_substs=True)] if (
        values['params_file']) else []
    actions: list[Any] = [Node(
        package='qwen_vl_ros', executable='qwen_vl_node', name='qwen_vl',
        namespace=values['namespace'], output='screen', parameters=[*files, own],
        arguments=['--ros-args', '--log-level', f'{logger}:={values["log_level"]}'],
        on_exit=Shutdown())]
    if values['use_usb_cam'] == 'true':
        camera = (cameras or ['camera'])[0].split('=')[0].lstrip('/')
        actions.append(Node(
            package='usb_cam', executable='usb_cam_node_exe', name='usb_cam', output='screen',
            namespace='/'.join(part for part in (values['namespace'], camera) if part)))
    if values['bag']:
        actions.append(ExecuteProcess(
            cmd=['ros2', 'bag', 'play', values['bag'], '--clock', '200', '--rate',
                 values['bag_rate']], output='screen'))
    if values['rviz'] == 'true':
        actions.append(Node(
            package='rviz2', executable='rviz2', output='log',
            arguments=['-d', str(share('config', 'qwen_vl.rviz'))]))
    return actions
