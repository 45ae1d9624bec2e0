"""The demo's checks. They look at what the library returned, token by token, and share no code with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._bench.arms import has_torch
from .._dispatch import backend_info, kernels
from .._policy import DEFAULT_POLICY, PathName
from ..collate import collate_routes
from ..pack import pack_routes
from .rollouts import EXPERTS, Rollout, lengths_of, routes_of


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, whether it holds (None: could not be looked at here), and what was seen."""

    name: str
    passed: bool | None
    detail: str


def run_checks(rollouts: Sequence[Rollout]) -> list[Check]:
    """Collate and pack the rollouts in every layout and return every check."""
    routes, lengths = routes_of(rollouts), lengths_of(rollouts)
    untouched = [part.copy() for part in routes]
    width = max(lengths)
    prompts = [rollout.prompt_length for rollout in rollouts]
    placed = [max(prompts) - prompt for prompt in prompts]
    left = collate_routes(routes, lengths)
    right = collate_routes(routes, lengths, padding="right")
    starts = collate_routes(routes, lengths, starts=placed)
    packed = pack_routes(routes, lengths)
    rows: list[tuple[str, Any, list[int]]] = [
        ("left padding", left, [width - length for length in lengths]),
        ("right padding", right, [0] * len(lengths)),
        ("starts = Pmax - P_i", starts, placed),
    ]
    checks = [_rectangle_check(name, batch, columns, rollouts) for name, batch, columns in rows]
    checks.append(_pack_check(packed, rollouts))
    checks.append(_dummy_check([*(batch for _, batch, _ in rows), packed]))
    checks.append(_zero_copy_check([left, packed]))
    checks.append(_paths_check(routes, lengths))
    same = all(np.array_equal(before, after) for before, after in zip(untouched, routes, strict=True))
    checks.append(Check("inputs untouched", same, f"{len(routes)} arrays compared with copies made before"))
    return checks


def _first_wrong_row(
    rows: Sequence[Any], mask: Sequence[bool], start: int, routes: NDArray[Any], length: int
) -> tuple[int, str] | None:
    """Compare one trajectory's rows with its capture: captured tokens, its uncaptured ones, padding around them."""
    captured = routes.tolist()
    dummy = [list(range(routes.shape[2]))] * routes.shape[1]
    for column, row in enumerate(rows):
        token = column - start
        inside = 0 <= token < len(captured)
        if row != (captured[token] if inside else dummy):
            return column, f"token {token} of {length} holds {row[0]}..."
        if mask[column] == inside:
            return column, f"the padding mask of token {token} of {length} is {mask[column]}"
    return None


def _rectangle_check(name: str, batch: Any, columns: Sequence[int], rollouts: Sequence[Rollout]) -> Check:
    title = f"{name}: each row at its token's place"
    if batch.starts.tolist() != list(columns):
        return Check(title, False, "the batch names other columns of token 0")
    for index, rollout in enumerate(rollouts):
        wrong = _first_wrong_row(
            batch.array[index].tolist(),
            batch.padding_mask[index].tolist(),
            columns[index],
            rollout.routes,
            rollout.sequence_length,
        )
        if wrong is not None:
            return Check(title, False, f"{rollout.name}, column {wrong[0]}: {wrong[1]}")
    count, wide = batch.array.shape[:2]
    return Check(title, True, f"{count} x {wide} rows and their mask compared")


def _pack_check(packed: Any, rollouts: Sequence[Rollout]) -> Check:
    title = "pack: each row at its token's place"
    begin = 0
    for index, rollout in enumerate(rollouts):
        end = begin + rollout.sequence_length
        if packed.cu_seqlens[index : index + 2].tolist() != [begin, end]:
            return Check(title, False, f"cu_seqlens of {rollout.name} is {packed.cu_seqlens[index]}, not {begin}")
        wrong = _first_wrong_row(
            packed.array[begin:end].tolist(),
            packed.padding_mask[begin:end].tolist(),
            0,
            rollout.routes,
            rollout.sequence_length,
        )
        if wrong is not None:
            return Check(title, False, f"{rollout.name}: {wrong[1]}")
        begin = end
    return Check(title, len(packed.array) == begin, f"{begin} rows, their mask and cu_seqlens compared")


def _dummy_check(batches: Sequence[Any]) -> Check:
    """Every row that the mask calls a dummy can be dispatched: distinct ids of experts that exist."""
    seen = 0
    for batch in batches:
        rows = batch.array[batch.padding_mask].reshape(-1, batch.array.shape[-1]).tolist()
        seen += len(rows)
        for row in rows:
            if len(set(row)) != len(row) or not all(0 <= expert < EXPERTS for expert in row):
                return Check("dummy routes are legal", False, f"a dummy row holds {row}")
    return Check("dummy routes are legal", True, f"{seen} rows of distinct ids below {EXPERTS}")


def _zero_copy_check(batches: Sequence[Any]) -> Check:
    title = "torch shares the memory (zero copy)"
    if not has_torch():
        return Check(title, None, "torch is not installed")
    for batch in batches:
        pairs = ((batch.indices, batch.array), (batch.padding_mask_tensor, batch.padding_mask))
        for tensor, array in pairs:
            if tensor.data_ptr() != array.ctypes.data or tuple(tensor.shape) != array.shape:
                return Check(title, False, f"{tensor.data_ptr():#x} is not {array.ctypes.data:#x}")
    return Check(title, True, "equal addresses of indices and mask, rectangle and pack")


def _paths_check(routes: Sequence[NDArray[Any]], lengths: Sequence[int]) -> Check:
    """Every path of the executor writes the same bytes, and is seen to have run."""
    title = "same bytes on every path"
    names: list[PathName] = ["slices"] if kernels() is None else ["serial", "parallel", "pool", "slices"]
    results: dict[str, tuple[bytes, bytes]] = {}
    for name in names:
        batch = collate_routes(routes, lengths, num_threads=2, _policy=replace(DEFAULT_POLICY, path=name))
        results[backend_info()["path"]] = (batch.array.tobytes(), batch.padding_mask.tobytes())
    different = [name for name, result in results.items() if result != results[next(iter(results))]]
    detail = f"{different} differ from {next(iter(results))}" if different else ", ".join(results)
    return Check(title, not different, detail)
