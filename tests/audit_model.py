"""The audit pair by pair, in plain Python, and random captures to hold it against; shared with the soak."""

from __future__ import annotations

import numpy as np
import paths

from r3numba import audit_routes, backend_info, collate_routes, pack_routes
from r3numba.audit import LONG_RUN

PATHS = paths.available()
KINDS = ("out_of_range", "duplicate", "zero", "zero_row", "zero_layer", "repeated_row")
TOPK = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 22)


def legal(rng, rows, layers, topk, experts, dtype=np.uint8):
    """Return routes with distinct ids in every row."""
    return rng.random((rows, layers, experts)).argsort(axis=2)[:, :, :topk].astype(dtype)


def oracle(routes, num_experts, moe, missing=None):
    """Count pair by pair: {kind: (count, first token, first layer, longest)} of one trajectory."""
    rows, _, topk = routes.shape
    limit = num_experts or np.iinfo(routes.dtype).max + 1
    seen = {kind: [] for kind in KINDS}
    audited = 0
    for t in range(rows):
        if missing is not None and missing[t]:
            continue
        audited += 1
        zero_layers = 0
        for layer in np.flatnonzero(moe):
            values = routes[t, layer].tolist()
            if any(v < 0 or v >= limit for v in values):
                seen["out_of_range"].append((t, layer))
            if topk > 1 and not any(values):
                seen["zero"].append((t, layer))
                zero_layers += 1
            elif len(set(values)) < topk:
                seen["duplicate"].append((t, layer))
        if zero_layers == sum(moe):
            seen["zero_row"].append((t, -1))
    for layer in np.flatnonzero(moe):
        if audited and sum(1 for _, other in seen["zero"] if other == layer) == audited:
            seen["zero_layer"].append((-1, layer))
    t, longest = 0, 0
    while t < rows:
        stop = t + 1
        if missing is None or not missing[t]:
            while stop < rows and (routes[stop] == routes[t]).all() and (missing is None or not missing[stop]):
                stop += 1
        if stop - t >= LONG_RUN:
            seen["repeated_row"].append((t, -1))
            longest = max(longest, stop - t)
        t = stop
    return {
        kind: (len(found), int(found[0][0]), int(found[0][1]), longest if kind == "repeated_row" else 0)
        for kind, found in seen.items()
        if found
    }


def found(audit, trajectory):
    return {f.kind: (f.count, f.token, f.layer, f.longest) for f in audit.findings if f.trajectory == trajectory}


def check(routes, num_experts=None, moe=None, missing=None, dtype=None, **policy):
    """Audit alone and in the pass of both collations, on every path, and compare each with the oracle."""
    layers = next(r for r in routes if r is not None).shape[1]
    dtype = dtype or max((r.dtype for r in routes if r is not None), key=lambda held: held.itemsize)
    mask = [True] * layers if moe is None else moe
    expected = [
        {} if r is None else oracle(np.asarray(r), num_experts, mask, None if missing is None else missing[i])
        for i, r in enumerate(routes)
    ]
    lengths = [2 if r is None else len(r) + 1 for r in routes]
    for path in PATHS:
        forced = paths.forced(path, **{**paths.TINY_PIECES, **policy})
        options = {"num_experts": num_experts, "moe_layers": moe, "_policy": forced}
        reports = []
        reports.append(audit_routes(routes, missing=missing, **options))
        plain = collate_routes(routes, lengths, missing=missing, dtype=dtype)
        for threads in (1, 3):
            both = {**options, "dtype": dtype, "missing": missing, "audit": True}
            batch = collate_routes(routes, lengths, num_threads=threads, **both)
            assert backend_info()["path"] in paths.may_report(path)
            np.testing.assert_array_equal(batch.array, plain.array)
            np.testing.assert_array_equal(batch.padding_mask, plain.padding_mask)
            reports.append(batch.audit)
            reports.append(pack_routes(routes, lengths, num_threads=threads, **both).audit)
        for audit in reports:
            assert [found(audit, i) for i in range(len(routes))] == expected, path
    return reports[-1]


def draw(rng, most_rows=90):
    """Return the arguments of ``check`` for random captures with random faults."""
    layers, topk = int(rng.choice([1, 2, 3, 4, 8, 9, 17])), int(rng.choice(TOPK))
    routes, missing = [], []
    for _ in range(int(rng.integers(1, 5))):
        rows = int(rng.choice([1, 2, 7, 40, most_rows]))
        dtype = rng.choice([np.uint8, np.int16, np.int32])
        r = legal(rng, rows, layers, topk, 30, dtype)
        for _ in range(int(rng.integers(0, 5))):
            plant(rng, r)
        how = rng.integers(5)
        if how == 1:
            r = np.asfortranarray(r)
        elif how == 2:
            r = np.repeat(r, 2, axis=2)[:, :, ::2]
        elif how == 3:
            r = np.repeat(r, 2, axis=0)[::2]
        routes.append(r)
        missing.append(rng.random(rows) < 0.2 if rng.random() < 0.5 else None)
    moe = [True, *(bool(x) for x in rng.random(layers - 1) < 0.7)] if rng.random() < 0.5 else None
    experts = [None, 30, 128, 129, 256][rng.integers(5)]
    return routes, experts, moe, missing if rng.random() < 0.5 else None


def plant(rng, routes):
    """Write one fault of a random kind, at a random place, into routes ``[rows, layers, topk]``."""
    rows, layers, topk = routes.shape
    fault, at = rng.integers(6), int(rng.integers(rows))
    layer, k = int(rng.integers(layers)), int(rng.integers(topk))
    if fault == 0:
        routes[at, layer, k] = routes[at, layer, (k + 1 + rng.integers(topk)) % topk]
    elif fault == 1:
        routes[at, layer, k] = rng.choice([29, 30, 127, 128, 200, 255])
    elif fault == 2:
        routes[at] = 0
    elif fault == 3:
        routes[:, layer] = 0
    elif fault == 4:
        routes[at : at + LONG_RUN + int(rng.integers(-1, 3))] = routes[at]
    elif routes.dtype != np.uint8:
        routes[at, layer, k] = -1 - int(rng.integers(3))
