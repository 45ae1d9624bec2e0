"""Traces: CASES 9 to 12 and their kinds, refusals, forks, rewinds, missing rows, and what they cost."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support import address, captured, need_torch, peak_of
from trace_model import Decoded

import r3numba
from r3numba import _rows
from r3numba.trace import RecordedTurn, RoutedExpertTrace, TokenMetadataTrace
from r3numba.wire import decode_response, decode_routes

DATA = Path(__file__).parent / "data"
WIDE = {np.uint8: 200, np.int16: 300, np.int32: 70_000}


def turn(trace, prompt, generated, rows, **options):
    return trace.record_generation(
        prompt_token_count=prompt, generated_token_count=generated, routed_experts=rows, **options
    )


def trace_of(*turns, **options):
    """Return a trace of turns ``(prompt, generated, rows)``."""
    trace = RoutedExpertTrace()
    for prompt, generated, rows in turns:
        turn(trace, prompt, generated, rows, **options)
    return trace


def rows_of(trace):
    """Return the rows of a trace without a claim about its loss mask."""
    return trace.fork().finalize(token_count=len(trace), loss_mask=[0] * len(trace))


def state_of(trace):
    """Return everything that a caller can see of a trace, as plain values."""
    rows = rows_of(trace)
    mask = trace.missing
    return len(trace), trace.uncovered, rows.tolist(), str(rows.dtype), mask is not None and mask.tolist(), repr(trace)


# ---- metadata --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3), (1, 2, 2), (0,)])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64", "complex64"])
def test_metadata_of_any_shape_and_dtype(trailing, dtype):
    trace, parts = TokenMetadataTrace(), []
    for count in (3, 0, 1, 7):
        parts.append(np.arange(count * int(np.prod(trailing))).reshape(count, *trailing).astype(dtype))
        trace.append(parts[-1])
    wanted = np.concatenate(parts)
    assert trace.shape == wanted.shape
    assert len(trace) == 11
    result = trace.finalize()
    assert result.dtype == dtype
    assert np.array_equal(result, wanted)


WIDENS = [
    ("uint8", "int16", "int16"), ("uint8", "uint16", "uint16"), ("uint16", "int32", "int32"),
    ("int8", "int64", "int64"), ("uint32", "int64", "int64"), ("float16", "float64", "float64"),
    ("float32", "float64", "float64"), ("complex64", "complex128", "complex128"), ("int16", ">i4", "int32"),
    ("float32", ">f4", "float32"),
]  # fmt: skip
REFUSED = [
    ("uint8", "int8"), ("uint16", "int16"), ("uint32", "int32"), ("uint64", "int64"), ("uint8", "float32"),
    ("int32", "float64"), ("bool", "uint8"), ("bool", "float32"), ("float32", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize(("narrow", "wide", "result"), WIDENS)
@pytest.mark.parametrize("order", [1, -1])
def test_metadata_widens_losslessly(narrow, wide, result, order):
    trace = TokenMetadataTrace()
    parts = [np.array([[1, 2], [3, 100]], narrow), np.array([[5, 6]], wide)][::order]
    for part in parts:
        trace.append(part)
    assert trace.dtype == result
    assert trace.finalize().dtype == result
    assert trace.finalize().dtype.isnative
    assert trace.finalize().tolist() == [*parts[0].tolist(), *parts[1].tolist()]


@pytest.mark.parametrize(("one", "other"), [*REFUSED, *[pair[::-1] for pair in REFUSED]])
def test_metadata_that_would_lose_is_refused(one, other):
    trace = TokenMetadataTrace()
    trace.append(np.ones((2, 3), one))
    with pytest.raises(TypeError, match=f"^rows has dtype {other}, need one that widens losslessly with {one}, the"):
        trace.append(np.ones((1, 3), other))
    with pytest.raises(TypeError, match="losslessly"):
        trace.append(np.ones((0, 3), other))
    assert trace.finalize().tolist() == np.ones((2, 3), one).tolist()
    assert trace.dtype == one


METADATA_FAULTS = {
    "list": ([[1, 2, 3]], TypeError, "^rows is a list, need an ndarray or a CPU tensor"),
    "none": (None, TypeError, "^rows is a NoneType, need an ndarray"),
    "text": (np.array([["a", "b", "c"]]), TypeError, "^rows has dtype <U1, need bool, integers, floats or complex"),
    "object": (np.ones((1, 3), object), TypeError, "^rows has dtype object, need bool, integers"),
    "date": (np.zeros((1, 3), "M8[s]"), TypeError, "^rows has dtype datetime64.s., need bool"),
    "structured": (np.zeros((1, 3), "u1,i2"), TypeError, "need bool, integers"),
    "masked": (np.ma.ones((1, 3), np.uint8), TypeError, "^rows is a MaskedArray"),
    "rank-0": (np.array(1, np.uint8), ValueError, r"^rows has 0 dimensions, need at least 1: \[tokens, ...\]"),
    "rank-1": (np.ones(3, np.uint8), ValueError, r"^rows has shape \[3\], need \[tokens, 3\]"),
    "trailing": (np.ones((1, 4), np.uint8), ValueError, r"^rows has shape \[1, 4\], need \[tokens, 3\]"),
    "trailing without rows": (np.ones((0, 4), np.uint8), ValueError, r"^rows has shape \[0, 4\], need"),
    "rank-3": (np.ones((1, 3, 1), np.uint8), ValueError, r"^rows has shape \[1, 3, 1\], need \[tokens, 3\]"),
}


@pytest.mark.parametrize("fault", METADATA_FAULTS)
def test_a_refused_append_changes_nothing(fault):
    rows, exception, text = METADATA_FAULTS[fault]
    trace = TokenMetadataTrace()
    trace.append(np.array([[1, 2, 3]], np.uint8))
    with pytest.raises(exception, match=text):
        trace.append(rows)
    assert (trace.shape, trace.dtype, trace.finalize().tolist()) == ((1, 3), np.uint8, [[1, 2, 3]])
    trace.append(np.array([[4, 5, 6]], np.uint8))
    assert trace.finalize().tolist() == [[1, 2, 3], [4, 5, 6]]


def test_metadata_without_rows_carries_neither_dtype_nor_shape():
    trace = TokenMetadataTrace()
    trace.append(np.zeros((0, 5), np.float64))
    assert (trace.dtype, trace.shape, len(trace)) == (None, None, 0)
    with pytest.raises(ValueError, match=r"^the trace holds no rows, need at least one: dtype and shape are unknown"):
        trace.finalize()
    trace.append(np.array([7], np.uint8))
    trace.append(np.zeros(0, np.int32))
    assert trace.finalize().dtype == np.uint8


def test_metadata_rewinds_and_forks():
    trace = TokenMetadataTrace()
    trace.append(np.arange(6, dtype=np.float32))
    other = trace.fork()
    trace.rewind(2)
    trace.append(np.array([9], np.float32))
    other.append(np.array([8], np.float64))
    assert trace.finalize().tolist() == [0, 1, 9]
    assert other.finalize().tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert (trace.dtype, other.dtype) == (np.float32, np.float64)
    for wrong, exception, text in (
        (4, ValueError, "is 4, need at most 3, the rows held"),
        (-1, ValueError, "is -1, need at least 0"),
        (True, TypeError, "is a bool"),
        (1.0, TypeError, "is a float"),
    ):
        with pytest.raises(exception, match=text):
            trace.rewind(wrong)
    assert trace.finalize().tolist() == [0, 1, 9]
    trace.rewind(0)
    assert trace.finalize().shape == (0,)
    assert trace.finalize().dtype == np.float32


def test_metadata_takes_tensors():
    torch = need_torch()
    trace = TokenMetadataTrace()
    trace.append(torch.tensor([1.5, 2.5], requires_grad=True))
    trace.append(torch.tensor([3.5], dtype=torch.float64))
    assert trace.finalize().tolist() == [1.5, 2.5, 3.5]
    with pytest.raises(TypeError, match=r"^rows is on device 'meta', need a CPU tensor"):
        trace.append(torch.zeros(2, device="meta"))


# ---- the cases -------------------------------------------------------------------------------------------------------


def test_case_9_turns_of_different_widths_make_one_trace():
    parts = [np.full((2, 2, 2), 200, np.uint8), np.full((2, 2, 2), 300, np.int16), np.full((2, 2, 2), 100, np.uint8)]
    trace = trace_of((2, 1, parts[0]), (4, 1, parts[1]), (6, 1, parts[2]))
    rows = trace.finalize(token_count=7, loss_mask=np.zeros(7))
    assert rows.dtype == np.int16
    assert rows[:, 0, 0].tolist() == [200, 200, 300, 300, 100, 100]


@pytest.mark.parametrize("first", WIDE)
@pytest.mark.parametrize("second", WIDE)
@pytest.mark.parametrize("third", WIDE)
def test_every_order_of_widths_keeps_the_ids(first, second, third):
    parts = [np.full((2, 1, 2), WIDE[dtype], dtype) for dtype in (first, second, third)]
    trace = trace_of((2, 1, parts[0]), (4, 1, parts[1]), (6, 1, parts[2]))
    rows = rows_of(trace)
    assert rows.dtype == max((first, second, third), key=lambda dtype: np.dtype(dtype).itemsize)
    assert rows[:, 0, 0].tolist() == [WIDE[dtype] for dtype in (first, second, third) for _ in range(2)]


def test_case_10_two_turns():
    rows = captured(8)
    trace, cursors = RoutedExpertTrace(), []
    for prompt, part in ((3, rows[:4]), (7, rows[4:])):
        cursors.append(trace.prompt_start)
        record = turn(trace, prompt, 2, part)
        assert record == RecordedTurn(appended=4, rewound=0, aborted=None, prompt_start=trace.prompt_start)
    assert [*cursors, trace.prompt_start] == [0, 4, 8]
    result = trace.finalize(token_count=10, loss_mask=[0, 0, 0, 1, 1, 0, 0, 1, 1, 0])
    assert np.array_equal(result, rows)
    assert len(result) == len(trace) == 8
    assert trace.uncovered == ()
    assert trace.missing is None


def test_case_11_a_trained_token_without_a_route():
    trace = trace_of((3, 2, captured(4)))
    wanted = (
        r"^loss_mask trains token 5, need 0 there: row 4, which produced it, is past the 4 rows held; tokens without a "
        r"route: 1 \(missing='accept' lets them through\)$"
    )
    with pytest.raises(ValueError, match=wanted):
        trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 1, 1])
    assert trace.uncovered == ()
    rows = trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 1, 1], missing="accept")
    assert len(rows) == 4
    assert trace.uncovered == (5,)
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 1, 0])
    assert trace.uncovered == ()


@pytest.mark.parametrize("routes", [None, captured(1), captured(40), np.zeros((0, 2, 4), np.uint8), "garbage"])
def test_case_12_an_aborted_turn_appends_nothing(routes):
    trace = trace_of((3, 2, captured(4, seed=1)))
    before = state_of(trace)
    assert turn(trace, 7, 0, routes) == RecordedTurn(0, 0, "no token", 4)
    assert state_of(trace) == before
    turn(trace, 7, 2, captured(4, seed=2))
    assert np.array_equal(rows_of(trace), np.concatenate((captured(4, seed=1), captured(4, seed=2))))


def test_case_12_a_turn_without_routes_appends_nothing_and_the_next_one_brings_them():
    rows = captured(12)
    trace = trace_of((3, 2, rows[:4]))
    assert turn(trace, 7, 2, None) == RecordedTurn(0, 0, "no routes", 4)
    assert turn(trace, 11, 2, rows[4:]) == RecordedTurn(8, 0, None, 12)
    assert np.array_equal(rows_of(trace), rows)


def test_an_aborted_first_turn_leaves_an_empty_trace():
    trace = RoutedExpertTrace()
    turn(trace, 3, 0, captured(2))
    turn(trace, 3, 1, None)
    assert trace.prompt_start == 0
    rows = trace.finalize(token_count=4, loss_mask=[1, 0, 0, 0])
    assert rows.shape == (0, 0, 0)
    batch = r3numba.collate_routes([rows, captured(3)], [4, 4])
    assert batch.padding_mask.tolist() == [[True] * 4, [False, False, False, True]]
    with pytest.raises(ValueError, match=r"^loss_mask trains token 1, need 0 there: row 0, .* past the 0 rows held"):
        trace.finalize(token_count=4, loss_mask=[1, 1, 0, 0])
    turn(trace, 3, 2, captured(4))
    assert len(trace) == 4


def test_a_turn_of_no_rows_is_no_abort():
    trace = trace_of((3, 2, captured(4)))
    assert turn(trace, 4, 1, captured(0)) == RecordedTurn(0, 0, None, 4)


# ---- refusals --------------------------------------------------------------------------------------------------------

GOOD = {"prompt_token_count": 7, "generated_token_count": 2, "routed_experts": captured(4, seed=2)}
ROWS = GOOD["routed_experts"]
NEGATIVE = ROWS.astype(np.int16)
NEGATIVE[2, 1, 3] = -1
GONE = ROWS.astype(np.int16)
GONE[1] = -1
REMEDY = "need uint8, int16 or int32: call compact_routes"
REFUSALS = {
    "one row less": ({"routed_experts": ROWS[:3]}, ValueError, r"^routed_experts has 3 rows, need 4 \(prompt_token_co"),
    "one row more": ({"routed_experts": captured(5)}, ValueError, "^routed_experts has 5 rows, need 4 "),
    "all rows from 0": ({"routed_experts": captured(8)}, ValueError, "has 8 rows, need 4 .* - prompt_start 4 "),
    "no rows": ({"routed_experts": ROWS[:0]}, ValueError, "has 0 rows, need 4"),
    "T rows": ({"generated_token_count": 1}, ValueError, "has 4 rows, need 3"),
    "the turn again": (
        {"prompt_token_count": 3, "routed_experts": captured(4, seed=1)}, ValueError,
        "^prompt_token_count is 3, need at least prompt_start = 4$",
    ),
    "no prompt": ({"prompt_token_count": 0}, ValueError, "^prompt_token_count is 0, need at least 1"),
    "bool prompt": ({"prompt_token_count": True}, TypeError, "^prompt_token_count is a bool, need an integer"),
    "float prompt": ({"prompt_token_count": 7.0}, TypeError, "^prompt_token_count is a float"),
    "less than no token": ({"generated_token_count": -1}, ValueError, "^generated_token_count is -1, need at least 0"),
    "float tokens": ({"generated_token_count": 2.0}, TypeError, "^generated_token_count is a float"),
    "none tokens": ({"generated_token_count": None}, TypeError, "^generated_token_count is a NoneType"),
    "int64": ({"routed_experts": ROWS.astype(np.int64)}, TypeError, f"^routed_experts has dtype int64, {REMEDY}"),
    "uint16": ({"routed_experts": ROWS.astype(np.uint16)}, TypeError, f"has dtype uint16, {REMEDY}"),
    "int8": ({"routed_experts": ROWS.astype(np.int8)}, TypeError, f"has dtype int8, {REMEDY}"),
    "float": ({"routed_experts": ROWS.astype(np.float32)}, TypeError, f"has dtype float32, {REMEDY}"),
    "bool": ({"routed_experts": ROWS.astype(bool)}, TypeError, f"has dtype bool, {REMEDY}"),
    "big-endian": ({"routed_experts": ROWS.astype(">i2")}, TypeError, f"has dtype >i2, {REMEDY}"),
    "list": ({"routed_experts": ROWS.tolist()}, TypeError, "^routed_experts is a list, need an ndarray, a CPU tensor "),
    "text": ({"routed_experts": "nrlre1:"}, TypeError, "^routed_experts is a str, need an ndarray"),
    "masked": ({"routed_experts": np.ma.array(ROWS)}, TypeError, "^routed_experts is a MaskedArray"),
    "rank": ({"routed_experts": ROWS[:, 0]}, ValueError, r"^routed_experts has 2 dimensions, need 3: \[rows, layers, "),
    "layers": ({"routed_experts": ROWS[:, :1]}, ValueError, "^routed_experts has 1 layers and topk 4, need 2 and 4 as"),
    "swapped": ({"routed_experts": ROWS.transpose(0, 2, 1)}, ValueError, "has 4 layers and topk 2, need 2 and 4 as be"),
    "no layers": ({"routed_experts": ROWS[:, :0]}, ValueError, "has 0 layers and topk 4, need at least 1 of each"),
    "negative": (
        {"routed_experts": NEGATIVE}, ValueError, r"^routed_experts\[2, 1, 3\] is -1, need at least 0 \(a row of -1 is "
    ),
    "missing row without a mask": ({"routed_experts": GONE}, ValueError, r"^routed_experts\[1, 0, 0\] is -1, need at "),
    "mask of another row": (
        {"routed_experts": GONE, "missing": np.arange(4) == 2}, ValueError, r"^routed_experts\[1, 0, 0\] is -1"
    ),
    "short mask": ({"missing": np.zeros(3, bool)}, ValueError, r"^missing has shape \[3\], need \[4\], one for each r"),
    "mask of ints": ({"missing": np.zeros(4, np.uint8)}, TypeError, "^missing has dtype uint8, need bool"),
    "mask as a list": ({"missing": [False] * 4}, TypeError, "^missing is a list, need an ndarray"),
    "two masks": (
        {"routed_experts": Decoded(ROWS, 4, np.ones(4, bool)), "missing": np.ones(4, bool)}, ValueError, "^missing is g"
    ),
    "decoded from 0": ({"routed_experts": Decoded(ROWS, 0)}, ValueError, "^routed_experts.start is 0, need 4, the cur"),
    "decoded from 3": ({"routed_experts": Decoded(ROWS, 3)}, ValueError, "^routed_experts.start is 3, need 4, the cur"),
    "decoded from 5": ({"routed_experts": Decoded(ROWS, 5)}, ValueError, "^routed_experts.start is 5, need 4, the cur"),
    "decoded from nowhere": (
        {"routed_experts": Decoded(ROWS, None)}, ValueError, "^routed_experts.start is None, need 4, the cursor: pass s"
    ),
    "decoded from true": ({"routed_experts": Decoded(ROWS, True)}, TypeError, "^routed_experts.start is a bool"),
    "decoded from -1": ({"routed_experts": Decoded(ROWS, -1)}, ValueError, "^routed_experts.start is -1, need at leas"),
    "decoded list": ({"routed_experts": Decoded(ROWS.tolist(), 4)}, TypeError, "^routed_experts is a list"),
    "stated start": ({"start": 0}, ValueError, "^start is 0, need 4, the cursor"),
    "stated start over another": ({"routed_experts": Decoded(ROWS, 0), "start": 4}, ValueError, "^routed_experts.star"),
    "stated float": ({"start": 4.0}, TypeError, "^start is a float, need an integer"),
    "word": ({"on_mismatch": "ignore"}, ValueError, "^on_mismatch is 'ignore', need 'raise' or 'rewind'"),
    "ids now only": (
        {"prompt_token_ids": range(7), "generated_token_ids": [1, 2]}, ValueError,
        "^prompt_token_ids is given, but the trace holds 4 rows without token ids: need them on every turn, or never",
    ),
    "prompt's ids alone": ({"prompt_token_ids": range(7)}, ValueError, "^generated_token_ids is None, need both"),
    "response's ids alone": ({"generated_token_ids": [1, 2]}, ValueError, "^prompt_token_ids is None, need both"),
    "rewind without ids": (
        {"prompt_token_count": 3, "on_mismatch": "rewind"}, ValueError, "^prompt_token_count is 3, need at least prompt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_refused_turn_changes_nothing(fault):
    changes, exception, text = REFUSALS[fault]
    trace = trace_of((3, 2, captured(4, seed=1)))
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 0, 0, 1], missing="accept")
    before = state_of(trace)
    with pytest.raises(exception) as caught:
        trace.record_generation(**{**GOOD, **changes})
    assert type(caught.value) is exception
    assert re.search(text, str(caught.value)), str(caught.value)
    assert trace.uncovered == (5,)
    assert state_of(trace) == before
    trace.record_generation(**GOOD)
    assert np.array_equal(rows_of(trace), np.concatenate((captured(4, seed=1), ROWS)))


IDS = {"prompt_token_ids": [10, 11, 12, 13, 14, 15, 16], "generated_token_ids": [17, 18]}
TOKEN_REFUSALS = {
    "another token": (
        {"prompt_token_ids": [10, 11, 99, 13, 14, 15, 16]}, ValueError,
        r"^prompt_token_ids\[2\] is 99, need 12, whose row is held: on_mismatch='rewind' would give up rows 2 to 3",
    ),
    "first token": ({"prompt_token_ids": [9, 11, 12, 13, 14, 15, 16]}, ValueError, r"^prompt_token_ids\[0\] is 9, nee"),
    "last row's token": ({"prompt_token_ids": [10, 11, 12, 9, 14, 15, 16]}, ValueError, r"^prompt_token_ids\[3\] is 9"),
    "short prompt": (
        {"prompt_token_ids": [10, 11, 12], "prompt_token_count": 3}, ValueError,
        "^prompt_token_count is 3, need at least prompt_start = 4",
    ),
    "none": (
        {"prompt_token_ids": None, "generated_token_ids": None}, ValueError,
        "^prompt_token_ids is None, but the trace holds 4 rows with token ids",
    ),
    "one of them": ({"generated_token_ids": None}, ValueError, "^generated_token_ids is None, need both"),
    "few": ({"prompt_token_ids": [10, 11, 12]}, ValueError, "^prompt_token_ids has 3 entries, need prompt_token_count"),
    "many": ({"generated_token_ids": [1, 2, 3]}, ValueError, "^generated_token_ids has 3 entries, need generated_toke"),
    "floats": ({"generated_token_ids": [1.0, 2.0]}, TypeError, r"^generated_token_ids\[0\] is a float, need an intege"),
    "bools": ({"generated_token_ids": [True, False]}, TypeError, r"^generated_token_ids\[0\] is a bool"),
    "text": ({"generated_token_ids": "ab"}, TypeError, "^generated_token_ids is a str, need a sequence of integers"),
    "matrix": ({"generated_token_ids": np.ones((2, 1), int)}, ValueError, "^generated_token_ids has 2 dimensions, nee"),
    "rewind, rows from the old cursor": (
        {"prompt_token_ids": [10, 11, 99, 13, 14, 15, 16], "on_mismatch": "rewind", "routed_experts": Decoded(ROWS, 4)},
        ValueError, r"^routed_experts.start is 4, need 2, the cursor \(the rows held that the prompt keeps\)",
    ),
    "rewind, rows too few": (
        {"prompt_token_ids": [10, 11, 99, 13, 14, 15, 16], "on_mismatch": "rewind"},
        ValueError, r"^routed_experts has 4 rows, need 6 \(prompt_token_count 7 - prompt_start 2 \+",
    ),
    "the turn again, rewinding": (
        {"prompt_token_count": 3, "prompt_token_ids": [10, 11, 12], "generated_token_ids": [13, 14],
         "on_mismatch": "rewind", "routed_experts": Decoded(captured(4, seed=1), 0)},
        ValueError, "^routed_experts.start is 0, need 3, the cursor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", TOKEN_REFUSALS)
def test_a_turn_with_other_token_ids_is_refused(fault):
    changes, exception, text = TOKEN_REFUSALS[fault]
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, captured(4, seed=1), prompt_token_ids=[10, 11, 12], generated_token_ids=[13, 14])
    before = state_of(trace)
    with pytest.raises(exception) as caught:
        trace.record_generation(**{**GOOD, **IDS, **changes})
    assert type(caught.value) is exception
    assert re.search(text, str(caught.value)), str(caught.value)
    assert state_of(trace) == before
    assert trace.prompt_start_for([10, 11, 12, 13, 0]) == 4
    trace.record_generation(**GOOD, **IDS)
    assert np.array_equal(rows_of(trace), np.concatenate((captured(4, seed=1), ROWS)))


@pytest.mark.parametrize("start", [4, np.int64(4), None])
def test_rows_whose_start_is_the_cursor_are_taken(start):
    for stated in ({"start": 4}, {} if start is not None else {"start": np.int32(4)}):
        trace = trace_of((3, 2, Decoded(captured(4, seed=1), 0)))
        turn(trace, 7, 2, Decoded(ROWS, start), **stated)
        assert np.array_equal(rows_of(trace), np.concatenate((captured(4, seed=1), ROWS)))


def test_topk_past_the_dtype_has_no_dummy():
    trace = RoutedExpertTrace()
    with pytest.raises(ValueError, match=r"^topk is 257, need at most 256 for uint8"):
        turn(trace, 1, 1, np.zeros((1, 1, 257), np.uint8), missing=np.ones(1, bool))


# ---- token ids and rewinds -------------------------------------------------------------------------------------------


def conversation(tokens, cut):
    """Return a trace with token ids: a prompt of ``cut`` tokens, the rest generated, rows named by their tokens."""
    trace = RoutedExpertTrace()
    turn(trace, cut, len(tokens) - cut, routes_of(tokens[:-1]), prompt_token_ids=tokens[:cut],
         generated_token_ids=tokens[cut:])  # fmt: skip
    return trace


def routes_of(tokens, seed=0):
    """Return one row a token that says which token it is, ``[rows, 2, 2]``."""
    return (
        np.asarray(tokens, np.int16)[:, None, None] * 10 + np.arange(4, dtype=np.int16).reshape(2, 2) + seed
    ).astype(np.int16)


@pytest.mark.parametrize("common", range(8))
@pytest.mark.parametrize("held", [False, True])
def test_a_prompt_rendered_anew_rewinds_to_the_common_prefix(common, held):
    trace = conversation(list(range(8)), 3)
    view = rows_of(trace) if held else None
    prompt = [*range(common), *range(50, 56)]
    cursor = trace.prompt_start_for(prompt)
    assert cursor == min(common, 7)
    new = routes_of([*prompt[cursor:], 60], seed=1)
    record = turn(trace, len(prompt), 2, Decoded(new, cursor), prompt_token_ids=prompt, generated_token_ids=[60, 61],
                  on_mismatch="rewind")  # fmt: skip
    assert record == RecordedTurn(len(new), 7 - cursor, None, cursor + len(new))
    assert np.array_equal(rows_of(trace), np.concatenate((routes_of(range(8))[:cursor], new)))
    assert trace.prompt_start_for([*prompt, 60, 61, 7]) == len(prompt) + 1
    assert view is None or np.array_equal(view, routes_of(range(7)))


def test_the_last_sampled_token_has_no_row_and_may_change():
    trace = conversation([1, 2, 3, 4], 2)
    assert turn(trace, 4, 1, routes_of([9]), prompt_token_ids=[1, 2, 3, 9], generated_token_ids=[5]).rewound == 0
    assert np.array_equal(rows_of(trace), routes_of([1, 2, 3, 9]))


def test_a_prompt_inside_the_rows_held_rewinds():
    trace = conversation([1, 2, 3, 4, 5], 3)
    record = turn(trace, 2, 3, routes_of([7, 8]), prompt_token_ids=[1, 2], generated_token_ids=[7, 8, 9],
                  on_mismatch="rewind")  # fmt: skip
    assert record == RecordedTurn(2, 2, None, 4)
    assert np.array_equal(rows_of(trace), routes_of([1, 2, 7, 8]))


def test_a_template_that_drops_the_thoughts_of_every_turn():
    """Thinking models: each prompt leaves out what was generated before, so that every turn rewinds."""
    trace, history = RoutedExpertTrace(), []
    for number in range(40):
        prompt = [*history, 100 + number]
        thoughts = list(range(200, 230))
        cursor = trace.prompt_start_for(prompt) if number else 0
        rows = routes_of([*prompt[cursor:], *thoughts[:-1]])
        turn(trace, len(prompt), 30, Decoded(rows, cursor), prompt_token_ids=prompt, generated_token_ids=thoughts,
             on_mismatch="rewind")  # fmt: skip
        history = [*prompt, 150]
    assert trace._routes._state.frozen == ()
    assert np.array_equal(rows_of(trace), routes_of([*prompt, *thoughts[:-1]]))


def test_prompt_start_for_needs_the_ids():
    trace = RoutedExpertTrace()
    assert trace.prompt_start_for([1, 2, 3]) == 0
    turn(trace, 3, 2, captured(4))
    with pytest.raises(ValueError, match=r"^prompt_token_ids is given, but the trace holds 4 rows without token ids"):
        trace.prompt_start_for([1, 2, 3])
    with pytest.raises(TypeError, match=r"^prompt_token_ids\[0\] is a float"):
        conversation([1, 2], 1).prompt_start_for([1.0])


def test_token_ids_are_the_traces_own():
    prompt, generated = np.array([1, 2, 3]), np.array([4, 5])
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, captured(4), prompt_token_ids=prompt, generated_token_ids=generated)
    prompt[:], generated[:] = 0, 0
    assert trace.prompt_start_for([1, 2, 3, 4, 5]) == 4


# ---- missing rows and the loss mask ----------------------------------------------------------------------------------


def naive_uncovered(loss_mask, rows, gone):
    return tuple(i + 1 for i in range(len(loss_mask) - 1) if loss_mask[i + 1] and (i >= rows or gone[i]))


def test_every_loss_mask_of_seven_tokens():
    """Against FIELD.md's rule, said once more: all masks, all trajectories of 4 rows with one or no missing row."""
    for gone in (None, 0, 1, 2, 3):
        absent = np.arange(4) == (-1 if gone is None else gone)
        trace = RoutedExpertTrace()
        turn(trace, 3, 2, captured(4), missing=absent)
        for tokens in (4, 5, 6, 7):
            for bits in range(1 << tokens):
                mask = [(bits >> index) & 1 for index in range(tokens)]
                wanted = naive_uncovered(mask, 4, absent)
                if wanted:
                    with pytest.raises(ValueError, match=f"^loss_mask trains token {wanted[0]}, need 0 there"):
                        trace.finalize(token_count=tokens, loss_mask=mask)
                else:
                    trace.finalize(token_count=tokens, loss_mask=mask)
                trace.finalize(token_count=tokens, loss_mask=mask, missing="accept")
                assert trace.uncovered == wanted


def test_a_trained_token_whose_row_is_missing():
    trace = RoutedExpertTrace()
    turn(trace, 3, 3, Decoded(captured(5), 0, np.arange(5) == 3))
    wanted = (
        r"^loss_mask trains token 4, need 0 there: row 3, which produced it, is missing \(the engine did not record it"
    )
    with pytest.raises(ValueError, match=wanted):
        trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 1, 1])
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 0, 1])
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 1, 1], missing="accept")
    assert trace.uncovered == (4,)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_missing_rows_travel_with_the_rows(dtype):
    first, second = captured(4, dtype=dtype).copy(), captured(4, seed=1)
    absent = np.array([False, True, False, False])
    if dtype != np.uint8:
        first[1] = -1
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, first, missing=absent)
    absent[:] = False
    turn(trace, 7, 2, Decoded(second, 4, np.array([False, False, False, True])))
    rows = trace.finalize(token_count=9, loss_mask=np.zeros(9))
    assert trace.missing.tolist() == [False, True, False, False, False, False, False, True]
    assert not trace.missing.flags.writeable
    assert rows.dtype == dtype
    assert rows[1].tolist() == rows[7].tolist() == [[0, 1, 2, 3]] * 2
    assert np.array_equal(rows[[0, 2, 3]], first[[0, 2, 3]])
    assert np.array_equal(rows[4:7], second[:3])
    batch = r3numba.collate_routes([rows], [9], missing=[trace.missing])
    assert batch.padding_mask[0].tolist() == [*trace.missing.tolist(), True]


def test_the_compacted_rows_of_an_engine_that_sends_minus_one():
    raw = captured(4).astype(np.int64)
    raw[2] = -1
    routes, missing = r3numba.compact_routes(raw, missing="mask")
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, routes, missing=missing)
    assert trace.missing.tolist() == [False, False, True, False]


FINALIZE_REFUSALS = {
    "fewer tokens": (
        {"token_count": 3, "loss_mask": [0] * 3},
        ValueError,
        "^token_count is 3, need at least 4, the rows held",
    ),
    "float count": ({"token_count": 5.0}, TypeError, "^token_count is a float"),
    "bool count": ({"token_count": True}, TypeError, "^token_count is a bool"),
    "negative": ({"token_count": -1}, ValueError, "^token_count is -1, need at least 0"),
    "short mask": ({"loss_mask": [0] * 4}, ValueError, "^loss_mask has 4 entries, need token_count = 5"),
    "long mask": ({"loss_mask": np.zeros(6)}, ValueError, "^loss_mask has 6 entries, need token_count = 5"),
    "matrix": ({"loss_mask": np.zeros((1, 5))}, ValueError, "^loss_mask has 2 dimensions, need 1"),
    "ragged": ({"loss_mask": [0, [0, 1], 0, 0, 0]}, ValueError, "^loss_mask is ragged, need one number"),
    "text": ({"loss_mask": "00000"}, TypeError, "^loss_mask is a str, need a sequence of bools or numbers"),
    "texts": ({"loss_mask": ["0"] * 5}, TypeError, "^loss_mask has dtype <U1, need bools or numbers"),
    "nones": ({"loss_mask": [None] * 5}, TypeError, "^loss_mask has dtype object, need bools or numbers"),
    "none": ({"loss_mask": None}, TypeError, "^loss_mask is a NoneType"),
    "set": ({"loss_mask": {0, 1, 2, 3, 4}}, TypeError, "^loss_mask is a set"),
    "rank-0": ({"loss_mask": np.array(0)}, ValueError, "^loss_mask has 0 dimensions, need 1"),
    "masked": ({"loss_mask": np.ma.zeros(5)}, TypeError, "^loss_mask is a MaskedArray"),
    "word": ({"missing": "mask"}, ValueError, "^missing is 'mask', need 'raise' or 'accept'"),
}


@pytest.mark.parametrize("fault", FINALIZE_REFUSALS)
def test_a_refused_finalize_changes_nothing(fault):
    changes, exception, text = FINALIZE_REFUSALS[fault]
    trace = trace_of((3, 2, captured(4)))
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 0, 0, 1], missing="accept")
    with pytest.raises(exception, match=text):
        trace.finalize(**{"token_count": 5, "loss_mask": [0] * 5, **changes})
    assert trace.uncovered == (5,)


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda m: np.array(m, bool), lambda m: np.array(m, np.float32),
             lambda m: [bool(v) for v in m], lambda m: [float(v) for v in m], lambda m: np.array(m) * np.nan]
)  # fmt: skip
def test_loss_masks_of_every_kind(make):
    trace = trace_of((3, 2, captured(4)))
    trace.finalize(token_count=6, loss_mask=make([0, 0, 0, 1, 1, 1]), missing="accept")
    assert trace.uncovered == (5,)


def test_a_recorded_turn_forgets_what_was_uncovered():
    trace = trace_of((3, 2, captured(4)))
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 1, 1, 1], missing="accept")
    turn(trace, 7, 2, ROWS)
    assert trace.uncovered == ()


# ---- forks, ownership, immutability ----------------------------------------------------------------------------------


def test_a_fork_shares_the_prefix_and_nothing_else():
    prefix = captured(1000, 4, 8)
    trace = trace_of((990, 11, prefix))
    gathered = trace.finalize(token_count=1001, loss_mask=np.zeros(1001))
    peak, forks = peak_of(lambda: [trace.fork() for _ in range(8)])
    assert peak < 30_000 < prefix.nbytes
    parts = [captured(50, 4, 8, seed=seed + 1) for seed in range(9)]
    for one, part in zip([*forks, trace], parts, strict=True):
        assert np.shares_memory(gathered, one.fork().finalize(token_count=1000, loss_mask=np.zeros(1000)))
        turn(one, 1041, 10, part)
        assert np.shares_memory(gathered, one._routes._state.frozen[0]), "the prefix is shared after an append too"
    for one, part in zip([*forks, trace], parts, strict=True):
        assert np.array_equal(rows_of(one), np.concatenate((prefix, part)))
    assert np.array_equal(gathered, prefix)


def test_forks_of_forks_rewind_and_widen_alone():
    trace = conversation([1, 2, 3, 4, 5], 2)
    one = trace.fork()
    two = one.fork()
    turn(one, 3, 2, routes_of([8, 9]), prompt_token_ids=[1, 2, 8], generated_token_ids=[9, 7], on_mismatch="rewind")
    turn(two, 6, 1, np.full((2, 2, 2), 70_000, np.int32), prompt_token_ids=[1, 2, 3, 4, 5, 6], generated_token_ids=[7])
    assert np.array_equal(rows_of(trace), routes_of([1, 2, 3, 4]))
    assert np.array_equal(rows_of(one), routes_of([1, 2, 8, 9]))
    assert rows_of(two).dtype == np.int32
    assert rows_of(two)[:, 0, 0].tolist() == [10, 20, 30, 40, 70_000, 70_000]
    assert rows_of(trace).dtype == rows_of(one).dtype == np.int16


def test_the_missing_rows_of_a_fork_are_its_own():
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, captured(4), missing=np.arange(4) == 1)
    other = trace.fork()
    turn(other, 7, 2, ROWS, missing=np.arange(4) == 2)
    turn(trace, 7, 2, ROWS)
    assert np.flatnonzero(trace.missing).tolist() == [1]
    assert np.flatnonzero(other.missing).tolist() == [1, 6]


def test_a_trace_owns_its_rows():
    rows, mask = captured(4).copy(), np.zeros(4, bool)
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, rows, missing=mask)
    rows[...], mask[...] = 0, True
    assert np.array_equal(rows_of(trace), captured(4))
    assert trace.missing is None
    assert not np.shares_memory(rows_of(trace), rows)


@pytest.mark.parametrize("kind", ["plain", "widened", "forked", "unpickled", "parts"])
def test_rows_handed_out_are_read_only_and_never_change(kind):
    trace = trace_of((3, 2, captured(4)))
    if kind == "widened":
        turn(trace, 5, 1, captured(1, dtype=np.int16))
    elif kind == "forked":
        trace = trace.fork()
    elif kind == "unpickled":
        trace = pickle.loads(pickle.dumps(trace))
    elif kind == "parts":
        trace.fork()
        turn(trace, 5, 1, captured(1))
    count = len(trace)
    rows = trace.finalize(token_count=count, loss_mask=[0] * count)
    content = rows.tolist()
    for view in (rows, rows[:1], rows.reshape(-1), rows.view(np.uint8)):
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 1
    for number in range(20):
        turn(trace, count + 1 + 100 * number, 100, captured(100, seed=number))
    assert rows.tolist() == content
    assert len(trace) == count + 2000


def test_a_rewind_to_the_same_size_leaves_rows_that_were_handed_out():
    """The memory keeps its size here, and a size that stays the same is not refused by CPython."""
    trace = conversation([1, 2, 3, 4, 5], 2)
    rows, mask = rows_of(trace), trace._missing_mask()
    turn(trace, 3, 2, routes_of([8, 9]), prompt_token_ids=[1, 2, 8], generated_token_ids=[9, 7], on_mismatch="rewind",
         missing=np.array([True, False]))  # fmt: skip
    assert np.array_equal(rows, routes_of([1, 2, 3, 4]))
    assert not mask.any()
    whole = trace.finalize(token_count=4, loss_mask=[0] * 4)
    assert whole[3].tolist() == routes_of([9])[0].tolist()


def test_rows_of_a_trace_may_be_given_to_it_again():
    trace = trace_of((4, 1, captured(4)))
    rows = trace.finalize(token_count=4, loss_mask=[0] * 4)
    turn(trace, 8, 1, rows)
    assert np.array_equal(rows_of(trace), np.concatenate((rows, rows)))


@pytest.mark.parametrize("layout", ["strided", "fortran", "reversed", "unaligned", "broadcast"])
def test_any_memory_layout(layout):
    plain = captured(6)
    rows = {
        "strided": lambda: np.repeat(plain, 2, axis=2)[:, :, ::2],
        "fortran": lambda: np.asfortranarray(plain),
        "reversed": lambda: plain[::-1].copy()[::-1],
        "unaligned": lambda: np.frombuffer(b"x" + plain.astype(np.int16).tobytes(), np.int16, offset=1).reshape(
            6, 2, 4
        ),
        "broadcast": lambda: np.broadcast_to(plain[:1], (6, 2, 4)),
    }[layout]()
    trace = trace_of((6, 1, rows), (12, 1, rows))
    assert np.array_equal(rows_of(trace), np.concatenate((rows, rows)))


def test_traces_take_tensors():
    torch = need_torch()
    rows = captured(8)
    trace = RoutedExpertTrace()
    turn(trace, 3, 2, torch.from_numpy(rows[:4].copy()), prompt_token_ids=torch.tensor([1, 2, 3]),
         generated_token_ids=torch.tensor([4, 5], dtype=torch.int32), missing=torch.zeros(4).bool())  # fmt: skip
    turn(trace, 7, 2, Decoded(torch.from_numpy(rows[4:].astype(np.int16)), 4), prompt_token_ids=[1, 2, 3, 4, 5, 6, 7],
         generated_token_ids=[8, 9])  # fmt: skip
    for dtype in (torch.bool, torch.bfloat16, torch.int64):
        mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]).to(dtype)
        result = trace.finalize(token_count=11, loss_mask=mask, missing="accept")
        assert trace.uncovered == (10,)
    assert np.array_equal(result, rows)
    ids = {"prompt_token_ids": torch.arange(1, 12), "generated_token_ids": torch.tensor([1])}
    with pytest.raises(TypeError, match=r"^routed_experts is on device 'meta', need a CPU tensor"):
        turn(trace, 11, 1, torch.zeros(3, 2, 4, dtype=torch.uint8, device="meta"), **ids)
    with pytest.raises(TypeError, match=r"^loss_mask is on device 'meta'"):
        trace.finalize(token_count=11, loss_mask=torch.zeros(11, device="meta"))
    with pytest.raises(TypeError, match=r"^routed_experts has dtype torch.bfloat16, need uint8, int16 or int32: call"):
        turn(trace, 11, 1, torch.zeros(3, 2, 4, dtype=torch.bfloat16), **ids)
    sparse = torch.zeros(3, 2, 4, dtype=torch.uint8).to_sparse()  # it has .indices
    with pytest.raises(TypeError, match=r"^routed_experts has layout torch.sparse_coo"):
        turn(trace, 11, 1, sparse, **ids)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_traces_pickle(protocol):
    trace = conversation([1, 2, 3, 4, 5], 2)
    turn(
        trace, 5, 1, routes_of([5]), missing=np.ones(1, bool), prompt_token_ids=[1, 2, 3, 4, 5], generated_token_ids=[6]
    )
    trace.finalize(token_count=6, loss_mask=[0, 0, 0, 0, 0, 1], missing="accept")
    notes = TokenMetadataTrace()
    notes.append(np.arange(3, dtype=np.float32))
    other, again = pickle.loads(pickle.dumps((trace, notes), protocol))
    assert state_of(other) == state_of(trace)
    assert other.prompt_start_for([1, 2, 3, 4, 5, 6]) == 5
    again.append(np.array([9], np.float64))
    turn(other, 7, 1, routes_of([6, 7]), prompt_token_ids=[1, 2, 3, 4, 5, 6, 7], generated_token_ids=[8])
    assert len(trace) == 5
    assert np.array_equal(rows_of(other)[5:], routes_of([6, 7]))
    assert (notes.finalize().tolist(), again.finalize().tolist()) == ([0, 1, 2], [0, 1, 2, 9])
    for empty in (RoutedExpertTrace(), TokenMetadataTrace()):
        assert len(pickle.loads(pickle.dumps(empty, protocol))) == 0


def test_a_pickle_out_of_band_copies_nothing():
    trace = trace_of((1000, 1, captured(1000, 4, 8)))
    buffers = []
    data = pickle.dumps(trace, 5, buffer_callback=buffers.append)
    assert len(data) < 2000
    other = pickle.loads(data, buffers=buffers)
    assert np.shares_memory(rows_of(other), rows_of(trace))
    turn(other, 1001, 2, captured(2, 4, 8))
    assert (len(trace), len(other)) == (1000, 1002)


def test_copies_are_forks():
    trace = trace_of((3, 2, captured(4)))
    shallow, deep = copy.copy(trace), copy.deepcopy(trace)
    assert np.shares_memory(rows_of(shallow), rows_of(trace))
    for one in (shallow, deep):
        turn(one, 7, 2, ROWS)
    assert (len(trace), len(shallow), len(deep)) == (4, 8, 8)
    assert np.array_equal(rows_of(shallow), rows_of(deep))


def test_forks_in_threads():
    prefix = captured(64, 8, 8)
    trace = trace_of((64, 1, prefix))
    forks, wrong = [trace.fork() for _ in range(8)], []

    def work(number, one):
        rng, parts = np.random.default_rng(number), [prefix]
        for _ in range(60):
            parts.append(captured(int(rng.integers(1, 40)), 8, 8, seed=number))
            turn(one, len(one) + len(parts[-1]), 1, parts[-1])
            other = one.fork()
            if rng.random() < 0.3 and not np.array_equal(rows_of(other), np.concatenate(parts)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(forks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert np.array_equal(rows_of(trace), prefix)


# ---- running out of memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["append", "widen", "first", "forked"])
def test_running_out_of_memory_changes_nothing(case, monkeypatch):
    trace = RoutedExpertTrace()
    if case != "first":
        turn(trace, 3, 2, captured(4), prompt_token_ids=[1, 2, 3], generated_token_ids=[4, 5])
    other = trace.fork() if case == "forked" else None
    new = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7], "generated_token_ids": [8, 9]}
    rows = captured(8 - len(trace), dtype=np.int16 if case == "widen" else np.uint8)
    before, resize = state_of(trace), _rows.resize
    for allowed in range(12):
        left = [allowed]

        def failing(memory, nbytes, left=left):
            if left[0] == 0:
                raise MemoryError
            left[0] -= 1
            return resize(memory, nbytes)

        monkeypatch.setattr(_rows, "resize", failing)
        try:
            turn(trace, 7, 2, rows, **new)
        except MemoryError:
            monkeypatch.setattr(_rows, "resize", resize)
            assert state_of(trace) == before
            assert pickle.loads(pickle.dumps(trace)).prompt_start == len(trace)
            assert trace.prompt_start_for([1, 2, 3, 4, 0]) == len(trace)
        else:
            break
    assert allowed > 1
    monkeypatch.setattr(_rows, "resize", resize)
    assert np.array_equal(rows_of(trace)[len(trace) - len(rows) :], rows)
    assert other is None or len(other) == 4


def test_running_out_of_memory_at_first_leaves_either_kind_of_turn_possible(monkeypatch):
    def failing(memory, nbytes):
        if nbytes > 100:
            raise MemoryError
        return resize(memory, nbytes)

    resize, trace = _rows.resize, RoutedExpertTrace()
    monkeypatch.setattr(_rows, "resize", failing)
    with pytest.raises(MemoryError):
        turn(trace, 20, 2, captured(21), prompt_token_ids=range(20), generated_token_ids=[1, 2])
    monkeypatch.setattr(_rows, "resize", resize)
    turn(trace, 20, 4, captured(23))
    assert len(pickle.loads(pickle.dumps(trace))) == len(trace.fork()) == 23


def test_a_result_that_cannot_fit_is_refused_with_both_figures(monkeypatch):
    monkeypatch.setattr("r3numba._memory.cgroup_memory_available", lambda: 1000)
    rows = np.broadcast_to(np.uint8(1), (300, 1024, 1024))
    trace = RoutedExpertTrace()
    with pytest.raises(MemoryError, match=r"needs 314,572,800 bytes, but only 1,000 bytes can still be allocated here"):
        turn(trace, 300, 1, rows)
    assert trace.prompt_start == 0


# ---- interrupts ------------------------------------------------------------------------------------------------------


def interrupted_at(number, call):
    """Run ``call`` with a KeyboardInterrupt at the number-th line of the package's trace modules; say if it came."""
    left = [number]

    def watch(frame, event, argument):
        if Path(frame.f_code.co_filename).name not in ("_rows.py", "trace.py"):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


#: The call, and the rows that it must leave behind where it came through, from those before.
INTERRUPTED = {
    "append": (
        lambda trace: turn(trace, 9, 1, routes_of(range(len(trace) + 1, 10)), **ids_of(9)),
        lambda before: [*before, *routes_of(range(len(before) + 1, 10)).tolist()],
    ),
    "widen": (
        lambda trace: turn(trace, 9, 1, routes_of(range(len(trace) + 1, 10)).astype(np.int32), **ids_of(9)),
        lambda before: [*before, *routes_of(range(len(before) + 1, 10)).tolist()],
    ),
    "rewind": (
        lambda trace: turn(trace, 3, 3, routes_of([7, 7]), on_mismatch="rewind", prompt_token_ids=[1, 2, 3],
                           generated_token_ids=[7, 7, 7]),
        lambda before: [*before[:3], *routes_of([7, 7]).tolist()],
    ),
    "fork": (lambda trace: trace.fork(), list),
    "finalize": (lambda trace: trace.finalize(token_count=6, loss_mask=[0] * 6), list),
    "pickle": (pickle.dumps, list),
}  # fmt: skip


def ids_of(count):
    return {"prompt_token_ids": range(1, count + 1), "generated_token_ids": [count + 1]}


@pytest.mark.parametrize("name", INTERRUPTED)
@pytest.mark.parametrize("parts", [False, True])
def test_an_interrupt_at_any_line_leaves_a_trace_of_right_rows(name, parts):
    """Everything, a part of it after a rewind, or nothing of the call has happened; no row is ever wrong."""
    for number in itertools.count(1):
        trace = conversation([1, 2, 3, 4, 5], 2)
        other = trace.fork() if parts else None
        if parts:
            turn(trace, 5, 1, np.full((1, 2, 2), 50, np.uint8), **ids_of(5))
        call, outcome = INTERRUPTED[name]
        before = rows_of(trace).tolist()
        came = interrupted_at(number, lambda trace=trace, call=call: call(trace))
        now = rows_of(trace).tolist()
        assert now in (before, outcome(before), before[:3] if name == "rewind" else before)
        if not came:
            assert now == outcome(before)
        assert len(pickle.loads(pickle.dumps(trace))) == len(trace)
        again = turn(trace, len(trace) + 1, 1, routes_of([60]).astype(np.int32), start=len(trace),
                     prompt_token_ids=[*trace._held_tokens(), 60], generated_token_ids=[61])  # fmt: skip
        assert again.appended == 1
        assert rows_of(trace).tolist() == [*now, *routes_of([60]).tolist()]
        assert other is None or np.array_equal(rows_of(other), routes_of([1, 2, 3, 4]))
        if not came:
            break
    assert number > 10


# ---- what it costs ---------------------------------------------------------------------------------------------------

TOTAL, LAYERS, TOPK = 8192, 48, 8


def calls_of(turns, dtypes, *, ids=False, missing=False, strided=False):
    """Return the calls of a conversation of TOTAL rows, the last of one row alone; the dtypes take turns."""
    whole = np.random.default_rng(0).integers(0, 128, (TOTAL, LAYERS, TOPK), np.uint8)
    tokens = np.arange(TOTAL + 1)
    edges = [*np.linspace(0, TOTAL - 1, turns).astype(int).tolist(), TOTAL] if turns > 1 else [0, TOTAL]
    calls = []
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        rows = whole[begin:end].astype(dtypes[min(number * len(dtypes) // turns, len(dtypes) - 1)])
        generated = max(1, (end - begin) // 2)
        prompt = end + 1 - generated
        call = {"prompt_token_count": prompt, "generated_token_count": generated, "routed_experts": rows}
        if strided:
            call["routed_experts"] = np.asfortranarray(rows)
        if missing:
            call["missing"] = np.arange(end - begin) % 7 == 3
        if ids:
            call.update(prompt_token_ids=tokens[:prompt], generated_token_ids=tokens[prompt : end + 1])
        calls.append(call)
    if dtypes[-1] is not np.uint8:  # the widest comes at the very end, when narrow and wide rows are both at their most
        calls[-1]["routed_experts"] = calls[-1]["routed_experts"].astype(dtypes[-1])
    return calls


def run_all(calls):
    trace = RoutedExpertTrace()
    for call in calls:
        trace.record_generation(**call)
    return trace, trace.finalize(token_count=TOTAL + 1, loss_mask=np.zeros(TOTAL + 1, bool))


NARROW_THEN_WIDE = (*[np.uint8] * 511, np.int16)
CONVERSATIONS = {
    "uint8": ((np.uint8,), {}),
    "int16": ((np.int16,), {}),
    "token ids": ((np.uint8,), {"ids": True}),
    "missing rows": ((np.uint8,), {"missing": True}),
    "strided": ((np.int16,), {"strided": True}),
    "int16 at the end": (NARROW_THEN_WIDE, {}),
    "int32 at the end": ((*[np.int16] * 511, np.int32), {}),
    "int16 in the middle": ((np.uint8, np.int16), {}),
    "three widths": ((np.uint8, np.int16, np.int32), {}),
    "narrow after wide": ((np.int16, np.uint8), {}),
}


@pytest.mark.parametrize("conversation_kind", CONVERSATIONS)
@pytest.mark.parametrize("turns", [1, 2, 3, 32, 512])
def test_peak_memory_is_at_most_one_and_a_half_of_the_final_rows(turns, conversation_kind):
    dtypes, options = CONVERSATIONS[conversation_kind]
    calls = calls_of(turns, dtypes, **options)
    peak, (trace, rows) = peak_of(lambda: run_all(calls))
    assert trace._routes._state.frozen == ()
    assert np.array_equal(rows[-1], calls[-1]["routed_experts"][-1]) or options.get("missing")
    assert rows.nbytes > 3_000_000
    assert peak <= 1.2 * rows.nbytes, f"{peak / rows.nbytes:.3f}"  # 1.5 is what is promised


@pytest.mark.parametrize("turns", [1, 2, 32, 512])
def test_each_row_is_written_once_and_moved_a_bounded_number_of_times(turns, monkeypatch):
    """Bytes written to memory, and bytes that a reallocation may move: in proportion to the rows, not to the turns."""
    counted = {"written": 0, "moved": 0, "reallocations": 0}
    resize = _rows.resize

    def counting(memory, nbytes):
        room, before = memory.__alloc__(), len(memory)
        resize(memory, nbytes)
        counted["written"] += max(0, nbytes - before)
        if memory.__alloc__() != room:
            counted["moved"] += min(before, nbytes)
            counted["reallocations"] += 1

    monkeypatch.setattr(_rows, "resize", counting)
    calls = calls_of(turns, (np.uint8,), ids=True)
    _, rows = run_all(calls)
    small = TOTAL * 9  # token ids and the mask of missing rows
    assert rows.nbytes <= counted["written"] <= rows.nbytes + small
    assert counted["moved"] <= 10 * (rows.nbytes + small)
    assert counted["reallocations"] <= 3 * 70


@pytest.mark.parametrize("turns", [1, 32, 512])
def test_finalize_copies_nothing_where_the_rows_lie_in_one_piece(turns):
    calls = calls_of(turns, (np.uint8,))
    trace, rows = run_all(calls)
    again = trace.finalize(token_count=TOTAL + 1, loss_mask=np.zeros(TOTAL + 1))
    assert address(again) == address(rows)
    peak, _ = peak_of(lambda: trace.finalize(token_count=TOTAL + 1, loss_mask=np.zeros(TOTAL + 1, bool)))
    assert peak < 50_000


def test_a_trace_goes_on_in_place_when_its_fork_is_gone():
    """A fork as a safeguard for each turn: nothing piles up, and nothing is copied at the end."""
    trace = trace_of((100, 1, captured(100, 8, 8)))
    for number in range(1, 9):
        fallback = trace.fork()
        del fallback
        turn(trace, 100 * number + 100, 1, captured(100, 8, 8, seed=number))
    assert trace._routes._state.frozen == ()
    assert len(trace) == 900


def test_a_fork_is_put_together_once():
    trace = trace_of((100, 1, captured(100, 8, 8)))
    other = trace.fork()
    turn(other, 200, 1, captured(100, 8, 8, seed=1))
    one = other.finalize(token_count=200, loss_mask=np.zeros(200))
    two = other.finalize(token_count=200, loss_mask=np.zeros(200))
    assert address(one) == address(two)
    del one, two
    turn(other, 300, 1, captured(100, 8, 8, seed=2))
    assert other._routes._state.frozen == (), "it grows in one piece again"


def test_a_group_of_forks_stays_within_one_and_a_half_of_its_results():
    prefix = captured(2000, LAYERS, TOPK)
    parts = [captured(2000, LAYERS, TOPK, seed=seed) for seed in range(8)]

    def group():
        trace = trace_of((2000, 1, prefix))
        forks = [trace.fork() for _ in range(8)]
        del trace
        for one, part in zip(forks, parts, strict=True):
            turn(one, 4000, 1, part)
        return [one.finalize(token_count=4000, loss_mask=np.zeros(4000, bool)) for one in forks]

    peak, results = peak_of(group)
    assert peak <= 1.5 * sum(result.nbytes for result in results)


def test_a_rewinding_conversation_does_not_pile_up():
    """What is given up is written over: ten times the kept rows were captured here."""
    rows = np.random.default_rng(0).integers(0, 128, (2000, LAYERS, TOPK), np.uint8)
    tokens = np.arange(4000)

    def talk():
        trace = RoutedExpertTrace()
        for number in range(20):
            keep = number * 10
            prompt, generated = tokens[: keep + 10], 5000 + tokens[:1000]
            turn(trace, len(prompt), 1000, rows[: len(prompt) - keep + 999], prompt_token_ids=prompt,
                 generated_token_ids=generated, on_mismatch="rewind")  # fmt: skip
        return trace

    peak, trace = peak_of(talk)
    assert peak <= 1.5 * len(trace) * LAYERS * TOPK


def test_tracemalloc_sees_the_memory():
    """The figures above mean something only while CPython reports a bytearray's memory."""
    peak, _ = peak_of(lambda: trace_of((1000, 1, captured(1000, 8, 8))))
    assert peak >= 64_000
    assert not tracemalloc.is_tracing()


# ---- the storage's own grounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", [_rows.resize, _rows._resize_and_fill])
def test_memory_that_anything_looks_at_is_not_resized(resize):
    memory = bytearray(16)
    rows = _rows.read_only(memory, np.dtype(np.int16), (2, 4))
    part = rows[1:].view(np.uint8)
    del rows
    for nbytes in (8, 15, 17, 1 << 20):
        with pytest.raises(BufferError):
            resize(memory, nbytes)
    assert len(memory) == 16
    del part
    resize(memory, 1 << 20)
    resize(memory, 3)
    assert len(memory) == 3


def test_resizing_without_the_c_api_serves_as_well(monkeypatch):
    monkeypatch.setattr(_rows, "resize", _rows._resize_and_fill)
    trace, rows = run_all(calls_of(32, (np.uint8, np.int16)))
    monkeypatch.undo()
    assert np.array_equal(rows, run_all(calls_of(32, (np.uint8, np.int16)))[1])
    assert trace._routes._state.frozen == ()


def test_the_call_is_chosen_where_the_c_api_is_missing(monkeypatch):
    monkeypatch.setattr(_rows.ctypes, "pythonapi", object())
    assert _rows._resize_call() is _rows._resize_and_fill


# ---- recorded conversations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[300], [100, 200, 300], [1, 20, 60, 150, 310], list(range(10, 311, 10))])
def test_the_recorded_long_turn_in_any_turns(cuts):
    """Rows of the recorded trajectory, cut as turns would bring them, give the trajectory again."""
    with np.load(DATA / "two_turn.npz") as data:
        tokens, routes = data["tokens"], data["routes"]
    trace = RoutedExpertTrace()
    for prompt in cuts:
        generated = min(7, len(tokens) - prompt)
        rows = routes[trace.prompt_start : prompt + generated - 1]
        turn(trace, prompt, generated, Decoded(rows, trace.prompt_start), prompt_token_ids=tokens[:prompt],
             generated_token_ids=tokens[prompt : prompt + generated])  # fmt: skip
    loss_mask = np.zeros(len(tokens))
    loss_mask[cuts[-1] : cuts[-1] + generated] = 1
    result = trace.finalize(token_count=len(tokens), loss_mask=loss_mask)
    assert np.array_equal(result, routes[: len(result)])
    assert len(result) == cuts[-1] + generated - 1


@pytest.mark.parametrize("name", ["rollouts_bf16", "rollouts_fp32"])
def test_recorded_rollouts_from_trace_to_batch(name):
    """Two turns each: the response is cut short, and goes on as a second turn with the first in its prompt."""
    with np.load(DATA / f"{name}.npz") as data:
        rollouts = [(data[f"p{i}"], data[f"c{i}"], data[f"r{i}"], data[f"l{i}"]) for i in range(16)]
    finished, lengths = [], []
    for prompt, completion, routes, logprobs in rollouts:
        trace, notes = RoutedExpertTrace(), TokenMetadataTrace()
        notes.append(np.zeros(len(prompt), np.float32))
        tokens = np.concatenate((prompt, completion))
        for begin, end in ((len(prompt), len(prompt) + 20), (len(prompt) + 20, len(tokens))):
            cursor = trace.prompt_start
            turn(trace, begin, end - begin, routes[cursor : end - 1], prompt_token_ids=tokens[:begin],
                 generated_token_ids=tokens[begin:end])  # fmt: skip
            notes.append(logprobs[begin - len(prompt) : end - len(prompt)])
        loss_mask = np.arange(len(tokens)) >= len(prompt)
        finished.append(trace.finalize(token_count=len(tokens), loss_mask=loss_mask))
        lengths.append(len(tokens))
        assert np.array_equal(notes.finalize()[len(prompt) :], logprobs)
    batch = r3numba.collate_routes(finished, lengths)
    wanted = r3numba.collate_routes([routes for *_, routes, _ in rollouts], lengths)
    assert np.array_equal(batch.array, wanted.array)
    assert np.array_equal(batch.padding_mask, wanted.padding_mask)


def test_recorded_chunked_prefill():
    with np.load(DATA / "chunked_prefill.npz") as data:
        routes, generated = [data[f"r{i}"] for i in range(3)], [data[f"t{i}"] for i in range(3)]
    for rows, response in zip(routes, generated, strict=True):
        prompt = len(rows) + 1 - len(response)
        trace = trace_of((prompt, len(response), rows))
        loss_mask = np.arange(len(rows) + 1) >= prompt
        assert np.array_equal(trace.finalize(token_count=len(rows) + 1, loss_mask=loss_mask), rows)


def bodies(name):
    return decode_response(json.loads((DATA / f"{name}.json").read_text()))


def test_recorded_bodies_from_the_wire_to_the_trace():
    """One engine's answer from 0, and the same answer from 20, which only a trace of 20 rows takes."""
    (whole,), (later,) = bodies("generate"), bodies("generate_start20")
    trace = RoutedExpertTrace()
    with pytest.raises(ValueError, match=r"^routed_experts.start is 20, need 0, the cursor"):
        turn(trace, 20, 6, later)
    turn(trace, 15, 6, whole.indices[:20])
    with pytest.raises(ValueError, match=r"^routed_experts.start is 0, need 20, the cursor"):
        turn(trace, 20, 6, whole)
    assert turn(trace, 20, 6, later) == RecordedTurn(5, 0, None, 25)
    assert np.array_equal(rows_of(trace), whole.indices)


def test_a_recorded_body_of_two_choices_that_does_not_say_where_it_starts():
    (first,), choices = bodies("generate"), bodies("completions_n2_start15")
    trace = trace_of((10, 6, first.indices[:15]))
    with pytest.raises(ValueError, match=r"^routed_experts.start is None, need 15, the cursor: pass start= where you"):
        turn(trace, 20, 6, choices[0])
    for choice in choices:
        one = trace.fork()
        assert turn(one, 20, 6, choice, start=15) == RecordedTurn(10, 0, None, 25)
        assert np.array_equal(rows_of(one), np.concatenate((first.indices[:15], choice.indices)))
    assert trace.prompt_start == 15


def test_rows_that_the_wire_reports_as_missing():
    trace = RoutedExpertTrace()
    turn(trace, 2, 2, decode_routes([[[3, 7]], [[-1, -1]], [[300, 5]]], start=0))
    assert trace.missing.tolist() == [False, True, False]
    assert rows_of(trace).tolist() == [[[3, 7]], [[0, 1]], [[300, 5]]]
