"""What the doctor finds: limits and their sources, the backend, the path of a call by size, settings, warnings.

Everything is found the way a real call finds it (the threading layer is started for it), and nothing here needs an
extra, so that it works where the installation does not.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any, Final

from .. import _dispatch
from .._bench.arms import has_torch
from .._bench.host import HUGE_PAGES, huge_page_setting, package_versions
from .._policy import MEGABYTE, Policy, policy_from_environment
from ..topology import Topology, plan_threads
from .console import size

#: Results whose path is shown, in bytes.
SIZES: Final = (1 * MEGABYTE, 100 * MEGABYTE, 1_000 * MEGABYTE, 16_000 * MEGABYTE)

_LIMIT_WHY: Final = {
    "cpu_count": "CPUs of the host; a container usually gets fewer.",
    "affinity_cpus": "CPUs that the scheduler may put this process on.",
    "cpu_quota": "CPU time that the container gets; a thread beyond it is throttled in every period.",
    "permitted_cpus": "No call uses more threads than this.",
    "memory_available": "A new result above 256 MiB that is larger than this is refused with a MemoryError.",
    "host_memory_available": "What the host as a whole could still give.",
    "num_threads": "Would fix the thread count of every call, up to the permitted CPUs.",
    "max_threads": "Would replace the cap of 8 threads.",
    "reserved_cpus": "Would leave that many CPUs to others.",
}
_VARIABLES: Final = {
    "R3NUMBA_BACKEND": "auto, numba or numpy: which backend serves.",
    "R3NUMBA_POLICY": "Forces one path at any size; meant for tests.",
    "R3NUMBA_STREAMING": "0 turns streaming stores off.",
    "R3NUMBA_CACHE": "1 keeps compiled kernels on disk.",
    "R3NUMBA_MEMORY_CHECK": "0 turns the check for memory before a large result off.",
    "R3NUMBA_NUM_THREADS": "The thread count of every call, up to the permitted CPUs.",
    "R3NUMBA_MAX_THREADS": "Replaces the cap of 8 threads.",
    "R3NUMBA_RESERVED_CPUS": "CPUs left to others.",
    "NUMBA_NUM_THREADS": "Size of Numba's pool: no launch can have more threads.",
    "NUMBA_THREADING_LAYER": "Which layer Numba takes: tbb, omp, workqueue or a search order.",
    "NUMBA_DISABLE_JIT": "1 runs kernels as plain Python; calls then use the NumPy fallback.",
    "NUMPY_MADVISE_HUGEPAGE": "0 stops NumPy asking for huge pages; first touches then cost about twice as much.",
    "OMP_NUM_THREADS": "OpenMP's default, torch's too; the thread count of our calls does not follow it.",
    "OMP_PROC_BIND": "Binds OpenMP's threads; the thread that started the pool then sees fewer CPUs in its mask.",
    "LOCAL_WORLD_SIZE": "Trainer processes on this host, as torchrun sets it.",
}
_LAYER_WHY: Final = {
    "tbb": "The prange kernel runs on it; safe with concurrent calls and after a fork.",
    "omp": "The prange kernel runs on it; a forked child uses our own small pool, as GNU OpenMP would die there.",
    "workqueue": "It aborts the process when two threads launch at once, so that nothing is ever launched on it.",
}
_PATH_WHY: Final = {
    "serial": "One thread needs no pool: the serial kernel runs in the calling thread",
    "parallel": "More than one thread pays: the prange kernel runs on Numba's pool",
    "pool": "More than one thread pays, and Numba's pool is not safe here: the serial kernel runs on our own pool",
    "slices": "No Numba serves here: NumPy slices do the same",
}


def diagnose() -> dict[str, Any]:
    """Return everything, as JSON can hold it; ``why`` is one sentence for a person."""
    topology = Topology.detect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "no Numba" is among our own warnings
        paths = [_path_at(nbytes, topology) for nbytes in SIZES]
        backend = _backend()
    record: dict[str, Any] = {
        "versions": package_versions(),
        "limits": _limits(topology),
        "backend": backend,
        "paths": paths,
        "stores": _stores(),
        "huge_pages": _huge_pages(),
        "environment": _environment(os.environ),
    }
    record["warnings"] = _warnings(record, topology)
    return record


def _limits(topology: Topology) -> list[dict[str, Any]]:
    return [
        {
            "name": field.name,
            "value": getattr(topology, field.name),
            "source": topology.source_of(field.name),
            "why": _LIMIT_WHY[field.name],
        }
        for field in dataclasses.fields(topology)
        if field.name != "sources"
    ]


def _path_at(nbytes: int, topology: Topology) -> dict[str, Any]:
    """Return what a fresh result of ``nbytes`` would run on; a setting that makes no sense is told, not raised."""
    record: dict[str, Any] = {"nbytes": nbytes, "path": None, "threads": None}
    try:
        policy = policy_from_environment()
        path, threads = _dispatch.would_run(nbytes, fresh=True, policy=policy)
        first = _PATH_WHY[path] if policy.path is None else "R3NUMBA_POLICY forces this path"
        why = f"{first}; {_thread_rule(nbytes, path, threads, topology.permitted_cpus, policy)}."
    except (ImportError, ValueError) as error:
        return {**record, "why": f"A call would raise {type(error).__name__}: {error}"}
    return {**record, "path": path, "threads": threads, "why": why}


def _thread_rule(nbytes: int, path: str, threads: int, cpus: int, policy: Policy) -> str:
    """Say which rule decided the thread count: the CPUs, if it were higher with more of them, the size, or the cap."""
    count = f"{threads} thread{'s' if threads > 1 else ''}"
    if policy.path == "serial":
        return count
    planned = plan_threads(nbytes, cpus, fresh=True, cap=policy.thread_cap)
    if os.environ.get("R3NUMBA_NUM_THREADS", "").strip():
        return f"{count} by R3NUMBA_NUM_THREADS, up to the permitted CPUs ({cpus})"
    below = max(policy.serial_below_fresh, policy.slices_serial_below if path == "slices" else 0)
    if nbytes < below:
        return f"{count}, as fresh results below {size(below)} gain nothing from a second"
    if threads < planned:
        return f"{count}, as Numba's pool has no more (NUMBA_NUM_THREADS)"
    if plan_threads(nbytes, cpus + 1_000_000, fresh=True, cap=policy.thread_cap) > threads:
        reserved = os.environ.get("R3NUMBA_RESERVED_CPUS", "").strip()
        less = f" less {reserved} reserved" if reserved else ""
        return f"{count}, as many as CPUs are permitted ({cpus}{less})"
    if threads == max(2, nbytes // policy.bytes_per_thread):
        return f"{count}, one for each {size(policy.bytes_per_thread)}, at least 2"
    cap = os.environ.get("R3NUMBA_MAX_THREADS", "").strip() or policy.thread_cap
    half = f" (half of it from {size(policy.half_cap_from)} on)" if nbytes >= policy.half_cap_from else ""
    return f"{count} by the cap of {cap}{half}"


def _backend() -> dict[str, Any]:
    """Return backend and layer after the sizes were asked for, which started what a call would start."""
    try:
        module = _dispatch.kernels()
    except (ImportError, ValueError) as error:
        return {"backend": None, "layer": None, "forked": None, "why": f"A call would raise: {error}"}
    if module is None or os.environ.get("R3NUMBA_POLICY") == "force_slices":
        return {"backend": "numpy", "layer": None, "forked": None, "why": _no_numba_why()}
    layer, forked = module.runtime.layer_name(), module.runtime.in_forked_child()
    why = "No layer is started, as no size here gets more than one thread."
    if forked and layer is None:
        why = "No layer is started in a forked process, as GNU OpenMP would die there."
    return {"backend": "numba", "layer": layer, "forked": forked, "why": _LAYER_WHY.get(layer, why)}


def _stores() -> dict[str, Any]:
    """Return which stores write a large result whose pages are mapped already."""
    try:
        policy = policy_from_environment()
        streaming = _dispatch.streams(policy.stream_from or 0, fresh=False, policy=policy)
    except (ImportError, ValueError) as error:
        return {"value": None, "why": f"A call would raise {type(error).__name__}: {error}"}
    if streaming:
        above = f"recycled or caller-owned results of {size(policy.stream_from or 0)} and more go past the caches"
        return {"value": "streaming", "why": f"R3NUMBA_STREAMING=0 turns them off; {above}."}
    if policy.stream_from is None:
        return {"value": "plain", "why": "R3NUMBA_STREAMING=0 turns streaming stores off."}
    if policy.path is not None:
        return {"value": "plain", "why": "R3NUMBA_POLICY forces a path that has no other."}
    return {"value": "plain", "why": "No streaming stores here: they need compiled kernels on an x86-64 processor."}


def _no_numba_why() -> str:
    if os.environ.get("R3NUMBA_POLICY") == "force_slices":
        return "R3NUMBA_POLICY=force_slices asks for NumPy slices."
    if os.environ.get("R3NUMBA_BACKEND") == "numpy":
        return "R3NUMBA_BACKEND=numpy asks for the NumPy fallback."
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT would run the kernels as plain Python, so that the NumPy fallback serves."
    try:
        import numba  # noqa: F401  (only its failure is of interest)
    except Exception as error:  # a broken Numba fails in many ways
        return f"Numba does not import ({type(error).__name__}: {error})."
    return "The kernels do not load."


def _huge_pages() -> dict[str, Any]:
    setting = huge_page_setting()
    why = {
        "always": "Every large allocation gets huge pages.",
        "madvise": "Allocations that ask get huge pages: NumPy's from 4 MiB on, so our results; torch's do not ask.",
        "never": "Nobody gets huge pages: the first touch of a result costs about twice as much.",
        None: "This kernel has no such setting.",
    }.get(setting, "An unknown setting.")
    return {"value": setting, "source": HUGE_PAGES, "why": why}


def _environment(environment: Mapping[str, str]) -> list[dict[str, str]]:
    prefixes = ("R3NUMBA_", "NUMBA_", "OMP_", "KMP_", "GOMP_")
    return [
        {"name": name, "value": value, "why": _VARIABLES.get(name, "Read by Numba or OpenMP, not by this library.")}
        for name, value in sorted(environment.items())
        if name in _VARIABLES or name.startswith(prefixes)
    ]


def _warnings(record: Mapping[str, Any], topology: Topology) -> list[str]:
    backend, found = record["backend"], []
    cpus = topology.permitted_cpus
    if backend["backend"] != "numba":
        found.append(f"The NumPy fallback serves, which is slower. {backend['why']}")
    if backend["layer"] == "workqueue":
        found.append(
            "Numba's layer is workqueue: another library's parallel kernel in a second thread may still abort this "
            "process. Install an OpenMP runtime (libgomp) or tbb where Numba finds it."
        )
    if topology.cpu_quota is not None and topology.cpu_quota < topology.affinity_cpus:
        found.append(
            f"The CFS quota allows {topology.cpu_quota:g} of {topology.affinity_cpus} CPUs. Our calls keep to it; "
            f"torch and OpenMP do not see it: set OMP_NUM_THREADS={cpus} and NUMBA_NUM_THREADS={cpus}."
        )
    if not has_torch():
        found.append("torch is not installed: batches have .array, and .indices raises ImportError.")
    if backend["forked"]:
        found.append("This process was forked without exec: large batches use our own pool unless the layer is tbb.")
    if record["huge_pages"]["value"] == "never" or os.environ.get("NUMPY_MADVISE_HUGEPAGE") == "0":
        found.append("Huge pages are off: fresh results cost about twice as much; use RouteCollator.")
    found += dict.fromkeys(path["why"] for path in record["paths"] if path["path"] is None)
    found.append(_many_processes(cpus))
    return found


def _many_processes(cpus: int) -> str:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    count = int(text) if text.isdecimal() else 1
    if count > 1:
        share = max(1, cpus // count)
        return (
            f"{count} trainer processes share the {cpus} permitted CPUs (LOCAL_WORLD_SIZE): set "
            f"R3NUMBA_MAX_THREADS={share} in each, as none knows of the others."
        )
    return (
        f"Hint: with n trainer processes on this host, set R3NUMBA_MAX_THREADS to {cpus} / n (at least 1) in each, as "
        "none knows of the others."
    )
