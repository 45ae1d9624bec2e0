"""Figures that a record of ``suite`` implies: ratios, shares of the limit, milliseconds saved, and the speed targets.

Everything here reads the record alone, so that a report can be made again from the JSON file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Case = Mapping[str, Any]

#: What a call may cost over bare slices, and what it may hold beside its result (issue: "Speed").
OVERHEAD_CALL: Final = 30e-6
OVERHEAD_TRAJECTORY: Final = 1.5e-6
PEAK_EXTRA: Final = 1 << 20
IMPORT_EXTRA: Final = 0.030
#: The figures for results of 100 MB and more; smaller ones are printed, not judged.
JUDGED_FROM: Final = 99_000_000


def median(case: Case, arm: str) -> float | None:
    """Return an arm's median in seconds, None where it did not run."""
    record = case["arms"].get(arm)
    return None if record is None else float(record["median"])


def ours_cold(case: Case) -> str:
    """Return the arm that stands for a call as a user makes it: two threads, or what this host has instead."""
    return next(name for name in ("default", "parallel_2", "slices_2", "slices_1") if name in case["arms"])


def ratio(case: Case, slow: str, fast: str) -> float | None:
    """Return how many times faster ``fast`` is than ``slow``, None where one of them did not run."""
    one, other = median(case, slow), median(case, fast)
    return None if one is None or other is None else one / other


def saved(case: Case, arm: str) -> float | None:
    """Return the seconds a step that our arm of the same kind of memory saves against ``arm``; None for our own."""
    record = case["arms"][arm]
    ours = ours_cold(case) if record["cold"] else "recycled_2"
    if record["ours"] or ours not in case["arms"]:
        return None
    return float(record["median"] - case["arms"][ours]["median"])


def share_of_limit(case: Case, arm: str) -> float | None:
    """Return limit / time for the arm's kind of memory and threads; None where that limit was not measured."""
    record = case["arms"].get(arm)
    if record is None:
        return None
    threads = min(2, (record.get("ran") or {}).get("threads") or record["threads"])
    limit = case["limits"].get(f"{'fresh' if record['cold'] else 'warm'}_{threads}")
    return None if limit is None else float(limit["median"] / record["median"])


def fastest(case: Case, arms: Iterable[str]) -> str | None:
    """Return the fastest of the arms that ran."""
    return min((arm for arm in arms if arm in case["arms"]), key=lambda arm: case["arms"][arm]["median"], default=None)


def noisy_arms(record: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return, for each batch with a timing that has no quiet repetition: its name, how many, and of how many."""
    cases = [*record["cases"], *record["others"], *filter(None, [record["skewed"]]), *record["widening"],
             *record["tiny"]["cases"]]  # fmt: skip
    counts = [(case["name"], sum(arm["noisy"] for arm in case["arms"].values()), len(case["arms"])) for case in cases]
    return [count for count in counts if count[1]]


def noise_text(record: Mapping[str, Any]) -> str:
    """Return one sentence on how quiet the run was."""
    found = noisy_arms(record)
    if not found:
        return "Every timing has quiet repetitions."
    where = "; ".join(f"{name}: {noisy} of {count}" for name, noisy, count in found)
    return f"Timings without one quiet repetition (other processes had our CPUs; not to be trusted): {where}."


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table of speed targets; ``met`` is None where this host cannot tell."""

    arm: str
    against: str
    needed: str
    measured: str
    met: bool | None
    noisy: bool = False


def targets(record: Mapping[str, Any]) -> list[Target]:
    """Return the targets of the collation, with the worst figure over all judged sizes."""
    cases = [case for case in record["cases"] if case["nbytes"] >= JUDGED_FROM]
    skewed = [record["skewed"]] if record["skewed"] else []
    return [
        _least("cold, 2 threads", "single write", 3.4, cases, _ratio_of("single", "parallel_2")),
        _least("cold, 2 threads", "original prefill", 3.5, cases, _ratio_of("prefill", "parallel_2")),
        _least("cold, 2 threads", "NumPy fallback, its better", 1.3, cases, _against_fallback),
        _least("cold, 1 thread", "NumPy fallback, 1 thread", 1.0, cases, _ratio_of("slices_1", "serial")),
        _least("NumPy fallback, 1 thread", "single write", 1.6, cases, _ratio_of("single", "slices_1")),
        _least("cold, 2 threads", "limit, fresh huge pages", 0.65, cases, _limit_of("parallel_2"), percent=True),
        _least("cold, 1 thread", "limit, fresh huge pages", 0.65, cases, _limit_of("serial"), percent=True),
        _least("skewed, 2 threads", "1 thread", 1.6, skewed, _ratio_of("serial", "parallel_2")),
        _least("recycled, 2 threads", "single write, reused", 4.0, cases, _ratio_of("single_reused", "recycled_2")),
        _least("recycled, 2 threads", "pool of 2, reused", 2.2, cases, _ratio_of("pool_2_reused", "recycled_2")),
        _least("recycled, 1 thread", "single write, reused", 2.3, cases, _ratio_of("single_reused", "recycled_1")),
        _least("recycled, 2 threads", "limit, warm", 0.8, cases, _limit_of("recycled_2"), percent=True),
        _least("recycled, 1 thread", "limit, warm", 0.8, cases, _limit_of("recycled_1"), percent=True),
        _least("recycled, widening", "NumPy's assignment", 2.0, record["widening"], _ratio_of("assign", "recycled_2")),
        _least("skewed, recycled, 2 threads", "1 thread", 1.7, skewed, _ratio_of("recycled_1", "recycled_2")),
        _compact_target(record["captures"]),
        *_tiny_targets(record["tiny"]["cases"]),
        _peak_target(record["peak_memory"]),
        _import_target(record["imports"]["median"]),
    ]


Figure = tuple[float | None, Sequence[str]]


def _ratio_of(slow: str, fast: str) -> Callable[[Case], Figure]:
    return lambda case: (ratio(case, slow, fast), (slow, fast))


def _limit_of(arm: str) -> Callable[[Case], Figure]:
    return lambda case: (share_of_limit(case, arm), (arm,))


def _against_fallback(case: Case) -> Figure:
    best = fastest(case, ("slices_1", "slices_2"))
    return (None, ()) if best is None else (ratio(case, best, "parallel_2"), (best, "parallel_2"))


def _least(
    arm: str,
    against: str,
    needed: float,
    cases: Sequence[Case],
    figure: Callable[[Case], Figure],
    *,
    percent: bool = False,
) -> Target:
    found = [(case, *figure(case)) for case in cases]
    values = [value for _, value, _ in found if value is not None]
    noisy = any(case["arms"][name]["noisy"] for case, value, names in found if value is not None for name in names)

    def text(value: float) -> str:
        return f"{value:.0%}" if percent else f"{value:.2f}x"

    shown = ", ".join(text(value) for value in values) or "not measured here"
    return Target(arm, against, text(needed), shown, min(values) >= needed if values else None, noisy)


def _compact_target(captures: Sequence[Mapping[str, Any]]) -> Target:
    found = {arm["name"]: arm for arm in captures}
    slow, fast = found["three_passes"], found["compact"]
    value = slow["median"] / fast["median"]
    noisy = slow["noisy"] or fast["noisy"]
    return Target("compact_routes, int64", "NumPy's three passes", "3.00x", f"{value:.2f}x", value >= 3, noisy)


def _tiny_targets(cases: Sequence[Case]) -> list[Target]:
    rows = [
        _least("10 KB to 2 MB", label, 1.0, cases, _ratio_of(name, "default"))
        for name, label in (("single", "single write"), ("prefill", "original prefill"))
    ]
    excess = [case["overhead"] - OVERHEAD_CALL - OVERHEAD_TRAJECTORY * case["trajectories"] for case in cases]
    shown = ", ".join(f"{case['overhead'] * 1e6:.0f}/{case['trajectories']}" for case in cases)
    noisy = any(case["arms"][name]["noisy"] for case in cases for name in ("default", "bare"))
    needed = f"{OVERHEAD_CALL * 1e6:+.0f} us + {OVERHEAD_TRAJECTORY * 1e6:.1f} us a trajectory"
    met = max(excess) <= 0 if excess else None
    return [*rows, Target("10 KB to 2 MB (us/trajectories)", "bare slices", needed, shown, met, noisy)]


def _peak_target(peak: Mapping[str, Any]) -> Target:
    figures = [peak[key] - peak["result"] for key in ("resident", "allocated") if peak[key] is not None]
    extra = max(figures)
    return Target("peak memory of a call", "its result", "+1 MiB", f"{extra / 1024:+.0f} KiB", extra <= PEAK_EXTRA)


def _import_target(medians: Mapping[str, float]) -> Target:
    extra = medians["r3numba"] - medians["numpy"]
    needed = f"{IMPORT_EXTRA * 1e3:+.0f} ms"
    return Target("import r3numba", "numpy alone", needed, f"{extra * 1e3:+.1f} ms", extra <= IMPORT_EXTRA)
