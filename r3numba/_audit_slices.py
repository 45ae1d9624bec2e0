"""The audit in NumPy, for hosts without a working Numba: the same counts, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._checks import as_array
from ._plan import SLICES_TEMPLATE_BYTES, Plan
from ._tally import DUPLICATE, RANGE, REPEATED, ZERO, ZERO_ROW

if TYPE_CHECKING:
    from .audit import AuditTask


def audit_pieces(plan: Plan, pieces: NDArray[np.int64], task: AuditTask, long_run: int) -> None:
    """Count, in the tallies of each of the ``pieces``, what is wrong with the source rows that land there."""
    for row, end, span, order in pieces.tolist():
        while row < end:
            while row >= plan.bounds[span + 1]:
                span += 1
            until = min(end, int(plan.bounds[span + 1]))
            shift = int(plan.bounds[span] + plan.first[span])
            begin, stop = max(0, row - shift), min(int(plan.sources.rows[span]), until - shift)
            if begin < stop:
                source = as_array(plan.sources.held[span])
                gone = None if plan.missing_held is None else as_array(plan.missing_held[span])
                tally, zeros = task.tallies[order + span], task.zeros[order + span]
                step = max(1, SLICES_TEMPLATE_BYTES // plan.row_bytes)
                for first in range(begin, stop, step):
                    _audit_block(source, gone, first, min(stop, first + step), task, tally, zeros)
                _repeated(source, gone, begin, stop, long_run, tally)
            row = until


def _audit_block(
    source: NDArray[Any],
    gone: NDArray[np.bool_] | None,
    begin: int,
    end: int,
    task: AuditTask,
    tally: NDArray[np.int64],
    zeros: NDArray[np.int64],
) -> None:
    block = source[begin:end]
    kept = np.broadcast_to(task.keep != 0, block.shape[:2])
    if gone is not None:
        kept = kept & ~gone[begin:end, None]
    topk = block.shape[2]
    ordered = np.sort(block, axis=2)
    outside = ((block < 0) | (block >= task.limit[block.itemsize])).any(axis=2) & kept
    zero = (ordered[:, :, -1] == 0) & (ordered[:, :, 0] == 0) & kept & (topk > 1)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) & kept & ~zero
    for column, found in ((RANGE, outside), (DUPLICATE, twice), (ZERO, zero)):
        if found.any():
            token, layer = np.argwhere(found)[0].tolist()
            _count(tally, column, int(found.sum()), begin + token, layer)
    zeros += zero.sum(axis=0)
    empty = (zero | ~kept).all(axis=1) & kept.any(axis=1)
    if empty.any():
        _count(tally, ZERO_ROW, int(empty.sum()), begin + int(np.argmax(empty)), 0)


def _count(tally: NDArray[np.int64], column: int, count: int, token: int, layer: int) -> None:
    if tally[column] == 0:
        tally[column + 1] = token
        tally[column + 2] = layer
    tally[column] += count


def _repeated(
    source: NDArray[Any],
    gone: NDArray[np.bool_] | None,
    begin: int,
    end: int,
    long_run: int,
    tally: NDArray[np.int64],
) -> None:
    """Count the runs of one row that begin in ``[begin, end)``, each to the first that differs or was not recorded."""
    flat = source.reshape(len(source), -1) if source.flags.c_contiguous else source

    def repeats(token: int) -> bool:
        """Say whether a row and the one before it are recorded, and the same."""
        if gone is not None and (gone[token] or gone[token - 1]):
            return False
        return np.array_equal(flat[token], flat[token - 1])

    token = begin
    while token < end:
        stop = token + 1
        if not (token and repeats(token)):
            while stop < len(flat) and repeats(stop):
                stop += 1
            if stop - token >= long_run:
                if tally[REPEATED] == 0:
                    tally[REPEATED + 1] = token
                tally[REPEATED] += 1
                tally[REPEATED + 2] = max(int(tally[REPEATED + 2]), stop - token)
        token = stop
