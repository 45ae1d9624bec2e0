"""``r3numba doctor``: what limits this process, what would run, and why. Needs no extra."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .console import size

HELP: Final = "name every limit with its source, and the path that would run at each size, with the reason"
_WIDTH: Final = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis; the exit status is 0, as a warning is no failure."""
    from .diagnosis import diagnose

    record = diagnose()
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        for line in report(record):
            print(line)
    return 0


def report(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the text report."""
    yield "Versions"
    yield from _wrapped(
        ", ".join(f"{name} {version or 'not installed'}" for name, version in record["versions"].items()), "  "
    )
    yield "Limits"
    for limit in record["limits"]:
        yield from _entry(limit["name"], _value(limit["name"], limit["value"]), limit["source"], limit["why"])
    backend, pages = record["backend"], record["huge_pages"]
    yield "Backend"
    yield from _entry("backend", backend["backend"] or "none", None, None)
    yield from _entry("threading layer", backend["layer"] or "none", None, backend["why"])
    yield from _entry("stores", record["stores"]["value"] or "none", None, record["stores"]["why"])
    yield from _entry("huge pages", pages["value"] or "none", pages["source"], pages["why"])
    yield "What would run (a fresh result of this size)"
    for path in record["paths"]:
        threads = path["threads"]
        ran = "refused" if path["path"] is None else f"{path['path']}, {threads} thread{'s' if threads > 1 else ''}"
        yield from _entry(size(path["nbytes"]), ran, None, path["why"])
    yield "Environment variables in force"
    if not record["environment"]:
        yield "  none"
    for variable in record["environment"]:
        yield from _entry(variable["name"], variable["value"], None, variable["why"])
    yield "Warnings and hints"
    for warning in record["warnings"]:
        yield from _wrapped(f"- {warning}", "  ", hanging=4)


def _value(name: str, value: object) -> str:
    if value is None:
        return "not set" if name in ("num_threads", "max_threads", "reserved_cpus") else "no limit"
    return size(value) if name.endswith("memory_available") and isinstance(value, int) else str(value)


def _entry(name: str, value: str, source: str | None, why: str | None) -> Iterator[str]:
    origin = f"   ({source})" if source else ""
    yield from _wrapped(f"{name:<22} {value}{origin}", "  ", hanging=25)
    if why:
        yield from _wrapped(why, " " * 25)


def _wrapped(text: str, indent: str, hanging: int | None = None) -> Iterator[str]:
    following = indent if hanging is None else " " * hanging
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=following, break_on_hyphens=False)
