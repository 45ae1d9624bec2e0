"""Rows that grow at the end and never change: the storage of the traces.

A trajectory must end up in one array, and growing one by concatenation moves every row at every turn, while a list of
turns needs the memory twice at the end. So rows lie in a ``bytearray``: CPython grows it by reallocation, by an eighth
at a time at least (large blocks are remapped by the kernel, not copied), and it *refuses to change its size while
anything else looks at its memory*. That refusal is what keeps an array that was handed out from ever changing or
moving: the store leaves that memory alone for good and goes on in another.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._memory import check_room
from ._policy import DEFAULT_POLICY

#: Kinds of dtype inside which widening can be lossless. Between them (integer to float) it is refused, lossless or not.
NEED = "bool, integers, floats or complex numbers"
_KINDS = {"b": "bool", "u": "integer", "i": "integer", "f": "float", "c": "complex"}


def _resize_and_fill(memory: bytearray, nbytes: int) -> None:
    """Resize where CPython's own call cannot be reached: the same refusals, but new bytes are written twice."""
    if nbytes < len(memory):
        del memory[nbytes:]
    else:
        memory.extend(bytes(nbytes - len(memory)))


def _resize_call() -> Callable[[bytearray, int], object]:
    try:
        prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_ssize_t)
        # A function object of our own: argument types set on ctypes.pythonapi's are shared with the whole process.
        return prototype(("PyByteArray_Resize", ctypes.pythonapi))
    except (AttributeError, ValueError):  # an interpreter without CPython's C API
        return _resize_and_fill


#: ``resize(memory, nbytes)``: BufferError while anything looks at the memory, MemoryError; new bytes are undefined.
resize = _resize_call()


class _State(NamedTuple):
    """All that a store is, replaced as a whole, so that an interrupt never finds half of a change."""

    frozen: tuple[NDArray[Any], ...]  # read-only, oldest first: what forks share, and what was handed out
    memory: bytearray  # the rows after them; whatever lies past the owner's row count is undefined
    dtype: np.dtype[Any] | None = None  # of memory and of every result; a frozen part may be narrower
    trailing: tuple[int, ...] | None = None

    @property
    def base(self) -> int:
        return sum(map(len, self.frozen))


class RowStore:
    """Rows ``[n, *trailing]``. The owner counts them: what it has not counted yet, or no more, does not exist.

    Not thread-safe; stores that were forked from one another share only what neither writes.
    """

    __slots__ = ("_state",)

    def __init__(self, rows: NDArray[Any] | None = None) -> None:
        self._state = _State((), bytearray())
        if rows is not None:
            whole = read_only(np.ascontiguousarray(rows).reshape(-1).view(np.uint8), rows.dtype, rows.shape)
            self._state = _State((whole,), bytearray(), rows.dtype, rows.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The widest dtype written so far; None before the first row."""
        return self._state.dtype

    @property
    def trailing(self) -> tuple[int, ...] | None:
        """The shape of a row; None before the first."""
        return self._state.trailing

    def widened(self, name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype that holds what is here and ``dtype``, without loss, or raise TypeError."""
        native, held = dtype.newbyteorder("="), self._state.dtype
        if native.kind not in _KINDS:
            raise TypeError(f"{name} has dtype {dtype}, need {NEED}")
        if held is None or held == native:
            return native
        if _KINDS[held.kind] == _KINDS[native.kind]:
            for wide, narrow in ((held, native), (native, held)):
                if np.can_cast(narrow, wide, "safe"):
                    return wide
        raise TypeError(
            f"{name} has dtype {dtype}, need one that widens losslessly with {held}, the dtype of the rows held"
        )

    def write(
        self, at: int, rows: NDArray[Any], replaced: tuple[NDArray[np.bool_], NDArray[Any]] | None = None
    ) -> None:
        """Copy checked ``rows`` to row ``at`` on; what was there and after it is given up.

        ``replaced`` is a mask of rows and the row that is written in their place. Whatever it raises, the rows before
        ``at`` are as they were.
        """
        if not len(rows):
            return
        dtype, trailing = self.widened("rows", rows.dtype), rows.shape[1:]
        items = math.prod(trailing)
        check_room(rows.size * dtype.itemsize, rows.shape, dtype, DEFAULT_POLICY)
        frozen, memory, held, _ = self._state
        begin = at - self._state.base
        if begin < 0:
            frozen, memory, begin = _first(frozen, at), bytearray(), 0
        try:
            # In two steps: a size that stays the same is not refused, whoever looks at the memory.
            resize(memory, begin * items * (held or dtype).itemsize)
            resize(memory, (begin + len(rows)) * items * dtype.itemsize)
        except BufferError:
            frozen = (*frozen, *self._tail(begin))
            memory, begin = bytearray(), 0
            resize(memory, rows.size * dtype.itemsize)
        if begin and held is not None and held != dtype:
            self._widen(begin * items, held, dtype)
        target = _writable(memory, dtype, (begin + len(rows), *trailing))[begin:]
        np.copyto(target, rows, casting="safe")
        if replaced is not None:
            target[replaced[0]] = replaced[1]
        self._state = _State(frozen, memory, dtype, trailing)

    def gather(self, count: int) -> NDArray[Any]:
        """Return the first ``count`` rows as one read-only array; a copy is made only where they lie in parts."""
        state = self._state
        if state.dtype is None or state.trailing is None:
            raise ValueError("the trace holds no rows, need at least one: dtype and shape are unknown")
        parts = (*_first(state.frozen, count), *self._tail(count - state.base))
        if len(parts) == 1 and parts[0].dtype == state.dtype:
            return parts[0]
        shape = (count, *state.trailing)
        nbytes = math.prod(shape) * state.dtype.itemsize
        check_room(nbytes, shape, state.dtype, DEFAULT_POLICY)
        memory = bytearray()
        resize(memory, nbytes)
        target, end = _writable(memory, state.dtype, shape), 0
        for part in parts:
            begin, end = end, end + len(part)
            np.copyto(target[begin:end], part, casting="safe")
        self._state = _State((), memory, state.dtype, state.trailing)
        return read_only(memory, state.dtype, shape)

    def held(self, count: int) -> NDArray[Any] | None:
        """Return the first ``count`` rows, as ``RowStore(rows)`` takes them again; None where no row ever came."""
        return None if self.dtype is None else self.gather(count)

    def fork(self, count: int) -> RowStore:
        """Return a store of the same first ``count`` rows, shared, which grows in memory of its own.

        This one is only read. Its memory stays as it is while the other looks at it, and grows on when that is gone.
        """
        state = self._state
        other = RowStore()
        frozen = (*_first(state.frozen, count), *self._tail(count - state.base))
        other._state = _State(frozen, bytearray(), state.dtype, state.trailing)
        return other

    def _tail(self, count: int) -> tuple[NDArray[Any], ...]:
        """Return the first ``count`` rows of the growing part, read-only, in a tuple; an empty one without rows."""
        state = self._state
        if count <= 0 or state.dtype is None or state.trailing is None:
            return ()
        return (read_only(state.memory, state.dtype, (count, *state.trailing)),)

    def _widen(self, items: int, held: np.dtype[Any], dtype: np.dtype[Any]) -> None:
        """Bring the growing part's ``items`` to a wider dtype where they are; its memory is large enough already.

        From the end on, in pieces that are written past everything that is still narrow: a copy of the whole would
        hold it twice. To move a piece again is harmless, so that an interrupt only comes through once all is done.
        """
        memory, end = self._state.memory, items
        narrow, wide = _writable(memory, held, (items,)), _writable(memory, dtype, (items,))
        first = narrow[:1].copy()  # the one item whose narrow and wide places overlap

        def move() -> None:
            nonlocal end
            while end > 1:
                begin = -(-end * held.itemsize // dtype.itemsize)
                wide[begin:end] = narrow[begin:end]
                end = begin
            wide[:1] = first
            self._state = self._state._replace(dtype=dtype)

        try:
            move()
        except BaseException:
            move()
            raise


def read_only(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the first bytes of ``buffer`` as an array that nobody can make writable.

    ``np.frombuffer`` and no other constructor: ``np.ndarray(buffer=)`` unwraps the memoryview and takes no hold on the
    memory, so that a bytearray may then be resized under it.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return np.frombuffer(memoryview(buffer)[:nbytes].toreadonly(), dtype).reshape(shape)


def _writable(memory: bytearray, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def _first(parts: tuple[NDArray[Any], ...], count: int) -> tuple[NDArray[Any], ...]:
    """Return the parts that hold the first ``count`` rows, the last one cut."""
    kept = []
    for part in parts:
        if count <= 0:
            break
        kept.append(part[:count])
        count -= len(part)
    return tuple(kept)
