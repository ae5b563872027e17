"""
Build the native kernels with CMake and say what was built and what was left out.

``make kernels`` runs this; setup.py calls it for ``colcon build`` and ``pip install``. It needs
nothing but Python: without CMake or a C++ compiler it says so in one line, and the package works
with its plain twins.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
ROOT = SOURCE.parent

#: Where the package looks for its libraries in the source tree.
OUTPUT = ROOT / 'qwen_vl_ros' / 'kernels' / 'lib'


class BuildError(RuntimeError):
    """The kernels could not be built; the message says why and what would help."""


def find_cmake() -> str:
    """
    Return CMake: of this environment, else of the system.

    :raises BuildError: where there is none.
    """
    beside = Path(sys.executable).parent / 'cmake'
    found = str(beside) if beside.exists() else shutil.which('cmake')
    if not found:
        raise BuildError('no cmake; get it with: pip install cmake (or apt-get install cmake)')
    return found


def build(output: Path = OUTPUT, folder: Path = ROOT / 'build' / 'kernels',
          options: list[str] | None = None) -> list[str]:
    """
    Configure and build.

    :param output: folder for the libraries.
    :param folder: CMake's own folder; kept, so that only what changed is built again.
    :param options: further arguments for CMake, such as ``-DQWEN_VL_CUDA=OFF``.
    :return: the lines that say what was built and what was left out.
    :raises BuildError: where a tool is missing or a source does not compile.
    """
    cmake = find_cmake()
    if not (os.environ.get('CXX') or shutil.which('c++') or shutil.which('g++')):
        raise BuildError('no C++ compiler; get it with: apt-get install g++')
    jobs = str(len(os.sched_getaffinity(0)))
    text = _run([cmake, '-S', str(SOURCE), '-B', str(folder), f'-DQWEN_VL_OUTPUT={output}',
                 *(options or [])])
    _run([cmake, '--build', str(folder), '--parallel', jobs])
    return [line[3:] for line in text.splitlines() if line.startswith('-- kernels: ')]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = '\n'.join(done.stdout.splitlines()[-30:])
        raise BuildError(f'{" ".join(command[:3])} ... failed:\n{last}')
    return done.stdout


def main() -> int:
    """Build into the source tree; 1 when that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--output', type=Path, default=OUTPUT, help='folder for the libraries')
    parser.add_argument('--build', type=Path, default=ROOT / 'build' / 'kernels',
                        help='folder for what lies in between')
    parser.add_argument('options', nargs='*', help='for CMake, such as -DQWEN_VL_CUDA=OFF')
    args = parser.parse_args()
    try:
        for line in build(args.output.resolve(), args.build.resolve(), args.options):
            print(line)
    except BuildError as error:
        print(f'kernels: {error}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
