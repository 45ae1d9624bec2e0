"""Collation over recycled buffers: one collator for each training loop."""

from __future__ import annotations

from typing import Any

from ._checks import integer
from ._memory import RecycledMemory
from .collate import RouteBatch, collate_routes
from .pack import PackedRoutes, pack_routes


class RouteCollator:
    """Collates like ``collate_routes`` and ``pack_routes``, into buffers that earlier batches gave back.

    Fresh pages cost more than the copy; a recycled buffer has none. A buffer is used again only after everything that
    shares its memory is gone: batch, arrays, views, tensors, DLPack capsules, pickle-5 buffers. So a batch never
    changes under its owner, and a loop that keeps its batches gets a new buffer for each.

    Parameters
    ----------
    max_bytes : int, optional
        The most that idle buffers may hold, in bytes. Without it too nothing is hoarded: idle buffers that are too
        small for a batch are freed when a larger one is made, one that 16 calls had no use for is freed, and so is one
        that is more than twice as large as all of the last 16 batches.

    Notes
    -----
    Thread-safe. An asynchronous reader (a non-blocking copy to a device) must hold the batch until its copy is done:
    no reference counts what a device still reads.

    Examples
    --------
    >>> import numpy as np
    >>> collator = RouteCollator()
    >>> batch = collator.collate_routes([np.ones((2, 1, 2), np.uint8)], [3])
    >>> address = batch.array.ctypes.data
    >>> del batch
    >>> collator.collate_routes([np.ones((2, 1, 2), np.uint8)], [3]).array.ctypes.data == address
    True
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._memory = RecycledMemory(None if max_bytes is None else integer("max_bytes", max_bytes, 0))

    def collate_routes(self, routes: Any, sequence_lengths: Any, **options: Any) -> RouteBatch:
        """Collate as ``r3numba.collate_routes`` does, with the same arguments and errors."""
        return collate_routes(routes, sequence_lengths, _memory=self._memory, **options)

    def pack_routes(self, routes: Any, sequence_lengths: Any, **options: Any) -> PackedRoutes:
        """Pack as ``r3numba.pack_routes`` does, with the same arguments and errors."""
        return pack_routes(routes, sequence_lengths, _memory=self._memory, **options)

    @property
    def idle_bytes(self) -> int:
        """Return the bytes that idle buffers hold now."""
        return self._memory.idle_bytes

    def clear(self) -> None:
        """Free idle buffers now, and each one on loan when it comes back. Live batches are untouched."""
        self._memory.clear()
