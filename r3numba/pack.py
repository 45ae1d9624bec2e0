"""The pack: trajectories end to end, ``[sum(T_i), layers, topk]``, as variable-length attention takes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._batch import (
    FRESH,
    Memory,
    Request,
    carry_out,
    destination,
    masks_of,
    read_order,
    read_request,
    rows_of,
    tensor_of,
)
from ._dispatch import checked_num_threads
from ._memory import check_addressable
from ._plan import row_major
from ._policy import Policy, policy_from_environment
from .collate import Padding, RouteBatch, place, write_rectangle

if TYPE_CHECKING:
    from .audit import RouteAudit

_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PackedRoutes:
    """One batch of routes, packed, over one buffer that NumPy and torch share.

    Attributes
    ----------
    array : ndarray ``[sum(T_i), layers, topk]``, uint8, int16 or int32
        Expert ids; dummy routes where ``padding_mask`` is True.
    padding_mask : ndarray ``[sum(T_i)]``, bool
        True = the row is a dummy: uncaptured or missing (Megatron's polarity).
    offsets : ndarray ``[batch + 1]``, int64
        Where each trajectory begins, and the sum.
    captured_lengths : ndarray ``[batch]``, int64
        How many tokens of each trajectory came with a route.
    audit : RouteAudit or None
        The report, where ``audit=True`` asked for one; ``select`` and slices do not pass it on.

    Notes
    -----
    ``p[i]`` is the view ``[T_i, layers, topk]`` of one trajectory, ``p[a:b]`` a pack of some, over the same memory.
    Thread-safe to read. It pickles with protocol 5 out of band, uncopied.

    Examples
    --------
    >>> import numpy as np
    >>> packed = pack_routes([np.ones((1, 1, 2), np.uint8), np.ones((2, 1, 2), np.uint8)], [2, 2])
    >>> packed.cu_seqlens.tolist(), packed[0][:, 0].tolist()
    ([0, 2, 4], [[1, 1], [0, 1]])
    """

    array: NDArray[Any]
    padding_mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    captured_lengths: NDArray[np.int64]
    audit: RouteAudit | None = None
    _has_missing: NDArray[np.bool_] | None = None

    @property
    def indices(self) -> Any:
        """Return a torch tensor over the memory of ``array``; ImportError without torch (extra ``torch``)."""
        return tensor_of(self.array)

    @property
    def padding_mask_tensor(self) -> Any:
        """Return a torch bool tensor over the memory of ``padding_mask``; ImportError without torch."""
        return tensor_of(self.padding_mask)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Return ``offsets`` as the int32 array ``[batch + 1]`` that attention kernels take (a new array)."""
        return self.offsets.astype(np.int32)

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each trajectory, int64 ``[batch]`` (a new array)."""
        return np.diff(self.offsets)

    @property
    def missing(self) -> tuple[NDArray[np.bool_] | None, ...] | None:
        """Return the missing rows as they may be passed on: None, or for each trajectory None or bool ``[n_i]``."""
        masks = masks_of(self.padding_mask, self.offsets[:-1], self.captured_lengths, self._has_missing)
        return None if masks is None else tuple(masks)

    def select(self, order: Sequence[int] | ArrayLike, *, num_threads: int | None = None) -> PackedRoutes:
        """Return a new pack of the trajectories that ``order`` names, in one pass.

        Parameters
        ----------
        order : integers ``[new batch]``
            Trajectory numbers, 0 to batch - 1; repeats are allowed.
        num_threads : int, optional
            As in ``collate_routes``.

        Returns
        -------
        PackedRoutes
            A copy; mask and missing rows travel along, so that filtering and resampling keep routes with their
            trajectory.

        Raises
        ------
        TypeError, ValueError
            If ``order`` holds anything but integers in that range, or nothing.
        MemoryError
            As ``collate_routes``.
        """
        request = self._request(read_order(order, len(self)))
        return write_pack(request, None, num_threads, FRESH, policy_from_environment())

    def pad(
        self,
        *,
        padding: Padding | None = None,
        starts: Sequence[int] | ArrayLike | None = None,
        max_length: int | None = None,
        out: Any = None,
        num_threads: int | None = None,
    ) -> RouteBatch:
        """Return the same trajectories as a rectangle; arguments and errors as in ``collate_routes``."""
        if not len(self):
            raise ValueError("the pack is empty, need at least one trajectory")
        request = self._request(np.arange(len(self)))
        columns, width = place(request.lengths, padding, starts, max_length)
        return write_rectangle(request, columns, width, out, num_threads, FRESH, policy_from_environment())

    def _request(self, picked: NDArray[np.int64]) -> Request:
        begin, rows = self.offsets[picked], self.captured_lengths[picked]
        flags = None if self._has_missing is None else self._has_missing[picked]
        return Request(
            sources=rows_of(self.array, begin, rows),
            lengths=self.offsets[picked + 1] - begin,
            missing=masks_of(self.padding_mask, begin, rows, flags),
            dtype=self.array.dtype,
            also_read=(("the pack", [self.array]), ("the pack's mask", [self.padding_mask])),
        )

    @overload
    def __getitem__(self, index: SupportsIndex) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> PackedRoutes: ...
    def __getitem__(self, index: SupportsIndex | slice) -> NDArray[Any] | PackedRoutes:
        if not isinstance(index, slice):
            number = operator.index(index)
            if not -len(self) <= number < len(self):
                raise IndexError(f"trajectory {number} of a pack of {len(self)}")
            number %= len(self)
            return self.array[self.offsets[number] : self.offsets[number + 1]]
        begin, end, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a pack is sliced with step {step}, need 1: use select for any other order")
        end = max(begin, end)
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return PackedRoutes(
            array=self.array[low:high],
            padding_mask=self.padding_mask[low:high],
            offsets=self.offsets[begin : end + 1] - low,
            captured_lengths=self.captured_lengths[begin:end],
            _has_missing=None if self._has_missing is None else self._has_missing[begin:end],
        )

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.captured_lengths)

    def __repr__(self) -> str:
        return f"PackedRoutes(batch={len(self)}, shape={list(self.array.shape)}, dtype={self.array.dtype})"

    def __reduce__(self) -> tuple[type[PackedRoutes], tuple[Any, ...]]:
        return PackedRoutes, (
            self.array, self.padding_mask, self.offsets, self.captured_lengths, self.audit, self._has_missing
        )  # fmt: skip


def pack_routes(
    routes: Sequence[Any],
    sequence_lengths: Sequence[int] | ArrayLike,
    *,
    dtype: Any = None,
    num_experts: int | None = None,
    moe_layers: Any = None,
    missing: Sequence[Any] | None = None,
    audit: bool = False,
    out: Any = None,
    num_threads: int | None = None,
    _policy: Policy | None = None,
    _memory: Memory = FRESH,
) -> PackedRoutes:
    """Collate the routes of a batch end to end, ``[sum(T_i), layers, topk]``.

    Trajectory i occupies rows ``offsets[i]`` to ``offsets[i + 1]``: its routes, then dummy routes for its uncaptured
    suffix, so that the next one begins where its tokens begin.

    Parameters
    ----------
    routes, sequence_lengths, dtype, num_experts, moe_layers, missing, audit, num_threads
        As in ``collate_routes``.
    out : ndarray or CPU tensor ``[sum(T_i), layers, topk]``, optional
        Where to write: exact shape and dtype, C-contiguous, writable, apart from the inputs.

    Returns
    -------
    PackedRoutes
        Over a new buffer from NumPy's allocator, or over ``out``.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As ``collate_routes``; a sum of more than 2^31 - 1 tokens is a ValueError, as ``cu_seqlens`` is int32.

    Notes
    -----
    Thread-safe as long as no two calls share ``out``. A refused call has written nothing.

    Examples
    --------
    >>> import numpy as np
    >>> pack_routes([np.ones((1, 1, 2), np.uint8), None], [2, 1]).padding_mask.tolist()
    [False, True, True]
    """
    policy = _policy or policy_from_environment()
    request = read_request(
        routes,
        sequence_lengths,
        dtype=dtype,
        num_experts=num_experts,
        moe_layers=moe_layers,
        missing=missing,
        audit=audit,
        out=out,
    )
    return write_pack(request, out, num_threads, _memory, policy)


def write_pack(request: Request, out: object, num_threads: object, memory: Memory, policy: Policy) -> PackedRoutes:
    """Return the pack of a checked request, by one plan and one execution."""
    threads = checked_num_threads(num_threads)
    sources = request.sources
    total = float(request.lengths.sum(dtype=np.float64))  # exact far beyond the limit, and it cannot wrap
    if total > _INT32_MAX:
        raise ValueError(
            f"sequence_lengths sum to {int(total)} tokens, need at most {_INT32_MAX} (cu_seqlens is int32)"
        )
    offsets = np.zeros(len(request.lengths) + 1, np.int64)
    np.cumsum(request.lengths, out=offsets[1:])
    shape = (int(offsets[-1]), sources.layers, sources.topk)
    check_addressable(shape, request.dtype)
    array, mask, fresh = destination(out, shape, shape[:1], request, memory, policy)
    plan = row_major(sources, offsets, np.zeros(len(request.lengths), np.int64), request.dtype, request.missing)
    audit = carry_out(request, plan, array.reshape(-1), mask, fresh=fresh, num_threads=threads, policy=policy)
    return PackedRoutes(array, mask, offsets, sources.rows, audit, request.has_missing)
