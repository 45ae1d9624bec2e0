"""router_padding_mask against a naive loop and the collated batch's mask; masks of missing rows that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    CALLS,
    LENGTHS,
    batch_of,
    captured,
    every_call,
    every_place,
    examples,
    good,
    guarded,
    need_torch,
    out_shape,
    refused,
    replaced,
)

from r3numba import collate_routes, pack_routes, router_padding_mask


@pytest.fixture
def torch():
    return need_torch()


def naive(attention, captured):
    """Walk every row: a token is captured while fewer than ``captured[i]`` tokens came before it."""
    result = []
    for row, count in zip(attention, captured, strict=True):
        seen, marks = 0, []
        for present in row:
            marks.append(not present or seen >= count)
            seen += bool(present)
        result.append(marks)
    return result


def test_case_21(torch):
    mask = router_padding_mask(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), [2, 4])
    assert mask.tolist() == [[True, False, False, True], [False, False, False, False]]
    assert mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("attention", "captured"),
    [
        ([[0, 0, 1, 1, 1]], [2]),
        ([[1, 1, 1, 0, 0]], [2]),
        ([[0, 1, 1, 1, 0]], [2]),
        ([[0, 1, 1, 1, 0]], [3]),
        ([[0, 1, 0, 0, 1, 1, 0]], [2]),
        ([[1, 0, 1, 0, 1]], [1]),
        ([[0, 0, 0]], [0]),
        ([[1, 1, 1]], [0]),
        ([[1, 1, 1]], [3]),
        ([[1], [0]], [1, 0]),
        ([[], []], [0, 0]),
    ],
    ids=["left", "right", "both", "all-captured", "holes", "one-of-holes", "no-token", "none", "all", "one", "width-0"],
)
def test_sides_and_holes(torch, attention, captured):
    mask = router_padding_mask(torch.tensor(attention, dtype=torch.int64), captured)
    assert mask.tolist() == naive(attention, captured)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_against_a_naive_loop(data):
    torch = need_torch()
    width = data.draw(st.integers(0, 9))
    attention = data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=5))
    captured = [data.draw(st.integers(0, sum(row))) for row in attention]
    dtype = data.draw(st.sampled_from([torch.bool, torch.uint8, torch.int32, torch.int64]))
    tensor = torch.tensor(attention, dtype=dtype).reshape(len(attention), width)
    if data.draw(st.booleans()):  # not contiguous
        tensor = tensor.t().contiguous().t()
    before = tensor.clone()
    mask = router_padding_mask(tensor, captured)
    assert mask.tolist() == naive(attention, captured)
    assert torch.equal(tensor, before)
    assert mask.shape == tensor.shape
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("lengths", ["list", "tuple", "ndarray", "tensor", "int32-tensor", "numpy-integers"])
def test_captured_lengths_of_every_kind(torch, lengths):
    counts = {
        "list": [2, 4],
        "tuple": (2, 4),
        "ndarray": np.array([2, 4], np.uint16),
        "tensor": torch.tensor([2, 4]),
        "int32-tensor": torch.tensor([2, 4], dtype=torch.int32),
        "numpy-integers": [np.int32(2), np.uint64(4)],
    }[lengths]
    mask = router_padding_mask(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), counts)
    assert mask.int().tolist() == [[1, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("padding", ["left", "right"])
@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_agrees_with_the_collated_batch(padding, data):
    torch = need_torch()
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
    rows = [data.draw(st.integers(0, length)) for length in lengths]
    rows[lengths.index(max(lengths))] = data.draw(st.integers(1, max(lengths)))
    width = max(lengths) + data.draw(st.integers(0, 2))
    batch = collate_routes(batch_of(rows), lengths, padding=padding, max_length=width)
    attention = [
        [1] * length + [0] * (width - length) if padding == "right" else [0] * (width - length) + [1] * length
        for length in lengths
    ]
    mask = router_padding_mask(torch.tensor(attention), rows)
    assert torch.equal(mask, batch.padding_mask_tensor)


def test_agrees_with_a_batch_placed_by_starts(torch):
    """Case 42's layout: prompts left-padded, responses right-padded."""
    prompts, responses, rows = np.array([1, 3, 2]), np.array([4, 1, 2]), [4, 3, 0]
    starts = prompts.max() - prompts
    batch = collate_routes(batch_of(rows), prompts + responses, starts=starts)
    attention = torch.zeros(batch.padding_mask.shape, dtype=torch.bool)
    for index, (start, length) in enumerate(zip(starts, prompts + responses, strict=True)):
        attention[index, start : start + length] = True
    assert torch.equal(router_padding_mask(attention, rows), batch.padding_mask_tensor)


def test_the_result_shares_nothing(torch):
    attention = torch.ones((1, 3), dtype=torch.bool)
    mask = router_padding_mask(attention, [3])
    mask[...] = True
    assert attention.all()
    assert router_padding_mask(attention, [3]).tolist() == [[False, False, False]]


GOOD = [[0, 1, 1], [1, 1, 1], [1, 1, 0]]
REFUSALS = {
    "array": (lambda t: np.array(GOOD), [2, 3, 2], TypeError, "attention_mask is a ndarray, need a tensor"),
    "list": (lambda t: GOOD, [2, 3, 2], TypeError, "attention_mask is a list, need a tensor"),
    "none": (lambda t: None, [2, 3, 2], TypeError, "attention_mask is a NoneType"),
    "float": (lambda t: t.tensor(GOOD).float(), [2, 3, 2], TypeError, "attention_mask has dtype torch.float32"),
    "bfloat16": (lambda t: t.tensor(GOOD).bfloat16(), [2, 3, 2], TypeError, "attention_mask has dtype torch.bfloat16"),
    "complex": (lambda t: t.zeros(3, 3, dtype=t.complex64), [2, 3, 2], TypeError, "attention_mask has dtype"),
    "sparse": (lambda t: t.tensor(GOOD).to_sparse(), [2, 3, 2], TypeError, "attention_mask has layout torch.sparse"),
    "one-dimension": (lambda t: t.ones(3, dtype=t.int64), [2, 3, 2], ValueError, "attention_mask has 1 dimensions"),
    "four-dimensions": (lambda t: t.ones(3, 1, 3, 3).int(), [2, 3, 2], ValueError, "has 4 dimensions, need 2"),
    "values-of-two": (lambda t: 2 * t.tensor(GOOD), [2, 3, 2], ValueError, "attention_mask has values other than"),
    "negative-values": (lambda t: -t.tensor(GOOD), [2, 3, 2], ValueError, "attention_mask has values other than"),
    "count": (lambda t: t.tensor(GOOD), [2, 3], ValueError, "captured_lengths has 2 entries, need 3"),
    "floats": (lambda t: t.tensor(GOOD), np.array([2.0, 3, 2]), TypeError, "captured_lengths has dtype float64"),
    "bools": (lambda t: t.tensor(GOOD), [2, 3, True], TypeError, r"captured_lengths\[2\] is a bool"),
    "negative": (lambda t: t.tensor(GOOD), [2, -1, 2], ValueError, r"captured_lengths\[1\] is -1, need at least 0"),
    "past-tokens": (lambda t: t.tensor(GOOD), [2, 3, 3], ValueError, r"captured_lengths\[2\] is 3, need at most 2"),
    "past-tokens-left": (lambda t: t.tensor(GOOD), [3, 3, 2], ValueError, r"captured_lengths\[0\] is 3, need at most"),
    "past-width": (lambda t: t.tensor(GOOD), [2, 4, 2], ValueError, r"captured_lengths\[1\] is 4, need at most 3"),
    "past-width-0": (lambda t: t.ones(2, 0).int(), [0, 1], ValueError, r"captured_lengths\[1\] is 1, need at most 0"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_refusals(torch, fault):
    make, counts, exception, text = REFUSALS[fault]
    attention = make(torch)
    with pytest.raises(exception, match=text):
        router_padding_mask(attention, counts)


# ---- missing rows ----------------------------------------------------------------------------------------------------

#: One entry of ``missing``.
MASKS = {
    "list": ([True, False, True], TypeError, "is a list, need a bool array or None"),
    "bool": (True, TypeError, "is a bool, need a bool array or None"),
    "uint8": (np.ones(5, np.uint8), TypeError, "has dtype uint8, need bool"),
    "float": (np.ones(5), TypeError, "has dtype float64, need bool"),
    "masked": (np.ma.ones(5, bool), TypeError, "is a MaskedArray, need a bool array or None"),
    "short": (np.ones(1, bool), ValueError, r"has shape \[1\], need \[\d\], one for each captured row"),
    "long": (np.ones(6, bool), ValueError, r"has shape \[6\], need \[\d\], one for each captured row"),
    "rank-2": (np.ones((5, 1), bool), ValueError, r"has shape \[5, 1\], need \[\d\]"),
    "rank-0": (np.array(True), ValueError, r"has shape \[\], need \[\d\]"),
}


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


def test_missing_is_a_view_of_the_mask():
    marks = np.array([False, True])
    for batch in (
        collate_routes([captured(1), captured(2)], [3, 3], missing=[None, marks]),
        pack_routes([captured(1), captured(2)], [3, 3], missing=[None, marks]),
    ):
        assert batch.missing[0] is None
        assert np.shares_memory(batch.missing[1], batch.padding_mask)
        assert batch.missing[1].tolist() == [False, True]


@every_call
@pytest.mark.parametrize("entry", [None, np.zeros((0, 9, 9))], ids=["none", "no-rows"])
def test_case_36_and_37_entries_without_rows(call, entry):
    """All dummy, mask all True, dtype from the others; if all are so, nobody knows the layers."""
    arguments, _ = good(call)
    batch = CALLS[call](**{**arguments, "routes": replaced(arguments["routes"], 2, entry), "missing": None})
    where = slice(sum(LENGTHS[:2]), sum(LENGTHS[:3])) if "pack" in call else 2
    assert batch.padding_mask[where].all()
    assert (batch.array[where] == np.arange(4)).all()
    assert batch.array.dtype == np.uint8
    refused(call, ValueError, "no trajectory has a captured row, need", routes=[entry] * 5, missing=None)
