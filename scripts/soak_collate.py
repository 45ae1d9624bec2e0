"""Random batches over every forced path against the oracle in ``tests/oracle.py``, one a case.

Case i draws everything from the seed and i, so that a failure is reproduced by its number alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import oracle  # noqa: E402  (tests/ is not a package)
import paths  # noqa: E402

import r3numba  # noqa: E402
import r3numba._dispatch as dispatch  # noqa: E402

# Three threads run whatever the host has: results may not depend on the count.
dispatch.permitted_cpus_cached = lambda: 3

DTYPES = (np.uint8, np.int16, np.int32)
LAYOUTS = ("left", "right", "starts", "pack", "select", "pad")


def draw_source(rng, rows, layers, topk):
    """Return routes ``[rows, layers, topk]`` of a random dtype and memory layout."""
    dtype = DTYPES[rng.integers(3)]
    largest = min(int(np.iinfo(dtype).max), 2**31 - 1)
    kind = rng.integers(7)
    if kind == 0:
        wide = rng.integers(0, largest, (rows, layers, 2 * topk), dtype=dtype, endpoint=True)
        return wide[:, :, :: 2 if rng.random() < 0.5 else -2][:, :, :topk]
    if kind == 1:
        return rng.integers(0, largest, (layers, rows, topk), dtype=dtype, endpoint=True).transpose(1, 0, 2)
    if kind == 2:
        return rng.integers(0, largest, (2 * rows, layers + 1, topk), dtype=dtype, endpoint=True)[::2, 1:]
    if kind == 3:
        raw = np.zeros(rows * layers * topk * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)
        raw[...] = rng.integers(0, largest, raw.size, dtype=dtype, endpoint=True)
        return raw.reshape(rows, layers, topk)
    if kind == 4:
        return np.asfortranarray(rng.integers(0, largest, (rows, layers, topk), dtype=dtype, endpoint=True))
    return rng.integers(0, largest, (rows, layers, topk), dtype=dtype, endpoint=True)


def check_case(seed, index):
    """Run one random batch on every path and compare each with the oracle."""
    rng = np.random.default_rng([seed, index])
    layers, topk = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    most_rows = 400 if index % 500 == 0 else 9  # now and then one that has many pieces
    batch = int(rng.integers(1, 6))
    rows = [0 if rng.random() < 0.15 else int(rng.integers(1, most_rows + 1)) for _ in range(batch)]
    rows[rng.integers(batch)] = int(rng.integers(1, most_rows + 1))
    routes = [draw_source(rng, n, layers, topk) if n else None for n in rows]
    lengths = [n + int(rng.integers(0, 4)) for n in rows]
    missing = None
    if rng.random() < 0.4:
        missing = [rng.random(n) < rng.choice([0.1, 0.5, 1.0]) if n and rng.random() < 0.7 else None for n in rows]
    widest = max((r.dtype for r in routes if r is not None), key=lambda dtype: dtype.itemsize)
    wider = [d for d in DTYPES if np.dtype(d).itemsize >= widest.itemsize]
    dtype = np.dtype(wider[rng.integers(len(wider))])
    layout = LAYOUTS[rng.integers(len(LAYOUTS))]
    width = max(lengths) + int(rng.integers(0, 3))
    columns = {"right": [0] * batch, "left": oracle.left(lengths, width)}.get(
        layout, [int(rng.integers(0, width - length + 1)) for length in lengths]
    )
    order = rng.integers(0, batch, int(rng.integers(1, 6)))
    threads, align = int(rng.integers(1, 4)), int(rng.choice([1, 64, 4096]))
    if layout in ("pack", "select"):
        picked = order if layout == "select" else np.arange(batch)
        wanted, mask = pack_of(routes, lengths, dtype, missing, picked)
    else:
        wanted, mask = oracle.rectangle(routes, lengths, columns, width, dtype, missing)
    for path in paths.ALL_PATHS:
        policy = paths.forced(path, piece_align=align, stream_run_from=1)
        options = {"dtype": dtype, "missing": missing, "num_threads": threads, "_policy": policy}
        if layout in ("left", "right"):
            result = r3numba.collate_routes(routes, lengths, padding=layout, max_length=width, **options)
        elif layout == "starts":
            result = r3numba.collate_routes(routes, lengths, starts=columns, max_length=width, **options)
        else:
            result = r3numba.pack_routes(routes, lengths, **options)
            os.environ["R3NUMBA_POLICY"] = f"force_{path}"
            if layout == "select":
                result = result.select(order, num_threads=threads)
            elif layout == "pad":
                result = result.pad(starts=columns, max_length=width, num_threads=threads)
            del os.environ["R3NUMBA_POLICY"]
        ran = r3numba.backend_info()["path"]
        if ran not in paths.may_report(path):
            raise AssertionError(f"case {index}: path {ran} ran where {path} was forced")
        if result.array.dtype != dtype or not np.array_equal(result.array, wanted):
            raise AssertionError(f"case {index}: {layout} on {path}: wrong indices")
        if not np.array_equal(result.padding_mask, mask):
            raise AssertionError(f"case {index}: {layout} on {path}: wrong mask")


def pack_of(routes, lengths, dtype, missing, picked):
    """Return the oracle's pack of some trajectories, which may all be without rows."""
    indices, mask, offsets = oracle.pack(routes, lengths, dtype, missing)
    rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in picked])
    return indices[rows], mask[rows]
