"""``r3numba inspect``: what lies in files of captured routes, whether it can be trusted, and which experts work."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from . import console

HELP: Final = "Summarise, audit and draw captured routes (npz, npy, JSON bodies, event streams, safetensors)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--num-experts", type=console.count, help="experts of a layer (default: the largest id + 1)")
    parser.add_argument("--dense-layers", default="", metavar="0,1,...", help="layers without experts, zero by design")
    parser.add_argument("--plot", type=console.writable_file, metavar="PNG", help="write a heat map, layers x experts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Inspect the files and return the exit status."""
    from .inspection import inspect_files  # NumPy and the library: not for ``--help``

    return inspect_files(arguments)
