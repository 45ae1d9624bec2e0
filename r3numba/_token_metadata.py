"""Rows aligned with the tokens of one trajectory, collected turn by turn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import host_array, integer
from ._rows import NEED, RowStore


class TokenMetadataTrace:
    """Rows aligned with the tokens of one trajectory, of any trailing shape, appended turn by turn.

    For what comes one row a token beside the routes: log-probabilities, sampling masks, positions. The dtype widens
    without loss as rows of wider dtypes come (uint8 and int16 give int16); the trace owns its rows, and a row that it
    holds never changes.

    Notes
    -----
    One thread at a time may use a trace; traces that were forked from one another may be used by different threads at
    once, and arrays from ``finalize`` may be read by any thread at any time. Traces pickle, and ``copy.copy`` forks.

    Appending costs the rows appended: rows are moved a second time only when their memory grows, by an eighth at
    least, or when a wider dtype comes. The GIL is released while rows are copied.

    Examples
    --------
    >>> import numpy as np
    >>> trace = TokenMetadataTrace()
    >>> trace.append(np.array([[1, 200]], np.uint8))
    >>> trace.append(np.array([[3, 300]], np.int16))
    >>> len(trace), trace.dtype, trace.finalize().tolist()
    (2, dtype('int16'), [[1, 200], [3, 300]])
    """

    __slots__ = ("_count", "_store")

    def __init__(self) -> None:
        self._count = 0
        self._store = RowStore()

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Return the dtype of the rows held, the widest that ever came; None before the first row."""
        return self._store.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape that ``finalize`` would return, ``(rows, *trailing)``; None before the first row."""
        return None if self._store.trailing is None else (self._count, *self._store.trailing)

    def append(self, rows: Any) -> None:
        """Append the rows of the next tokens.

        Parameters
        ----------
        rows : ndarray or CPU tensor ``[tokens, *trailing]``, bool, integer, float or complex
            Copied: later writes into it do not reach the trace. Without rows it changes nothing, the dtype included.

        Raises
        ------
        TypeError
            For a dtype that does not widen losslessly with the dtype held: uint8 and int8, integer and float, bool
            and integer. Nothing has changed then.
        ValueError
            For another trailing shape than that of the rows held. Nothing has changed then.
        """
        array = host_array("rows", rows, NEED)
        if array.ndim < 1:
            raise ValueError("rows has 0 dimensions, need at least 1: [tokens, ...]")
        self._store.widened("rows", array.dtype)
        trailing = self._store.trailing
        if trailing is not None and array.shape[1:] != trailing:
            need = ", ".join(map(str, ("tokens", *trailing)))
            raise ValueError(f"rows has shape {list(array.shape)}, need [{need}]")
        self._store.write(self._count, array)
        self._count += len(array)

    def rewind(self, row_count: int) -> None:
        """Give up all rows from ``row_count`` on, 0 to ``len(trace)``; dtype and trailing shape stay as they are.

        Raises
        ------
        TypeError, ValueError
            If ``row_count`` is no integer in that range.
        """
        count = integer("row_count", row_count, 0)
        if count > self._count:
            raise ValueError(f"row_count is {count}, need at most {self._count}, the rows held")
        self._count = count

    def fork(self) -> TokenMetadataTrace:
        """Return a trace that holds the same rows, uncopied; appends to either never show in the other."""
        other = TokenMetadataTrace()
        other._store, other._count = self._store.fork(self._count), self._count
        return other

    def finalize(self) -> NDArray[Any]:
        """Return all rows.

        Returns
        -------
        ndarray ``[rows, *trailing]``
            C-contiguous and read-only; it never changes, whatever becomes of the trace. No copy, except the first time
            after rows were appended by a fork, or while a fork or an earlier result was alive.

        Raises
        ------
        ValueError
            If no row was ever appended: dtype and shape are unknown.
        MemoryError
            Where a copy cannot fit in what the container may still use.
        """
        return self._store.gather(self._count)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"TokenMetadataTrace(shape={self.shape}, dtype={self.dtype})"

    def __getstate__(self) -> tuple[int, NDArray[Any] | None]:
        return self._count, self._store.held(self._count)

    def __setstate__(self, state: tuple[int, NDArray[Any] | None]) -> None:
        self._count, self._store = state[0], RowStore(state[1])
