"""The whole of ``r3numba bench``: runs every section and returns one record that JSON can hold."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from .._dispatch import backend_info
from ..topology import cgroup_memory_available, permitted_cpus
from .arms import ARMS, Arm, Workbench, available, check_equal, widening_arms
from .capture import run_captures
from .fresh_process import first_call_times, import_times, peak_memory
from .host import host_record
from .limit import CANDIDATES, MEMORY_KINDS, THREAD_COUNTS, Limit, limit_of
from .measure import Task, calls_for, measure, torch_at_one_thread
from .shapes import SHAPES, SPREADS, TINY, BenchBatch, batch_of, make_batch, make_skewed

SCHEMA: Final = 1
#: What a case may hold at once, as a multiple of its result: input, the limit's source, reused, recycled and warm
#: buffers, the rectangle that all are compared with, and the one being made.
_MEMORY_FACTOR: Final = 7
#: The arms of the sections that look at one question each.
OTHER_ARMS: Final = ("prefill", "single", "slices_1", "serial", "parallel_2", "recycled_2")
SKEWED_ARMS: Final = (
    "single", "slices_1", "serial", "parallel_1", "parallel_2", "recycled_1", "recycled_2", "plain_1", "plain_2",
)  # fmt: skip
TINY_ARMS: Final = ("prefill", "single", "bare", "default")
#: A repetition of a tiny batch is as many calls as take this long, so that reading clocks does not show.
_TINY_SECONDS: Final = 0.02
_PEAK_BYTES: Final = 400_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. ``sizes`` are bytes of the result, smallest first; ``repeat`` counts quiet repetitions."""

    sizes: tuple[int, ...] = (100_000_000, 400_000_000, 1_600_000_000)
    repeat: int = 9
    shape: str = "48x8"
    spread: str = "typical"
    #: Leave out the other shapes and spreads, and repeat processes less often.
    quick: bool = False


class Progress(Protocol):
    """What hears how far the run is."""

    def section(self, title: str, steps: int) -> None:
        """Begin a section of so many steps."""
        ...

    def step(self, label: str) -> None:
        """Count one step."""
        ...


class NoProgress:
    """Hears and says nothing."""

    def section(self, title: str, steps: int) -> None:
        """Ignore it."""

    def step(self, label: str) -> None:
        """Ignore it."""


def run_suite(settings: Settings, progress: Progress, command: str) -> dict[str, Any]:
    """Run every section. Torch's and Numba's thread counts are as before when it returns; nothing else is changed."""
    shape = SHAPES[settings.shape]
    with torch_at_one_thread():
        cases, left_out = [], []
        for nbytes in settings.sizes:
            batch = _fitting(nbytes, functools.partial(make_batch, shape, settings.spread, nbytes))
            if batch is None:
                left_out.append(nbytes)
                continue
            cases.append(
                run_case(batch, available(main_arms()), settings.repeat, progress, limit_threads=THREAD_COUNTS)
            )
        middle = settings.sizes[len(settings.sizes) // 2]
        others = [] if settings.quick else _others(settings, middle, progress)
        skewed_batch = _fitting(middle, functools.partial(make_skewed, shape, middle))
        skewed = skewed_batch and run_case(
            skewed_batch, available(SKEWED_ARMS), settings.repeat, progress, limit_threads=(2,)
        )
        widening = _widening(settings, middle, progress)
        tiny = _tiny(settings, progress)
        progress.section("decode, compact, trace, audit", 16 * settings.repeat)
        captures = run_captures(settings.repeat, progress.step)
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": host_record(),
        "settings": {
            "sizes": list(settings.sizes), "repeat": settings.repeat, "shape": settings.shape,
            "spread": settings.spread, "quick": settings.quick,
        },
        "cases": cases,
        "left_out": left_out,
        "others": others,
        "skewed": skewed,
        "widening": widening,
        "tiny": tiny,
        "captures": captures,
        **_processes(settings, progress),
    }  # fmt: skip


def main_arms() -> tuple[str, ...]:
    """Return the arms of the series over sizes; the unforced call only where it is no arm that is there already."""
    return tuple(name for name in ARMS if name != "default" or permitted_cpus() > 2)


def run_case(
    batch: BenchBatch,
    arms: Sequence[Arm],
    repeat: int,
    progress: Progress,
    *,
    limit_threads: Sequence[int],
    dtype: str | None = None,
) -> dict[str, Any]:
    """Measure arms and limit on one batch, interleaved, after all arms were seen to give the same rectangle.

    ``dtype``: what the arms widen the batch to; the limit, which copies, says nothing about that.
    """
    result_dtype = np.dtype(dtype or batch.shape.dtype)
    nbytes = batch.nbytes // batch.shape.dtype.itemsize * result_dtype.itemsize
    with Workbench(batch) as work, Limit(batch.copied_bytes, batch.nbytes - batch.copied_bytes) as limit:
        tasks = [Task(arm.name, _bound(arm, work), nbytes if arm.cold else 0, threads=arm.threads or 2) for arm in arms]
        limits = limit.tasks(limit_threads)
        progress.section(f"{nbytes / 1e9:.2g} GB, {batch.name}", (len(tasks) + len(limits)) * (repeat + 1))
        ran = {}
        for arm in check_equal(work, arms):
            ran[arm.name] = dict(backend_info()) if arm.ours else None
            progress.step(f"check {arm.label}")
        for task in limits:
            task.run()
            progress.step("limit")
        timings = measure([*tasks, *limits], repeat, step=progress.step)
    return {
        "name": f"{batch.name}, {nbytes / 1e9:.2g} GB",
        "nbytes": nbytes,
        "copied_bytes": batch.copied_bytes,
        "result_shape": list(batch.result_shape),
        "dtype": str(result_dtype),
        "arms": {arm.name: {**_describe(arm), "ran": ran[arm.name], **timings[arm.name].record()} for arm in arms},
        "limits": {
            f"{memory}_{threads}": {"candidate": best.name.rpartition("_")[2], **best.record()}
            for memory in MEMORY_KINDS
            for threads in limit_threads
            if (best := limit_of(timings, memory, threads)) is not None
        },
        "limit_candidates": {
            name: timing.record() for name, timing in timings.items() if name.rpartition("_")[2] in CANDIDATES
        },
    }


def _bound(arm: Arm, work: Workbench) -> Callable[[], object]:
    return lambda: arm.run(work)


def _describe(arm: Arm) -> dict[str, Any]:
    return {"label": arm.label, "threads": arm.threads, "cold": arm.cold, "ours": arm.ours}


def _fitting(nbytes: int, make: Callable[[], BenchBatch]) -> BenchBatch | None:
    """Return the batch, or None where its arms would not fit in the memory that is left."""
    room = cgroup_memory_available()
    return None if room is not None and _MEMORY_FACTOR * nbytes > room else make()


def _others(settings: Settings, nbytes: int, progress: Progress) -> list[dict[str, Any]]:
    pairs = [(name, settings.spread) for name in SHAPES if name != settings.shape]
    pairs += [(settings.shape, name) for name in SPREADS if name != settings.spread]
    cases = []
    for name, spread in pairs:
        batch = _fitting(nbytes, functools.partial(make_batch, SHAPES[name], spread, nbytes))
        if batch is not None:
            cases.append(run_case(batch, available(OTHER_ARMS), min(5, settings.repeat), progress, limit_threads=(2,)))
    return cases


def _widening(settings: Settings, nbytes: int, progress: Progress) -> list[dict[str, Any]]:
    """Measure uint8 routes that are widened to results of ``nbytes``, into memory that is used again."""
    cases = []
    for dtype in ("int16", "int32"):
        narrow = nbytes // np.dtype(dtype).itemsize
        batch = _fitting(nbytes, functools.partial(make_batch, SHAPES["48x8"], settings.spread, narrow))
        if batch is not None:
            cases.append(
                run_case(batch, widening_arms(dtype), settings.repeat, progress, limit_threads=(), dtype=dtype)
            )
    return cases


def _tiny(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Measure tiny batches, and fit what a call and a trajectory cost over bare slices."""
    arms = available(TINY_ARMS)
    progress.section("tiny batches", len(TINY) * len(arms) * settings.repeat)
    cases = []
    for trajectories, tokens in TINY:
        batch = batch_of(SHAPES[settings.shape], [tokens] * trajectories, f"{trajectories} x {tokens}")
        with Workbench(batch) as work, torch_at_one_thread():
            for _ in check_equal(work, arms):
                pass
            tasks = [Task(a.name, _bound(a, work), 0, calls_for(_bound(a, work), _TINY_SECONDS)) for a in arms]
            timings = measure(tasks, settings.repeat, step=progress.step)
        cases.append({
            "name": f"tiny {batch.name}",
            "trajectories": trajectories,
            "tokens": tokens,
            "nbytes": batch.nbytes,
            "overhead": timings["default"].median - timings["bare"].median,
            "arms": {arm.name: {**_describe(arm), **timings[arm.name].record()} for arm in arms},
        })  # fmt: skip
    design = np.array([[1.0, case["trajectories"]] for case in cases])
    overheads = np.array([case["overhead"] for case in cases])
    a_call, a_trajectory = np.linalg.lstsq(design, overheads)[0]
    return {"cases": cases, "a_call": float(a_call), "a_trajectory": float(a_trajectory)}


def _processes(settings: Settings, progress: Progress) -> dict[str, Any]:
    repeat = 3 if settings.quick else 7
    sections: dict[str, Callable[[], Any]] = {
        "imports": lambda: import_times(repeat),
        "first_call": lambda: first_call_times(1 if settings.quick else 3),
        "peak_memory": lambda: peak_memory(min(_PEAK_BYTES, max(settings.sizes))),
    }
    progress.section("new processes: imports, first call, peak memory", len(sections))
    record = {}
    for name, section in sections.items():
        record[name] = section()
        progress.step(name)
    return record
