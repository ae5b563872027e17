"""The ``qwen_vl`` command: one module of this package for each subcommand."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from qwen_vl_ros import __version__
from qwen_vl_ros.cli.bag import BagError
from qwen_vl_ros.cli.common import CliError
from qwen_vl_ros.engine.errors import EngineError

#: Subcommands in the order of the help text. Each is a module ``qwen_vl_ros.cli.NAME`` with
#: ``add_parser(subparsers)`` and ``run(args) -> int``; heavy imports belong into ``run``.
COMMANDS = (
    'ask',
    'replay',
    'compare',
    'eval',
    'doctor',
    'roofline',
    'sensors',
    'interconnect',
    'bench',
)

DESCRIPTION = '''\
Ask what a robot's camera sees, and what the answer cost.

exit codes: 0 all done, 1 something was asked and failed, 2 bad input, 130 interrupted'''


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without all options before it."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f'{self.prog}: {message}; {self.prog} --help says more\n')


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = Parser(
        prog='qwen_vl', description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--version', action='version', version=f'qwen_vl {__version__}')
    subparsers = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name in COMMANDS:
        importlib.import_module(f'qwen_vl_ros.cli.{name}').add_parser(subparsers)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """
    Parse a command line.

    argparse gives up a list of files at the first option behind it; a command that names its
    list of paths in ``rest`` gets the words that were left over.
    """
    parser = build_parser()
    args, left = parser.parse_known_args(argv)
    if left:
        name = getattr(args, 'rest', '')
        if not name or any(word.startswith('-') for word in left):
            parser.error(f'unrecognized arguments: {" ".join(left)}')
        setattr(args, name, [*getattr(args, name), *map(Path, left)])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    :return: the exit code.
    """
    args = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return importlib.import_module(f'qwen_vl_ros.cli.{args.command}').run(args)
    except (CliError, BagError) as error:
        print(f'qwen_vl {args.command}: {error}', file=sys.stderr)
        return 2
    except EngineError as error:
        print(f'qwen_vl {args.command}: {error.message}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f'qwen_vl {args.command}: interrupted', file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:
        where = f' {error.filename}' if error.filename else ''
        print(f'qwen_vl {args.command}: cannot read or write{where}: {error.strerror or error}',
              file=sys.stderr)
        _discard_output()
        return 2


def _discard_output() -> None:
    """Let what is left in stdout's buffer go nowhere: Python would complain of it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == '__main__':
    sys.exit(main())
