"""The command ``r3numba``: ``demo``, ``doctor``, ``bench`` and ``inspect``.

Importing this imports neither Numba, torch, rich nor matplotlib; each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from .console import MissingExtraError

#: Each is a module here with ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> exit status``.
COMMANDS: Final = ("demo", "doctor", "bench", "inspect")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 where a check failed, 2 where it could not run.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; by default that of this process.

    Raises
    ------
    SystemExit
        For ``--help`` and for arguments that argparse refuses.
    """
    parser = argparse.ArgumentParser(prog="r3numba", description="Routed-expert replay: see it work, and measure it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    options.command_line = ["r3numba", *(sys.argv[1:] if arguments is None else arguments)]
    try:
        status: int = options.run(options)
    except (MissingExtraError, OSError, ValueError) as error:
        # OSError: a file that cannot be written. ValueError: an environment variable that makes no sense.
        print(f"r3numba {options.command}: {error}", file=sys.stderr)
        return 2
    return status
