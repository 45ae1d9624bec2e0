"""Refusals: the right exception, a message that names the trajectory, need and got, and nothing written or leaked."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import numpy as np
import pytest
import support
from support import CALLS, LENGTHS, ROWS, batch_of, every_call, every_place, need_torch, out_shape, refused, replaced

from r3numba import RouteCollator, _dispatch, collate_routes, pack_routes

EVERYWHERE = [*CALLS, "pad"]


@every_call
def test_the_arguments_unchanged_are_accepted(call):
    arguments, whole = support.good(call)
    batch = CALLS[call](**arguments)
    assert batch.array is arguments["out"]
    assert batch.padding_mask.sum() == (sum(LENGTHS) if "pack" in call else 30) - sum(ROWS) + 4
    assert (whole[:64] == 0xA5).all()
    assert (whole[-64:] == 0xA5).all()


# ---- routes ----------------------------------------------------------------------------------------------------------


@every_call
@every_place
@pytest.mark.parametrize("fault", support.ENTRIES)
def test_one_trajectory(call, place, fault):
    entry, exception, text = support.ENTRIES[fault]
    arguments, _ = support.good(call)
    routes = replaced(arguments["routes"], place, entry)
    refused(call, exception, rf"^routes\[{place}\] {text}", routes=routes)


@every_call
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 2, 3), (2, 4, 2), (2, 2, 0), (2, 0, 4)], ids=str)
def test_layers_and_topk_of_one_trajectory(call, shape):
    """Case 23's kin: the same number of ids in another shape is refused too."""
    routes = support.good(call)[0]["routes"]
    for place in (2, 4):
        text = rf"^routes\[{place}\] has {shape[1]} layers and topk {shape[2]}, need 2 and 4 as in routes\[0\]$"
        refused(call, ValueError, text, routes=replaced(routes, place, np.zeros(shape, np.uint8)))
    text = "need at least 1 of each" if 0 in shape else r"^routes\[1\] has 2 layers and topk 4, need .* routes\[0\]$"
    refused(call, ValueError, text, routes=replaced(routes, 0, np.zeros(shape, np.uint8)))


@every_call
def test_rows_past_the_tokens(call):
    text = r"^routes\[3\] has 18 rows for a sequence of 17 tokens$"
    refused(call, ValueError, text, routes=batch_of((3, 1, 5, 18, 4)), sequence_lengths=[4, 2, 5, 17, 4], missing=None)
    for place in support.PLACES:
        text = rf"^routes\[{place}\] has {ROWS[place]} rows for a sequence of {ROWS[place] - 1} tokens$"
        refused(call, ValueError, text, sequence_lengths=replaced(LENGTHS, place, ROWS[place] - 1))


@every_call
@pytest.mark.parametrize("fault", support.WHOLE)
def test_routes_as_a_whole(call, fault):
    routes, exception, text = support.WHOLE[fault]
    refused(call, exception, text, routes=routes, missing=None)


@every_call
@every_place
@pytest.mark.parametrize("kind", ["meta", "sparse", "csr", "float32", "bool", "int64", "bfloat16", "uint16"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors(call, place, kind):
    torch = need_torch()
    dtype = torch.uint8 if kind in ("meta", "sparse", "csr") else getattr(torch, kind)
    tensor = torch.zeros(support.SHAPE, dtype=dtype, device="meta" if kind == "meta" else "cpu")
    if kind in ("sparse", "csr"):
        tensor = tensor.to_sparse() if kind == "sparse" else tensor.to_sparse_csr()
    text = {
        "meta": r"is on device 'meta', need a CPU tensor: call \.cpu\(\)",
        "sparse": "has layout torch.sparse_coo, need a strided tensor",
        "csr": "has layout torch.sparse_csr, need a strided tensor",
    }.get(kind, rf"has dtype torch\.{kind}, {support.REMEDY}")
    refused(call, TypeError, rf"^routes\[{place}\] {text}", routes=replaced(batch_of(ROWS), place, tensor))


# ---- lengths, masks of missing rows ----------------------------------------------------------------------------------


@every_call
@every_place
@pytest.mark.parametrize("fault", support.NUMBERS)
def test_one_length(call, place, fault):
    value, exception, text = support.NUMBERS[fault]
    refused(call, exception, rf"^sequence_lengths\[{place}\] {text}", sequence_lengths=replaced(LENGTHS, place, value))


@every_call
@pytest.mark.parametrize("fault", support.VECTORS)
def test_lengths_as_a_whole(call, fault):
    values, exception, text = support.VECTORS[fault]
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


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["collate", "collator", "pad"])
@pytest.mark.parametrize("fault", support.PLACEMENTS)
def test_placement(call, fault):
    options, exception, text = support.PLACEMENTS[fault]
    refused(call, exception, text, **options)


@pytest.mark.parametrize("call", [*CALLS, "pad"])
@pytest.mark.parametrize("fault", support.OPTIONS)
def test_options(call, fault):
    options, exception, text = support.OPTIONS[fault]
    if call != "pad":
        refused(call, exception, text, **({"missing": None} if "topk" in fault else {}), **options)
    elif "num_threads" in options:
        refused(call, exception, text, **options)
        for batch in (support.packed(), collate_routes(batch_of(ROWS), LENGTHS)):
            with pytest.raises(exception, match=text):
                batch.select([0], **options)


@pytest.mark.parametrize("fault", [*support.NUMBERS, *support.VECTORS, "past"])
def test_orders(fault):
    """``select`` reads its order as lengths are read, and wants numbers of trajectories."""
    value, exception, text = {**support.NUMBERS, **support.VECTORS}.get(fault, (5, ValueError, r"is 5, need 0 to 4"))
    order = value if fault in support.VECTORS else [0, 1, value]
    if fault in ("few", "many"):  # any count is an order; 6 is no trajectory
        text = r"\[0\] is 6, need 0 to 4"
    text = {"empty": " is empty, need at least one", "negative": r"\[2\] is -1, need 0 to 4"}.get(fault, text)
    for batch in (support.packed(), collate_routes(batch_of(ROWS), LENGTHS)):
        before = batch.array.tobytes(), batch.padding_mask.tobytes()
        with pytest.raises(exception, match=rf"^order(\[2\])? ?{text}"):
            batch.select(order)
        assert (batch.array.tobytes(), batch.padding_mask.tobytes()) == before


# ---- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", EVERYWHERE)
@pytest.mark.parametrize("fault", support.OUTS)
def test_out(call, fault):
    make, exception, text = support.OUTS[fault]
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
    dtype = getattr(torch, kind, torch.uint8) if "int" in kind or "float" in kind else torch.uint8
    out = torch.zeros((*shape, 2), dtype=dtype, device="meta" if kind == "meta" else "cpu")[..., 0]
    out = out if kind == "strided" else out.to_sparse() if kind == "sparse" else out.contiguous()
    text = {
        "meta": "is on device 'meta', need a CPU tensor",
        "sparse": "has layout torch.sparse_coo, need a strided tensor",
        "strided": "has strides .*, need a C-contiguous",
    }.get(kind, f"has dtype (torch.)?{kind}, need uint8")
    refused(call, ValueError if kind == "strided" else TypeError, f"^out {text}", out=out)


@every_call
@pytest.mark.parametrize("side", ["last-byte", "first-byte", "inside", "strided", "backwards"])
def test_out_over_routes(call, side):
    """One byte of overlap is refused, memory that only touches is not."""
    size, length = int(np.prod(out_shape(call))), 8 * ROWS[2]
    memory = np.full(size + 6 * length, 3, np.uint8)
    out = memory[2 * length : 2 * length + size].reshape(out_shape(call))
    begins = {"last-byte": length + 1, "first-byte": 2 * length + size - 1, "inside": 3 * length}
    begin = begins.get(side, 2 * length - 8)
    step = {"strided": 2, "backwards": -1}.get(side, 1)
    rows = memory[begin : begin + length * abs(step)].reshape(-1, 2, 4)[::step]
    routes = replaced(batch_of(ROWS), 2, rows)
    refused(call, ValueError, r"^out overlaps routes\[2\], need memory of its own", out=out, routes=routes)
    for begin in (length, 2 * length + size):
        routes = replaced(batch_of(ROWS), 2, memory[begin : begin + length].reshape(-1, 2, 4))
        assert CALLS[call](routes, LENGTHS, out=out).array is out


@pytest.mark.parametrize("part", [5, 4], ids=["captured-rows", "dummy-rows"])
def test_pad_over_its_own_pack(part):
    memory, routes = np.full(2000, 3, np.uint8), replaced(batch_of(ROWS), 0, None)
    pack = pack_routes(routes, LENGTHS, out=memory[800:968].reshape(21, 2, 4))[:part]
    size, end = part * 6 * 8, 800 + pack.array.nbytes
    for begin in (800 - size + 1, 801, end - 1):
        before = memory.tobytes()
        with pytest.raises(ValueError, match=r"^out overlaps .*, need memory of its own"):
            pack.pad(out=memory[begin : begin + size].reshape(part, 6, 2, 4))
        assert memory.tobytes() == before
    for begin in (800 - size, end):
        pack.pad(out=memory[begin : begin + size].reshape(part, 6, 2, 4))


# ---- sizes, environment, leaks ---------------------------------------------------------------------------------------


@every_call
def test_sizes_past_memory(call):
    """Tiny routes, huge lengths: refused at once, with what is needed and what there is."""
    tokens = 2**31 - 5 if "pack" in call else 2**35
    wide = {"routes": [np.zeros((1, 2048, 16), np.uint8)] * 5, "missing": None, "dtype": "int32", "out": None}
    text = r"^a batch of shape \[.*\] \(int32\) needs [\d,]{15,} bytes, but only [\d,]+ bytes can still be"
    refused(call, MemoryError, text, sequence_lengths=[1, 1, tokens, 1, 1], **wide)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("length", [2**31 - 16, 2**31, 2**61, 2**62, 2**63 - 1])
def test_sizes_past_what_can_be_counted(call, length):
    """A pack's sum has to fit int32; a rectangle's bytes have to fit an address space."""
    text = r"^sequence_lengths sum to \d{10,} tokens, need at most 2147483647 \(cu_seqlens is int32\)$"
    for lengths in (replaced(LENGTHS, 2, length), [length] * 5):
        if "pack" in call:
            refused(call, ValueError, text, sequence_lengths=lengths, out=None)
        elif length >= 2**61:
            refused(call, MemoryError, support.PAST, sequence_lengths=lengths, out=None)


@pytest.mark.parametrize("path", support.available_paths())
def test_elements_past_2_31_are_no_fault(path, monkeypatch):
    """Only the last rows are written here, so that the 2 GiB before them stay untouched and cost nothing."""
    width, routes = (1 << 21) + 64, support.captured(20, 64, 8)
    monkeypatch.setenv("R3NUMBA_MEMORY_CHECK", "0")
    monkeypatch.setattr(_dispatch, "cut_pieces", lambda *ignored: np.array([[2 * width - 40, 2 * width, 1, 0]]))
    batch = collate_routes([None, routes], [5, 30], max_length=width, _policy=support.forced(path))
    assert (2 * width - 40) * 64 * 8 > 1 << 31
    assert np.array_equal(batch.array[1, -30:-10], routes)
    assert (batch.array[1, [*range(-40, -30), *range(-10, 0)]] == np.arange(8)).all()
    assert batch.padding_mask[1, -40:].tolist() == [True] * 10 + [False] * 20 + [True] * 10


@pytest.mark.parametrize("call", EVERYWHERE)
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BACKEND", "cupy"),
        ("POLICY", "force_everything"),
        ("NUM_THREADS", "0"),
        ("NUM_THREADS", "two"),
        ("NUM_THREADS", "1.5"),
        ("MAX_THREADS", "0"),
        ("RESERVED_CPUS", "-1"),
    ],
)
def test_environment(call, variable, value, monkeypatch):
    monkeypatch.setattr(support, "packed", lambda pack=support.packed(): pack)  # noqa: B008  (made before the variable is set)
    monkeypatch.setenv(f"R3NUMBA_{variable}", value)
    refused(call, ValueError, f"^R3NUMBA_{variable} .*{value}")


@every_call
@pytest.mark.parametrize("loaded", [True, False])
def test_a_path_that_needs_numba_without_it(call, loaded, monkeypatch):
    """The answer does not depend on what an earlier call has imported."""
    monkeypatch.setenv("R3NUMBA_BACKEND", "numpy")
    monkeypatch.setenv("R3NUMBA_POLICY", "force_serial")
    if not loaded:
        monkeypatch.setattr(_dispatch, "_kernels", None)
    refused(call, ValueError, "'serial' is forced and needs Numba, but the backend here is NumPy")


FAULTS = [
    {"routes": replaced(batch_of(ROWS), 4, np.zeros(support.SHAPE, np.int64))},
    {"sequence_lengths": replaced(LENGTHS, 4, 3)},
    {"missing": [None, None, None, None, np.ones(3, bool)]},
    {"out": np.zeros((1, 1), np.uint8)},
    {"num_threads": 0, "out": None},
    {"num_experts": 3, "out": None},
    {"sequence_lengths": [2**62] * 5, "out": None},
]


@pytest.mark.parametrize(("most", "exception"), [(-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_max_bytes(most, exception):
    with pytest.raises(exception, match=r"^max_bytes is (-1|a bool|a float), need"):
        RouteCollator(max_bytes=most)


def test_nothing_leaks(monkeypatch):
    """Refused calls hold nothing, and a collator has every buffer back, whichever step refused."""
    collator = RouteCollator()
    arguments = {call: support.good(call)[0] for call in ("collate", "pack")}
    place = support.address(collator.collate_routes(batch_of(ROWS), LENGTHS).array)
    idle = collator.idle_bytes

    def refuse_all():
        for method in (collate_routes, pack_routes, collator.collate_routes, collator.pack_routes):
            for fault in FAULTS:
                with pytest.raises((TypeError, ValueError, MemoryError)):
                    method(**{**arguments["pack" if "pack" in method.__name__ else "collate"], **fault})
        with monkeypatch.context() as patch:
            patch.setenv("R3NUMBA_BACKEND", "cupy")  # seen only after the result was allocated
            with pytest.raises(ValueError, match="R3NUMBA_BACKEND"):
                collator.collate_routes(batch_of(ROWS), LENGTHS)
        assert collator.idle_bytes == idle

    def held():
        gc.collect()
        arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        return sum(trace.size for trace in traces), sys.getallocatedblocks()

    tracemalloc.start()
    try:
        for _ in range(3):
            refuse_all()
        before = held()
        for _ in range(30):
            refuse_all()
        after = held()
    finally:
        tracemalloc.stop()
    assert after[0] - before[0] < 2_000  # bytes of arrays: 870 calls, of which each held one or two
    assert after[1] - before[1] < 870  # blocks of the interpreter: fewer than one a call
    assert support.address(collator.collate_routes(batch_of(ROWS), LENGTHS).array) == place
