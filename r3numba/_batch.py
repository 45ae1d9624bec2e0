"""What rectangle and pack share: the checked request, the destination, and sources that lie in an earlier batch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ._checks import (
    as_array,
    canonical_dtype,
    dummy_fits,
    experts_dtype,
    host_array,
    integer_vector,
    kind,
    not_negative,
)
from ._dispatch import execute
from ._memory import FreshMemory
from ._plan import Plan, Sources, address_of
from ._policy import Policy
from ._sources import effective, extent, read_missing, read_sources

if TYPE_CHECKING:
    from .audit import AuditOptions, RouteAudit


class Memory(Protocol):
    """Where a result may come from: fresh pages, or a buffer that an earlier batch gave back."""

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], mask_shape: tuple[int, ...], policy: Policy
    ) -> tuple[NDArray[Any], NDArray[np.bool_], bool]:
        """Return indices, mask, and whether the pages are fresh."""
        ...


FRESH = FreshMemory()
#: Extents are looked at in parts of so many trajectories, so that their arithmetic takes no memory that counts.
_PART = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """A batch that passed its checks: sources, ``lengths`` int64 [batch] in tokens, masks of missing rows, dtype.

    ``also_read`` are arrays, apart from the sources, that a destination may not overlap: a name for each list of them.
    """

    sources: Sources
    lengths: NDArray[np.int64]
    missing: Sequence[Any] | None
    dtype: np.dtype[Any]
    also_read: Sequence[tuple[str, Sequence[Any]]] = ()
    audit: AuditOptions | None = None

    @property
    def has_missing(self) -> NDArray[np.bool_] | None:
        """Return bool [batch]: which trajectories have missing rows; None where none has."""
        if self.missing is None:
            return None
        return np.fromiter((mask is not None for mask in self.missing), np.bool_, len(self.missing))


def read_request(
    routes: object,
    sequence_lengths: object,
    *,
    dtype: object,
    num_experts: int | None,
    moe_layers: object,
    missing: object,
    audit: object,
    out: object,
) -> Request:
    """Return the checked request of a public call; every fault of an input is raised here, before any write."""
    if audit is not False and audit is not True:
        raise TypeError(f"audit is a {kind(audit)}, need a bool")
    sources = read_sources(routes)
    lengths = integer_vector("sequence_lengths", sequence_lengths, len(sources.rows))
    long = sources.rows > lengths  # true for a negative length too
    if long.any():
        not_negative("sequence_lengths", lengths)
        index = int(np.argmax(long))
        raise ValueError(
            f"routes[{index}] has {int(sources.rows[index])} rows for a sequence of {int(lengths[index])} tokens"
        )
    result = _result_dtype(sources, dtype, num_experts)
    dummy_fits(sources.topk, result)
    masks = read_missing(missing, sources)
    options = None
    if audit or moe_layers is not None:
        from .audit import read_options  # an import that batches without an audit do not pay

        options = read_options(sources, num_experts, moe_layers)
    also_read = () if masks is None or out is None else (("missing", masks),)
    return Request(sources, lengths, effective(masks), result, also_read, options if audit else None)


def _result_dtype(sources: Sources, dtype: object, num_experts: object) -> np.dtype[Any]:
    """Return the dtype that the caller fixed, else the batch's widest; the values are never scanned for it."""
    needed = sources.dtype
    result = None if dtype is None else canonical_dtype("dtype", dtype)
    if num_experts is not None:
        count, by_experts = experts_dtype(num_experts, sources.topk)
        if result is None:
            result = by_experts
        elif result.itemsize < by_experts.itemsize:
            raise TypeError(f"dtype is {result}, need at least {by_experts} for num_experts = {count}")
    if result is None:
        return needed
    if result.itemsize < needed.itemsize:
        widest = int(np.argmax(sources.itemsize * (sources.rows > 0)))
        raise TypeError(f"the result's dtype is {result}, need at least {needed} (routes[{widest}] is {needed})")
    return result


def destination(
    out: object,
    shape: tuple[int, ...],
    mask_shape: tuple[int, ...],
    request: Request,
    memory: Memory,
    policy: Policy,
) -> tuple[NDArray[Any], NDArray[np.bool_], bool]:
    """Return the indices to write (``out`` where it was given and fits), the mask, and whether pages are fresh."""
    if out is None:
        return memory.empty(shape, request.dtype, mask_shape, policy)
    array = host_array("out", out, str(request.dtype))
    if array.dtype != request.dtype:
        raise TypeError(f"out has dtype {array.dtype}, need {request.dtype} (dtype= or num_experts= fixes another)")
    if array.shape != shape:
        raise ValueError(f"out has shape {list(array.shape)}, need {list(shape)}")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"out has strides {array.strides}, need a C-contiguous and aligned array")
    if not array.flags.writeable:
        raise ValueError("out is read-only, need a writable array")
    _refuse_overlap(array, request)
    return array, np.empty(mask_shape, np.bool_), False


def _refuse_overlap(out: NDArray[Any], request: Request) -> None:
    """Refuse an ``out`` inside whose bytes an input lies: the kernel reads while it writes."""
    begin = address_of(out)
    for first in range(0, len(request.lengths), _PART):
        low, end = extent(request.sources, slice(first, first + _PART))
        touching = (low < begin + out.nbytes) & (end > begin)
        if touching.any():
            raise ValueError(f"out overlaps routes[{first + int(np.argmax(touching))}], need memory of its own")
    for name, arrays in request.also_read:
        for index, array in enumerate(arrays):
            if array is not None and np.may_share_memory(as_array(array), out):
                which = name if len(arrays) == 1 and name != "missing" else f"{name}[{index}]"
                raise ValueError(f"out overlaps {which}, need memory of its own")


class RowViews(Sequence[Any]):
    """Views of rows of one array, each made when it is asked for, or None where a flag is False.

    The kernels need only the array to stay alive.
    """

    __slots__ = ("array", "begin", "flags", "rows")

    def __init__(
        self,
        array: NDArray[Any],
        begin: NDArray[np.int64],
        rows: NDArray[np.int64],
        flags: NDArray[np.bool_] | None = None,
    ) -> None:
        self.array, self.begin, self.rows, self.flags = array, begin, rows, flags

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if self.flags is not None and not self.flags[index]:
            return None
        return self.array[self.begin[index] : self.begin[index] + self.rows[index]]


def rows_of(array: NDArray[Any], begin: NDArray[np.int64], rows: NDArray[np.int64]) -> Sources:
    """Return sources inside ``array`` ``[total, layers, topk]``: ``rows[i]`` rows from row ``begin[i]`` on."""
    _, layers, topk = array.shape
    size = array.itemsize
    return Sources(
        held=RowViews(array, begin, rows),
        address=address_of(array) + begin * (layers * topk * size),
        rows=rows,
        itemsize=np.full(len(rows), size, np.int8),
        strides=np.empty((0, 3), np.int64),
        layers=layers,
        topk=topk,
        dtype=array.dtype,
    )


def masks_of(
    padding_mask: NDArray[np.bool_],
    begin: NDArray[np.int64],
    rows: NDArray[np.int64],
    has_missing: NDArray[np.bool_] | None,
) -> RowViews | None:
    """Return the masks of missing rows, as views of the flat ``padding_mask``: a captured True is a missing row."""
    if has_missing is None or not has_missing.any():
        return None
    return RowViews(padding_mask, begin, rows, has_missing)


def read_order(order: object, count: int) -> NDArray[np.int64]:
    """Return the trajectories that a ``select`` names, int64; repeats are allowed, negative ones are not."""
    picked = integer_vector("order", order)
    if not len(picked):
        raise ValueError("order is empty, need at least one trajectory")
    wrong = (picked < 0) | (picked >= count)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(f"order[{index}] is {int(picked[index])}, need 0 to {count - 1}")
    return picked


def tensor_of(array: NDArray[Any]) -> Any:
    """Return a torch tensor over the memory of ``array``, or an ImportError that names the extra."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("this needs torch: pip install 'r3numba[torch]', or use the .array beside it") from error
    return torch.from_numpy(array)


def carry_out(
    request: Request,
    plan: Plan,
    out: NDArray[Any],
    mask: NDArray[np.bool_],
    *,
    fresh: bool,
    num_threads: int | None,
    policy: Policy,
) -> RouteAudit | None:
    """Execute the plan of a request, with its audit in the same pass where one was asked for."""
    if request.audit is None:
        execute(plan, out, mask, fresh=fresh, num_threads=num_threads, policy=policy)
        return None
    from .audit import execute_audited

    return execute_audited(plan, out, mask, fresh=fresh, num_threads=num_threads, policy=policy, options=request.audit)
