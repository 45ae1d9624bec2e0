"""Refusals: the right exception, a message that names the trajectory, need and got, and nothing written or leaked."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from support import CALLS, LENGTHS, ROWS, address, batch_of, forced, good, guarded, need_torch, packed, refused

import r3numba
from r3numba import RouteCollator, _dispatch, collate_routes, pack_routes

LAYERS, TOPK = 2, 4
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
        assert (part == np.arange(TOPK)).all()
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
