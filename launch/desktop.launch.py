"""The node on a PC, with or without a GPU, and RViz. ``--show-args`` is the manual."""

from launch import LaunchDescription

from qwen_vl_ros.node.launching import describe
from qwen_vl_ros.share import share


def generate_launch_description() -> LaunchDescription:
    """Return the node with the settings for a PC."""
    return describe(params_file=str(share('config', 'desktop.yaml')), rviz='true')
