"""What only a process of its own can show: import time, first call, peak memory of a call."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Final

IMPORT_NUMPY: Final = "import numpy"
IMPORTS: Final = {
    "numpy": IMPORT_NUMPY,
    "r3numba": f"{IMPORT_NUMPY}\nimport r3numba",
    "collate_routes": f"{IMPORT_NUMPY}\nfrom r3numba import collate_routes, RouteCollator",
}
#: What a trainer's first step pays: Numba's import, compilation, and for a large batch the thread pool's start.
FIRST_CALLS: Final = {
    "small": "import numpy, r3numba\nr3numba.collate_routes([numpy.zeros((9, 48, 8), 'uint8')], [10])",
    "large": "import numpy, r3numba\nr3numba.collate_routes([numpy.zeros((30000, 48, 8), 'uint8')], [30001])",
    "warmup": "import numpy, r3numba\nr3numba.warmup()",
}
_TIMED: Final = "import time\nbegin = time.perf_counter()\n{statement}\nprint(time.perf_counter() - begin)"
_STATUS: Final = "/proc/self/status"
_CLEAR: Final = "/proc/self/clear_refs"


def run_python(code: str) -> str:
    """Return what ``code`` prints in a new interpreter that finds this copy of the package."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"a measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def seconds_in_new_process(statements: dict[str, str], repeat: int) -> dict[str, list[float]]:
    """Return how long each statement takes in a new process each time, the statements in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(repeat):
        for name, statement in statements.items():
            seconds[name].append(float(run_python(_TIMED.format(statement=statement))))
    return seconds


def import_times(repeat: int) -> dict[str, Any]:
    """Return the seconds that each of ``IMPORTS`` takes, samples and medians; a first round warms the disk."""
    samples = {name: values[1:] for name, values in seconds_in_new_process(IMPORTS, repeat + 1).items()}
    return {"samples": samples, "median": {name: statistics.median(values) for name, values in samples.items()}}


def first_call_times(repeat: int) -> dict[str, Any]:
    """Return the seconds of the first call, imports included (samples and medians)."""
    samples = seconds_in_new_process(FIRST_CALLS, repeat)
    return {"samples": samples, "median": {name: statistics.median(values) for name, values in samples.items()}}


def peak_memory(nbytes: int) -> dict[str, Any]:
    """Return what one warm call of about ``nbytes`` adds to the peak of resident memory, beside its result."""
    code = f"from r3numba._bench import fresh_process\nfresh_process.print_peak({int(nbytes)})"
    record: dict[str, Any] = json.loads(run_python(code))
    return record


def print_peak(nbytes: int) -> None:
    """Measure in this process, which should be new, and print one JSON object.

    ``result``: bytes of indices and mask; ``resident``: what the call added to the peak of resident memory (None where
    the system does not say); ``allocated``: the same of what Python and NumPy asked for, exact to the byte.
    """
    from ..collate import collate_routes
    from .shapes import SHAPES, make_batch

    batch = make_batch(SHAPES["48x8"], "typical", nbytes)
    collate_routes(batch.routes, batch.lengths)  # compiles, and starts the threads
    resident: int | None = None
    try:
        _trim_heap()
        Path(_CLEAR).write_text("5")  # "reset the peak resident set size" (proc_pid_clear_refs(5))
        before = _status_bytes("VmRSS")
        result = collate_routes(batch.routes, batch.lengths)
        resident = _status_bytes("VmHWM") - before
    except OSError:
        result = collate_routes(batch.routes, batch.lengths)
    size = result.array.nbytes + result.padding_mask.nbytes
    del result
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    collate_routes(batch.routes, batch.lengths)
    allocated = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    record = {"trajectories": len(batch.lengths), "result": size, "resident": resident, "allocated": allocated}
    print(json.dumps(record))


def _trim_heap() -> None:
    """Give free heap memory back, so that the call cannot hide in pages that are resident already (glibc alone)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(key: str) -> int:
    for line in Path(_STATUS).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {key}")
