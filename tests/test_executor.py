"""Every executor path, each forced, against the oracle: same bytes for every input, at any thread count."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import paths
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import examples

from r3numba import backend_info, collate_routes, pack_routes
from r3numba._plan import Plan, cut_pieces, row_major
from r3numba._sources import read_sources

DTYPES = (np.uint8, np.int16, np.int32)
PATHS = paths.available()


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    """Let two and three threads run wherever the tests do: the thread count is asked for, not found."""
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 3)


def ids(rng, shape, dtype, order="C"):
    largest = {np.uint8: 255, np.int16: 32767, np.int32: 2**31 - 1}[dtype]
    routes = np.asarray(rng.integers(0, largest, shape, endpoint=True), dtype=dtype, order=order)
    routes.flags.writeable = False
    return routes


LAYOUTS = {
    "contiguous": lambda rng, n, layers, k, d: ids(rng, (n, layers, k), d),
    "fortran": lambda rng, n, layers, k, d: ids(rng, (n, layers, k), d, "F"),
    "layer-major": lambda rng, n, layers, k, d: ids(rng, (layers, n, k), d).transpose(1, 0, 2),
    "every-other-row": lambda rng, n, layers, k, d: ids(rng, (2 * n, layers, k), d)[::2],
    "every-other-id": lambda rng, n, layers, k, d: ids(rng, (n, layers, 2 * k), d)[:, :, ::2],
    "some-layers": lambda rng, n, layers, k, d: ids(rng, (n, layers + 3, k), d)[:, 2 : layers + 2],
    "backwards": lambda rng, n, layers, k, d: ids(rng, (n, layers, k), d)[::-1, ::-1, ::-1],
    "unaligned": lambda rng, n, layers, k, d: unaligned(ids(rng, (n, layers, k), d)),
    "repeated-row": lambda rng, n, layers, k, d: np.broadcast_to(ids(rng, (1, layers, k), d), (n, layers, k)),
}


def unaligned(routes):
    raw = np.empty(routes.nbytes + 1, np.uint8)
    view = raw[1:].view(routes.dtype).reshape(routes.shape)
    view[...] = routes
    view.flags.writeable = False
    return view


def guarded(shape, dtype):
    """Return an array to write into, filled with a sentinel, and a function that checks the bytes on both sides."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + 128, 0xA5, np.uint8)

    def intact():
        return bool((raw[:64] == 0xA5).all() and (raw[64 + nbytes :] == 0xA5).all())

    return raw[64 : 64 + nbytes].view(dtype).reshape(shape), intact


def compare(routes, lengths, *, path, threads, dtype=None, missing=None, columns=None, **policy):
    """Run rectangle (left, right, placed) and pack on one path, and compare all with the oracle."""
    policy = paths.forced(path, **{**paths.TINY_PIECES, **policy})
    options = {"dtype": dtype, "missing": missing, "num_threads": threads, "_policy": policy}
    present = [r for r in routes if r is not None and len(r)]
    result_dtype = np.dtype(dtype or max((r.dtype for r in present), key=lambda d: d.itemsize))
    width = max(lengths) + 2
    layouts = {
        "left": ({"padding": "left"}, oracle.left(lengths, width)),
        "right": ({"padding": "right"}, [0] * len(lengths)),
        "starts": ({"starts": [(i + 1) % 3 for i in range(len(lengths))]}, [(i + 1) % 3 for i in range(len(lengths))]),
    }
    for name, (how, starts) in layouts.items():
        if name == "starts" and max(s + t for s, t in zip(starts, lengths, strict=True)) > width:
            continue
        out, intact = guarded((len(lengths), width, *present[0].shape[1:]), result_dtype)
        batch = collate_routes(routes, lengths, max_length=width, out=out, **how, **options)
        indices, mask = oracle.rectangle(routes, lengths, starts, width, result_dtype, missing)
        assert batch.array.dtype == result_dtype
        np.testing.assert_array_equal(batch.array, indices, err_msg=f"{path} {name}")
        np.testing.assert_array_equal(batch.padding_mask, mask, err_msg=f"{path} {name}")
        assert intact(), f"{path} {name} wrote outside of its buffer"
        assert backend_info()["path"] in paths.may_report(path)
        assert backend_info()["threads"] == paths.threads_of(path, threads)
    out, intact = guarded((sum(lengths), *present[0].shape[1:]), result_dtype)
    packed = pack_routes(routes, lengths, out=out, **options)
    indices, mask, offsets = oracle.pack(routes, lengths, result_dtype, missing)
    np.testing.assert_array_equal(packed.array, indices, err_msg=f"{path} pack")
    np.testing.assert_array_equal(packed.padding_mask, mask, err_msg=f"{path} pack")
    np.testing.assert_array_equal(packed.offsets, offsets)
    assert intact(), f"{path} pack wrote outside of its buffer"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", DTYPES)
def test_every_layout_on_every_path(source, layout, path, threads):
    rng = np.random.default_rng(7)
    routes = [LAYOUTS[layout](rng, n, 3, 2, source) for n in (5, 1, 17)]
    routes.insert(1, None)
    lengths = [6, 3, 1, 20]
    for dtype in DTYPES:
        if np.dtype(dtype).itemsize >= np.dtype(source).itemsize:
            compare(routes, lengths, path=path, threads=threads, dtype=dtype)


@pytest.mark.parametrize("path", PATHS)
def test_mixed_dtypes_layouts_and_missing_rows(path):
    rng = np.random.default_rng(11)
    routes = [
        LAYOUTS[layout](rng, int(rng.integers(1, 30)), 4, 3, DTYPES[index % 3])
        for index, layout in enumerate([*LAYOUTS, *LAYOUTS])
    ]
    lengths = [len(r) + int(rng.integers(0, 4)) for r in routes]
    missing = [None if i % 4 == 3 else rng.random(len(r)) < 0.3 for i, r in enumerate(routes)]
    missing[0] = np.ones(len(routes[0]), bool)
    missing[1] = np.zeros(len(routes[1]), bool)
    compare(routes, lengths, path=path, threads=2, missing=missing)


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, topk = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    routes, lengths, missing = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.sampled_from([0, 1, 2, 3, 9, 40]))
        layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
        given_routes = layout(rng, rows, layers, topk, draw(st.sampled_from(DTYPES))) if rows else None
        routes.append(given_routes)
        lengths.append(rows + draw(st.integers(0, 3)))
        missing.append(rng.random(rows) < 0.3 if rows and draw(st.booleans()) else None)
    if not any(r is not None for r in routes):
        routes[0], lengths[0] = LAYOUTS["contiguous"](rng, 2, layers, topk, np.uint8), 2
        missing[0] = None
    return routes, lengths, missing if draw(st.booleans()) else None


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(), st.sampled_from(PATHS), st.integers(1, 3), st.sampled_from([1, 64, 4096]))
def test_any_batch(batch, path, threads, align):
    routes, lengths, missing = batch
    compare(routes, lengths, path=path, threads=threads, missing=missing, piece_align=align)


@pytest.mark.large
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("threshold", [8_000_000, 64_000_000])
def test_results_around_each_threshold(threshold, offset, monkeypatch):
    """Straddle the serial threshold and the second 32 MB, in bytes; the policy alone chooses, all paths agree."""
    monkeypatch.delenv("R3NUMBA_NUM_THREADS", raising=False)
    rng = np.random.default_rng(3)
    rows = threshold + offset  # one byte a row: layers and topk are 1
    lengths = [rows // 3, rows - rows // 3]
    routes = [ids(rng, (lengths[0] - 1, 1, 1), np.uint8), ids(rng, (lengths[1] // 2, 1, 1), np.uint8)]
    expected = np.zeros((rows, 1, 1), np.uint8)
    expected[: len(routes[0])] = routes[0]
    expected[lengths[0] : lengths[0] + len(routes[1])] = routes[1]
    packed = pack_routes(routes, lengths)
    info = backend_info()
    serial_below = 8_000_000 if "serial" in PATHS else 64_000_000  # the fallback gains from a second thread later
    assert info["threads"] == (1 if rows < serial_below else 2)
    if "serial" in PATHS:
        assert (info["path"] == "serial") == (rows < 8_000_000)
    np.testing.assert_array_equal(packed.array, expected)
    for path in PATHS:
        forced = pack_routes(routes, lengths, _policy=paths.forced(path))
        assert backend_info()["path"] in paths.may_report(path)
        assert (forced.array == packed.array).all(), path
        assert (forced.padding_mask == packed.padding_mask).all(), path


@pytest.mark.large
@pytest.mark.parametrize("path", PATHS)
def test_a_large_batch_in_real_pieces(path):
    """About 40 MB in pieces of 2 MiB, wide and narrow rows, left-padded: compared with plain NumPy slices."""
    rng = np.random.default_rng(5)
    routes = [ids(rng, (n, 24, 8), np.uint8) for n in (20_000, 1, 9_000, 30_000)]
    lengths = [len(r) + 1 for r in routes]
    expected = np.broadcast_to(np.arange(8, dtype=np.int16), (4, 30_001, 24, 8)).copy()
    for row, (r, t) in enumerate(zip(routes, lengths, strict=True)):
        expected[row, 30_001 - t : 30_001 - t + len(r)] = r
    batch = collate_routes(routes, lengths, dtype=np.int16, num_threads=2, _policy=paths.forced(path))
    assert (batch.array == expected).all()


@pytest.mark.parametrize("layout", ["contiguous", "layer-major", "every-other-id"])
@pytest.mark.parametrize("path", PATHS)
def test_a_layer_major_destination_is_one_more_plan(path, layout):
    """A rank's share: a subset of layers, layer-major, widened to int64, by the same executor."""
    from r3numba._dispatch import execute

    rng = np.random.default_rng(13)
    routes = [ids(rng, (n, 5, 3), np.uint8) for n in (7, 4)]
    routes[1] = LAYOUTS[layout](rng, 4, 5, 3, np.uint8)
    sources = read_sources(routes)
    bounds = np.array([0, 8, 14])
    layers = np.array([4, 1])
    plan = row_major(sources, bounds, np.array([0, 1]), np.dtype(np.int64))
    plan = Plan(
        sources=sources, bounds=bounds, first=plan.first, missing=plan.missing, missing_held=None, layer_of=layers,
        dtype=np.dtype(np.int64), row_stride=3, layer_stride=14 * 3,
    )  # fmt: skip
    out = np.full((2, 14, 3), -1, np.int64)
    mask = np.empty(14, bool)
    execute(plan, out.reshape(-1), mask, fresh=False, num_threads=2, policy=paths.forced(path, **paths.TINY_PIECES))
    expected = np.broadcast_to(np.arange(3), (2, 14, 3)).copy()
    expected[:, 0:7] = routes[0][:, layers].transpose(1, 0, 2)
    expected[:, 9:13] = routes[1][:, layers].transpose(1, 0, 2)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(mask, [*[False] * 7, True, True, *[False] * 4, True])


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 200), st.integers(1, 300)
)
def test_pieces_tile_the_destination(lengths, threads, base, align):
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    sources = read_sources([np.zeros((1, 2, 3), np.uint8)])
    plan = row_major(sources, bounds, np.zeros(len(lengths), np.int64), np.dtype(np.int16))
    out = np.zeros(base + 1, np.uint8)[base:]  # any address will do: nothing is written
    pieces = cut_pieces(plan, out, threads, align)
    tiled = sorted(pieces.tolist())
    assert tiled[0][0] == 0
    assert tiled[-1][1] == bounds[-1]
    for (_, end, *_), (begin, *_) in itertools.pairwise(tiled):
        assert end == begin
    for begin, _, span, _ in tiled:
        assert bounds[span] <= begin <= bounds[span + 1]


def test_two_threads_get_pieces_of_equal_bytes_and_both_kinds():
    """One at 16k tokens, the rest at 512: no thread is left with the copies alone."""
    lengths = [16_384] + [512] * 31
    sources = read_sources([np.zeros((1, 48, 8), np.uint8)] * 32)
    plan = row_major(sources, np.arange(33) * 16_384, np.zeros(32, np.int64), np.dtype(np.uint8))
    pieces = cut_pieces(plan, np.empty(1, np.uint8), 2, 2 << 20)
    sizes = [int((half[:, 1] - half[:, 0]).sum()) * plan.row_bytes for half in np.array_split(pieces, 2)]
    assert abs(sizes[0] - sizes[1]) <= plan.total_rows * plan.row_bytes / 8
    copied = [
        int((np.minimum(half[:, 1], lengths[0]) - np.minimum(half[:, 0], lengths[0])).sum())
        for half in np.array_split(pieces, 2)
    ]
    assert min(copied) > 0.25 * lengths[0]


def test_every_path_was_taken():
    """The lane's own paths really ran, and the whole table is more than the slices wherever Numba is."""
    taken = set()
    for path in reversed(PATHS):  # the slices report no layer, so they do not come last
        collate_routes([np.zeros((1, 1, 1), np.uint8)], [2], num_threads=2, _policy=paths.forced(path))
        taken.add(backend_info()["path"])
    if "parallel" in PATHS and backend_info()["layer"] == "workqueue":
        taken.add("parallel")  # never launched there, whoever asks
    expected = set(PATHS) if len(paths.may_report("streaming")) == 1 else set(PATHS) - {"streaming"}
    assert taken == expected
