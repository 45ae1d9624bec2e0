"""Was a repetition quiet? How long this process's threads were ready to run and had no CPU, from the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: Above this share of the wall time a repetition counts as noisy: another process had our CPU.
WAIT_LIMIT: Final = 0.06
_TASKS: Final = "/proc/self/task"


def read_waits(tasks: str | os.PathLike[str] = _TASKS) -> dict[str, int]:
    """Return how many nanoseconds each thread has waited for a CPU so far; empty where the kernel does not say.

    The second figure of ``/proc/<pid>/task/<tid>/schedstat`` is time on a run queue (the kernel's sched-stats.rst). A
    thread that ends while this reads is left out.
    """
    waits: dict[str, int] = {}
    try:
        threads = os.listdir(tasks)
    except OSError:
        return waits
    for thread in threads:
        try:
            waits[thread] = int(Path(tasks, thread, "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return waits


def wait_share(before: Mapping[str, int], after: Mapping[str, int], wall_nanoseconds: int) -> float | None:
    """Return the threads' waiting between two readings as a share of the wall time; None where nothing was read.

    A thread that began in between brings all of its waiting, one that ended nothing.
    """
    if not after or wall_nanoseconds <= 0:
        return None
    waited = sum(max(0, nanoseconds - before.get(thread, 0)) for thread, nanoseconds in after.items())
    return waited / wall_nanoseconds


def is_quiet(share: float | None, limit: float = WAIT_LIMIT) -> bool:
    """Say whether a share of waiting passes; an unknown one does, as nothing speaks against it."""
    return share is None or share < limit
