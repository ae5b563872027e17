"""Where the files lie that come with the package: in a source tree and in an installation."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = 'qwen_vl_ros'


def share(*parts: str) -> Path:
    """
    Return the path of a shipped file or folder, such as ``share('config', 'orin.yaml')``.

    The source tree comes first, then ``share/qwen_vl_ros`` of every prefix that ROS knows.

    :param parts: below the root of the source tree: ``config``, ``launch``, ``models``.
    :raises FileNotFoundError: naming the places that were looked at.
    """
    roots = [Path(__file__).resolve().parents[1]]
    roots += [Path(prefix) / 'share' / PACKAGE
              for prefix in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep) if prefix]
    for root in roots:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(
        f"{'/'.join(parts)} is in none of {', '.join(str(root) for root in roots)}")


def use_large_data_profile() -> None:
    """
    Let Fast DDS take pictures whole, unless the user chose a profile.

    Its defaults lose two of three best-effort pictures between two processes. Has to be called
    before ``rclpy.init``; other middleware ignores it.
    """
    names = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
    if not any(os.environ.get(name) for name in (*names, 'FASTDDS_BUILTIN_TRANSPORTS')):
        profile = str(share('config', 'fastdds.xml'))
        os.environ.update(dict.fromkeys(names, profile))
