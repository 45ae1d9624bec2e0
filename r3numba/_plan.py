"""The plan: what goes where, as plain NumPy arithmetic that a test can read.

Every output (rectangle, packed, a rank's share) is a row of **spans**. Span ``s`` is the destination rows
``[bounds[s], bounds[s + 1])``; inside it the rows from ``first[s]`` on, ``rows[s]`` of them, come from one source, and
all others are dummies. The spans tile the destination, so that every cell is written once whatever the layout.

A destination is ``[rows, layers, topk]`` over one flat buffer, with a stride for rows and one for layers: a rectangle
and a pack are row-major, a rank's share is layer-major over a subset of the source's layers. A new layout is a new
plan; the executors in ``_kernels`` and ``_slices`` stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._checks import is_tensor

#: Pieces a thread gets of a result that is not large; a large one is cut into pieces of ``PIECE_UNITS`` huge pages.
#: 2, 4, 8 and 16 MiB took the same time (403 MB on two threads), and the small ones balance uneven lengths.
PIECES_A_THREAD: Final = 8
PIECE_UNITS: Final = 2
#: One block of dummy rows is the template of every fill: for the kernel small enough for the second-level cache and a
#: few runs that are worth streaming, for NumPy's slices large enough that the interpreter's part does not count.
KERNEL_TEMPLATE_BYTES: Final = 64 << 10
SLICES_TEMPLATE_BYTES: Final = 256 << 10

#: A cache line, in bytes: what a streaming store writes, and what an audit looks at in one go.
LINE: Final = 64
#: How far ahead of the copy the source is asked for, in bytes. 400 MB, GB/s on one thread: 18.7 without, 19.0 at 256
#: and 512, 21.8 at 1024, 21.6 at 2048, 21.1 at 4096. Four interleaved streams of 4 KiB gave 15.7, two 14.8.
AHEAD: Final = 2048

_NO_ADDRESSES: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the routes of each trajectory lie; ``held`` keeps that memory alive (an address does not).

    ``address`` int64 [n] of row 0 (0 = no rows); ``rows`` int64 [n]; ``itemsize`` int8 [n]: 1, 2 or 4, which names the
    canonical dtype; ``strides`` int64 [n, 3] in bytes (row, layer, id), or [0, 3] where all are C-contiguous.
    """

    held: Sequence[Any]
    address: NDArray[np.int64]
    rows: NDArray[np.int64]
    itemsize: NDArray[np.int8]
    strides: NDArray[np.int64]
    layers: int
    topk: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Spans of destination rows and the geometry of the destination.

    ``bounds`` int64 [spans + 1]; ``first`` int64 [spans], relative to the span's begin; ``missing`` int64 [spans]:
    addresses of bool [rows] masks (0 = none missing), or [0] where no span has any; ``layer_of`` int64 [layers]: the
    source's layer for each layer of the destination; the strides count elements.
    """

    sources: Sources
    bounds: NDArray[np.int64]
    first: NDArray[np.int64]
    missing: NDArray[np.int64]
    missing_held: Sequence[Any] | None
    layer_of: NDArray[np.int64]
    dtype: np.dtype[Any]
    row_stride: int
    layer_stride: int

    @property
    def total_rows(self) -> int:
        """Return the number of destination rows."""
        return int(self.bounds[-1])

    @property
    def row_bytes(self) -> int:
        """Return the bytes that one destination row takes over all its layers."""
        return len(self.layer_of) * self.sources.topk * self.dtype.itemsize


@functools.lru_cache(maxsize=4)
def dummy_block(layers: int, topk: int, dtype: np.dtype[Any], nbytes: int) -> NDArray[Any]:
    """Return the template of the fills: read-only dummy rows ``[n, layers, topk]``, at least one and about ``nbytes``.

    A constant, so it is kept (a call of a few rows would spend a fifth of its time on it); nothing can write to it.
    """
    block = np.empty((max(1, nbytes // (layers * topk * dtype.itemsize)), layers, topk), dtype)
    block[:] = np.arange(topk, dtype=dtype)
    block.flags.writeable = False
    return block


@functools.lru_cache(maxsize=4)
def dummy_bytes(layers: int, topk: int, dtype: np.dtype[Any]) -> NDArray[np.uint8]:
    """Return the template of the kernels' fills as bytes: read-only ``[n, layers, topk * itemsize]``."""
    return dummy_block(layers, topk, dtype, KERNEL_TEMPLATE_BYTES).view(np.uint8)


def row_major(
    sources: Sources,
    bounds: NDArray[np.int64],
    first: NDArray[np.int64],
    dtype: np.dtype[Any],
    missing: Sequence[Any] | None = None,
) -> Plan:
    """Return the plan of a rectangle or a pack: rows ``[layers, topk]`` one after the other."""
    if missing is None:
        addresses = _NO_ADDRESSES
    else:
        found = (0 if mask is None else address_of(mask) for mask in missing)
        addresses = np.fromiter(found, np.int64, len(missing))
    return Plan(
        sources=sources,
        bounds=bounds,
        first=first,
        missing=addresses,
        missing_held=missing,
        layer_of=np.arange(sources.layers),
        dtype=dtype,
        row_stride=sources.layers * sources.topk,
        layer_stride=sources.topk,
    )


def address_of(array: Any) -> int:
    """Return the address of the first element of an ndarray (1 us) or CPU tensor (0.1 us); it keeps nothing alive.

    ``__array_interface__`` is no faster, and each reading of it interns a string: with many trajectories the table of
    such strings outgrows what a call may use.
    """
    return int(array.data_ptr() if is_tensor(array) else array.ctypes.data)


def cut_pieces(plan: Plan, out: NDArray[Any], threads: int, align: int) -> NDArray[np.int64]:
    """Return the work items, int64 [pieces, 4]: first row, end row, the span of the first row, and the item's number.

    Pieces hold equal bytes, whole multiples of ``align`` in the addresses of ``out`` (rounded to rows), and are
    **dealt** like cards: both executors give each thread a contiguous run of items, so that thread t gets pieces t,
    t + threads, ... and long trajectories that lie side by side fall to all of them.
    """
    total = plan.total_rows
    if threads == 1 or total < 2:
        return np.array([[0, total, 0, 0]])
    nbytes, base_address = total * plan.row_bytes, address_of(out)
    step = min(max(1, nbytes // (threads * PIECES_A_THREAD * align)), PIECE_UNITS) * align
    begin = base_address // align * align + step
    inner = -(-(np.arange(begin, base_address + nbytes, step) - base_address) // plan.row_bytes)
    edges = np.unique(np.concatenate(([0, total], inner)))
    low, high = edges[:-1], edges[1:]
    span = np.searchsorted(plan.bounds, low, side="right") - 1
    pieces = np.stack((low, high, span, np.arange(len(low))), axis=1)
    return np.concatenate([pieces[thread::threads] for thread in range(threads)])
