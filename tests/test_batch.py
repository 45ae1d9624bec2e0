"""RouteBatch and PackedRoutes after collation: select, pad, views, the way back into collation, and pickles."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    CALLS,
    DTYPES,
    LARGEST,
    LENGTHS,
    ROWS,
    address,
    available_paths,
    batch_of,
    captured,
    examples,
    guarded,
    need_torch,
    out_shape,
    packed,
    same,
    same_missing,
)

import r3numba
from r3numba import PackedRoutes, RouteBatch, collate_routes, pack_routes

LAYERS, TOPK = 2, 3


@st.composite
def batches(draw, most=5):
    """Return routes, lengths and missing masks: None, no rows, no tokens, all and some rows missing among them."""
    count = draw(st.integers(1, most))
    lengths = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    rows = [draw(st.integers(0, length)) for length in lengths]
    with_rows = draw(st.integers(0, count - 1))
    lengths[with_rows], rows[with_rows] = max(1, lengths[with_rows]), max(1, rows[with_rows])
    dtype = draw(st.sampled_from(DTYPES))
    routes, missing = [], []
    for index, number in enumerate(rows):
        none = number == 0 and draw(st.booleans())
        routes.append(None if none else captured(number, LAYERS, TOPK, dtype, draw(st.integers(0, 99)) + 100 * index))
        marks = draw(st.none() | st.lists(st.booleans(), min_size=number, max_size=number))
        missing.append(None if marks is None else np.array(marks, bool))
    return routes, lengths, draw(st.sampled_from([missing, None]))


def picked(batch, order):
    """Return the routes, lengths and missing masks that ``order`` names, as a caller would pick them by hand."""
    routes, lengths, missing = batch
    chosen = None if missing is None else [missing[index] for index in order]
    return [routes[index] for index in order], [lengths[index] for index in order], chosen


def has_rows(routes):
    return any(entry is not None and len(entry) for entry in routes)


def orders(count):
    return st.lists(st.integers(0, count - 1), min_size=1, max_size=8)


def padded(lengths, data):
    """Return options of a rectangle that holds the lengths, and the columns that they ask for."""
    how = data.draw(st.sampled_from(["left", "right", "default", "starts"]))
    room = data.draw(st.integers(0, 3))
    if how == "starts":
        columns = [data.draw(st.integers(0, 4)) for _ in lengths]
        width = max(start + length for start, length in zip(columns, lengths, strict=True)) + room
        return {"starts": columns, "max_length": width}, columns, width
    width = max(lengths) + room
    options = {"max_length": width} if how == "default" else {"padding": how, "max_length": width}
    return options, [0] * len(lengths) if how == "right" else oracle.left(lengths, width), width


# ---- select and pad against direct collation -------------------------------------------------------------------------


@pytest.mark.parametrize("path", available_paths())
@settings(deadline=None, max_examples=examples(60))
@given(batch=batches(), data=st.data())
def test_select_is_collation_of_the_picked(path, batch, data):
    routes, lengths, missing = batch
    order = data.draw(orders(len(lengths)))
    options, columns, width = padded(lengths, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("R3NUMBA_POLICY", f"force_{path}")
        rectangle = collate_routes(routes, lengths, missing=missing, **options).select(order)
        pack = pack_routes(routes, lengths, missing=missing).select(np.array(order))
    some_routes, some_lengths, some_missing = picked(batch, order)
    assert rectangle.starts.tolist() == [columns[index] for index in order]
    assert rectangle.array.shape == (len(order), width, LAYERS, TOPK)
    if has_rows(some_routes):
        starts = [columns[index] for index in order]
        same(
            rectangle, collate_routes(some_routes, some_lengths, starts=starts, max_length=width, missing=some_missing)
        )
        same(pack, pack_routes(some_routes, some_lengths, missing=some_missing))
    else:  # nothing to collate by hand: what is left has to be dummies
        for result in (rectangle, pack):
            assert result.padding_mask.all()
            assert result.missing is None
            assert np.array_equal(result.array, r3numba.dummy_routes(result.array.shape, result.array.dtype))
            assert result.sequence_lengths.tolist() == some_lengths
            assert result.captured_lengths.tolist() == [0] * len(order)


@pytest.mark.parametrize("path", available_paths())
@settings(deadline=None, max_examples=examples(60))
@given(batch=batches(), data=st.data())
def test_pad_is_direct_collation(path, batch, data):
    routes, lengths, missing = batch
    options, columns, width = padded(lengths, data)
    direct = collate_routes(routes, lengths, missing=missing, **options)
    pack = pack_routes(routes, lengths, missing=missing)
    whole, out = guarded(direct.array.shape, direct.array.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("R3NUMBA_POLICY", f"force_{path}")
        same(pack.pad(**options), direct)
        written = pack.pad(out=out, num_threads=2, **options)
    assert written.array is out
    same(written, direct)
    assert (whole[:64] == 0xA5).all()
    assert (whole[-64:] == 0xA5).all()
    indices, mask = oracle.rectangle(routes, lengths, columns, width, direct.array.dtype, missing)
    assert np.array_equal(direct.array, indices)
    assert np.array_equal(direct.padding_mask, mask)


def test_pad_into_a_tensor():
    torch = need_torch()
    pack = pack_routes([captured(2), captured(3)], [3, 3])
    out = torch.full((2, 3, 2, 4), 7, dtype=torch.uint8)
    padded_batch = pack.pad(padding="right", out=out)
    assert address(padded_batch.array) == out.data_ptr()
    assert np.array_equal(out.numpy(), collate_routes([captured(2), captured(3)], [3, 3], padding="right").array)


@settings(deadline=None, max_examples=examples(80))
@given(batch=batches(), data=st.data())
def test_missing_goes_back_into_collation(batch, data):
    """The rows of a batch, passed on with its ``missing``, give the same batch again."""
    routes, lengths, missing = batch
    pack = pack_routes(routes, lengths, missing=missing)
    rows = pack.captured_lengths.tolist()
    parts = [trajectory[:count] for trajectory, count in zip(pack, rows, strict=True)]
    same(pack_routes(parts, pack.sequence_lengths, missing=pack.missing), pack)
    options, _, _ = padded(lengths, data)
    rectangle = collate_routes(parts, lengths, missing=pack.missing, **options)
    same(rectangle, collate_routes(routes, lengths, missing=missing, **options))
    same_missing(rectangle.missing, pack.missing)
    wanted = None
    if missing is not None and any(mask is not None and mask.any() for mask in missing):
        wanted = [mask if mask is not None and mask.any() else None for mask in missing]
    same_missing(pack.missing, wanted)


def test_select_copies():
    routes, lengths = [captured(2), captured(3, seed=5)], [3, 3]
    for batch in (collate_routes(routes, lengths), pack_routes(routes, lengths)):
        chosen = batch.select([1, 0])
        for name in ("array", "padding_mask", "captured_lengths", "sequence_lengths"):
            assert not np.shares_memory(getattr(chosen, name), getattr(batch, name))
        chosen.array[...] = 1
        chosen.padding_mask[...] = True
        assert not batch.padding_mask.all()
        assert LARGEST[np.uint8] in batch.array


# ---- views of a pack -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(100))
@given(batch=batches(most=6), data=st.data())
def test_pack_as_a_sequence(batch, data):
    routes, lengths, missing = batch
    pack = pack_routes(routes, lengths, missing=missing)
    indices, mask, offsets = oracle.pack(routes, lengths, pack.array.dtype, missing)
    parts = [indices[offsets[index] : offsets[index + 1]] for index in range(len(lengths))]
    assert len(pack) == len(lengths)
    assert [part.tolist() for part in pack] == [part.tolist() for part in parts]
    for index in range(-len(lengths), len(lengths)):
        assert pack[index].tolist() == parts[index].tolist()
        assert pack[np.int64(index)].shape == parts[index].shape
    for index in (len(lengths), -len(lengths) - 1):
        with pytest.raises(IndexError, match=f"trajectory {index} of a pack of {len(lengths)}"):
            pack[index]
    bounds = st.none() | st.integers(-8, 8)
    where = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1])))
    again = slice(data.draw(bounds), data.draw(bounds))
    everything = range(len(lengths))
    for piece, numbers in ((pack[where], everything[where]), (pack[where][again], everything[where][again])):
        assert type(piece) is PackedRoutes
        assert len(piece) == len(numbers)
        assert [part.tolist() for part in piece] == [parts[index].tolist() for index in numbers]
        assert piece.sequence_lengths.tolist() == [lengths[index] for index in numbers]
        assert piece.captured_lengths.tolist() == [pack.captured_lengths[index] for index in numbers]
        assert piece.offsets[0] == 0
        assert piece.padding_mask.tolist() == [x for i in numbers for x in mask[offsets[i] : offsets[i + 1]].tolist()]
        assert piece.array.size == 0 or np.shares_memory(piece.array, pack.array)
        if has_rows([routes[index] for index in numbers]):
            some_routes, some_lengths, some_missing = picked(batch, numbers)
            same(piece, pack_routes(some_routes, some_lengths, missing=some_missing, dtype=pack.array.dtype))
            same(piece.pad(), collate_routes(some_routes, some_lengths, missing=some_missing))
            same(piece.select([len(numbers) - 1]), pack.select([numbers[-1]]))


def test_pack_views_share_memory_and_write_through():
    pack = pack_routes([captured(2), captured(1), captured(3)], [2, 2, 3])
    pack[1][0] = 9
    pack[1:][0][0, 0, 0] = 8
    assert pack.array[2].tolist() == [[8, 9, 9, 9], [9, 9, 9, 9]]
    assert np.shares_memory(pack[1:].padding_mask, pack.padding_mask)


@pytest.mark.parametrize("step", [2, -1, -2])
def test_other_steps_are_refused(step):
    with pytest.raises(ValueError, match=f"step {step}, need 1: use select"):
        pack_routes([captured(1), captured(1)], [1, 1])[::step]


@pytest.mark.parametrize("index", ["0", 0.0, None, (0, 0), [0]], ids=repr)
def test_indices_of_another_type_are_refused(index):
    with pytest.raises(TypeError):
        pack_routes([captured(1)], [1])[index]


def test_an_empty_slice_refuses_what_needs_a_trajectory():
    empty = pack_routes([captured(1), captured(1)], [1, 2])[1:1]
    assert (len(empty), empty.cu_seqlens.tolist(), empty.array.shape, list(empty)) == (0, [0], (0, 2, 4), [])
    with pytest.raises(ValueError, match="order is empty"):
        empty.select([])
    with pytest.raises(ValueError, match="need at least one trajectory"):
        empty.pad()


def test_dtypes_and_case_13():
    """Lengths 5 and 4, captures of 4 and 3 rows: row 0 of trajectory 1 lands at 5, not at 4."""
    routes = [captured(4), captured(3, seed=1)]
    pack = pack_routes(routes, [5, 4])
    assert (pack.cu_seqlens.dtype, pack.cu_seqlens.tolist()) == (np.int32, [0, 5, 9])
    assert (pack.offsets.dtype, pack.offsets.tolist()) == (np.int64, [0, 5, 9])
    assert np.array_equal(pack.array[5], routes[1][0])
    assert pack.padding_mask.tolist() == [False] * 4 + [True] + [False] * 3 + [True]
    batch = collate_routes(routes, [5, 4])
    for one in (pack, batch):
        assert one.sequence_lengths.dtype == one.captured_lengths.dtype == np.int64
        assert one.padding_mask.dtype == np.bool_
    assert batch.starts.dtype == np.int64
    assert batch.audit is None


# ---- length, repr, torch's absence, pickles --------------------------------------------------------------------------


def test_repr_and_length():
    routes = [captured(2, dtype=np.int16), None]
    assert repr(collate_routes(routes, [3, 1])) == "RouteBatch(shape=[2, 3, 2, 4], dtype=int16)"
    assert repr(pack_routes(routes, [3, 1])) == "PackedRoutes(batch=2, shape=[4, 2, 4], dtype=int16)"
    assert len(collate_routes(routes, [3, 1])) == len(pack_routes(routes, [3, 1])) == 2


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import r3numba
routes = [np.ones((2, 1, 2), np.uint8), None]
for batch in (r3numba.collate_routes(routes, [3, 1]), r3numba.pack_routes(routes, [3, 1])):
    assert batch.select([1, 0]).array.any()
    for name in ("indices", "padding_mask_tensor"):
        try:
            getattr(batch, name)
        except ImportError as error:
            assert "r3numba[torch]" in str(error), error
        else:
            raise AssertionError(name)
print("done")
"""


#: The one warning of a lane without Numba is no fault here.
WARNINGS = ("-W", "error", "-W", "ignore:r3numba runs without Numba:RuntimeWarning")


def test_without_torch_the_error_names_the_extra():
    done = subprocess.run([sys.executable, *WARNINGS, "-c", WITHOUT_TORCH], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout.decode().strip()) == (0, "done"), done.stderr.decode()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@settings(deadline=None, max_examples=examples(20))
@given(batch=batches())
def test_pickles_hold_everything(protocol, batch):
    routes, lengths, missing = batch
    for one in (collate_routes(routes, lengths, missing=missing), pack_routes(routes, lengths, missing=missing)):
        again = pickle.loads(pickle.dumps(one, protocol))
        same(again, one)
        same(again.select([0]), one.select([0]))
        assert not np.shares_memory(again.array, one.array)
        same(copy.deepcopy(one), one)
        assert np.shares_memory(copy.copy(one).array, one.array)
        assert type(again) in (RouteBatch, PackedRoutes)


# ---- one buffer for NumPy and torch ----------------------------------------------------------------------------------

MADE = {
    **{call: lambda call=call, **options: CALLS[call](batch_of(ROWS), LENGTHS, **options) for call in CALLS},
    "select": lambda **options: collate_routes(batch_of(ROWS), LENGTHS, **options).select([2, 0]),
    "pack-select": lambda **options: packed(**options).select([2, 0]),
    "pad": lambda **options: packed(**options).pad(),
    "slice": lambda **options: packed(**options)[1:],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", MADE)
def test_torch_shares_the_buffer(made, dtype):
    need_torch()
    batch = MADE[made](dtype=dtype)
    for tensor, array in ((batch.indices, batch.array), (batch.padding_mask_tensor, batch.padding_mask)):
        assert tensor.data_ptr() == address(array) == array.ctypes.data
        assert list(tensor.shape) == list(array.shape)
        assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
        assert tensor.is_contiguous()
        position = (-1,) * array.ndim
        tensor[position] = 1
        assert array[position] == 1
        array[position] = 0
        assert tensor[position].item() == 0


def test_out_is_the_memory_of_the_batch():
    torch = need_torch()
    for call, function in CALLS.items():
        out = torch.full(out_shape(call), 77, dtype=torch.uint8)
        batch = function(batch_of(ROWS), LENGTHS, out=out)
        assert address(batch.array) == batch.indices.data_ptr() == out.data_ptr()
        assert out.tolist() == function(batch_of(ROWS), LENGTHS).array.tolist()
