"""The audit: captures whose shape is right and whose content is not, and the mismatch figure of two captures.

Known corrupt captures: all zero (a hook that was never bound), zero prompt rows, zero layers of other pipeline stages,
one stale row repeated, ids out of range. Dense layers are zero by design, so ``moe_layers`` names the others; expert 0
is a real id, so a zero alone proves nothing, while several zeros in one row do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import _dispatch
from ._audit_slices import audit_pieces
from ._checks import host_array, integer, is_tensor, sequence
from ._plan import LINE, Plan, Sources, address_of, cut_pieces, row_major
from ._policy import Policy, policy_from_environment
from ._slices import move_pieces
from ._sources import effective, read_missing, read_sources
from ._tally import COLUMNS, DUPLICATE, LAYERS, RANGE, REPEATED, ZERO, ZERO_ROW, kind_of, step_of

#: Rows from which a repeated row counts as stale; reports tell of tens of them, and greedy loops stay below.
LONG_RUN: Final = 32
#: Rows are moved and looked at in blocks of this; what does not pass is looked at again while it lies in cache. 200 MB
#: of uint8, two threads, fresh and recycled: 28 and 19 ms in blocks of 16 KiB, 24 and 11 of 64 KiB, 21 and 10 of
#: 256 KiB, 24 and 10 of 1 MiB; source and copy of 256 KiB still fit any second-level cache.
AUDIT_BLOCK_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One kind of fault in one trajectory.

    Attributes
    ----------
    kind : str
        "out_of_range" (token and layer with such an id), "duplicate" (token and layer with an id twice), "zero" (token
        and layer), "zero_row" (tokens, every MoE layer zero), "zero_layer" (layers, every token zero), "repeated_row"
        (runs of ``LONG_RUN`` rows and more; a missing row ends one).
    trajectory, token, layer : int
        Where the first one is; -1 where the kind has no such coordinate.
    count : int
        How many there are.
    longest : int
        Rows of the longest run of "repeated_row", else 0.
    """

    kind: str
    trajectory: int
    token: int
    layer: int
    count: int
    longest: int = 0

    def __str__(self) -> str:
        what = {
            "out_of_range": "(token, layer) pairs with an id out of range",
            "duplicate": "(token, layer) pairs with an id twice",
            "zero": "(token, layer) pairs of zeros",
            "zero_row": "tokens with zeros in every layer",
            "zero_layer": "layers with zeros in every token",
            "repeated_row": f"runs of one repeated row, the longest of {self.longest} rows",
        }[self.kind]
        place = [f"token {self.token}"] * (self.token >= 0) + [f"layer {self.layer}"] * (self.layer >= 0)
        return f"routes[{self.trajectory}]: {self.count} {what}, first at {', '.join(place)}"


class CorruptRoutesError(ValueError):
    """Raised by ``RouteAudit.raise_if_bad``; ``audit`` is the report."""

    def __init__(self, message: str, audit: RouteAudit) -> None:
        super().__init__(message)
        self.audit = audit


@dataclass(frozen=True, slots=True)
class RouteAudit:
    """What an audit found.

    Attributes
    ----------
    findings : tuple of AuditFinding
        By trajectory; empty where nothing is wrong.
    trajectories, rows, layers, topk : int
        What was handed over; ``rows`` over all trajectories, missing ones too, ``layers`` without those that
        ``moe_layers`` leaves out.
    blind_spots : tuple of str
        What this audit could not see.

    Notes
    -----
    Thread-safe. An audit cannot see routes that are legal and wrong (shifted, or physical ids in place of logical
    ones): ``compare_routes`` with a second capture can.
    """

    findings: tuple[AuditFinding, ...]
    trajectories: int
    rows: int
    layers: int
    topk: int
    blind_spots: tuple[str, ...]

    def count(self, kind: str) -> int:
        """Return how many faults of a kind there are over all trajectories."""
        return sum(finding.count for finding in self.findings if finding.kind == kind)

    def raise_if_bad(self) -> None:
        """Raise CorruptRoutesError (a ValueError) with every finding, or do nothing."""
        if self.findings:
            shown = "\n".join(f"- {finding}" for finding in self.findings[:20])
            more = f"\n- and {len(self.findings) - 20} more" if len(self.findings) > 20 else ""
            raise CorruptRoutesError(f"the routes are corrupt:\n{shown}{more}", self)

    def __str__(self) -> str:
        head = f"{self.trajectories} trajectories, {self.rows} rows, {self.layers} layers, top-{self.topk}"
        lines = [str(finding) for finding in self.findings] or ["nothing found"]
        return "\n".join([head, *lines, *(f"not seen: {spot}" for spot in self.blind_spots)])


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The checked arguments of an audit: bool ``[layers]`` and the number of experts, if it was given."""

    moe_layers: NDArray[np.bool_]
    num_experts: int | None


@dataclass(frozen=True, slots=True)
class AuditTask:
    """What the kernels need of an audit, and where they count.

    ``keep`` uint64 [layers], all bits of a layer that counts; ``limit`` int64 [9], by item size the first id that is
    out of range; ``lines`` int64 [9, 3], by item size the kind of layers that are looked at by line (-1: they are not),
    the address of a row of bytes, not 0 for ids that count, which goes on for a line, and the bytes of a look;
    ``block``, rows.
    """

    options: AuditOptions
    keep: NDArray[np.uint64]
    limit: NDArray[np.int64]
    lines: NDArray[np.int64]
    lines_held: list[NDArray[np.uint8]]
    block: int
    tallies: NDArray[np.int64]
    zeros: NDArray[np.int64]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return what every kernel of the audit takes before its sources."""
        return (self.block, self.tallies, self.zeros, self.keep, self.limit, self.lines, LONG_RUN)


def read_options(sources: Sources, num_experts: int | None, moe_layers: object) -> AuditOptions:
    """Return the checked options of an audit of ``sources``."""
    experts = None if num_experts is None else integer("num_experts", num_experts, sources.topk)
    if moe_layers is None:
        return AuditOptions(np.ones(sources.layers, np.bool_), experts)
    if is_tensor(moe_layers) or isinstance(moe_layers, np.ndarray):
        mask = host_array("moe_layers", moe_layers, "bool")
    else:
        mask = np.array(sequence("moe_layers", moe_layers, "a bool for each layer"))
    if mask.dtype != np.bool_:
        raise TypeError(f"moe_layers has dtype {mask.dtype}, need a bool for each layer")
    if mask.shape != (sources.layers,):
        raise ValueError(f"moe_layers has shape {list(mask.shape)}, need [{sources.layers}], a bool for each layer")
    if not mask.any():
        raise ValueError("moe_layers is False everywhere, need at least one layer to audit")
    return AuditOptions(mask, experts)


def new_task(plan: Plan, pieces: NDArray[np.int64], options: AuditOptions) -> AuditTask:
    """Return a task with a tally for each part of a trajectory that lies in a piece."""
    limit = np.zeros(9, np.int64)  # by item size, as lines
    lines = np.full((9, 3), -1)
    held = []
    for size, most in ((1, 1 << 8), (2, 1 << 15), (4, 1 << 31)):
        limit[size] = most if options.num_experts is None else min(most, options.num_experts)
        layer = (size, plan.sources.topk)
        row_bytes = size * plan.sources.topk * plan.sources.layers
        if layer in LAYERS and row_bytes >= LINE and _dispatch.compiled():
            kept = np.repeat(options.moe_layers, size * plan.sources.topk)
            held.append(np.concatenate((kept, kept[:LINE])).view(np.uint8))
            lines[size] = kind_of(*layer), address_of(held[-1]), step_of(*layer)
    segments = len(pieces) + len(plan.first)
    return AuditTask(
        options=options,
        keep=np.where(options.moe_layers, np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0)),
        limit=limit,
        lines=lines,
        lines_held=held,
        block=max(1, AUDIT_BLOCK_BYTES // plan.row_bytes),
        tallies=np.zeros((segments, COLUMNS), np.int64),
        zeros=np.zeros((segments, plan.sources.layers), np.int64),
    )


def execute_audited(
    plan: Plan,
    out: NDArray[Any],
    mask: NDArray[np.bool_],
    *,
    fresh: bool,
    num_threads: int | None,
    policy: Policy,
    options: AuditOptions,
) -> RouteAudit:
    """Do what ``_dispatch.execute`` does, and audit each block of rows in passing."""
    threads = _dispatch.thread_count(out.nbytes, fresh=fresh, num_threads=num_threads, policy=policy)
    pieces = cut_pieces(plan, out, threads, policy.piece_align)
    task = new_task(plan, pieces, options)

    def slices(part: NDArray[np.int64]) -> None:
        move_pieces(plan, part, out, mask)
        audit_pieces(plan, part, task, LONG_RUN)

    streamed = _dispatch.streams(out.nbytes, fresh=fresh, policy=policy)
    stores = _dispatch.stores_for(streamed, policy)
    _dispatch.run(
        pieces, threads, policy, twin="both_serial", home="_audit_kernels", streamed=streamed, slices=slices,
        arguments=(stores, *task.arguments, *_dispatch.move_arguments(plan, out, mask)),
    )  # fmt: skip
    return report(plan, task, pieces)


def report(plan: Plan, task: AuditTask, pieces: NDArray[np.int64]) -> RouteAudit:
    """Return what the tallies of all segments say, by trajectory."""
    sources = plan.sources
    segments = _segments(plan, pieces)
    findings: list[AuditFinding] = []
    flagged = np.flatnonzero(task.tallies.any(axis=1))
    by_trajectory: dict[int, list[int]] = {}
    for segment in flagged.tolist():
        by_trajectory.setdefault(int(segments[segment]), []).append(segment)
    for trajectory, parts in sorted(by_trajectory.items()):
        tally, zeros = task.tallies[parts], task.zeros[parts].sum(axis=0)
        for kind, column in (("out_of_range", RANGE), ("duplicate", DUPLICATE), ("zero", ZERO)):
            findings += _merged(kind, trajectory, tally, column, tally[:, column + 2])
        findings += _merged("zero_row", trajectory, tally, ZERO_ROW, None)
        gone = None if plan.missing_held is None else plan.missing_held[trajectory]
        audited = int(sources.rows[trajectory]) - (0 if gone is None else int(gone.sum()))
        empty = np.flatnonzero((zeros == audited) & (task.keep != 0)) if audited else np.empty(0, np.int64)
        if len(empty):
            findings.append(AuditFinding("zero_layer", trajectory, -1, int(empty[0]), len(empty)))
        findings += _merged("repeated_row", trajectory, tally, REPEATED, None, int(tally[:, REPEATED + 2].max()))
    blind = ["routes that are legal and wrong: shifted rows, physical ids in place of logical ones"]
    if sources.topk == 1:
        blind.append("duplicates and zero rows: with topk = 1 a zero is expert 0")
    if task.options.num_experts is None:
        blind.append("ids that the dtype holds but the layer does not: num_experts was not given")
    return RouteAudit(
        findings=tuple(findings),
        trajectories=len(sources.rows),
        rows=int(sources.rows.sum()),
        layers=int((task.keep != 0).sum()),
        topk=sources.topk,
        blind_spots=tuple(blind),
    )


def _merged(
    kind: str,
    trajectory: int,
    tally: NDArray[np.int64],
    column: int,
    layers: NDArray[np.int64] | None,
    longest: int = 0,
) -> list[AuditFinding]:
    """Return the finding of one kind over the segments of a trajectory, first coordinates first, or none."""
    hit = tally[:, column] > 0
    if not hit.any():
        return []
    first = int(np.argmin(np.where(hit, tally[:, column + 1], np.iinfo(np.int64).max)))
    token, layer = int(tally[first, column + 1]), -1 if layers is None else int(layers[first])
    return [AuditFinding(kind, trajectory, token, layer, int(tally[:, column].sum()), longest)]


def _segments(plan: Plan, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the trajectory of each tally: piece p and span s count in tally p + s."""
    owner = np.zeros(len(pieces) + len(plan.first), np.int64)
    for _, high, span, order in pieces.tolist():
        last = max(span, int(np.searchsorted(plan.bounds, high, side="left")) - 1)
        owner[order + span : order + last + 1] = np.arange(span, last + 1)
    return owner


def audit_routes(
    routes: Any,
    *,
    num_experts: int | None = None,
    moe_layers: Any = None,
    missing: Any = None,
    _policy: Policy | None = None,
) -> RouteAudit:
    """Count what is wrong with captured routes, in one pass.

    Parameters
    ----------
    routes : array or tensor ``[rows, layers, topk]``, or a sequence of them, uint8, int16 or int32
        One trajectory, or the batch as ``collate_routes`` takes it (None and no rows allowed); only read.
    num_experts : int, optional
        Experts of a layer; without it the dtype is the only bound.
    moe_layers : bool ``[layers]``, optional
        Which layers have experts; dense ones are all zero by design and are left out. By default all.
    missing : sequence of None or bool ``[rows]``, optional
        Rows that the engine did not record, trajectory by trajectory; they are not audited.

    Returns
    -------
    RouteAudit
        Findings with count and first coordinates; ``raise_if_bad()`` turns them into an error.

    Raises
    ------
    TypeError, ValueError
        For inputs that ``collate_routes`` would refuse, or a ``moe_layers`` that does not fit.

    Notes
    -----
    Nothing is copied. Thread-safe; the GIL is released. In a training step, ``collate_routes(..., audit=True)`` does
    the same in the pass that copies.

    Examples
    --------
    >>> import numpy as np
    >>> print(audit_routes(np.zeros((3, 1, 2), np.uint8), num_experts=8).findings[1])
    routes[0]: 3 tokens with zeros in every layer, first at token 0
    """
    policy = _policy or policy_from_environment()
    single = is_tensor(routes) or isinstance(routes, np.ndarray)
    if single and routes.ndim == 3:
        routes = [routes]
    sources = read_sources(routes)
    plan = source_plan(sources, effective(read_missing(missing, sources)))
    options = read_options(sources, num_experts, moe_layers)
    nbytes = plan.total_rows * plan.row_bytes
    threads = _dispatch.thread_count(nbytes, fresh=False, num_threads=None, policy=policy)
    pieces = cut_pieces(plan, plan.bounds, threads, policy.piece_align)  # nothing is written: any address
    task = new_task(plan, pieces, options)
    _dispatch.run(
        pieces, threads, policy, twin="audit_serial", home="_audit_kernels",
        arguments=(*task.arguments, *_dispatch.source_arguments(plan)),
        slices=lambda part: audit_pieces(plan, part, task, LONG_RUN),
    )  # fmt: skip
    return report(plan, task, pieces)


def source_plan(sources: Sources, missing: Sequence[Any] | None) -> Plan:
    """Return the plan whose destination rows are the source rows, end to end."""
    bounds = np.zeros(len(sources.rows) + 1, np.int64)
    np.cumsum(sources.rows, out=bounds[1:])
    return row_major(sources, bounds, np.zeros(len(sources.rows), np.int64), sources.dtype, missing)


@dataclass(frozen=True, slots=True)
class RouteMismatch:
    """How far two captures of the same tokens differ, as expert sets (the order inside a row does not matter).

    Attributes
    ----------
    pairs, tokens : float
        Shares (0 to 1) of (token, layer) pairs, and of tokens with any such layer, whose sets differ.
    by_layer : ndarray ``[layers]``, float64
        The share of tokens that differ, layer by layer.
    rows : int
        Tokens compared.
    first : tuple of int, or None
        Token and layer of the first difference.
    """

    pairs: float
    tokens: float
    by_layer: NDArray[np.float64]
    rows: int
    first: tuple[int, int] | None


def compare_routes(a: Any, b: Any) -> RouteMismatch:
    """Compare two captures of the same tokens: the mismatch figure that papers quote.

    Parameters
    ----------
    a, b : ndarray or CPU tensor ``[rows, layers, topk]``, integers
        The dtypes may differ.

    Raises
    ------
    TypeError, ValueError
        For anything but integers of the same three dimensions.

    Notes
    -----
    Works in blocks, so that its memory does not grow with the rows. Thread-safe.

    Examples
    --------
    >>> import numpy as np
    >>> compare_routes(np.array([[[1, 2]], [[3, 4]]]), np.array([[[2, 1]], [[3, 5]]])).pairs
    0.5
    """
    left, right = host_array("a", a, "integers"), host_array("b", b, "integers")
    for name, array in (("a", left), ("b", right)):
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {array.dtype}, need integers")
        if array.ndim != 3:
            raise ValueError(f"{name} has {array.ndim} dimensions, need 3: [rows, layers, topk]")
    if left.shape != right.shape:
        raise ValueError(f"b has shape {list(right.shape)}, need {list(left.shape)} as a has")
    rows, layers, topk = left.shape
    step = max(1, (1 << 18) // max(1, layers * topk))
    by_layer = np.zeros(layers, np.int64)
    tokens, first = 0, None
    for begin in range(0, rows, step):
        here = np.sort(left[begin : begin + step], axis=2)
        differ = (here != np.sort(right[begin : begin + step], axis=2)).any(axis=2)
        if first is None and differ.any():
            token, layer = np.argwhere(differ)[0].tolist()
            first = (begin + token, layer)
        by_layer += differ.sum(axis=0)
        tokens += int(differ.any(axis=1).sum())
    return RouteMismatch(
        pairs=float(by_layer.sum()) / (rows * layers) if rows * layers else 0.0,
        tokens=tokens / rows if rows else 0.0,
        by_layer=by_layer / rows if rows else np.zeros(layers),
        rows=rows,
        first=first,
    )


__all__ = [
    "AuditFinding", "CorruptRoutesError", "RouteAudit", "RouteMismatch", "audit_routes", "compare_routes",
]  # fmt: skip
