"""What the commands share: the extra's packages, progress, tables, and how figures are written."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MissingExtraError(Exception):
    """A package of the extra ``cli`` is not installed."""


def require(module: str) -> Any:
    """Return a module of the extra ``cli``; MissingExtraError, in one line, where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"this needs {package}: pip install 'r3numba[cli]' ({error})") from error


def console() -> Any:
    """Return rich's console on standard output; wide enough for our tables where the output is no terminal."""
    made = require("rich.console").Console(highlight=False)
    if not made.is_terminal:
        made.width = 130
    return made


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> Any:
    """Return a rich table; the first ``text_columns`` columns are text, the others numbers, right-aligned."""
    made = require("rich.table").Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < text_columns else "right")
    for row in rows:
        made.add_row(*row)
    return made


@contextmanager
def progress_bar(target: Any) -> Iterator[Bar]:
    """Show a progress bar on standard error's side of the console while the body runs; it leaves nothing behind."""
    progress = require("rich.progress")
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
               progress.TimeElapsedColumn())  # fmt: skip
    with progress.Progress(*columns, console=target, transient=True) as bar:
        yield Bar(bar)


class Bar:
    """One line that says which section runs and how far it is."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def section(self, title: str, steps: int) -> None:
        """Begin a section of so many steps."""
        self._progress.reset(self._task, description=title, total=steps)

    def step(self, label: str) -> None:
        """Count one step; noisy repetitions that are done again come on top of those announced."""
        task = self._progress.tasks[0]
        if task.finished:
            self._progress.update(self._task, total=task.total + 1)
        self._progress.advance(self._task)


def figure_module() -> Any:
    """Return matplotlib.figure with a backend that needs no display; pyplot and its global state stay out."""
    require("matplotlib.backends.backend_agg")
    return require("matplotlib.figure")


# --- Types of arguments: argparse shows the message ---------------------------------------------------------------


def gigabytes(text: str) -> int:
    """Return a size given in GB as bytes, at least a megabyte."""
    try:
        nbytes = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size in GB such as 0.4") from None
    if nbytes < 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0.001 GB")
    return nbytes


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of at least 1")
    return int(text)


def writable_file(text: str) -> Path:
    """Return the path of a file to write, in a directory that exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no directory")
    return path


# --- Figures ------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"


def size(nbytes: float) -> str:
    """Return bytes in the unit that reads best (MB = 1e6 bytes)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"
