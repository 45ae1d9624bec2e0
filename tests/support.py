"""What several test files share: the paths that can run here, captured routes of many kinds, and measurements."""

from __future__ import annotations

import gc
import importlib.util
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from r3numba._policy import DEFAULT_POLICY

DTYPES = (np.uint8, np.int16, np.int32)
#: One id past what the next narrower dtype holds, so that a wrapped id cannot pass for the right one.
LARGEST = {np.uint8: 255, np.int16: 2**15 - 1, np.int32: 2**31 - 1}


def available_paths():
    """Return the executor paths that this process can be forced onto."""
    if os.environ.get("R3NUMBA_BACKEND") == "numpy" or importlib.util.find_spec("numba") is None:
        return ("slices",)
    try:
        import numba  # noqa: F401
    except ImportError:
        return ("slices",)
    return ("serial", "parallel", "pool", "slices")


def jit_runs():
    """Say whether kernels are compiled here: as plain Python a megabyte takes a second."""
    return os.environ.get("NUMBA_DISABLE_JIT", "") in ("", "0")


def forced(path, **changes):
    return replace(DEFAULT_POLICY, path=path, **changes)


def most_threads(path, threads):
    """Return how many of ``threads`` a launch may have: Numba's own bound counts on the parallel path."""
    if path != "parallel":
        return threads
    import numba

    return min(threads, numba.config.NUMBA_NUM_THREADS)


def need_torch():
    """Return torch, or skip: the one reason for a skip in the files that import this."""
    return pytest.importorskip("torch", reason="needs torch")


def captured(rows, layers=2, topk=4, dtype=np.uint8, seed=0):
    """Return read-only routes ``[rows, layers, topk]`` over the whole range of the dtype."""
    generator = np.random.default_rng(seed)
    routes = generator.integers(0, LARGEST[dtype], (rows, layers, topk), dtype, endpoint=True)
    if routes.size:
        routes[-1, -1, -1] = LARGEST[dtype]
    routes.flags.writeable = False
    return routes


def batch_of(rows, layers=2, topk=4, dtypes=(np.uint8,), seed=0):
    """Return one array a trajectory; the dtypes take turns."""
    return [
        captured(count, layers, topk, dtypes[index % len(dtypes)], seed + index) for index, count in enumerate(rows)
    ]


def guarded(shape, dtype=np.uint8, sentinel=0xA5):
    """Return ``(whole, out)``: an array to write into, filled with a sentinel, with 64 bytes of it on either side."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = np.full(nbytes + 128, sentinel, np.uint8)
    return whole, whole[64 : 64 + nbytes].view(dtype).reshape(shape)


def address(array):
    return array.__array_interface__["data"][0]


def same(one, other):
    """Assert that two batches hold the same, and in the same dtypes."""
    assert type(one) is type(other)
    for name in ("array", "padding_mask", "sequence_lengths", "captured_lengths"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype, name
        assert left.shape == right.shape, name
        assert left.tobytes() == right.tobytes(), name
    for name in ("starts", "offsets"):
        if hasattr(one, name):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    same_missing(one.missing, other.missing)


def same_missing(one, other):
    def plain(missing):
        return missing and [None if mask is None else np.asarray(mask).tolist() for mask in missing]

    assert plain(one) == plain(other)


def peak_of(call):
    """Return the most bytes that ``call`` held beyond those before it, and its result (tracemalloc; NumPy reports)."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = call()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()
