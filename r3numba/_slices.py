"""The fallback executor: the same plan in readable NumPy slices, for hosts without a working Numba.

One dummy block serves as template of every fill, because NumPy broadcasts an 8-byte row very slowly; with huge-page
memory under it this alone beats the usual single write (``r3numba bench`` has the arm).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import as_array
from ._plan import SLICES_TEMPLATE_BYTES, Plan, dummy_block

#: Missing rows are looked for in parts of this many rows, so that the edges between them take no memory that counts.
_CHUNK_ROWS = 4096


def move_pieces(plan: Plan, pieces: NDArray[np.int64], out: NDArray[Any], mask: NDArray[np.bool_]) -> None:
    """Write destination rows and padding mask of each of the ``pieces``; ``out`` is the flat destination."""
    size = out.itemsize
    dummies = dummy_block(len(plan.layer_of), plan.sources.topk, plan.dtype, SLICES_TEMPLATE_BYTES)
    target = np.lib.stride_tricks.as_strided(
        out,
        (plan.total_rows, len(plan.layer_of), plan.sources.topk),
        (plan.row_stride * size, plan.layer_stride * size, size),
    )
    for row, end, span, _ in pieces.tolist():
        while row < end:
            stop = min(end, int(plan.bounds[span + 1]))
            routes_begin = int(plan.bounds[span] + plan.first[span])
            begin = min(max(row, routes_begin), stop)
            finish = min(max(row, routes_begin + int(plan.sources.rows[span])), stop)
            _fill(target, mask, row, begin, dummies)
            if begin < finish:
                _move(plan, span, target, mask, begin, finish, begin - routes_begin, dummies)
            _fill(target, mask, finish, stop, dummies)
            row = stop
            span += 1


def _fill(target: NDArray[Any], mask: NDArray[np.bool_], row: int, end: int, dummies: NDArray[Any]) -> None:
    mask[row:end] = True
    for start in range(row, end, len(dummies)):
        stop = min(end, start + len(dummies))
        target[start:stop] = dummies[: stop - start]


def _move(
    plan: Plan,
    span: int,
    target: NDArray[Any],
    mask: NDArray[np.bool_],
    begin: int,
    finish: int,
    source_row: int,
    dummies: NDArray[Any],
) -> None:
    source = as_array(plan.sources.held[span])
    absent = None if plan.missing_held is None else as_array(plan.missing_held[span])
    if absent is None:
        mask[begin:finish] = False
        _copy(plan, target[begin:finish], source[source_row : source_row + finish - begin])
        return
    for chunk in range(0, finish - begin, _CHUNK_ROWS):
        rows = min(_CHUNK_ROWS, finish - begin - chunk)
        part = absent[source_row + chunk : source_row + chunk + rows]
        edges = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), rows]
        for start, stop in itertools.pairwise(edges):
            row, end, first = begin + chunk + start, begin + chunk + stop, source_row + chunk + start
            if part[start]:
                _fill(target, mask, row, end, dummies)
            else:
                mask[row:end] = False
                _copy(plan, target[row:end], source[first : first + stop - start])


def _copy(plan: Plan, target: NDArray[Any], source: NDArray[Any]) -> None:
    if source.shape[1:] == target.shape[1:]:  # all layers, in their order
        target[...] = source
        return
    for layer, from_layer in enumerate(plan.layer_of.tolist()):
        target[:, layer] = source[:, from_layer]
