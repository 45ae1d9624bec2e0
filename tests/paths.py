"""The executor paths that this process can take, and the policy that forces each (skips of a path stand here alone)."""

from __future__ import annotations

import os
from dataclasses import replace

from r3numba import backend_info
from r3numba._dispatch import kernels
from r3numba._policy import DEFAULT_POLICY

NUMBA_PATHS = ("parallel", "pool", "serial")
ALL_PATHS = (*NUMBA_PATHS, "slices")


def available():
    """Return the paths to compare: all of them, or slices alone in the lane without Numba."""
    if os.environ.get("R3NUMBA_BACKEND") == "numpy" or not numba_imports():
        return ("slices",)
    kernels()
    return ALL_PATHS


def numba_imports():
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def forced(path, **changes):
    return replace(DEFAULT_POLICY, path=path, **changes)


#: Pieces of a few bytes, so that a batch of a few hundred is cut as one of gigabytes would be.
TINY_PIECES = {"piece_align": 64}


def threads_of(path, threads):
    """Return the thread count that a forced path reports when ``threads`` are asked for."""
    if path == "serial":
        return 1
    if path == "parallel" and backend_info()["path"] == "parallel":
        import numba

        return min(threads, numba.config.NUMBA_NUM_THREADS)
    return threads
