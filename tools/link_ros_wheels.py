"""
Make the ROS 2 wheels of a virtual environment usable for generating interfaces.

The ``.cmake`` files that the wheels export name the include folders of the Python and the numpy
with which the wheels were built (``/opt/python/cpXY-cpXY/...``). This puts the environment's own
in their place. Running it again changes nothing.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

NUMPY = re.compile(r'/opt/python/[^";]*?/numpy/(?:_core|core)/include')
PYTHON = re.compile(r'/opt/python/[^";]*?/include/python3\.\d+')


def rewrite(prefix: Path, python_include: str, numpy_include: str) -> int:
    """
    Rewrite the two paths in every exported CMake file below ``prefix/share``.

    :param prefix: root of the virtual environment.
    :param python_include: folder that holds ``Python.h``.
    :param numpy_include: folder that holds ``numpy/ndarrayobject.h``.
    :return: number of files changed.
    """
    changed = 0
    for path in sorted(prefix.glob('share/*/cmake/*.cmake')):
        old = path.read_text()
        new = PYTHON.sub(lambda _: python_include, NUMPY.sub(lambda _: numpy_include, old))
        if new != old:
            path.write_text(new)
            changed += 1
    return changed


def main() -> int:
    """Rewrite the files of the environment that runs this program."""
    import numpy

    include = sysconfig.get_paths()['include']
    if not (Path(include) / 'Python.h').exists():
        version = f'{sys.version_info.major}.{sys.version_info.minor}'
        print(f'Python.h is missing ({include}): install the headers, for example with '
              f'"apt-get install python{version}-dev" or "apt-get install python3-dev"',
              file=sys.stderr)
        return 1
    changed = rewrite(Path(sys.prefix), include, numpy.get_include())
    print(f'{changed} exported CMake files now name {include}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
