"""The look at a line on its way: every place of every kind of layer, every block edge, no byte beside the source."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import paths
import pytest

from r3numba import audit_routes, backend_info, collate_routes
from r3numba._plan import LINE
from r3numba._tally import LAYERS, kind_of, step_of

pytestmark = pytest.mark.skipif(not paths.compiled(), reason="needs Numba")
PATHS = ("serial", "streaming")


def layers_for(itemsize, topk, nbytes):
    return -(-nbytes // (itemsize * topk))


def legal(rows, layers, topk, dtype, experts=64):
    """Return distinct ids in each layer, none of them 0, and no row like the one before it."""
    start = np.arange(rows)[:, None, None] * 5 + np.arange(layers)[:, None] * 7
    return ((start + np.arange(topk) * 2) % (experts - 1) + 1).astype(dtype)


def placed(routes, offset):
    """Return room for ``routes`` that begins so many bytes past a line."""
    raw = np.zeros(routes.nbytes + 2 * LINE, np.uint8)
    begin = -raw.ctypes.data % LINE + offset
    return raw[begin : begin + routes.nbytes].view(routes.dtype).reshape(1, *routes.shape)


def reports(routes, offset=0, moe=None, experts=64):
    """Return what an audit alone and in the pass of each kind of store found, which has to be the same."""
    audits = [audit_routes(routes, num_experts=experts, moe_layers=moe)]
    for path in PATHS:
        out = placed(routes, offset)
        batch = collate_routes(
            [routes], [len(routes)], num_experts=experts, moe_layers=moe, audit=True, dtype=routes.dtype, out=out,
            _policy=paths.forced(path, stream_run_from=LINE),
        )  # fmt: skip
        assert backend_info()["path"] in paths.may_report(path)
        assert np.array_equal(out[0], routes)
        audits.append(batch.audit)
    found = [[(f.kind, f.count, f.token, f.layer, f.longest) for f in audit.findings] for audit in audits]
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize(("itemsize", "topk"), LAYERS)
@pytest.mark.parametrize("nbytes", [LINE, LINE + 1, 3 * LINE + 40])
def test_every_id_of_a_run(itemsize, topk, nbytes):
    """One wrong id at each place of some rows, for results that begin at some places of a line."""
    dtype = f"{'u' if itemsize == 1 else 'i'}{itemsize}"
    layers = layers_for(itemsize, topk, nbytes)
    routes = legal(3, layers, topk, dtype)
    half = [layer % 2 == 0 for layer in range(layers)]
    offsets = [offset for offset in (0, 1, 4, 8, 24, 36, 60) if offset % itemsize == 0]
    for offset in offsets:
        assert reports(routes, offset) == []
    for number, place in enumerate(np.ndindex(routes.shape)):
        token, layer, k = place
        bad, offset = routes.copy(), offsets[number % len(offsets)]
        bad[place] = (64, -1 if itemsize > 1 else 255)[number % 2]
        assert reports(bad, offset) == [("out_of_range", 1, token, layer, 0)]
        assert reports(bad, offset, half) == [("out_of_range", 1, token, layer, 0)] * (layer % 2 == 0)
        if topk > 1:
            bad[place] = routes[token, layer, (k + 1 + number % (topk - 1)) % topk]
            assert reports(bad, offset) == [("duplicate", 1, token, layer, 0)]
            bad[token, layer] = 0
            assert reports(bad, offset, half)[:1] == [("zero", 1, token, layer, 0)] * (layer % 2 == 0)


@pytest.mark.parametrize("layers", [8, 9, 15, 24])
@pytest.mark.parametrize("block", [1, 2, 7, 32, 33, 1000])
def test_a_repeated_row_wherever_a_block_ends(layers, block, monkeypatch):
    """Runs of the length that counts, and of one row less, from each row on; and pairs that differ in one id."""
    monkeypatch.setattr("r3numba.audit.AUDIT_BLOCK_BYTES", block * layers * 8)
    monkeypatch.setattr("r3numba.audit.LONG_RUN", 5)
    routes = legal(40, layers, 8, "u1")
    for begin in range(36):
        bad = routes.copy()
        bad[begin : begin + 5] = bad[begin]
        assert reports(bad, 8) == [("repeated_row", 1, begin, -1, 5)]
        bad[begin + 4, begin % layers] = bad[begin + 4, begin % layers, ::-1]
        assert reports(bad, 16) == []
    for begin in (0, 3, 35):
        bad = routes.copy()
        bad[begin : begin + 4] = bad[begin]
        assert reports(bad) == []


def test_rows_that_share_the_last_layer_do_not_repeat():
    routes = legal(70, 9, 8, "u1")
    routes[:, -1] = routes[0, -1]
    assert reports(routes) == []


@pytest.mark.parametrize(("dtype", "topk", "layers"), [("u1", 8, 9), ("u1", 6, 13), ("i2", 10, 5), ("i4", 12, 2)])
def test_a_note_is_of_a_run_that_passed(dtype, topk, layers):
    """The kernel itself: a legal run is noted with its ids; a bad one and the template are not, all are written.

    A note that is wrongly missing costs time alone, so no report can tell.
    """
    from r3numba._dispatch import stores_for
    from r3numba._kernels import store_run
    from r3numba._numba import jit

    @jit(parallel=False)
    def write(stores, target, size, address, itemsize, count):
        store_run(stores, target, size, address, itemsize, count)

    routes = legal(20, layers, topk, dtype)
    routes[:, 1] = 0  # a dense layer
    size, row_bytes = routes.itemsize, routes[0].nbytes
    kept = np.repeat(np.arange(layers) != 1, topk * size)
    keep = np.concatenate((kept, kept[:LINE]))
    bad, twin, other = routes.copy(), routes.copy(), routes.copy()
    bad[3, 0, 3], twin[7], other[:, -1] = 64, twin[6], other[0, -1]
    kind, step = kind_of(size, topk), step_of(size, topk)
    for inner in {None, stores_for(True, paths.forced(None)), stores_for(False, paths.forced(None)), LINE}:
        if inner is not None and paths.may_report("streaming") != ("streaming",):
            continue
        for source, template, expected in (
            (routes, 0, routes.size), (other, 0, routes.size), (bad, 0, 0), (twin, 0, 0), (routes, 1, 0),
            (routes[:1], 0, routes[:1].size),
        ):  # fmt: skip
            for offset in (0, 8, 12, 24):
                out, note, at = placed(source, offset), np.zeros(1, np.int64), source.ctypes.data
                stores = (
                    inner, at if template else 0, note.ctypes.data, kind, step, row_bytes, keep.ctypes.data, 63,
                )  # fmt: skip
                write(stores, out.ctypes.data, size, at, size, source.size)
                assert note[0] == expected
                assert np.array_equal(out[0], source)


GUARDED = """
import ctypes, mmap
import numpy as np
from r3numba import audit_routes, collate_routes
from r3numba._policy import DEFAULT_POLICY
from dataclasses import replace

page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
room = mmap.mmap(-1, 4 * page)
memory = np.frombuffer(room, np.uint8)
for barred in (0, 3):  # the two pages between them are ours
    assert libc.mprotect(memory.ctypes.data + barred * page, page, 0) == 0
for rows, layers, topk in ((1, 8, 8), (2, 8, 8), (3, 9, 8), (7, 15, 8), (20, 40, 8), (1, 61, 8), (2, 11, 6), (3, 7, 10),
                           (20, 30, 6), (5, 3, 22), (4, 64, 1)):
    nbytes = rows * layers * topk
    ids = (np.arange(rows)[:, None, None] * 5 + np.arange(layers)[:, None] * 7 + np.arange(topk) * 2) % 63
    for begin in (page, 3 * page - nbytes):
        routes = memory[begin : begin + nbytes].reshape(rows, layers, topk)
        for values in (ids, ids * 0, ids[:1] + ids * 0):
            routes[:] = values
            audit_routes(routes, num_experts=64)
            for path in ("serial", "streaming"):
                policy = replace(DEFAULT_POLICY, path=path, stream_run_from=64)
                batch = collate_routes([routes], [rows + 1], num_experts=64, audit=True, _policy=policy)
                assert (batch.array[0, :rows] == routes).all()
print("inside")
"""


def test_nothing_beside_the_source_is_read():
    """Sources that begin and end at a page that may not be touched: a byte too far ends the process."""
    assert mmap.PAGESIZE >= 4096
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=300)
    assert done.stdout == "inside\n", (done.returncode, done.stderr[-500:])
