"""Interleaved repetitions of many tasks in one process, medians and quartiles, noisy repetitions told apart."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .quiet import is_quiet, read_waits, wait_share

#: Pause before a long repetition: OpenMP's workers spin for a while after a launch, on a CPU that the next arm needs.
SETTLE_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class Task:
    """Something to time.

    ``cold_bytes``: before each repetition this much memory is touched and freed, as memory that was given back for a
    second re-faults at a tenth of the speed on virtual machines; 0 for a warm task. ``number``: calls a repetition.
    ``threads``: how many touch it.
    """

    name: str
    run: Callable[[], object]
    cold_bytes: int = 0
    number: int = 1
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: seconds a call, and the share of the wall time that threads waited for a CPU (None: unknown)."""

    seconds: float
    wait: float | None

    @property
    def quiet(self) -> bool:
        """Say whether nobody else had our CPU."""
        return is_quiet(self.wait)


@dataclass(frozen=True, slots=True)
class Timing:
    """All repetitions of one task. The figures come from the quiet ones; from all, where none was quiet."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def noisy(self) -> bool:
        """Say whether no repetition was quiet."""
        return not any(sample.quiet for sample in self.samples)

    @property
    def quiet_count(self) -> int:
        """Return the number of quiet repetitions."""
        return sum(sample.quiet for sample in self.samples)

    def quantile(self, share: float) -> float:
        """Return a quantile in seconds."""
        return float(np.quantile([s.seconds for s in self.samples if s.quiet or self.noisy], share))

    @property
    def median(self) -> float:
        """Return the median in seconds."""
        return self.quantile(0.5)

    def record(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "median": self.median,
            "quartiles": [self.quantile(0.25), self.quantile(0.75)],
            "noisy": self.noisy,
            "quiet": self.quiet_count,
            "samples": [{"seconds": sample.seconds, "wait": sample.wait} for sample in self.samples],
        }


@contextlib.contextmanager
def torch_at_one_thread() -> Iterator[None]:
    """Run the body with torch at one thread, where torch is loaded; the caller's count comes back after it."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def touch_and_free(nbytes: int, threads: int = 1) -> None:
    """Make the host back ``nbytes`` of memory right now, by as many threads as will use it, and free them.

    Each CPU keeps free pages of its own: after a touch by one thread, every second repetition of two threads got pages
    that the host had taken back, and took 2 to 10 times as long (0.4 GB: 30 to 270 ms).
    """
    memory = np.empty(nbytes, np.uint8)

    def touch(part: NDArray[np.uint8]) -> None:
        part[::4096] = 1

    if threads < 2:
        touch(memory)
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, np.array_split(memory, threads)))


def sample(task: Task) -> Sample:
    """Run one repetition; the result is freed outside of the timed part."""
    if task.cold_bytes:
        touch_and_free(task.cold_bytes, task.threads)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)  # an omp launch sets it back to all CPUs (numba#9387)
    if task.number == 1:
        time.sleep(SETTLE_SECONDS)
    waits = read_waits()
    begin = time.perf_counter_ns()
    if task.number == 1:
        result = task.run()
        end = time.perf_counter_ns()
        del result
    else:
        run = task.run
        for _ in range(task.number):
            run()
        end = time.perf_counter_ns()
    return Sample((end - begin) / 1e9 / task.number, wait_share(waits, read_waits(), end - begin))


def measure(
    tasks: Sequence[Task], repeat: int, *, extra: int | None = None, step: Callable[[str], None] | None = None
) -> dict[str, Timing]:
    """Time all tasks, one repetition of each in turn, until each has ``repeat`` quiet ones.

    Noisy repetitions are kept and marked, and repeated in at most ``extra`` further rounds (by default twice as many).
    The order turns by one each round, so that no task always follows the same one. ``step`` hears of every repetition.
    Each task should have run once before.
    """
    timings = {task.name: Timing(task.name) for task in tasks}
    extra = 2 * repeat if extra is None else extra
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch_at_one_thread():
            for turn in range(repeat + extra):
                shift = turn % len(tasks)
                for task in (*tasks[shift:], *tasks[:shift]):
                    timing = timings[task.name]
                    if turn >= repeat and timing.quiet_count >= repeat:
                        continue
                    timing.samples.append(sample(task))
                    if step is not None:
                        step(task.name)
    finally:
        if collecting:
            gc.enable()
    return timings


def calls_for(run: Callable[[], object], seconds: float) -> int:
    """Return how many calls take about ``seconds``, at least 1, from a few trial calls."""
    run()
    begin = time.perf_counter()
    for _ in range(3):
        run()
    return max(1, round(3 * seconds / max(time.perf_counter() - begin, 1e-9)))
