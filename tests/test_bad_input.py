"""Refusals: the right exception, a message that names the trajectory, need and got, and nothing written or leaked."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
import support
from support import (
    CALLS,
    ENTRIES,
    LENGTHS,
    MASKS,
    NUMBERS,
    OPTIONS,
    PLACEMENTS,
    REMEDY,
    ROWS,
    SHAPE,
    VECTORS,
    WHOLE,
    address,
    batch_of,
    good,
    guarded,
    need_torch,
    out_shape,
    packed,
    refused,
)

from r3numba import RouteCollator, _dispatch, collate_routes, pack_routes

PLACES = (0, 2, 4)
every_call = pytest.mark.parametrize("call", CALLS)
every_place = pytest.mark.parametrize("place", PLACES)


def replaced(values, place, value):
    return [*values[:place], value, *values[place + 1 :]]


@every_call
def test_the_arguments_unchanged_are_accepted(call):
    arguments, whole = good(call)
    batch = CALLS[call](**arguments)
    assert batch.array is arguments["out"]
    assert batch.padding_mask.sum() == (sum(LENGTHS) if "pack" in call else 30) - sum(ROWS) + 4
    assert (whole[:64] == 0xA5).all()
    assert (whole[-64:] == 0xA5).all()


# ---- routes ----------------------------------------------------------------------------------------------------------


@every_call
@every_place
@pytest.mark.parametrize("fault", ENTRIES)
def test_one_trajectory(call, place, fault):
    entry, exception, text = ENTRIES[fault]
    arguments, _ = good(call)
    routes = replaced(arguments["routes"], place, entry)
    refused(call, exception, rf"^routes\[{place}\] {text}", routes=routes)


@every_call
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 2, 3), (2, 4, 2), (2, 2, 0), (2, 0, 4)], ids=str)
def test_layers_and_topk_of_one_trajectory(call, shape):
    """Case 23's kin: the same number of ids in another shape is refused too."""
    routes = good(call)[0]["routes"]
    for place in (2, 4):
        text = rf"^routes\[{place}\] has {shape[1]} layers and topk {shape[2]}, need 2 and 4 as in routes\[0\]$"
        refused(call, ValueError, text, routes=replaced(routes, place, np.zeros(shape, np.uint8)))
    text = "need at least 1 of each" if 0 in shape else r"^routes\[1\] has 2 layers and topk 4, need .* routes\[0\]$"
    refused(call, ValueError, text, routes=replaced(routes, 0, np.zeros(shape, np.uint8)))


@every_call
def test_rows_past_the_tokens(call):
    text = r"^routes\[3\] has 18 rows for a sequence of 17 tokens$"
    refused(call, ValueError, text, routes=batch_of((3, 1, 5, 18, 4)), sequence_lengths=[4, 2, 5, 17, 4], missing=None)
    for place in PLACES:
        text = rf"^routes\[{place}\] has {ROWS[place]} rows for a sequence of {ROWS[place] - 1} tokens$"
        refused(call, ValueError, text, sequence_lengths=replaced(LENGTHS, place, ROWS[place] - 1))


@every_call
@pytest.mark.parametrize("fault", WHOLE)
def test_routes_as_a_whole(call, fault):
    routes, exception, text = WHOLE[fault]
    refused(call, exception, text, routes=routes, missing=None)


@every_call
def test_case_36_and_37_entries_without_rows(call):
    for entry in (None, np.zeros((0, 9, 9), np.float64)):
        arguments, _ = good(call)
        arguments.update(routes=replaced(arguments["routes"], 2, entry), missing=None)
        batch = CALLS[call](**arguments)
        begin = sum(LENGTHS[:2])
        part = batch.array[begin : begin + 5] if "pack" in call else batch.array[2]
        mask = batch.padding_mask[begin : begin + 5] if "pack" in call else batch.padding_mask[2]
        assert mask.all()
        assert (part == np.arange(4)).all()
        assert batch.array.dtype == np.uint8
    refused(call, ValueError, "no trajectory has a captured row", routes=[None] * 5, missing=None)


@every_call
@every_place
@pytest.mark.parametrize("kind", ["meta", "sparse", "csr", "float32", "bool", "int64", "bfloat16", "uint16"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors(call, place, kind):
    torch = need_torch()
    dtype = torch.uint8 if kind in ("meta", "sparse", "csr") else getattr(torch, kind)
    tensor = torch.zeros(SHAPE, dtype=dtype, device="meta" if kind == "meta" else "cpu")
    if kind in ("sparse", "csr"):
        tensor = tensor.to_sparse() if kind == "sparse" else tensor.to_sparse_csr()
    text = {
        "meta": r"is on device 'meta', need a CPU tensor: call \.cpu\(\)",
        "sparse": "has layout torch.sparse_coo, need a strided tensor",
        "csr": "has layout torch.sparse_csr, need a strided tensor",
    }.get(kind, rf"has dtype torch\.{kind}, {REMEDY}")
    refused(call, TypeError, rf"^routes\[{place}\] {text}", routes=replaced(batch_of(ROWS), place, tensor))


# ---- lengths, masks of missing rows ----------------------------------------------------------------------------------


@every_call
@every_place
@pytest.mark.parametrize("fault", NUMBERS)
def test_one_length(call, place, fault):
    value, exception, text = NUMBERS[fault]
    refused(call, exception, rf"^sequence_lengths\[{place}\] {text}", sequence_lengths=replaced(LENGTHS, place, value))


@every_call
@pytest.mark.parametrize("fault", VECTORS)
def test_lengths_as_a_whole(call, fault):
    values, exception, text = VECTORS[fault]
    refused(call, exception, rf"^sequence_lengths ?{text}", sequence_lengths=values)


@every_call
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bool", "meta", "bool-scalar"])
def test_lengths_as_tensors(call, kind):
    torch = need_torch()
    if kind == "bool-scalar":
        values, text = [*LENGTHS[:4], torch.tensor(True)], r"\[4\] is a bool, need an integer"
    elif kind == "meta":
        values, text = torch.zeros(5, dtype=torch.int64, device="meta"), "is on device 'meta', need a CPU tensor"
    else:
        values, text = torch.ones(5, dtype=getattr(torch, kind)), rf"has dtype (torch\.)?{kind}, need integers"
    short = {"routes": batch_of([1] * 5), "missing": None}
    refused(call, TypeError, rf"^sequence_lengths ?{text}", sequence_lengths=values, **short)


@every_call
@every_place
@pytest.mark.parametrize("fault", MASKS)
def test_one_missing_mask(call, place, fault):
    mask, exception, text = MASKS[fault]
    missing = replaced(good(call)[0]["missing"], place, mask)
    refused(call, exception, rf"^missing\[{place}\] {text}", missing=missing)


@every_call
@pytest.mark.parametrize(
    ("missing", "exception", "text"),
    [
        (5, TypeError, "^missing is a int, need a sequence"),
        ("abcde", TypeError, "^missing is a str, need a sequence"),
        ({}, TypeError, "^missing is a dict, need a sequence"),
        (np.array(True), TypeError, "^missing "),
        ([None] * 4, ValueError, "^missing has 4 entries, need 5, one for each trajectory"),
        ([None] * 6, ValueError, "^missing has 6 entries, need 5, one for each trajectory"),
        (np.ones((5, 3), bool), ValueError, r"^missing\[1\] has shape \[3\], need \[1\]"),
    ],
    ids=["number", "text", "dict", "rank-0", "few", "many", "rectangle"],
)
def test_missing_as_a_whole(call, missing, exception, text):
    refused(call, exception, text, missing=missing)


@every_call
def test_a_mask_on_another_device(call):
    mask = need_torch().ones(5, dtype=need_torch().bool, device="meta")
    refused(call, TypeError, r"^missing\[2\] is on device 'meta'", missing=[None, None, mask, None, None])


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["collate", "collator", "pad"])
@pytest.mark.parametrize("fault", PLACEMENTS)
def test_placement(call, fault):
    options, exception, text = PLACEMENTS[fault]
    refused(call, exception, text, **options)


@pytest.mark.parametrize("call", [*CALLS, "pad"])
@pytest.mark.parametrize("fault", OPTIONS)
def test_options(call, fault):
    options, exception, text = OPTIONS[fault]
    if call != "pad":
        refused(call, exception, text, **({"missing": None} if "topk" in fault else {}), **options)
    elif "num_threads" in options:
        refused(call, exception, text, **options)
        for batch in (packed(), collate_routes(batch_of(ROWS), LENGTHS)):
            with pytest.raises(exception, match=text):
                batch.select([0], **options)


@pytest.mark.parametrize("fault", [*NUMBERS, *VECTORS, "past"])
def test_orders(fault):
    """``select`` reads its order as lengths are read, and wants numbers of trajectories."""
    value, exception, text = {**NUMBERS, **VECTORS}.get(fault, (5, ValueError, r"is 5, need 0 to 4"))
    order = value if fault in VECTORS else [0, 1, value]
    if fault in ("few", "many"):  # any count is an order; 6 is no trajectory
        text = r"\[0\] is 6, need 0 to 4"
    text = {"empty": " is empty, need at least one", "negative": r"\[2\] is -1, need 0 to 4"}.get(fault, text)
    for batch in (packed(), collate_routes(batch_of(ROWS), LENGTHS)):
        before = batch.array.tobytes(), batch.padding_mask.tobytes()
        with pytest.raises(exception, match=rf"^order(\[2\])? ?{text}"):
            batch.select(order)
        assert (batch.array.tobytes(), batch.padding_mask.tobytes()) == before


# ---- out -------------------------------------------------------------------------------------------------------------

EVERYWHERE = [*CALLS, "pad"]
OUTS = {
    "list": (lambda shape: [[1]], TypeError, "^out is a list, need an ndarray or a CPU tensor"),
    "batch": (lambda shape: packed(), TypeError, "^out is a PackedRoutes, need an ndarray"),
    "masked": (lambda shape: np.ma.zeros(shape, np.uint8), TypeError, "^out is a MaskedArray, need an ndarray"),
    "wider": (lambda shape: np.zeros(shape, np.int16), TypeError, "^out has dtype int16, need uint8"),
    "int8": (lambda shape: np.zeros(shape, np.int8), TypeError, "^out has dtype int8, need uint8"),
    "bool": (lambda shape: np.zeros(shape, bool), TypeError, "^out has dtype bool, need uint8"),
    "float": (lambda shape: np.zeros(shape), TypeError, "^out has dtype float64, need uint8"),
    "more": (lambda s: guarded((s[0] + 1, *s[1:]))[1], ValueError, r"^out has shape \[\d+, .*, 2, 4\], need \[\d+, "),
    "fewer": (lambda s: guarded((s[0] - 1, *s[1:]))[1], ValueError, r"^out has shape \[\d+, .*, 2, 4\], need \[\d+, "),
    "flat": (lambda s: guarded(s)[1].reshape(-1), ValueError, r"^out has shape \[\d+\], need \[\d+, .*2, 4\]"),
    "swapped": (lambda s: guarded((*s[:-2], 4, 2))[1], ValueError, r"^out has shape .*, 4, 2\], need .*, 2, 4\]"),
    "fortran": (lambda shape: np.zeros(shape, np.uint8, "F"), ValueError, r"^out has strides \(.*\), need a C-contig"),
    "strided": (lambda s: guarded((2 * s[0], *s[1:]))[1][::2], ValueError, r"^out has strides \(.*\), need a C-conti"),
    "backwards": (lambda shape: guarded(shape)[1][::-1], ValueError, r"^out has strides \(.*\), need a C-contiguous"),
    "read-only": (lambda shape: _read_only(guarded(shape)[1]), ValueError, "^out is read-only, need a writable array"),
}  # fmt: skip


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("call", EVERYWHERE)
@pytest.mark.parametrize("fault", OUTS)
def test_out(call, fault):
    make, exception, text = OUTS[fault]
    refused(call, exception, text, out=make(out_shape(call)))


@every_call
def test_out_of_int16(call):
    raw = np.full(2 * np.prod(out_shape(call)) + 1, 7, np.uint8)
    misaligned = raw[1:].view(np.int16).reshape(out_shape(call))
    refused(
        call, ValueError, "^out has strides .*, need a C-contiguous and aligned array", dtype="int16", out=misaligned
    )
    swapped = np.zeros(out_shape(call), np.dtype(np.int16).newbyteorder())
    refused(call, TypeError, "^out has dtype [<>]i2, need int16", dtype="int16", out=swapped)
    refused(call, TypeError, "^out has dtype uint8, need int16", dtype="int16")


@pytest.mark.parametrize("call", EVERYWHERE)
@pytest.mark.parametrize("kind", ["meta", "sparse", "int16", "bfloat16", "strided"])
def test_out_as_a_tensor(call, kind):
    torch = need_torch()
    shape = out_shape(call)
    make, exception, text = {
        "meta": (
            lambda: torch.zeros(shape, dtype=torch.uint8, device="meta"),
            TypeError,
            "is on device 'meta', need a",
        ),
        "sparse": (lambda: torch.zeros(shape, dtype=torch.uint8).to_sparse(), TypeError, "has layout torch.sparse_coo"),
        "int16": (lambda: torch.zeros(shape, dtype=torch.int16), TypeError, "has dtype (torch.)?int16, need uint8"),
        "bfloat16": (
            lambda: torch.zeros(shape, dtype=torch.bfloat16),
            TypeError,
            "has dtype torch.bfloat16, need uint8",
        ),
        "strided": (lambda: torch.zeros((*shape, 2), dtype=torch.uint8)[..., 0], ValueError, "has strides"),
    }[kind]
    refused(call, exception, f"^out {text}", out=make())


@every_call
@pytest.mark.parametrize("side", ["last-byte", "first-byte", "inside", "strided", "backwards"])
def test_out_over_routes(call, side):
    """One byte of overlap is refused, memory that only touches is not."""
    size, length = int(np.prod(out_shape(call))), 8 * ROWS[2]
    memory = np.full(size + 6 * length, 3, np.uint8)
    out = memory[2 * length : 2 * length + size].reshape(out_shape(call))
    begin = {"last-byte": length + 1, "first-byte": 2 * length + size - 1, "inside": 3 * length}.get(
        side, 2 * length - 8
    )
    step = {"strided": 2, "backwards": -1}.get(side, 1)
    rows = memory[begin : begin + length * abs(step)].reshape(-1, 2, 4)[::step]
    routes = replaced(batch_of(ROWS), 2, rows)
    refused(call, ValueError, r"^out overlaps routes\[2\], need memory of its own", out=out, routes=routes)
    for begin in (length, 2 * length + size):
        routes = replaced(batch_of(ROWS), 2, memory[begin : begin + length].reshape(-1, 2, 4))
        assert CALLS[call](routes, LENGTHS, out=out).array is out


@every_call
@pytest.mark.parametrize("marks", ["one", "strided", "none"])
def test_out_over_a_missing_mask(call, marks):
    """A mask without a True, and one that is copied because it is strided, is an input as any other."""
    whole, out = guarded(out_shape(call))
    whole[8:68] = 0
    mask = whole[60:65].view(np.bool_) if marks != "strided" else whole[58:68:2].view(np.bool_)
    mask[1] = marks != "none"
    missing = [None, None, mask, None, None]
    refused(call, ValueError, r"^out overlaps missing\[2\], need memory of its own", out=out, missing=missing)


@pytest.mark.parametrize("part", [5, 4], ids=["captured-rows", "dummy-rows"])
def test_pad_over_its_own_pack(part):
    memory = np.full(2000, 3, np.uint8)
    pack = pack_routes(batch_of(ROWS), LENGTHS, out=memory[800:968].reshape(21, 2, 4))[:part]
    size, end = part * 6 * 8, 800 + pack.array.nbytes
    for begin in (800 - size + 1, 801, end - 1):
        before = memory.tobytes()
        with pytest.raises(ValueError, match=r"^out overlaps .*, need memory of its own"):
            pack.pad(out=memory[begin : begin + size].reshape(part, 6, 2, 4))
        assert memory.tobytes() == before
    for begin in (800 - size, end):
        pack.pad(out=memory[begin : begin + size].reshape(part, 6, 2, 4))


# ---- sizes, environment, leaks ---------------------------------------------------------------------------------------

BOTH_FIGURES = (
    r"^a batch of shape \[.*\] \(.*\) needs [\d,]{15,} bytes, but only [\d,]+ bytes can still be allocated here$"
)


@every_call
def test_sizes_past_memory(call):
    """Tiny routes, huge lengths: refused at once, with what is needed and what there is."""
    tokens = 2**31 - 5 if "pack" in call else 2**45
    wide = {"routes": [np.zeros((1, 2048, 16), np.uint8)] * 5, "missing": None, "dtype": "int32"}
    refused(call, MemoryError, BOTH_FIGURES, sequence_lengths=[1, 1, tokens, 1, 1], out=None, **wide)


@pytest.mark.parametrize("call", ["collate", "collator"])
@pytest.mark.parametrize("length", [2**61, 2**62, 2**63 - 1])
def test_sizes_past_any_address(call, length):
    refused(call, MemoryError, support.PAST, sequence_lengths=replaced(LENGTHS, 2, length), out=None)


@pytest.mark.parametrize("call", ["pack", "collator-pack"])
@pytest.mark.parametrize("length", [2**31 - 16, 2**31, 2**62, 2**63 - 1])
def test_a_pack_past_int32(call, length):
    text = r"^sequence_lengths sum to \d{10,} tokens, need at most 2147483647 \(cu_seqlens is int32\)$"
    refused(call, ValueError, text, sequence_lengths=replaced(LENGTHS, 2, length), out=None)
    refused(call, ValueError, text, sequence_lengths=[length] * 5, out=None)


@pytest.mark.parametrize("call", EVERYWHERE)
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("R3NUMBA_BACKEND", "cupy"),
        ("R3NUMBA_POLICY", "force_everything"),
        ("R3NUMBA_NUM_THREADS", "0"),
        ("R3NUMBA_NUM_THREADS", "two"),
        ("R3NUMBA_NUM_THREADS", "1.5"),
        ("R3NUMBA_MAX_THREADS", "0"),
        ("R3NUMBA_RESERVED_CPUS", "-1"),
    ],
)
def test_environment(call, variable, value, monkeypatch):
    if call == "pad":
        monkeypatch.setattr(support, "packed", lambda pack=packed(): pack)
    monkeypatch.setenv(variable, value)
    refused(call, ValueError, f"^{variable} .*{value}")


@every_call
@pytest.mark.parametrize("loaded", [True, False])
def test_a_path_that_needs_numba_without_it(call, loaded, monkeypatch):
    monkeypatch.setenv("R3NUMBA_BACKEND", "numpy")
    monkeypatch.setenv("R3NUMBA_POLICY", "force_serial")
    if not loaded:
        monkeypatch.setattr(_dispatch, "_kernels", None)
    refused(call, ValueError, "'serial' is forced and needs Numba, but the backend here is NumPy")


FAULTS = [
    {"routes": replaced(batch_of(ROWS), 4, np.zeros(SHAPE, np.int64))},
    {"sequence_lengths": replaced(LENGTHS, 4, 3)},
    {"missing": [None, None, None, None, np.ones(3, bool)]},
    {"out": np.zeros((1, 1), np.uint8)},
    {"num_threads": 0},
    {"num_experts": 3},
    {"routes": [np.zeros((1, 2048, 16), np.uint8)] * 5, "missing": None, "sequence_lengths": [2**30] * 5, "out": None},
]


def test_nothing_leaks(monkeypatch):
    """Refused calls hold nothing, and a collator has every buffer back, whichever step refused."""
    collator = RouteCollator()
    place = address(collator.collate_routes(batch_of(ROWS), LENGTHS).array)
    idle = collator.idle_bytes
    assert idle > 0

    def refuse_all():
        for method in (collate_routes, pack_routes, collator.collate_routes, collator.pack_routes):
            for fault in FAULTS:
                with pytest.raises((TypeError, ValueError, MemoryError)):
                    method(**{**good("pack" if "pack" in method.__name__ else "collate")[0], **fault})
        with monkeypatch.context() as patch:
            patch.setenv("R3NUMBA_BACKEND", "cupy")  # seen only after the result was allocated
            with pytest.raises(ValueError, match="R3NUMBA_BACKEND"):
                collator.collate_routes(batch_of(ROWS), LENGTHS)
        assert collator.idle_bytes == idle

    refuse_all()
    gc.collect()
    tracemalloc.start()
    refuse_all()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(30):
        refuse_all()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000
    assert address(collator.collate_routes(batch_of(ROWS), LENGTHS).array) == place
