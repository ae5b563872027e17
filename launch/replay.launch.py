"""
The node about a recording, played over DDS under the recording's own time.

``bag`` is required. For the same answers on every run use ``qwen_vl replay``, which reads the
recording without playing it.
"""

from launch import LaunchDescription

from qwen_vl_ros.node.launching import describe
from qwen_vl_ros.share import share


def generate_launch_description() -> LaunchDescription:
    """Return the node and the player."""
    return describe(params_file=str(share('config', 'desktop.yaml')), bag=None)
