"""Every threshold of the library, in one frozen record (standard library alone).

The figures were measured; the comment beside each says what set it. A test or a user forces a path with
``R3NUMBA_POLICY`` or the private ``_policy=`` argument; nothing else in the package compares sizes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

PathName = Literal["parallel", "pool", "serial", "slices", "streaming"]

MEGABYTE: Final = 1_000_000
MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds that choose a path and a thread count. All sizes are bytes of the result."""

    #: A second thread costs more than it saves below these (fresh pages fault; recycled ones do not).
    serial_below_fresh: int = 8 * MEGABYTE
    serial_below_recycled: int = 3 * MEGABYTE
    #: More threads than one per 32 MB, or than eight, never won on any host reported (192 cores included).
    bytes_per_thread: int = 32 * MEGABYTE
    thread_cap: int = 8
    #: From here on the memory bus is the limit and half of the cap is as fast.
    half_cap_from: int = 16_000 * MEGABYTE
    #: The NumPy fallback on two threads: slower at 38 MB, faster at 101 MB (the interpreter's part is not parallel).
    slices_serial_below: int = 64 * MEGABYTE
    #: A new allocation above this is first compared with what the container may still use.
    memory_check_from: int = 256 * MEBIBYTE
    #: Quotas change while a process lives; they are read again after this many seconds.
    topology_seconds: float = 1.0
    #: Work is cut on multiples of this in addresses, a huge page: two threads that share one wait for each other's
    #: page fault (101 MB on two threads: 15 ms in unaligned 1 MiB pieces, 9.7 ms in aligned ones).
    piece_align: int = 2 * MEBIBYTE
    #: Streaming stores write recycled or caller-owned memory from this size on; below, the caches hold a result until
    #: it is read. None = never, not even where the path is forced.
    stream_from: int | None = 32 * MEGABYTE
    #: A run of fewer bytes gets plain stores all the same: 1.5 KB runs took 1.4 to 1.8 times as long streamed, 12 KB as
    #: long, 49 KB 0.75 times.
    stream_run_from: int = 16 << 10
    #: Force one path at any size (the thread count is not forced).
    path: PathName | None = None


DEFAULT_POLICY: Final = Policy()

_FORCED: Final = {
    "force_parallel": "parallel",
    "force_pool": "pool",
    "force_serial": "serial",
    "force_slices": "slices",
    "force_streaming": "streaming",
}
_SWITCH: Final = ("", "0", "1")


def policy_from_environment() -> Policy:
    """Return the default policy, with the path that ``R3NUMBA_POLICY`` forces; ``R3NUMBA_STREAMING=0`` bars streaming.

    Raises
    ------
    ValueError
        If ``R3NUMBA_POLICY`` or ``R3NUMBA_STREAMING`` holds an unknown word.
    """
    word, switch = os.environ.get("R3NUMBA_POLICY", ""), os.environ.get("R3NUMBA_STREAMING", "")
    if not word and not switch:
        return DEFAULT_POLICY
    if word and word not in _FORCED:
        raise ValueError(f"R3NUMBA_POLICY is {word!r}, need one of {', '.join(_FORCED)}")
    if switch not in _SWITCH:
        raise ValueError(f"R3NUMBA_STREAMING is {switch!r}, need 0 or 1")
    return replace(
        DEFAULT_POLICY,
        path=cast(PathName, _FORCED[word]) if word else None,
        stream_from=None if switch == "0" else DEFAULT_POLICY.stream_from,
    )
