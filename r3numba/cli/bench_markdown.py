"""The benchmark table of the README, made from a record of ``r3numba bench``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from .._bench import figures
from .bench_report import threads_of
from .console import milliseconds, size

ARMS: Final = (
    "prefill", "single", "single_huge", "pool_2", "slices_1", "serial", "parallel_2", "default", "single_reused",
    "pool_2_reused", "recycled_1", "recycled_2", "plain_2",
)  # fmt: skip


def markdown(record: Mapping[str, Any]) -> str:
    """Return the table with the command, date, host and versions that made it."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    host, cases = record["host"], record["cases"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items() if version)
    yield f"<!-- Made by `{record['command']}` on {record['date'][:10]}; do not edit. -->"
    yield ""
    yield (
        f"`{record['command']}`, {record['date'][:10]}: {host['cpu']}, {host['permitted_cpus']} CPUs, huge pages "
        f"{host['huge_pages']}; {versions}. Medians, all arms interleaved in one "
        f"process, torch at 1 thread. {figures.noise_text(record)}"
    )
    yield ""
    yield from _table(
        ("ms per step", "pages", "threads", *(size(case["nbytes"]) for case in cases), "GB/s", "of this host's limit"),
        _time_rows(cases),
    )
    yield ""
    yield from _table(
        ("ms saved per step against", "pages", *(size(case["nbytes"]) for case in cases), "ratio"), _saved_rows(cases)
    )
    yield ""
    yield from _table(
        ("target", "against", "at least", "measured", ""),
        (
            (row.arm, row.against, row.needed, row.measured,
             {True: "met", False: "**missed**", None: "not measured"}[row.met] + (", noisy" if row.noisy else ""))
            for row in figures.targets(record)
        ),
    )  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _time_rows(cases: Sequence[figures.Case]) -> Iterator[tuple[str, ...]]:
    """Yield one row an arm; GB/s and share are those of the largest result."""
    for name in ARMS:
        found = [case["arms"].get(name) for case in cases]
        if not found or found[-1] is None:
            continue
        last = found[-1]
        share = figures.share_of_limit(cases[-1], name)
        yield (
            f"**{last['label']}**" if last["ours"] else last["label"],
            "fresh" if last["cold"] else "warm",
            str(threads_of(last)),
            *("" if arm is None else milliseconds(arm["median"]) for arm in found),
            f"{cases[-1]['nbytes'] / last['median'] / 1e9:.1f}",
            "" if share is None else f"{share:.0%}",
        )


def _saved_rows(cases: Sequence[figures.Case]) -> Iterator[tuple[str, ...]]:
    for name in ARMS:
        if not cases or name not in cases[-1]["arms"]:
            continue
        values = [figures.saved(case, name) if name in case["arms"] else None for case in cases]
        if values[-1] is None:
            continue
        arm = cases[-1]["arms"][name]
        ours = figures.ours_cold(cases[-1]) if arm["cold"] else "recycled_2"
        ratio = figures.ratio(cases[-1], name, ours)
        yield (
            arm["label"],
            "fresh" if arm["cold"] else "warm",
            *("" if value is None else milliseconds(value) for value in values),
            "" if ratio is None else f"{ratio:.1f}x",
        )
