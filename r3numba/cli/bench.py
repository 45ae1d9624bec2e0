"""``r3numba bench``: milliseconds per step on this host, its limit, what is saved, and the ratios after that."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .console import console, count, gigabytes, progress_bar, require, writable_file

HELP: Final = "measure collation on this host: ms per step, share of the host's limit, ms saved, ratios"
_FILE_OPTIONS: Final = ("--json", "--plot", "--markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write every repetition and figure")
    parser.add_argument("--plot", type=writable_file, metavar="FILE", help="write a picture")
    parser.add_argument("--markdown", type=writable_file, metavar="FILE", help="write the README's table")
    parser.add_argument(
        "--sizes", type=_sizes, metavar="GB,...", help="of the results (default: 0.1,0.4,1.6; with --quick: 0.1)"
    )
    parser.add_argument("--repeat", type=count, metavar="N", help="quiet repetitions (default: 9; with --quick: 3)")
    parser.add_argument("--quick", action="store_true", help="one size, few repetitions, no other shapes and spreads")
    parser.add_argument("--shape", default="48x8", metavar="NAME", help="48x8 (default), 58x8, 47x4, 60x8 or 40x22")
    parser.add_argument(
        "--spread", default="typical", metavar="NAME", help="uniform, mild, typical (default) or heavy: 1 to 1/64"
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(gigabytes(part) for part in text.split(",")))


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; 0 whatever the figures are."""
    out = console()
    if options.plot is not None:
        require("matplotlib")
    from .._bench.shapes import SHAPES, SPREADS
    from .._bench.suite import Settings, run_suite

    for name, value, known in (("shape", options.shape, SHAPES), ("spread", options.spread, SPREADS)):
        if value not in known:
            raise ValueError(f"--{name} is {value!r}, need one of {', '.join(known)}")
    settings = Settings(
        sizes=options.sizes or ((100_000_000,) if options.quick else Settings().sizes),
        repeat=options.repeat or (3 if options.quick else Settings().repeat),
        shape=options.shape,
        spread=options.spread,
        quick=options.quick,
    )
    with progress_bar(out) as bar:
        record = run_suite(settings, bar, command_text(options.command_line))
    from .bench_report import print_report

    print_report(out, record)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot is not None:
        from .bench_figure import draw

        draw(options.plot, record)
    if options.markdown is not None:
        from .bench_markdown import markdown

        options.markdown.write_text(markdown(record))
    return 0


def command_text(arguments: Sequence[str]) -> str:
    """Return the command line with file names only, so that no path of this machine ends up in a document."""
    words = []
    previous = ""
    for word in arguments:
        option, equals, value = word.partition("=")
        if previous in _FILE_OPTIONS:
            word = Path(word).name
        elif equals and option in _FILE_OPTIONS:
            word = f"{option}={Path(value).name}"
        words.append(word)
        previous = word
    return shlex.join(words)
