"""The tables of ``r3numba bench``, from the record alone: milliseconds first, ratios after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .._bench import figures
from .._bench.figures import Case
from .console import milliseconds, size, table

#: (slower arm, faster arm, how the row reads); None for the faster arm = our cold call.
RATIOS: Final = (
    ("prefill", None, "original prefill"),
    ("single", None, "single write"),
    ("single_huge", None, "single write, huge pages"),
    ("pool_2", None, "single write, pool of 2"),
    ("bare", None, "bare NumPy slices"),
    ("slices_1", None, "NumPy fallback, 1 thread"),
    ("slices_2", None, "NumPy fallback, 2 threads"),
    ("serial", None, "our 1 thread"),
    ("prefill_reused", "recycled_2", "original prefill, reused buffer (RouteCollator against it)"),
    ("single_reused", "recycled_2", "single write, reused buffer (RouteCollator against it)"),
    ("pool_2_reused", "recycled_2", "pool of 2, reused buffer (RouteCollator against it)"),
)
#: What huge pages and a dummy block give by themselves, before any kernel of ours.
ALONE: Final = (
    ("single", "single_huge", "huge pages alone: single write on them"),
    ("single", "bare", "huge pages and a dummy block: ten lines of NumPy"),
    ("single", "slices_1", "the NumPy fallback, 1 thread"),
)


def print_report(out: Any, record: Mapping[str, Any]) -> None:
    """Print everything."""
    for line in host_lines(record["host"]):
        out.print(line)
    for case in record["cases"]:
        out.print(case_table(case))
    for nbytes in record["left_out"]:
        out.print(f"[yellow]{size(nbytes)} was left out: its arms together do not fit in the memory that is left.[/]")
    if record["cases"]:
        out.print(saved_table(record))
        out.print(ratio_table(record))
    if record["others"]:
        out.print(others_table(record))
    if record["skewed"]:
        out.print(case_table(record["skewed"]))
    for case in record["widening"]:
        out.print(case_table(case))
    out.print(tiny_table(record["tiny"]))
    out.print(capture_table(record["captures"]))
    for line in process_lines(record):
        out.print(line)
    out.print(target_table(record))
    out.print(figures.noise_text(record))


def host_lines(host: Mapping[str, Any]) -> Iterator[str]:
    """Yield the head of the report."""
    memory = "" if host["memory_bytes"] is None else f", {size(host['memory_bytes'])} memory"
    yield f"{host['cpu']}, {host['permitted_cpus']} of {host['cpus']} CPUs{memory}, huge pages: {host['huge_pages']}"
    yield ", ".join(f"{name} {version}" for name, version in host["versions"].items() if version)
    yield "GB/s counts the bytes of the result. Torch runs at 1 thread. Figures are medians of quiet repetitions."


def threads_of(arm: Mapping[str, Any]) -> int:
    """Return the threads that ran, where the arm is ours, else the arm's own."""
    return int((arm.get("ran") or arm)["threads"])


def case_title(case: Case) -> str:
    """Return what was measured, with its shape."""
    count, width, layers, topk = case["result_shape"]
    filled = 1 - case["copied_bytes"] / case["nbytes"]
    return (
        f"{case['name']}: {count} x {width} tokens x {layers} layers x top-{topk} {case['dtype']}, {filled:.0%} dummies"
    )


def case_table(case: Case) -> Any:
    """Return milliseconds, quartiles, GB/s, share of the limit and milliseconds saved of every arm."""
    rows = []
    for name, arm in case["arms"].items():
        share, saved = figures.share_of_limit(case, name), figures.saved(case, name)
        low, high = arm["quartiles"]
        rows.append((
            f"[bold]{arm['label']}[/]" if arm["ours"] else arm["label"],
            "fresh" if arm["cold"] else "warm",
            str(threads_of(arm)),
            milliseconds(arm["median"]),
            f"{milliseconds(low)} to {milliseconds(high)}",
            f"{case['nbytes'] / arm['median'] / 1e9:.1f}",
            "" if share is None else f"{share:.0%}",
            "" if saved is None else milliseconds(saved),
            "noisy" if arm["noisy"] else f"{arm['quiet']}/{len(arm['samples'])}",
        ))  # fmt: skip
    for name, limit in case["limits"].items():
        memory, _, threads = name.partition("_")
        rows.append((
            f"limit ({limit['candidate']})", memory, threads, milliseconds(limit["median"]),
            f"{milliseconds(limit['quartiles'][0])} to {milliseconds(limit['quartiles'][1])}",
            f"{case['nbytes'] / limit['median'] / 1e9:.1f}", "100%", "",
            "noisy" if limit["noisy"] else f"{limit['quiet']}/{len(limit['samples'])}",
        ))  # fmt: skip
    columns = ("arm", "pages", "threads", "ms", "quartiles", "GB/s", "of limit", "ms saved", "quiet")
    return table(case_title(case), columns, rows, text_columns=2)


def saved_table(record: Mapping[str, Any]) -> Any:
    """Return the milliseconds per step that our call saves against each baseline, by size."""
    cases = record["cases"]
    rows = []
    for name, arm in cases[0]["arms"].items():
        values = [figures.saved(case, name) if name in case["arms"] else None for case in cases]
        if any(value is not None for value in values):
            pages = "fresh" if arm["cold"] else "warm"
            rows.append((arm["label"], pages, *("" if v is None else milliseconds(v) for v in values)))
    fresh = [(figures.median(case, figures.ours_cold(case)), figures.median(case, "recycled_2")) for case in cases]
    rows.append((
        "our own call on fresh pages", "warm",
        *("" if cold is None or warm is None else milliseconds(cold - warm) for cold, warm in fresh),
    ))  # fmt: skip
    columns = ("ms saved per step against", "pages", *(size(case["nbytes"]) for case in cases))
    return table("Milliseconds saved per step (fresh: collate_routes; warm: RouteCollator)", columns, rows,
                 text_columns=2)  # fmt: skip


def ratio_table(record: Mapping[str, Any]) -> Any:
    """Return the ratios against each baseline, by size."""
    cases = record["cases"]
    rows = []
    for slow, fast, label in (*RATIOS, *ALONE):
        values = [figures.ratio(case, slow, fast or figures.ours_cold(case)) for case in cases]
        if any(value is not None for value in values):
            rows.append((label, *("" if value is None else f"{value:.2f}x" for value in values)))
    columns = ("collate_routes, 2 threads, against", *(size(case["nbytes"]) for case in cases))
    return table("Ratios", columns, rows)


def others_table(record: Mapping[str, Any]) -> Any:
    """Return the other shapes and spreads: milliseconds of a few arms."""
    labels = {name: arm["label"] for case in record["others"] for name, arm in case["arms"].items()}
    rows = []
    for case in record["others"]:
        times = (figures.median(case, name) for name in labels)
        share = figures.share_of_limit(case, figures.ours_cold(case))
        rows.append((
            case["name"],
            *("" if value is None else milliseconds(value) for value in times),
            "" if share is None else f"{share:.0%}",
        ))  # fmt: skip
    return table("Other shapes and spreads, ms", ("batch", *labels.values(), "of limit"), rows)


def tiny_table(tiny: Mapping[str, Any]) -> Any:
    """Return microseconds of tiny batches, and the overhead over bare slices."""
    names = list(tiny["cases"][0]["arms"])
    labels = [tiny["cases"][0]["arms"][name]["label"] for name in names]
    rows = []
    for case in tiny["cases"]:
        allowed = figures.OVERHEAD_CALL + figures.OVERHEAD_TRAJECTORY * case["trajectories"]
        rows.append((
            f"{case['trajectories']} x {case['tokens']} tokens",
            size(case["nbytes"]),
            *(f"{case['arms'][name]['median'] * 1e6:.1f}" for name in names),
            f"{case['overhead'] * 1e6:+.1f}",
            f"{allowed * 1e6:.0f}",
        ))  # fmt: skip
    title = (
        f"Tiny batches, us a call; fitted overhead over bare slices: {tiny['a_call'] * 1e6:+.1f} us a call "
        f"{tiny['a_trajectory'] * 1e6:+.2f} us a trajectory"
    )
    return table(title, ("batch", "size", *labels, "overhead", "allowed"), rows)


def capture_table(captures: Sequence[Mapping[str, Any]]) -> Any:
    """Return the table of decoding, compaction, traces and the audit, each held against the least work of its kind."""
    labels = {arm["name"]: arm["label"] for arm in captures}
    rows = [
        (
            arm["label"],
            milliseconds(arm["median"]),
            f"{arm['nbytes'] / arm['median'] / 1e9:.1f}",
            "" if arm["against"] is None else f"{arm['ratio']:.2f}x of {labels[arm['against']]}",
            "noisy" if arm["noisy"] else "",
        )
        for arm in captures
    ]
    return table(
        "Before the batch: decoding, compaction, traces, audit", ("arm", "ms", "GB/s", "time", "repetitions"), rows
    )


def process_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield memory, import and first-call figures."""
    peak, imports, first = record["peak_memory"], record["imports"]["median"], record["first_call"]["median"]
    resident = "unknown" if peak["resident"] is None else f"{(peak['resident'] - peak['result']) / 1024:+.0f} KiB"
    yield (
        f"Peak memory of a call of {size(peak['result'])} (indices and mask): result {resident} resident, "
        f"{(peak['allocated'] - peak['result']) / 1024:+.0f} KiB allocated"
    )
    yield (
        f"Import: numpy {milliseconds(imports['numpy'])} ms; with r3numba "
        f"{milliseconds(imports['r3numba'] - imports['numpy'])} ms more, with collate_routes "
        f"{milliseconds(imports['collate_routes'] - imports['numpy'])} ms more"
    )
    yield (
        f"First call of a process, imports and compilation included: small {first['small']:.2f} s, large "
        f"{first['large']:.2f} s; warmup() {first['warmup']:.2f} s"
    )


def target_table(record: Mapping[str, Any]) -> Any:
    """Return the speed targets with what was measured."""
    marks = {True: "[green]met[/]", False: "[bold red]missed[/]", None: "not measured"}
    rows = [
        (row.arm, row.against, row.needed, row.measured, marks[row.met] + (" (noisy)" if row.noisy else ""))
        for row in figures.targets(record)
    ]
    columns = ("target", "against", "at least", "measured, by size", "")
    return table("Speed targets (results of 100 MB and more, where no other size is named)", columns, rows,
                 text_columns=5)  # fmt: skip
