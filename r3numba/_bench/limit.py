"""The limit of this host: the fastest copy and fill found for the same mix of bytes, with no layout logic at all.

Each candidate copies ``copied`` bytes and fills ``filled`` bytes of one destination, on 1 or 2 threads, into fresh huge
pages or warm memory. The limit is the best candidate; ``share of limit`` = limit / ours.

``libc`` hands each part to ``memmove`` and ``memset`` whole, so that the C library is free to stream; ``blocks``
walks it in pieces of 2 MiB, copied by the kernels' own memcpy and filled from a template that stays in cache;
``streams`` does both with streaming stores, where the host has them.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._dispatch import kernels, streams
from .._plan import address_of
from .._policy import DEFAULT_POLICY
from .measure import Task, Timing

Move = Callable[[int, int, int, int], None]
CANDIDATES: Final = ("libc", "blocks", "streams")
#: The fill's template: it stays in the first-level cache.
_TEMPLATE_BYTES: Final = 16 << 10
HUGE_PAGE: Final = 2 << 20
MEMORY_KINDS: Final = ("fresh", "warm")
THREAD_COUNTS: Final = (1, 2)


def _libc_move(destination: int, source: int, copied: int, filled: int) -> None:
    ctypes.memmove(destination, source, copied)
    ctypes.memset(destination + copied, 7, filled)


def _blocks_move() -> Move:
    """Compile the candidate that walks in blocks; ctypes and the kernel both release the GIL."""
    from .. import _numba

    template = np.arange(_TEMPLATE_BYTES, dtype=np.int64).astype(np.uint8)
    copy_bytes, block, fill = _numba.copy_bytes, HUGE_PAGE, _TEMPLATE_BYTES

    @_numba.jit(parallel=False)
    def walk(destination: int, source: int, copied: int, filled: int, pattern: int) -> None:
        for begin in range(0, copied, block):
            copy_bytes(destination + begin, source + begin, min(block, copied - begin))
        for begin in range(0, filled, fill):
            copy_bytes(destination + copied + begin, pattern, min(fill, filled - begin))

    def move(destination: int, source: int, copied: int, filled: int) -> None:
        walk(destination, source, copied, filled, address_of(template))

    return move


def _streams_move() -> Move:
    """Compile the candidate with streaming stores, without plan, pieces and spans."""
    from .. import _numba, _streaming

    template = np.arange(_TEMPLATE_BYTES, dtype=np.int64).astype(np.uint8)
    stream_run, fence, fill = _streaming.stream_run, _streaming.fence, _TEMPLATE_BYTES

    @_numba.jit(parallel=False)
    def walk(destination: int, source: int, copied: int, filled: int, pattern: int) -> None:
        stream_run(destination, 1, source, 1, copied)
        for begin in range(0, filled, fill):
            stream_run(destination + copied + begin, 1, pattern, 1, min(fill, filled - begin))
        fence()

    def move(destination: int, source: int, copied: int, filled: int) -> None:
        walk(destination, source, copied, filled, address_of(template))

    return move


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Return uninitialised bytes that begin on a huge page, so that no edge of them is made of small pages."""
    room = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    raw = np.empty(room + HUGE_PAGE, np.uint8)
    skip = -address_of(raw) % HUGE_PAGE
    return raw[skip : skip + room]


class Limit:
    """The tasks that measure the limit for one mix; a context manager that ends its pool. One thread uses it.

    Parameters
    ----------
    copied, filled : int
        Bytes that the layout copies from captured routes, and fills with dummies.
    """

    def __init__(self, copied: int, filled: int) -> None:
        self.copied = copied
        self.filled = filled
        self._source = aligned_buffer(copied)
        self._source[:] = 3
        self._warm: NDArray[np.uint8] | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="r3numba-limit")
        self._moves: dict[str, Move] = {"libc": _libc_move}
        if kernels() is not None:
            self._moves["blocks"] = _blocks_move()
        if streams(0, fresh=False, policy=replace(DEFAULT_POLICY, path="streaming")):
            self._moves["streams"] = _streams_move()

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        self._warm = None

    def tasks(self, thread_counts: Iterable[int] = THREAD_COUNTS) -> list[Task]:
        """Return one task for each candidate, kind of memory and thread count (1 or 2)."""
        return [
            Task(
                f"limit_{memory}_{threads}_{candidate}",
                self._runner(move, memory == "fresh", threads),
                cold_bytes=self.copied + self.filled if memory == "fresh" else 0,
                threads=threads,
            )
            for memory in MEMORY_KINDS
            for threads in thread_counts
            for candidate, move in self._moves.items()
        ]

    def _runner(self, move: Move, fresh: bool, threads: int) -> Callable[[], Any]:
        def run() -> NDArray[np.uint8]:
            if fresh:
                destination = aligned_buffer(self.copied + self.filled)
            else:
                if self._warm is None:
                    self._warm = aligned_buffer(self.copied + self.filled)
                destination = self._warm
            self._move(move, address_of(destination), threads)
            return destination

        return run

    def _move(self, move: Move, destination: int, threads: int) -> None:
        """Give each thread an equal part of the copy and of the fill, cut on huge pages."""
        source = address_of(self._source)
        middle = (self.copied // 2 + self.filled // 2) // HUGE_PAGE * HUGE_PAGE if threads == 2 else 0
        total = self.copied + self.filled
        if not middle:
            move(destination, source, self.copied, self.filled)
            return
        first_copied = min(self.copied, round(middle * self.copied / total))
        parts = (
            (destination, source, first_copied, middle - first_copied),
            (destination + middle, source + first_copied, self.copied - first_copied,
             total - middle - (self.copied - first_copied)),
        )  # fmt: skip
        other = self._pool.submit(move, *parts[1])
        move(*parts[0])
        other.result()


def limit_of(timings: dict[str, Timing], memory: str, threads: int) -> Timing | None:
    """Return the best candidate's timing for one kind of memory and thread count; None where none was measured."""
    found = [timing for name, timing in timings.items() if name.startswith(f"limit_{memory}_{threads}_")]
    return min(found, key=lambda timing: timing.median, default=None)
