"""
Run random frames through the CPU kernel.

Natively under AddressSanitizer and UndefinedBehaviorSanitizer, or cross-compiled for 64-bit ARM
under qemu-user (without sanitizers). Both print a digest of all patches: the same seed gives the
same digest on both, or NEON and AVX differ.

    python kernels/fuzz.py --cases 1000000          # about eight minutes
    python kernels/fuzz.py --target aarch64
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from build import ROOT, BuildError, build

COMPILER = 'aarch64-linux-gnu-g++'
EMULATOR = 'qemu-aarch64'

#: ARMv8.2 with dot product, without SVE and I8MM: what a Cortex-A78AE has, among qemu's models.
EMULATED = 'cortex-a76'

NATIVE = ['-DQWEN_VL_CUDA=OFF', '-DQWEN_VL_FUZZ=ON', '-DQWEN_VL_SANITIZE=ON']
AARCH64 = ['-DQWEN_VL_CUDA=OFF', '-DQWEN_VL_FUZZ=ON', '-DCMAKE_SYSTEM_NAME=Linux',
           '-DCMAKE_SYSTEM_PROCESSOR=aarch64', f'-DCMAKE_CXX_COMPILER={COMPILER}']


def missing(target: str) -> list[str]:
    """Return the tools that a target needs and that are not there."""
    needed = [COMPILER, EMULATOR] if target == 'aarch64' else []
    return [tool for tool in needed if not shutil.which(tool)]


def prepare(target: str, folder: Path) -> list[str]:
    """
    Build the program.

    :param target: ``native`` or ``aarch64``.
    :return: the command that runs it.
    :raises BuildError: where a tool is missing or it does not compile.
    """
    lacking = missing(target)
    if lacking:
        raise BuildError(f'{", ".join(lacking)} missing; get them with: '
                         'apt-get install g++-aarch64-linux-gnu qemu-user')
    build(folder / 'lib', folder, AARCH64 if target == 'aarch64' else NATIVE)
    program = str(folder / 'qwen_vl_fuzz')
    if target == 'aarch64':
        return [EMULATOR, '-cpu', EMULATED, '-L', '/usr/aarch64-linux-gnu', program]
    return [program]


def main() -> int:
    """Build and run; not 0 when a byte was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=int, default=2000)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--target', choices=('native', 'aarch64'), default='native')
    args = parser.parse_args()
    try:
        command = prepare(args.target, ROOT / 'build' / f'fuzz-{args.target}')
    except BuildError as error:
        print(f'fuzz: {error}', file=sys.stderr)
        return 1
    return subprocess.run([*command, str(args.cases), str(args.seed)]).returncode


if __name__ == '__main__':
    sys.exit(main())
