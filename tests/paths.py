"""The executor paths that this process can take, and the policy that forces each (skips of a path stand here alone)."""

from __future__ import annotations

import os
from dataclasses import replace

from r3numba import backend_info
from r3numba._dispatch import kernels, streams
from r3numba._policy import DEFAULT_POLICY

NUMBA_PATHS = ("parallel", "pool", "serial", "streaming")
ALL_PATHS = (*NUMBA_PATHS, "slices")


def available():
    """Return the paths to compare: all of them, or slices alone in the lane without Numba."""
    if os.environ.get("R3NUMBA_BACKEND") == "numpy" or not numba_imports():
        return ("slices",)
    kernels()
    return ALL_PATHS


def scanning():
    """Return the paths of what only reads, or narrows: there are no streaming stores in it."""
    return tuple(path for path in available() if path != "streaming")


def numba_imports():
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def jit_runs():
    """Say whether kernels would be compiled here: as plain Python a megabyte takes a second."""
    return os.environ.get("NUMBA_DISABLE_JIT", "") in ("", "0")


def compiled():
    """Say whether there are kernels here, and compiled ones."""
    return available() != ("slices",) and jit_runs()


def forced(path, **changes):
    return replace(DEFAULT_POLICY, path=path, **changes)


def may_report(path):
    """Return what ``backend_info()`` may call a forced path.

    Nothing is launched in parallel on workqueue or in a forked child, and a host without streaming stores uses plain
    ones, on any path.
    """
    if path == "parallel":
        return ("parallel", "pool")
    if path == "streaming" and not streams(0, fresh=False, policy=forced("streaming")):
        return ("serial", "parallel", "pool")
    return (path,)


#: Pieces and streamed runs of a few bytes, so that a batch of a few hundred is treated as one of gigabytes would be.
TINY_PIECES = {"piece_align": 64, "stream_run_from": 1}


def threads_of(path, threads):
    """Return the thread count that a forced path reports when ``threads`` are asked for."""
    if path == "serial":
        return 1
    if path in ("parallel", "streaming") and backend_info()["path"] == "parallel":
        import numba

        return min(threads, numba.config.NUMBA_NUM_THREADS)
    return threads
