"""Compilation ahead of the first step."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from ._checks import CANONICAL
from ._dispatch import kernels, streams
from ._policy import DEFAULT_POLICY, PathName, policy_from_environment
from .audit import audit_routes
from .collate import collate_routes
from .routes import compact_routes

#: What engines hand over before compaction; any other integer dtype compiles its scan at its first use.
_CAPTURED = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)


def warmup() -> None:
    """Compile every kernel that a later call may need, the parallel one and the audit's too.

    It takes some 20 seconds, once a process (with ``R3NUMBA_CACHE=1`` once an installation), and starts Numba's thread
    pool where one will be used, never in a forked child. Without Numba it does nothing.

    Raises
    ------
    ImportError
        If ``R3NUMBA_BACKEND=numba`` and Numba does not import.

    Notes
    -----
    Thread-safe. Call it before the first step, from the process that will collate.

    Examples
    --------
    >>> warmup()
    """
    if kernels() is None:
        return
    paths: tuple[PathName, ...] = ("serial", "parallel")
    for path in paths:
        policy = replace(DEFAULT_POLICY, path=path)
        collate_routes([np.zeros((1, 1, 1), np.uint8)], [1], _policy=policy)  # one compilation serves every dtype
        for captured in _CAPTURED:  # without a copy only the scan runs
            with contextlib.suppress(ValueError):
                compact_routes(np.zeros((1, 1, 1), captured), copy=False, _policy=policy)
    for captured in _CAPTURED:
        for dtype in CANONICAL:
            if np.dtype(captured).itemsize > dtype.itemsize:
                compact_routes(np.full((1, 1, 1), np.iinfo(dtype).max >> 1, captured), _policy=DEFAULT_POLICY)
    policy = replace(policy_from_environment(), path="serial")
    collate_routes([np.zeros((1, 1, 1), np.uint8)], [1], audit=True, _policy=policy)
    audit_routes(np.zeros((1, 1, 1), np.uint8), _policy=policy)
    policy = replace(policy, path="streaming")
    if streams(0, fresh=False, policy=policy):
        collate_routes([np.zeros((1, 1, 1), np.uint8)], [1], _policy=policy)
