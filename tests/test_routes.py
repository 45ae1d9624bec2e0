"""compact_routes and dummy_routes: against a naive oracle, on every path, for every integer dtype and memory layout."""

from __future__ import annotations

import numpy as np
import paths
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import DTYPES, examples, forced, jit_runs, misaligned, most_threads, need_torch, read_only

from r3numba import backend_info, collate_routes, compact_routes, dummy_routes
from r3numba._policy import DEFAULT_POLICY
from r3numba.routes import _compact_on_device

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
#: Ids on either side of what each canonical dtype holds.
EDGES = (0, 1, 127, 128, 255, 256, 300, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**31 - 1)
THRESHOLD = DEFAULT_POLICY.serial_below_recycled


LAYOUTS = {
    "contiguous": lambda a: a.copy(),
    "read-only": lambda a: read_only(a.copy()),
    "fortran": lambda a: np.array(a, order="F"),
    "every-other-row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "every-other-id": lambda a: np.repeat(a, 2, axis=2)[:, :, ::2],
    "reversed": lambda a: a[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "other-byte-order": lambda a: a.astype(a.dtype.newbyteorder()),
    "misaligned": misaligned,
}


def naive(routes, num_experts=None, missing="raise"):
    """Return dtype name, nested list and missing rows, or the exception's type, one id at a time."""
    rows, absent = routes.tolist(), []
    topk = routes.shape[2]
    for index, row in enumerate(rows):
        ids = [value for layer in row for value in layer]
        gone = missing == "mask" and all(value == -1 for value in ids)
        if not gone and min(ids) < 0:
            return ValueError
        absent.append(gone)
        if gone:
            rows[index] = [list(range(topk)) for _ in row]
    most = max([value for row in rows for layer in row for value in layer], default=0)
    if num_experts is not None and (num_experts < topk or most >= num_experts):
        return ValueError
    largest = most if num_experts is None else num_experts - 1
    for bits, name in ((8, "uint8"), (15, "int16"), (31, "int32")):
        if largest < 1 << bits:
            return name, rows, absent
    return ValueError


def check(routes, result, expected, missing="raise"):
    name, rows, absent = expected
    if missing == "mask":
        result, mask = result
        assert mask.dtype == np.bool_
        assert mask.tolist() == absent
    assert result.dtype == np.dtype(name)
    assert result.dtype.isnative
    assert result.shape == routes.shape
    assert result.tolist() == rows
    assert result.flags.c_contiguous
    assert result.flags.writeable


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_dtype_and_layout(dtype, layout):
    for largest in (edge for edge in EDGES if edge <= np.iinfo(dtype).max):
        source = (np.arange(24) % (largest + 1)).astype(dtype).reshape(3, 2, 4)
        source[1, 1, 2] = largest
        routes = LAYOUTS[layout](source)
        before = routes.tobytes()
        check(routes, compact_routes(routes), naive(source))
        assert routes.tobytes() == before


@pytest.mark.parametrize("dtype", INTEGERS)
def test_no_rows(dtype):
    for routes in (np.empty((0, 2, 4), dtype), np.empty((3, 2, 4), dtype)[:0], np.empty((0, 2, 4), dtype, "F")):
        check(routes, compact_routes(routes), ("uint8", [], []))
        check(routes, compact_routes(routes, num_experts=512), ("int16", [], []))
        check(routes, compact_routes(routes, missing="mask"), ("uint8", [], []), "mask")


@pytest.mark.parametrize("case", ["contiguous", "unsigned", "signed", "wide", "experts", "empty"])
@pytest.mark.parametrize("kind", ["ndarray", "tensor"])
def test_no_copy_where_none_is_needed(kind, case):
    """The input itself where it is canonical, a view of it where only the sign changes."""
    routes, options, name = {
        "contiguous": (np.arange(8, dtype=np.uint8), {}, "uint8"),
        "unsigned": (np.arange(300, 308, dtype=np.uint16), {}, "int16"),
        "signed": (np.arange(8, dtype=np.int8), {}, "uint8"),
        "wide": (np.arange(40000, 40008, dtype=np.uint32), {}, "int32"),
        "experts": (np.arange(8, dtype=np.uint16), {"num_experts": 300}, "int16"),
        "empty": (np.empty(0, np.uint8), {}, "uint8"),
    }[case]
    routes = routes.reshape(-1, 2, 2)
    given_routes = need_torch().from_numpy(routes) if kind == "tensor" else routes
    for copy in (None, False):
        result = compact_routes(given_routes, copy=copy, **options)
        assert str(result.dtype).removeprefix("torch.") == name
        assert (result is given_routes) == (routes.dtype == name)
        if routes.size:
            assert np.shares_memory(np.asarray(result), routes)
        assert np.asarray(result).tolist() == routes.tolist()
    forced_copy = compact_routes(given_routes, copy=True, **options)
    assert type(forced_copy) is type(given_routes)
    assert not np.shares_memory(np.asarray(forced_copy), routes)
    assert np.asarray(forced_copy).tolist() == routes.tolist()


NEEDS_A_COPY = {
    "narrowing": lambda: np.zeros((2, 2, 2), np.int64),
    "widening": lambda: np.zeros((2, 2, 2), np.uint8),
    "fortran": lambda: np.zeros((2, 2, 2), np.uint8, order="F"),
    "read-only": lambda: read_only(np.zeros((2, 2, 2), np.uint8)),
    "other-byte-order": lambda: np.full((2, 2, 2), 300, np.dtype(np.int16).newbyteorder()),
}


@pytest.mark.parametrize("case", NEEDS_A_COPY)
def test_copy_false_refuses_where_a_copy_is_needed(case):
    routes = NEEDS_A_COPY[case]()
    options = {"num_experts": 512} if case == "widening" else {}
    with pytest.raises(ValueError, match="copy is False"):
        compact_routes(routes, copy=False, **options)
    assert not np.shares_memory(compact_routes(routes, **options), routes)
    with pytest.raises(ValueError, match="copy is False, but missing rows"):
        compact_routes(np.full((1, 1, 2), -1, np.int16), missing="mask", copy=False)


@pytest.mark.parametrize("copy", [0, 1, np.True_, np.False_, "yes", np.array([True, False])], ids=repr)
def test_copy_of_another_type_is_refused(copy):
    with pytest.raises(TypeError, match="copy is"):
        compact_routes(np.zeros((1, 1, 2), np.int64), copy=copy)


# ---- the same on every path, and for tensors -------------------------------------------------------------------------


@pytest.mark.parametrize("path", paths.scanning())
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_paths_around_the_serial_threshold(path, around, monkeypatch):
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 3)
    size = THRESHOLD + around if jit_runs() or path == "slices" else 30_000 + around
    routes = np.ones((size, 1, 1), np.uint8)
    for place in (0, size // 3, size // 2, size - 1):
        routes[place] = 200
        with pytest.raises(ValueError, match=rf"^routes\[{place}, 0, 0\] is 200, need less than num_experts = 200$"):
            compact_routes(routes, num_experts=200, _policy=forced(path))
        routes[place] = 1
    assert compact_routes(routes, _policy=forced(path)) is routes
    info = backend_info()
    assert info["path"] in {"parallel": ("parallel", "pool")}.get(path, (path,))
    if size > 1_000_000:
        one = around < 0 or path in ("serial", "slices")  # slices have a threshold of their own, 64 MB
        assert info["threads"] == (1 if one else most_threads(info["path"], 2))


@pytest.mark.parametrize("path", paths.scanning())
@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_place_of_the_extremes_on_every_path(path, dtype, monkeypatch):
    monkeypatch.setenv("R3NUMBA_NUM_THREADS", "3")
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 3)
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    for size in (1, 2, 3, 7, 12):
        for place in range(size):
            routes = np.ones((size, 1, 1), dtype)
            routes[place] = largest
            check(routes, compact_routes(routes, _policy=forced(path)), naive(routes))
            if dtype.startswith("int"):
                routes[place] = -1
                with pytest.raises(ValueError, match=rf"routes\[{place}, 0, 0\] is -1, need at least 0"):
                    compact_routes(routes, _policy=forced(path))


def values(dtype):
    bounds = np.iinfo(dtype)
    edges = [edge for edge in (*EDGES, 2**31, 2**63) if edge <= bounds.max]
    usual = st.sampled_from(edges) | st.integers(0, min(bounds.max, 300))
    return usual if bounds.min == 0 else usual | st.sampled_from([-1, -2, int(bounds.min)])


@st.composite
def payloads(draw):
    dtype = draw(st.sampled_from(INTEGERS))
    shape = draw(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4)))
    pool = draw(st.lists(values(dtype), min_size=1, max_size=4))
    flat = draw(st.lists(st.sampled_from(pool), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    routes = np.array(flat, dtype).reshape(shape)
    if np.iinfo(dtype).min < 0:
        for row in range(shape[0]):
            if draw(st.integers(0, 3)) == 0:
                routes[row] = -1
    experts = draw(st.none() | st.sampled_from([1, 4, 128, 256, 257, 512, 2**15, 2**15 + 1, 2**31]))
    return routes, experts, draw(st.sampled_from(["raise", "mask"]))


@pytest.mark.parametrize("path", paths.scanning())
@settings(deadline=None, max_examples=examples(120))
@given(payload=payloads(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_against_the_oracle(path, payload, layout):
    source, experts, missing = payload
    routes, expected = LAYOUTS[layout](source), naive(source, experts, missing)
    if expected is ValueError:
        with pytest.raises(ValueError, match=r"^(routes|num_experts)"):
            compact_routes(routes, num_experts=experts, missing=missing, _policy=forced(path))
    else:
        result = compact_routes(routes, num_experts=experts, missing=missing, _policy=forced(path))
        check(routes, result, expected, missing)
    assert routes.tobytes() == source.tobytes() or layout == "other-byte-order"


@pytest.mark.parametrize("compact", [compact_routes, _compact_on_device], ids=["host", "device"])
@settings(deadline=None, max_examples=examples(150))
@given(payload=payloads(), copy=st.sampled_from([None, True, False]), transposed=st.booleans())
@example(payload=(np.full((1, 1, 2), 2**64 - 1, np.uint64), None, "mask"), copy=None, transposed=False)
@example(payload=(np.full((1, 1, 4), -1, np.int8), 1, "mask"), copy=False, transposed=False)
def test_tensors_as_arrays(compact, payload, copy, transposed):
    """A tensor gives what the array gives, where it lives; the device's code is called with a CPU tensor."""
    torch = need_torch()
    routes, experts, missing = payload
    if transposed:
        routes = np.array(routes, order="F")
    tensor = torch.from_numpy(routes.copy(order="K"))
    options = {"num_experts": experts, "missing": missing, "copy": copy}
    results = []
    for call, source in ((compact_routes, routes), (compact, tensor)):
        try:
            results.append(call(source, **options) if call is compact_routes else call(source, *options.values()))
        except ValueError as error:  # the words after the figures name dtypes, which differ
            results.append(str(error).split(" (")[0].split(", but")[0])
    expected, result = results
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
        return
    if missing == "mask":
        (result, mask), (expected, absent) = result, expected
        assert mask.dtype == torch.bool
        assert mask.tolist() == absent.tolist()
    assert str(result.dtype) == f"torch.{expected.dtype}"
    assert result.is_contiguous()
    assert result.tolist() == expected.tolist()
    if routes.size:
        assert (result.data_ptr() == tensor.data_ptr()) == np.shares_memory(expected, routes)


@pytest.mark.parametrize("path", paths.scanning())
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32", "uint32", "int16"])
def test_the_first_ids_may_suggest_a_dtype_that_the_last_one_refutes(path, dtype):
    """One pass narrows to what the first 4096 ids need; another is made where a later id needs more."""
    for last in (255, 256, 2**15 - 1, 2**15, 2**31 - 1):
        if last > np.iinfo(dtype).max:
            continue
        for rows in (600, 2_000):  # the sample is the whole, or its beginning
            routes = np.arange(rows * 8, dtype=np.int64).reshape(rows, 2, 4) % 200
            routes[-1, -1, -1] = last
            result = compact_routes(routes.astype(dtype), _policy=forced(path))
            assert result.dtype == (np.uint8 if last < 256 else np.int16 if last < 2**15 else np.int32)
            assert np.array_equal(result, routes)
            missing = routes.copy()
            missing[3] = -1
            if dtype.startswith("int"):
                result, absent = compact_routes(missing.astype(dtype), missing="mask", _policy=forced(path))
                assert absent.tolist() == [row == 3 for row in range(rows)]
                assert (result[3] == np.arange(4)).all()
                assert np.array_equal(result[4:], routes[4:])


# ---- cases and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "name"), [(255, "uint8"), (256, "int16"), (300, "int16"), (32768, "int32")])
def test_case_14_ids_never_wrap(largest, name):
    routes = compact_routes(np.array([[[0, largest]]], np.int64))
    assert (routes.dtype.name, routes.tolist()) == (name, [[[0, largest]]])
    with pytest.raises(ValueError, match=rf"routes\[0, 0, 1\] is {largest}, need less than num_experts = {largest}"):
        compact_routes(np.array([[[0, largest]]], np.int64), num_experts=largest)


def test_case_15_a_wrapped_int8_payload_is_refused():
    payload = np.array([[[3, 200]], [[1, 2]]], np.uint8).view(np.int8)
    for missing in ("raise", "mask"):
        with pytest.raises(ValueError, match=r"^routes\[0, 0, 1\] is -56, need at least 0$"):
            compact_routes(payload, missing=missing)


def test_case_38_missing_rows_are_masked_then_collated():
    payload = np.arange(40 * 2 * 3, dtype=np.int32).reshape(40, 2, 3)
    payload[10:13] = -1
    routes, missing = compact_routes(payload, missing="mask")
    batch = collate_routes([routes], [42], padding="right", missing=[missing])
    assert np.flatnonzero(batch.padding_mask[0]).tolist() == [10, 11, 12, 40, 41]
    for row in range(42):
        expected = [[0, 1, 2]] * 2 if row in (10, 11, 12, 40, 41) else payload[row].tolist()
        assert batch.array[0, row].tolist() == expected


def test_case_39_num_experts_gives_one_dtype_on_every_rank():
    ranks = [np.array([[[1, 200]]]), np.array([[[1, 300]]])]
    assert [compact_routes(routes, num_experts=512).dtype.name for routes in ranks] == ["int16", "int16"]


REFUSALS = {
    "list": ([[[1]]], {}, TypeError, "routes is a list, need an ndarray or a CPU tensor"),
    "float": (np.zeros((1, 1, 2)), {}, TypeError, "routes has dtype float64, need integers"),
    "bool": (np.zeros((1, 1, 2), bool), {}, TypeError, "routes has dtype bool, need integers"),
    "masked": (np.ma.zeros((1, 1, 2), int), {}, TypeError, "routes is a MaskedArray"),
    "rank-2": (np.zeros((1, 2), int), {}, ValueError, "routes has 2 dimensions, need 3"),
    "no-layer": (np.zeros((1, 0, 2), int), {}, ValueError, "routes has 0 layers and topk 2, need at least 1"),
    "no-id": (np.zeros((0, 1, 0), int), {}, ValueError, "routes has 1 layers and topk 0, need at least 1"),
    "2^31": (np.full((1, 1, 1), 2**31), {}, ValueError, r"routes\[0, 0, 0\] is 2147483648, need less than 2\^31"),
    "hint": (np.full((2, 1, 1), -1), {}, ValueError, r"routes\[0, 0, 0\] is -1, .*missing='mask'"),
    "one-layer": (np.array([[[1], [1]], [[1], [-1]]]), {"missing": "mask"}, ValueError, r"routes\[1, 1, 0\] is -1 but"),
    "one-id": (np.array([[[1, -1], [1, 1]]]), {"missing": "mask"}, ValueError, r"routes\[0, 0, 1\] is -1 but row 0"),
    "few-experts": (np.zeros((1, 1, 4), int), {"num_experts": 3}, ValueError, "num_experts is 3, need at least topk"),
    "many-experts": (np.zeros((1, 1, 1), int), {"num_experts": 2**31 + 1}, ValueError, "num_experts = 2147483649"),
    "bool-experts": (np.zeros((1, 1, 1), int), {"num_experts": True}, TypeError, "num_experts is a bool"),
    "float-experts": (np.zeros((1, 1, 1), int), {"num_experts": 8.0}, TypeError, "num_experts is a float"),
    "missing-word": (np.zeros((1, 1, 1), int), {"missing": "drop"}, ValueError, "missing is 'drop', need 'raise' or"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_refusals(fault):
    routes, options, exception, text = REFUSALS[fault]
    with pytest.raises(exception, match=text):
        compact_routes(routes, **options)


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16"])
def test_tensors_of_no_integers_are_refused(dtype):
    torch = need_torch()
    for compact in (lambda t: compact_routes(t), lambda t: _compact_on_device(t, None, "raise", None)):
        with pytest.raises(TypeError, match=rf"^routes has dtype (torch\.)?{dtype}"):
            compact(torch.zeros((1, 1, 2), dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 4), (5,), (1, 1, 1), (2, 0, 3), (3, 256)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, "torch"])
def test_dummy_routes(shape, dtype):
    routes = dummy_routes(shape, need_torch().int16 if dtype == "torch" else dtype)
    dtype = "int16" if dtype == "torch" else dtype
    assert (routes.shape, routes.dtype) == (shape, np.dtype(dtype))
    assert all(row.tolist() == list(range(shape[-1])) for row in routes.reshape(-1, shape[-1]))
    assert routes.flags.c_contiguous
    assert routes.flags.writeable


@pytest.mark.parametrize(
    ("shape", "dtype", "exception", "text"),
    [
        ((2, 3, 0), "uint8", ValueError, "need a last axis"),
        ((), "uint8", ValueError, "need a last axis"),
        ((-1, 3), "uint8", ValueError, r"shape\[0\] is -1, need at least 0"),
        ((2.0, 3), "uint8", TypeError, r"shape\[0\] is a float, need an integer"),
        ((True, 3), "uint8", TypeError, r"shape\[0\] is a bool, need an integer"),
        ((2, 257), "uint8", ValueError, "topk is 257, need at most 256"),
        ((1, 32769), "int16", ValueError, "topk is 32769, need at most 32768"),
        (5, "uint8", TypeError, "^shape is a int"),
        ((1, 1), "uint16", TypeError, "dtype is uint16, need uint8, int16 or int32"),
        ((1, 1), None, TypeError, "need uint8, int16 or int32"),
    ],
    ids=str,
)
def test_dummy_routes_refuse(shape, dtype, exception, text):
    with pytest.raises(exception, match=text):
        dummy_routes(shape, dtype)
