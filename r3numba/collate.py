"""The rectangle: one batch of routes ``[batch, max_length, layers, topk]``, left-padded, right-padded or placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
from ._checks import integer, integer_vector, kind, not_negative
from ._dispatch import checked_num_threads
from ._memory import check_addressable
from ._plan import row_major
from ._policy import Policy, policy_from_environment

if TYPE_CHECKING:
    from .audit import RouteAudit

Padding = Literal["left", "right"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RouteBatch:
    """One batch of routes as a rectangle, over one buffer that NumPy and torch share.

    Attributes
    ----------
    array : ndarray ``[batch, max_length, layers, topk]``, uint8, int16 or int32
        Expert ids; dummy routes where ``padding_mask`` is True.
    padding_mask : ndarray ``[batch, max_length]``, bool
        True = the row is a dummy: padding, uncaptured, or missing (Megatron's polarity).
    sequence_lengths, captured_lengths : ndarray ``[batch]``, int64
        Tokens of each trajectory, and how many of them came with a route.
    starts : ndarray ``[batch]``, int64
        The column of each trajectory's token 0.
    audit : RouteAudit or None
        The report, where ``audit=True`` asked for one; ``select`` does not pass it on.

    Notes
    -----
    Thread-safe to read. Nothing in it is copied by ``indices``, ``padding_mask_tensor`` or ``missing``. It pickles
    with protocol 5 out of band, uncopied.

    Examples
    --------
    >>> import numpy as np
    >>> batch = collate_routes([np.ones((2, 1, 2), np.uint8), None], [3, 1])
    >>> batch.array[:, :, 0].tolist()
    [[[1, 1], [1, 1], [0, 1]], [[0, 1], [0, 1], [0, 1]]]
    >>> batch.padding_mask.tolist()
    [[False, False, True], [True, True, True]]
    """

    array: NDArray[Any]
    padding_mask: NDArray[np.bool_]
    sequence_lengths: NDArray[np.int64]
    captured_lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
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
    def missing(self) -> tuple[NDArray[np.bool_] | None, ...] | None:
        """Return the missing rows as they may be passed on: None, or for each trajectory None or bool ``[n_i]``."""
        masks = masks_of(self.padding_mask.reshape(-1), self._begin(), self.captured_lengths, self._has_missing)
        return None if masks is None else tuple(masks)

    def select(self, order: Sequence[int] | ArrayLike, *, num_threads: int | None = None) -> RouteBatch:
        """Return a new batch of the trajectories that ``order`` names, in one pass.

        Parameters
        ----------
        order : integers ``[new batch]``
            Trajectory numbers, 0 to batch - 1; repeats are allowed.
        num_threads : int, optional
            As in ``collate_routes``.

        Returns
        -------
        RouteBatch
            A copy, of the same width; mask and missing rows travel along.

        Raises
        ------
        TypeError, ValueError
            If ``order`` holds anything but integers in that range, or nothing.
        MemoryError
            As ``collate_routes``.
        """
        picked = read_order(order, len(self.array))
        begin, rows = self._begin()[picked], self.captured_lengths[picked]
        flags = None if self._has_missing is None else self._has_missing[picked]
        request = Request(
            sources=rows_of(self.array.reshape(-1, *self.array.shape[2:]), begin, rows),
            lengths=self.sequence_lengths[picked],
            missing=masks_of(self.padding_mask.reshape(-1), begin, rows, flags),
            dtype=self.array.dtype,
        )
        return write_rectangle(
            request, self.starts[picked], self.array.shape[1], None, num_threads, FRESH, policy_from_environment()
        )

    def _begin(self) -> NDArray[np.int64]:
        """Return where each trajectory's token 0 lies among all rows, int64 [batch]."""
        begin: NDArray[np.int64] = np.arange(len(self.array)) * self.array.shape[1] + self.starts
        return begin

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"RouteBatch(shape={list(self.array.shape)}, dtype={self.array.dtype})"

    def __reduce__(self) -> tuple[type[RouteBatch], tuple[Any, ...]]:
        return RouteBatch, (
            self.array, self.padding_mask, self.sequence_lengths, self.captured_lengths, self.starts, self.audit,
            self._has_missing,
        )  # fmt: skip


def collate_routes(
    routes: Sequence[Any],
    sequence_lengths: Sequence[int] | ArrayLike,
    *,
    padding: Padding | None = None,
    starts: Sequence[int] | ArrayLike | None = None,
    max_length: int | None = None,
    dtype: Any = None,
    num_experts: int | None = None,
    moe_layers: Any = None,
    missing: Sequence[Any] | None = None,
    audit: bool = False,
    out: Any = None,
    num_threads: int | None = None,
    _policy: Policy | None = None,
    _memory: Memory = FRESH,
) -> RouteBatch:
    """Collate the routes of a batch into one rectangle ``[batch, max_length, layers, topk]``.

    Row i holds dummy routes before the first token, then the routes of trajectory i, then dummy routes for its
    uncaptured suffix and whatever follows. Every cell is written once, by as few threads as pay.

    Parameters
    ----------
    routes : sequence of ndarray or CPU tensor ``[n_i, layers, topk]``, uint8, int16 or int32, or None
        The captured rows of each trajectory, from its first token; strided, read-only and mixed dtypes are fine.
        None, or no rows, means nothing captured. They are only read.
    sequence_lengths : integers ``[batch]``
        All tokens of each trajectory; ``n_i <= sequence_lengths[i]``.
    padding : {"left", "right"}, default "left"
        On which side the tokens of shorter trajectories are padded.
    starts : integers ``[batch]``, optional
        The column of each token 0, instead of ``padding`` (prompts left-padded and responses right-padded:
        ``max(prompt_lengths) - prompt_lengths``).
    max_length : int, optional
        Width in tokens; by default the least that holds every trajectory.
    dtype : dtype, optional
        uint8, int16 or int32 (NumPy's or torch's); by default the widest of the batch.
    num_experts : int, optional
        Experts of a layer; fixes the dtype to the one that every rank derives from it.
    moe_layers : bool ``[layers]``, optional
        Which layers have experts, for the audit: dense ones are all zero by design.
    missing : sequence of None or bool ``[n_i]``, optional
        Rows inside the captured part that the engine did not record (True); they become dummies.
    audit : bool
        Whether to audit the routes in the same pass; the report is the result's ``audit``, and nothing is raised.
    out : ndarray or CPU tensor, optional
        Where to write: exact shape and dtype, C-contiguous, writable, apart from the inputs.
    num_threads : int, optional
        At most this many threads, bounded by the permitted CPUs; by default ``topology.plan_threads`` decides.

    Returns
    -------
    RouteBatch
        Over a new buffer from NumPy's allocator, or over ``out``.

    Raises
    ------
    TypeError
        For a wrong type or dtype, a device tensor, or a result dtype narrower than an input.
    ValueError
        For a wrong value or shape; the message names the trajectory.
    MemoryError
        Where the result cannot fit in what the container may still use (checked for new results above 256 MiB).

    Notes
    -----
    A refused call has written nothing. Thread-safe as long as no two calls share ``out``; the GIL is released while
    bytes move. The mask's polarity is Megatron-core's code, where True means padding.

    Examples
    --------
    >>> import numpy as np
    >>> routes = [np.array([[[3, 1]], [[2, 0]]], np.uint8), np.array([[[1, 2]]], np.uint8)]
    >>> collate_routes(routes, [3, 2]).array[:, :, 0].tolist()
    [[[3, 1], [2, 0], [0, 1]], [[0, 1], [1, 2], [0, 1]]]
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
    columns, width = place(request.lengths, padding, starts, max_length)
    return write_rectangle(request, columns, width, out, num_threads, _memory, policy)


def place(
    lengths: NDArray[np.int64], padding: object, starts: object, max_length: object
) -> tuple[NDArray[np.int64] | None, int]:
    """Return the column of each token 0, int64 [batch] (None = padded on the left), and the width in tokens."""
    if not (padding is None or isinstance(padding, str)):
        raise TypeError(f"padding is a {kind(padding)}, need 'left' or 'right'")
    if padding not in (None, "left", "right"):
        raise ValueError(f"padding is {padding!r}, need 'left' or 'right'")
    ends = lengths
    columns = None
    if starts is not None:
        if padding is not None:
            raise ValueError(f"starts and padding = {padding!r} exclude each other")
        columns = integer_vector("starts", starts, len(lengths))
        not_negative("starts", columns)
        ends = columns + lengths
        if int(ends.min()) < 0:  # the sum wrapped
            index, most = int(np.argmin(ends)), int(np.iinfo(np.int64).max)
            raise ValueError(
                f"starts[{index}] is {int(columns[index])}, need at most {most - int(lengths[index])} "
                f"for a sequence of {int(lengths[index])} tokens"
            )
    width = int(ends.max())
    if max_length is not None:
        asked = integer("max_length", max_length, 0)
        if asked < width:
            index = int(np.argmax(ends > asked))
            raise ValueError(f"max_length is {asked}, need at least {int(ends[index])} for trajectory {index}")
        width = asked
    if padding == "right":
        columns = np.zeros_like(lengths)
    return columns, width


def write_rectangle(
    request: Request,
    columns: NDArray[np.int64] | None,
    width: int,
    out: object,
    num_threads: object,
    memory: Memory,
    policy: Policy,
) -> RouteBatch:
    """Return the rectangle of a checked request, by one plan and one execution."""
    threads = checked_num_threads(num_threads)
    sources = request.sources
    batch = len(sources.rows)
    shape = (batch, width, sources.layers, sources.topk)
    check_addressable(shape, request.dtype)
    if columns is None:
        columns = width - request.lengths
    array, mask, fresh = destination(out, shape, shape[:2], request, memory, policy)
    plan = row_major(sources, np.arange(batch + 1) * width, columns, request.dtype, request.missing)
    audit = carry_out(
        request, plan, array.reshape(-1), mask.reshape(-1), fresh=fresh, num_threads=threads, policy=policy
    )
    return RouteBatch(array, mask, request.lengths, sources.rows, columns, audit, request.has_missing)
