"""A naive model of the traces: Python lists, one rule after another, nothing shared with the package's code.

``drive(rng)`` makes one random sequence of calls on a family of traces (forks, copies, unpickled ones) and on their
models, and raises AssertionError at the first disagreement.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3numba.trace import RoutedExpertTrace, TokenMetadataTrace

CANONICAL = ("uint8", "int16", "int32")
LARGEST = {"uint8": 255, "int16": 2**15 - 1, "int32": 2**31 - 1}
#: Which dtypes hold another without loss, written out.
HOLDS = {
    "bool": {"bool"}, "uint8": {"uint8"}, "int8": {"int8"}, "int16": {"int16", "int8", "uint8"},
    "uint16": {"uint16", "uint8"}, "int32": {"int32", "int16", "int8", "uint16", "uint8"},
    "float16": {"float16"}, "float32": {"float32", "float16"}, "float64": {"float64", "float32", "float16"},
}  # fmt: skip


@dataclass
class Decoded:
    """Stands for what ``decode_routes`` returns."""

    indices: Any
    start: int | None
    missing: Any = None


class RoutesModel:
    """What a RoutedExpertTrace must hold."""

    def __init__(self):
        self.rows, self.gone = [], []  # one nested list and one bool a row
        self.tokens = None  # ids of the tokens whose rows are held; None: they came without
        self.dtype = self.shape = None
        self.uncovered = ()

    def fork(self):
        return copy.deepcopy(self)

    def common(self, prompt):
        number = 0
        for held, came in zip(self.tokens or [], prompt, strict=False):
            if held != came:
                break
            number += 1
        return number

    def record(self, *, prompt_token_count, generated_token_count, routed_experts, prompt_token_ids=None,
               generated_token_ids=None, start=None, missing=None, on_mismatch="raise"):  # fmt: skip
        """Return (set of exceptions of which one must come, None), or (empty, what the call returns)."""
        faults = set()
        for count, least in ((prompt_token_count, 1), (generated_token_count, 0)):
            if isinstance(count, bool) or not isinstance(count, int):
                faults.add(TypeError)
            elif count < least:
                faults.add(ValueError)
        if on_mismatch not in ("raise", "rewind"):
            faults.add(ValueError)
        if faults:
            return faults, None
        if generated_token_count == 0:
            return set(), (0, 0, "no token", len(self.rows))
        if routed_experts is None:
            return set(), (0, 0, "no routes", len(self.rows))
        ids = (prompt_token_ids, generated_token_ids)
        if (ids[0] is None) != (ids[1] is None):
            return {ValueError}, None
        given = ids[0] is not None
        if given and (len(ids[0]) != prompt_token_count or len(ids[1]) != generated_token_count):
            return {ValueError}, None
        if self.rows and given != (self.tokens is not None):
            return {ValueError}, None
        keep = self.common(ids[0]) if given else len(self.rows)
        if keep < len(self.rows) and on_mismatch == "raise":
            return {ValueError}, None
        if prompt_token_count < keep:
            return {ValueError}, None
        if isinstance(routed_experts, Decoded):
            array, says = routed_experts.indices, routed_experts.start
            if missing is not None and routed_experts.missing is not None:
                return {ValueError}, None
            missing = routed_experts.missing if missing is None else missing
            if says is None and start is None:
                faults.add(ValueError)
        else:
            array, says = routed_experts, None
        for value in (says, start):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                faults.add(TypeError)
            elif value is not None and value != keep:
                faults.add(ValueError)
        if not isinstance(array, np.ndarray) or str(array.dtype) not in CANONICAL:
            return faults | {TypeError}, None
        if array.ndim != 3 or 0 in array.shape[1:] or self.shape not in (None, array.shape[1:]):
            return faults | {ValueError}, None
        if missing is not None:
            if not isinstance(missing, np.ndarray) or missing.dtype != np.bool_:
                return faults | {TypeError}, None
            if missing.shape != (len(array),):
                return faults | {ValueError}, None
        gone = [False] * len(array) if missing is None else [bool(flag) for flag in missing]
        rows = array.tolist()
        for row, absent in zip(rows, gone, strict=True):
            if not absent and any(number < 0 for layer in row for number in layer):
                faults.add(ValueError)
        if len(rows) != prompt_token_count - keep + generated_token_count - 1:
            faults.add(ValueError)
        if faults:
            return faults, None
        rewound = len(self.rows) - keep
        topk = array.shape[2]
        rows = [[list(range(topk))] * array.shape[1] if absent else row for row, absent in zip(rows, gone, strict=True)]
        self.rows, self.gone = self.rows[:keep] + rows, self.gone[:keep] + gone
        self.tokens = (list(ids[0]) + list(ids[1]))[: len(self.rows)] if given else None
        if rows:
            self.shape = array.shape[1:]
            self.dtype = max(self.dtype or "uint8", str(array.dtype), key=CANONICAL.index)
        self.uncovered = ()
        return set(), (len(rows), rewound, None, len(self.rows))

    def finalize(self, token_count, loss_mask, missing):
        if token_count < len(self.rows) or len(loss_mask) != token_count:
            return {ValueError}
        without = []
        for row in range(token_count - 1):
            has_route = row < len(self.rows) and not self.gone[row]
            if loss_mask[row + 1] and not has_route:
                without.append(row + 1)
        if without and missing == "raise":
            return {ValueError}
        self.uncovered = tuple(without)
        return set()

    def check(self, trace):
        assert trace.prompt_start == len(trace) == len(self.rows), f"{trace.prompt_start} rows, not {len(self.rows)}"
        assert trace.uncovered == self.uncovered, f"uncovered {trace.uncovered}, not {self.uncovered}"
        gone = trace.missing
        if any(self.gone):
            assert gone is not None, "no mask, but missing rows"
            assert gone.tolist() == self.gone, "wrong mask of missing rows"
        else:
            assert gone is None, "a mask without a missing row"
        if self.tokens is not None:
            for index in range(len(self.tokens)):
                other = [*self.tokens[:index], self.tokens[index] + 1]
                assert trace.prompt_start_for(other) == index, f"token {index} is not the one held"
            assert trace.prompt_start_for([*self.tokens, 5]) == len(self.tokens)
        kept = trace.fork().finalize(token_count=len(self.rows), loss_mask=[0] * len(self.rows))
        self.check_rows(kept)

    def check_rows(self, rows):
        assert not rows.flags.writeable or not rows.size
        assert rows.flags.c_contiguous
        if self.dtype is None:
            assert rows.shape == (0, 0, 0), f"rows of shape {rows.shape} out of nothing"
            return
        assert rows.shape == (len(self.rows), *self.shape), f"shape {rows.shape}"
        assert rows.dtype == self.dtype, f"dtype {rows.dtype}, not {self.dtype}"
        assert rows.tolist() == self.rows, "wrong rows"


class MetadataModel:
    """What a TokenMetadataTrace must hold."""

    def __init__(self):
        self.rows, self.dtype, self.shape = [], None, None

    def fork(self):
        return copy.deepcopy(self)

    def append(self, array):
        name = str(array.dtype)
        if name not in HOLDS:
            return {TypeError}
        if self.dtype is not None and name not in HOLDS[self.dtype] and self.dtype not in HOLDS[name]:
            return {TypeError}
        if self.shape is not None and array.shape[1:] != self.shape:
            return {ValueError}
        if len(array):
            self.shape = array.shape[1:]
            if self.dtype is None or name not in HOLDS[self.dtype]:
                self.dtype = name
            self.rows += array.tolist()
        return set()

    def check(self, trace):
        assert len(trace) == len(self.rows)
        assert trace.dtype == (None if self.dtype is None else np.dtype(self.dtype)), f"{trace.dtype}, not {self.dtype}"
        if self.dtype is None:
            assert trace.shape is None
            return
        rows = trace.fork().finalize()
        assert rows.dtype == self.dtype
        assert rows.shape == trace.shape == (len(self.rows), *self.shape)
        assert rows.tolist() == self.rows


@dataclass
class Member:
    """One trace of the family with its models, and its own true conversation."""

    trace: RoutedExpertTrace
    model: RoutesModel
    notes: TokenMetadataTrace
    notes_model: MetadataModel
    tokens: list[int]

    def check(self):
        self.model.check(self.trace)
        self.notes_model.check(self.notes)


def drive(rng):
    """Make one random sequence of calls, and compare every outcome, and every array handed out, to its end."""
    with_ids = bool(rng.random() < 0.6)
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    family = [Member(RoutedExpertTrace(), RoutesModel(), TokenMetadataTrace(), MetadataModel(), [])]
    kept = []  # (array handed out, its bytes at that time)
    for _ in range(int(rng.integers(4, 16)) if rng.random() < 0.97 else 80):
        member = family[rng.integers(len(family))]
        step = rng.random()
        if step < 0.55:
            _record(rng, member, with_ids, shape)
        elif step < 0.65:
            _append(rng, member, kept)
        elif step < 0.8:
            _finalize(rng, member, kept)
        elif step < 0.92:
            _fork(rng, member, family)
        elif member.notes_model.rows and step < 0.96:
            count = int(rng.integers(0, len(member.notes_model.rows) + 1))
            member.notes.rewind(count)
            del member.notes_model.rows[count:]
        else:
            kept[:] = [entry for entry in kept if rng.random() < 0.5]
        for array, content in kept:
            assert array.tobytes() == content, "an array that was handed out has changed"
        if rng.random() < 0.2:
            for other in family:
                other.check()
    for member in family:
        member.check()
    for array, content in kept:
        assert array.tobytes() == content, "an array that was handed out has changed"


def _outcome(call, expected):
    """Run the call; return its result, or None after one of the expected exceptions."""
    result = error = None
    try:
        result = call()
    except (TypeError, ValueError) as raised:
        error = raised
    if expected:
        assert type(error) in expected, f"{error!r} where one of {expected} was expected"
    else:
        assert error is None, f"{error!r} where success was expected"
    return result


def draw_rows(rng, count, shape, dtype):
    """Return rows ``[count, *shape]`` of a random memory layout, over the dtype's whole range."""
    most = LARGEST[dtype]
    layout = rng.integers(5)
    if layout == 0:
        return rng.integers(0, most, (2 * count, *shape), dtype, endpoint=True)[::2]
    if layout == 1:
        return np.asfortranarray(rng.integers(0, most, (count, *shape), dtype, endpoint=True))
    rows = rng.integers(0, most, (count, *shape), dtype, endpoint=True)
    if layout == 2:
        return rows[::-1]
    rows.flags.writeable = layout != 3
    return rows


def _record(rng, member, with_ids, shape):
    trace, model = member.trace, member.model
    prompt = max(1, len(model.rows) + int(rng.integers(-1, 5)))
    generated = int(rng.integers(0, 5))
    tokens = list(member.tokens[:prompt])
    tokens += rng.integers(0, 3, prompt - len(tokens)).tolist()
    call: dict[str, Any] = {"prompt_token_count": prompt, "generated_token_count": generated}
    if with_ids:
        if rng.random() < 0.25:  # the history was rendered anew
            place = int(rng.integers(0, prompt))
            tokens[place:] = rng.integers(0, 3, prompt - place).tolist()
        call["prompt_token_ids"], call["generated_token_ids"] = tokens, rng.integers(0, 3, generated).tolist()
        if rng.random() < 0.5:
            call["prompt_token_ids"] = np.array(tokens, rng.choice(["int32", "int64"]))
    cursor = len(model.rows)
    if rng.random() < 0.6:
        call["on_mismatch"] = "rewind"
        if with_ids:
            cursor = model.common(tokens)
            assert cursor == trace.prompt_start_for(tokens)
    rows = draw_rows(rng, max(0, prompt - cursor + generated - 1), shape, CANONICAL[rng.choice(3, p=[0.7, 0.2, 0.1])])
    missing = None
    if rng.random() < 0.25:
        missing = rng.random(len(rows)) < rng.choice([0.0, 0.3, 1.0])
        if rows.dtype != np.uint8:
            rows = rows.copy()
            rows[missing] = -1
    if rng.random() < 0.5:
        call["routed_experts"] = Decoded(rows, cursor, missing)
    else:
        call.update(routed_experts=rows, missing=missing)
        if rng.random() < 0.3:
            call["start"] = cursor
    if rng.random() < 0.05:
        call["routed_experts"] = None
    elif rng.random() < 0.3:
        call = FAULTS[rng.integers(len(FAULTS))](rng, call)
    before = len(model.rows)
    expected, result = model.record(**call)
    record = _outcome(lambda: trace.record_generation(**call), expected)
    if record is None:
        return
    assert (record.appended, record.rewound, record.aborted, record.prompt_start) == result, f"{record}, not {result}"
    assert record.rewound <= before
    if record.aborted is None:
        member.tokens = [*tokens, *(call.get("generated_token_ids") or [0] * generated)]
        _overwrite(call)


def _overwrite(call):
    """Write into what the trace was given: it owns its rows."""
    given = call["routed_experts"]
    array, mask = (given.indices, given.missing) if isinstance(given, Decoded) else (given, call.get("missing"))
    if array.flags.writeable:
        array[...] = 1
    if mask is not None:
        mask[...] = ~mask
    for ids in (call.get("prompt_token_ids"), call.get("generated_token_ids")):
        if ids is not None:
            ids[:] = [9] * len(ids)


def _change(name, *values):
    def fault(rng, call):
        return {**call, name: values[rng.integers(len(values))]}

    return fault


def _change_rows(change):
    def fault(rng, call):
        given = call["routed_experts"]
        if isinstance(given, Decoded):
            return {**call, "routed_experts": Decoded(change(rng, given.indices), given.start, given.missing)}
        return {**call, "routed_experts": change(rng, given)}

    return fault


def _negative(rng, rows):
    rows = rows.astype(np.int16)
    if rows.size:
        rows[int(rng.integers(len(rows))), 0, 0] = -1
    return rows


def _start(rng, call):
    """Change where the rows are said to start, or say nothing."""
    given, value = call["routed_experts"], [None, 0, 1, 7, -1, True, 2.0, "0"][rng.integers(8)]
    if isinstance(given, Decoded) and rng.random() < 0.7:
        return {**call, "routed_experts": Decoded(given.indices, value, given.missing)}
    return {**call, "start": value}


FAULTS = (
    _change("prompt_token_count", 0, -1, 1, 2, 50, True, 3.0, None, "3"),
    _change("generated_token_count", -1, 0, 1, 50, False, 2.0, None),
    _change("on_mismatch", "ignore", None, True),
    _change("routed_experts", 5, [[[1, 2]]], "rows"),
    _change("prompt_token_ids", None, [], [1, 2]),
    _change("generated_token_ids", None, [], [1, 2]),
    _change("missing", np.zeros(50, bool), np.zeros(1, np.uint8), [True], np.ones((1, 1), bool)),
    _change_rows(lambda rng, rows: rows[: max(0, len(rows) - int(rng.integers(1, 3)))]),
    _change_rows(lambda rng, rows: np.concatenate((rows, rows[:1]))),
    _change_rows(lambda rng, rows: rows[:0]),
    _change_rows(lambda rng, rows: rows.astype(["int64", "uint16", "int8", "float32", "bool", ">i2"][rng.integers(6)])),
    _change_rows(lambda rng, rows: np.concatenate((rows, rows), axis=int(rng.integers(1, 3)))),
    _change_rows(lambda rng, rows: rows.reshape(len(rows), rows.shape[1] * rows.shape[2])),
    _change_rows(lambda rng, rows: rows[:, :0]),
    _change_rows(lambda rng, rows: rows.tolist()),
    _change_rows(_negative),
    _start,
)


def _append(rng, member, kept):
    shape = [(), (2,), (2, 3), (0,)][rng.integers(4)] if member.notes_model.shape is None else member.notes_model.shape
    if rng.random() < 0.1:
        shape = (*shape, 2)
    name = [*HOLDS, "complex64", "U3"][rng.choice(len(HOLDS) + 2)]
    if member.notes_model.dtype is not None and rng.random() < 0.6:
        similar = [n for n in HOLDS if member.notes_model.dtype in HOLDS[n] or n in HOLDS[member.notes_model.dtype]]
        name = similar[rng.integers(len(similar))]
    if name == "complex64":
        name = "U3" if member.notes_model.dtype is None else name  # the model has no list form of it
    rows = rng.integers(0, 200 if name != "int8" else 100, (int(rng.integers(0, 5)), *shape)).astype(name)
    if rng.random() < 0.2 and rows.dtype.kind != "U":
        rows = np.asfortranarray(rows)
    if rng.random() < 0.1 and len(kept):  # rows that lie in a trace's own memory
        rows = kept[0][0]
    expected = {TypeError} if name == "complex64" and rows.dtype == name else member.notes_model.append(rows)
    _outcome(lambda: member.notes.append(rows), expected)
    if rows.flags.writeable and rows.dtype.kind != "U":
        rows[...] = 1
    if member.notes_model.dtype is not None and rng.random() < 0.4:
        array = member.notes.finalize()
        assert array.tolist() == member.notes_model.rows
        kept.append((array, array.tobytes()))


def _finalize(rng, member, kept):
    tokens = max(0, len(member.model.rows) + int(rng.integers(-1, 4)))
    loss_mask = (rng.random(tokens) < rng.choice([0.0, 0.2, 0.9])).astype(rng.choice(["bool", "int64", "float32"]))
    if rng.random() < 0.1:
        loss_mask = np.append(loss_mask, 0)
    how = "accept" if rng.random() < 0.5 else "raise"
    expected = member.model.finalize(tokens, loss_mask.tolist(), how)
    given = loss_mask if rng.random() < 0.5 else loss_mask.tolist()
    call = {"token_count": tokens, "loss_mask": given, "missing": how}
    rows = _outcome(lambda: member.trace.finalize(**call), expected)
    if rows is not None:
        member.model.check_rows(rows)
        kept.append((rows, rows.tobytes()))
    if member.model.rows and rng.random() < 0.3 and member.trace.missing is not None:
        kept.append((member.trace.missing, member.trace.missing.tobytes()))


def _fork(rng, member, family):
    how = rng.integers(4)
    if how < 2:
        trace, notes = member.trace.fork(), member.notes.fork()
    elif how == 2:
        protocol = int(rng.integers(2, pickle.HIGHEST_PROTOCOL + 1))
        trace, notes = pickle.loads(pickle.dumps((member.trace, member.notes), protocol))
    else:
        trace, notes = copy.copy(member.trace), copy.deepcopy(member.notes)
    other = Member(trace, member.model.fork(), notes, member.notes_model.fork(), list(member.tokens))
    if len(family) < 4:
        family.append(other)
    else:
        family[rng.integers(len(family))] = other
