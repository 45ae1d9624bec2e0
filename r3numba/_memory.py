"""Where results live: NumPy's allocator, a check against the container's limit, and buffers that are used again.

NumPy asks the kernel for huge pages (torch's allocator does not), which halves the cost of a first touch; that is why
the result is a NumPy array that torch shares, and not the other way round.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ._plan import LINE
from ._policy import Policy
from .topology import cgroup_memory_available

#: A buffer is kept for this many calls without a use for it, and taken back while it is at most ``_OVERSIZE`` times the
#: largest batch of as many calls: one long batch, or one evaluation that holds many, leaves nothing behind for good.
_IDLE_CALLS = 16
_OVERSIZE = 2
_ADDRESSABLE = 1 << 62  # no address space is larger, and a plan's int64 arithmetic holds below it


def check_room(nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any], policy: Policy, freed: int = 0) -> None:
    """Raise MemoryError, with both figures, where a new allocation cannot fit in what the container may still use.

    ``freed`` bytes of ours will be given back before it. Only above
    ``policy.memory_check_from``; R3NUMBA_MEMORY_CHECK=0 turns it off.
    """
    if nbytes <= policy.memory_check_from or os.environ.get("R3NUMBA_MEMORY_CHECK", "1") == "0":
        return
    available = cgroup_memory_available()
    if available is not None and nbytes > available + freed:
        _refuse(nbytes, shape, dtype, available + freed)


def _refuse(nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any], available: int) -> NoReturn:
    raise MemoryError(
        f"a batch of shape {list(shape)} ({dtype}) needs {nbytes:,} bytes, "
        f"but only {available:,} bytes can still be allocated here"
    )


def check_addressable(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise MemoryError, with both figures, for a result that no address space holds (its plan would overflow)."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > _ADDRESSABLE:
        _refuse(nbytes, shape, dtype, cgroup_memory_available() or _ADDRESSABLE)


class FreshMemory:
    """Allocates each batch anew. Thread-safe: it holds nothing."""

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], mask_shape: tuple[int, ...], policy: Policy
    ) -> tuple[NDArray[Any], NDArray[np.bool_], bool]:
        """Return uninitialised indices and mask, and True: their pages are fresh."""
        check_room(math.prod(shape) * dtype.itemsize + math.prod(mask_shape), shape, dtype, policy)
        return np.empty(shape, dtype), np.empty(mask_shape, np.bool_), True


class _Owner:
    """Owns a loan of a recycled buffer. It is no array on purpose.

    NumPy collapses a chain of views to the last ndarray in it, subclasses skipped, so that an array cannot own memory
    for its views: the buffer came back under eight of eight kinds of live view. An object that only exposes
    ``__array_interface__`` stays the base of every view, tensor and DLPack capsule made from it.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self.__array_interface__ = buffer.__array_interface__


class RecycledMemory:
    """Lends buffers and takes each back after everything that shares its memory is gone. Thread-safe.

    A new buffer has the size of its batch, no more, and those without use are freed (``_IDLE_CALLS``): skewed sizes pay
    for a new one now and then, about one call in eight at the widest spread that docs/performance.md counts.

    Parameters
    ----------
    max_bytes : int or None
        The most that idle buffers may hold; None = no bound. Buffers on loan do not count.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # a finalizer may run inside our own locked region
        self._idle: list[tuple[NDArray[np.uint8], int]] = []  # and the number of calls when it came back
        self._calls = 0
        self._recent: deque[int] = deque(maxlen=_IDLE_CALLS)  # bytes that the last calls needed
        self._generation = 0

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], mask_shape: tuple[int, ...], policy: Policy
    ) -> tuple[NDArray[Any], NDArray[np.bool_], bool]:
        """Return uninitialised indices and mask over one lent buffer, and whether its pages are fresh."""
        indices_bytes = math.prod(shape) * dtype.itemsize
        mask_bytes = math.prod(mask_shape)
        mask_begin = -(-indices_bytes // LINE) * LINE  # on a cache line of its own
        needed = max(1, mask_begin + mask_bytes)
        buffer = self._take(needed)
        fresh = buffer is None
        if buffer is None:
            check_room(needed, shape, dtype, policy, freed=self.idle_bytes)
            with self._lock:
                # What is idle is too small for this loop's batches: it would never be used again at full size.
                self._idle.clear()
            buffer = np.empty(needed, np.uint8)
        owner = _Owner(buffer)
        weakref.finalize(owner, self._give_back, buffer, self._generation).atexit = False
        lent = np.asarray(owner)
        indices = lent[:indices_bytes].view(dtype).reshape(shape)
        mask = lent[mask_begin : mask_begin + mask_bytes].view(np.bool_).reshape(mask_shape)
        return indices, mask, fresh

    def clear(self) -> None:
        """Free the idle buffers now, and each one on loan as soon as it comes back."""
        with self._lock:
            self._generation += 1
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Return the bytes that idle buffers hold."""
        with self._lock:
            return sum(buffer.nbytes for buffer, _ in self._idle)

    def _take(self, needed: int) -> NDArray[np.uint8] | None:
        """Return the smallest idle buffer that fits, the latest of equal ones, or None; free those of no use."""
        with self._lock:
            self._calls += 1
            self._recent.append(needed)
            fitting = [buffer for buffer, _ in reversed(self._idle) if buffer.nbytes >= needed]
            best = min(fitting, key=lambda buffer: buffer.nbytes, default=None)
            self._idle = [
                (buffer, since)
                for buffer, since in self._idle
                if buffer is not best and self._calls - since <= _IDLE_CALLS
            ]
            return best

    def _give_back(self, buffer: NDArray[np.uint8], generation: int) -> None:
        with self._lock:
            if generation != self._generation or buffer.nbytes > _OVERSIZE * max(self._recent):
                return
            idle = sum(other.nbytes for other, _ in self._idle)
            if self._max_bytes is None or idle + buffer.nbytes <= self._max_bytes:
                self._idle.append((buffer, self._calls))
