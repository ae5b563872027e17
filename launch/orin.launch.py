"""The node on a Jetson AGX Orin. ``--show-args`` is the manual."""

from launch import LaunchDescription

from qwen_vl_ros.node.launching import describe
from qwen_vl_ros.share import share


def generate_launch_description() -> LaunchDescription:
    """Return the node with the settings for an Orin."""
    return describe(params_file=str(share('config', 'orin.yaml')))
