"""What several test files share: the paths that can run here, captured routes of many kinds, and measurements."""

from __future__ import annotations

import os
import re
import tracemalloc

import numpy as np
import pytest
from paths import available as available_paths
from paths import forced, jit_runs

from r3numba import RouteCollator, collate_routes, pack_routes

__all__ = ["available_paths", "forced", "jit_runs"]  # and everything below

DTYPES = (np.uint8, np.int16, np.int32)
#: One id past what the next narrower dtype holds, so that a wrapped id cannot pass for the right one.
LARGEST = {np.uint8: 255, np.int16: 2**15 - 1, np.int32: 2**31 - 1}


def examples(count):
    """Return how many examples a property gets: ``make explore`` draws more of them, and others each time."""
    return count * int(os.environ.get("R3NUMBA_EXPLORE", "1"))


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


def read_only(array):
    array.flags.writeable = False
    return array


def misaligned(array):
    """Return a copy whose elements begin one byte past where the dtype wants them."""
    raw = np.zeros(array.nbytes + 1, np.uint8)
    moved = raw[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


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
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = call()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


# ---- refusals: a batch that is accepted, and one change to it --------------------------------------------------------

ROWS, LENGTHS = (3, 1, 5, 2, 4), [4, 2, 5, 6, 4]
CALLS = {
    "collate": collate_routes,
    "pack": pack_routes,
    "collator": lambda *args, **options: RouteCollator().collate_routes(*args, **options),
    "collator-pack": lambda *args, **options: RouteCollator().pack_routes(*args, **options),
}


PLACES = (0, 2, 4)
every_call = pytest.mark.parametrize("call", CALLS)
every_place = pytest.mark.parametrize("place", PLACES)


def replaced(values, place, value):
    return [*values[:place], value, *values[place + 1 :]]


def packed(**options):
    """Return the pack of the batch that is accepted."""
    return pack_routes(batch_of(ROWS), LENGTHS, **options)


def out_shape(call):
    return (sum(LENGTHS), 2, 4) if "pack" in call else (len(LENGTHS), max(LENGTHS), 2, 4)


def good(call):
    """Return the arguments of a batch that is accepted, and the bytes that its ``out`` lies in."""
    whole, out = guarded(out_shape(call))
    if call == "pad":
        return {"out": out}, whole
    masks = [np.arange(rows) == 1 if rows > 1 else None for rows in ROWS]
    return {"routes": batch_of(ROWS), "sequence_lengths": list(LENGTHS), "missing": masks, "out": out}, whole


def refused(call, exception, text, **changes):
    """Call with the good arguments changed; expect exactly this exception, and every byte as it was."""
    arguments, whole = good(call)
    arguments.update(changes)
    arrays = [whole, *_arrays_in(arguments)]
    before = [array.tobytes() for array in arrays]
    function = packed().pad if call == "pad" else CALLS[call]
    with pytest.raises(exception) as caught:
        function(**arguments)
    assert type(caught.value) is exception, repr(caught.value)
    assert re.search(text, str(caught.value)), f"{text!r} is not in {str(caught.value)!r}"
    assert [array.tobytes() for array in arrays] == before


def _arrays_in(arguments):
    parts = [part for value in arguments.values() for part in (value if isinstance(value, (list, tuple)) else [value])]
    parts += [part.numpy() for part in parts if hasattr(part, "untyped_storage") and _readable(part)]
    parts += [part.base for part in parts if isinstance(part, np.ndarray) and isinstance(part.base, np.ndarray)]
    return [part for part in parts if isinstance(part, np.ndarray) and part.dtype != object]


def _readable(tensor):
    return str(tensor.layout) == "torch.strided" and tensor.device.type == "cpu" and "bfloat16" not in str(tensor.dtype)


# ---- the tables: what is wrong, the exception, and its message after the name of the argument or trajectory ----------

SHAPE = (2, 2, 4)
REMEDY = "need uint8, int16 or int32: call compact_routes"
PAST = r"^a batch of shape .* needs [\d,]{20,} bytes, but only [\d,]+ bytes can still be allocated here$"
INT16 = batch_of(ROWS, dtypes=(np.uint8, np.uint8, np.int16))
#: One entry of ``routes``.
ENTRIES = {
    "list": ([[[1, 2, 3, 4]] * 2], TypeError, "is a list, need an ndarray, a CPU tensor or None"),
    "number": (5, TypeError, "is a int, need an ndarray"),
    "masked": (np.ma.zeros(SHAPE, np.uint8), TypeError, "is a MaskedArray, need an ndarray"),
    "float": (np.zeros(SHAPE), TypeError, f"has dtype float64, {REMEDY}"),
    "bool": (np.zeros(SHAPE, bool), TypeError, f"has dtype bool, {REMEDY}"),
    "int64": (np.zeros(SHAPE, np.int64), TypeError, f"has dtype int64, {REMEDY}"),
    "int8": (np.zeros(SHAPE, np.int8), TypeError, f"has dtype int8, {REMEDY}"),
    "uint16": (np.zeros(SHAPE, np.uint16), TypeError, f"has dtype uint16, {REMEDY}"),
    "big-endian": (np.zeros(SHAPE, ">i2"), TypeError, f"has dtype >i2, {REMEDY}"),
    "object": (np.zeros(SHAPE, object), TypeError, f"has dtype object, {REMEDY}"),
    "structured": (np.zeros(SHAPE, "u1,i2"), TypeError, f"has dtype .*f0.*, {REMEDY}"),
    "rank-0": (np.array(1, np.uint8), ValueError, r"has 0 dimensions, need 3: \[rows, layers, topk\]"),
    "rank-2": (np.zeros(SHAPE[1:], np.uint8), ValueError, "has 2 dimensions, need 3"),
    "rank-4": (np.zeros((1, *SHAPE), np.uint8), ValueError, "has 4 dimensions, need 3"),
}
#: ``routes`` as a whole.
WHOLE = {
    "none": (None, TypeError, "^routes is a NoneType, need a sequence"),
    "number": (5, TypeError, "^routes is a int, need a sequence"),
    "text": ("routes", TypeError, "^routes is a str, need a sequence"),
    "bytes": (b"12345", TypeError, "^routes is a bytes, need a sequence"),
    "dict": ({0: np.zeros(SHAPE, np.uint8)}, TypeError, "^routes is a dict, need a sequence"),
    "iterator": (iter([np.zeros(SHAPE, np.uint8)]), TypeError, "^routes is a list_iterator, need a sequence"),
    "rank-0": (np.array(1, np.uint8), TypeError, "^routes "),
    "one-array": (np.zeros(SHAPE, np.uint8), ValueError, r"^routes\[0\] has 2 dimensions, need 3"),
    "empty": ([], ValueError, "^routes is empty, need at least one trajectory"),
    "all-none": ([None] * 5, ValueError, "no trajectory has a captured row, need at least one: layers and topk"),
    "no-rows": ([None, *[np.zeros((0, 2, 4), np.uint8)] * 4], ValueError, "no trajectory has a captured row"),
    "fewer": (batch_of(ROWS[:4]), ValueError, "^sequence_lengths has 5 entries, need 4, one for each trajectory"),
    "more": (batch_of((*ROWS, 1)), ValueError, "^sequence_lengths has 5 entries, need 6, one for each trajectory"),
}
#: One entry of a vector of integers.
NUMBERS = {
    "negative": (-1, ValueError, "is -1, need at least 0"),
    "bool": (True, TypeError, "is a bool, need an integer"),
    "numpy-bool": (np.True_, TypeError, "is a bool, need an integer"),
    "float": (6.0, TypeError, "is a float, need an integer"),
    "numpy-float": (np.float64(6), TypeError, "is a float64, need an integer"),
    "text": ("6", TypeError, "is a str, need an integer"),
    "none": (None, TypeError, "is a NoneType, need an integer"),
    "nested": ([6], TypeError, "is a list, need an integer"),
    "2^63": (2**63, ValueError, r"is 9223372036854775808, need less than 2\^63"),
    "2^64": (np.uint64(2**64 - 1), ValueError, r"is 18446744073709551615, need less than 2\^63"),
    "-2^70": (-(2**70), ValueError, "is -1180591620717411303424, need"),
}
#: A vector of integers as a whole.
VECTORS = {
    "none": (None, TypeError, "is a NoneType, need a sequence of integers"),
    "number": (6, TypeError, "is a int, need a sequence of integers"),
    "text": ("45664", TypeError, "is a str, need a sequence of integers"),
    "bytes": (b"\6\6\6\6\6", TypeError, "is a bytes, need a sequence"),
    "dict": (dict.fromkeys([6, 7, 8, 9, 10]), TypeError, "is a dict, need a sequence"),
    "set": ({6, 7, 8, 9, 10}, TypeError, "is a set, need a sequence"),
    "floats": (np.full(5, 6.0), TypeError, "has dtype float64, need integers"),
    "bools": (np.full(5, True), TypeError, "has dtype bool, need integers"),
    "objects": (np.full(5, 6, object), TypeError, "has dtype object, need integers"),
    "masked": (np.ma.array([6] * 5), TypeError, "is a MaskedArray"),
    "rank-0": (np.array(6), ValueError, "has 0 dimensions, need 1"),
    "rank-2": (np.full((5, 1), 6), ValueError, "has 2 dimensions, need 1"),
    "few": ([6] * 4, ValueError, "has 4 entries, need 5, one for each trajectory"),
    "many": (np.full(6, 6), ValueError, "has 6 entries, need 5, one for each trajectory"),
    "empty": ([], ValueError, "has 0 entries, need 5"),
    "past-2^63": (np.full(5, 2**63, np.uint64), ValueError, r"\[0\] is 9223372036854775808, need less than 2\^63"),
}
#: Options that place the trajectories of a rectangle.
PLACEMENTS = {
    "short": ({"max_length": 5}, ValueError, "^max_length is 5, need at least 6 for trajectory 3$"),
    "negative": ({"max_length": -1}, ValueError, "^max_length is -1, need at least 0"),
    "bool": ({"max_length": True}, TypeError, "^max_length is a bool, need an integer"),
    "float": ({"max_length": 6.0}, TypeError, "^max_length is a float, need an integer"),
    "text": ({"max_length": "6"}, TypeError, "^max_length is a str, need an integer"),
    "2^62": ({"max_length": 2**62}, MemoryError, PAST),
    "2^63": ({"max_length": 2**63}, MemoryError, PAST),
    "2^70": ({"max_length": 2**70}, MemoryError, PAST),
    "2^70-right": ({"max_length": 2**70, "padding": "right"}, MemoryError, PAST),
    "starts-few": ({"starts": [0] * 4}, ValueError, "^starts has 4 entries, need 5"),
    "starts-negative": ({"starts": [0, 0, 0, -1, 0]}, ValueError, r"^starts\[3\] is -1, need at least 0"),
    "starts-float": ({"starts": [0, 0, 1.0, 0, 0]}, TypeError, r"^starts\[2\] is a float, need an integer"),
    "starts-bool": ({"starts": [0, 0, 0, 0, True]}, TypeError, r"^starts\[4\] is a bool, need an integer"),
    "starts-number": ({"starts": 0}, TypeError, "^starts is a int, need a sequence"),
    "starts-2^63": ({"starts": [0, 2**63 - 1, 0, 0, 0]}, ValueError, r"^starts\[1\] is 9223372036854775807, need at"),
    "starts-2^62": ({"starts": [0, 2**62, 0, 0, 0]}, MemoryError, PAST),
    "starts-far": (
        {"starts": [0, 0, 1, 0, 3], "max_length": 6}, ValueError, "^max_length is 6, need at least 7 for trajectory 4$"
    ),
    "starts-left": ({"starts": [0] * 5, "padding": "left"}, ValueError, "^starts and padding = 'left' exclude each"),
    "padding-word": ({"padding": "both"}, ValueError, "^padding is 'both', need 'left' or 'right'"),
    "padding-case": ({"padding": "Left"}, ValueError, "^padding is 'Left', need 'left' or 'right'"),
    "padding-number": ({"padding": 1}, TypeError, "^padding is a int, need 'left' or 'right'"),
    "padding-array": ({"padding": np.array(["left", "right"])}, TypeError, "^padding is a ndarray, need 'left'"),
}  # fmt: skip
#: Options of every call.
OPTIONS = {
    "narrow": ({"dtype": "uint8", "routes": INT16}, TypeError, r"need at least int16 \(routes\[2\] is int16\)"),
    "narrow-experts": ({"num_experts": 256, "routes": INT16}, TypeError, r"uint8, need at least int16 \(routes\[2\]"),
    "experts-over-dtype": ({"dtype": "uint8", "num_experts": 257}, TypeError, "uint8, need at least int16 for num_exp"),
    "dtype-uint16": ({"dtype": np.uint16}, TypeError, "^dtype is uint16, need uint8, int16 or int32"),
    "dtype-float": ({"dtype": float}, TypeError, "^dtype is float64, need uint8, int16 or int32"),
    "dtype-big-endian": ({"dtype": ">i2"}, TypeError, "^dtype is >i2, need uint8, int16 or int32"),
    "dtype-word": ({"dtype": "tiny"}, TypeError, "^dtype is 'tiny', need uint8, int16 or int32"),
    "few-experts": ({"num_experts": 3}, ValueError, "^num_experts is 3, need at least topk = 4"),
    "no-experts": ({"num_experts": 0}, ValueError, "^num_experts is 0, need at least 1"),
    "many-experts": ({"num_experts": 2**31 + 1}, ValueError, "^num_experts = 2147483649 needs ids"),
    "bool-experts": ({"num_experts": True}, TypeError, "^num_experts is a bool, need an integer"),
    "float-experts": ({"num_experts": 8.0}, TypeError, "^num_experts is a float, need an integer"),
    "topk": ({"routes": [np.zeros((1, 1, 257), np.uint8)] * 5}, ValueError, "^topk is 257, need at most 256 for uint8"),
    "audit": ({"audit": 1}, TypeError, "^audit is a int, need a bool"),
    "moe-layers": ({"moe_layers": [0]}, TypeError, "^moe_layers has dtype int64, need a bool for each layer"),
    "no-thread": ({"num_threads": 0}, ValueError, "^num_threads is 0, need at least 1"),
    "few-threads": ({"num_threads": -1}, ValueError, "^num_threads is -1, need at least 1"),
    "bool-threads": ({"num_threads": True}, TypeError, "^num_threads is a bool, need an integer"),
    "float-threads": ({"num_threads": 2.0}, TypeError, "^num_threads is a float, need an integer"),
    "text-threads": ({"num_threads": "2"}, TypeError, "^num_threads is a str, need an integer"),
}


OUTS = {
    "list": (lambda shape: [[1]], TypeError, "^out is a list, need an ndarray or a CPU tensor"),
    "batch": (lambda shape: packed(), TypeError, "^out is a PackedRoutes, need an ndarray"),
    "masked": (lambda shape: np.ma.zeros(shape, np.uint8), TypeError, "^out is a MaskedArray, need an ndarray"),
    "wider": (lambda shape: np.zeros(shape, np.int16), TypeError, "^out has dtype int16, need uint8"),
    "int8": (lambda shape: np.zeros(shape, np.int8), TypeError, "^out has dtype int8, need uint8"),
    "bool": (lambda shape: np.zeros(shape, bool), TypeError, "^out has dtype bool, need uint8"),
    "float": (lambda shape: np.zeros(shape), TypeError, "^out has dtype float64, need uint8"),
    "more": (lambda s: guarded((s[0] + 1, *s[1:]))[1], ValueError, r"^out has shape \[\d+, .*2, 4\], need \[\d+, "),
    "fewer": (lambda s: guarded((s[0] - 1, *s[1:]))[1], ValueError, r"^out has shape \[\d+, .*2, 4\], need \[\d+, "),
    "flat": (lambda s: guarded(s)[1].reshape(-1), ValueError, r"^out has shape \[\d+\], need \[\d+, .*2, 4\]"),
    "swapped": (lambda s: guarded((*s[:-2], 4, 2))[1], ValueError, r"^out has shape .*, 4, 2\], need .*, 2, 4\]"),
    "fortran": (lambda shape: np.zeros(shape, np.uint8, "F"), ValueError, r"^out has strides \(.*\), need a C-contig"),
    "strided": (lambda s: guarded((2 * s[0], *s[1:]))[1][::2], ValueError, r"^out has strides \(.*\), need a C-conti"),
    "backwards": (lambda shape: guarded(shape)[1][::-1], ValueError, r"^out has strides \(.*\), need a C-contiguous"),
    "read-only": (lambda shape: read_only(guarded(shape)[1]), ValueError, "^out is read-only, need a writable array"),
}  # fmt: skip
