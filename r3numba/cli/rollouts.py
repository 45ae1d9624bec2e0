"""The rollouts that the package ships: captured from vLLM 0.30, which ran a tiny Qwen3-MoE on a CPU."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Experts of the captured model; each of its layers is a mixture of experts.
EXPERTS: Final = 16
FILES: Final = ("rollouts_bf16.npz", "rollouts_fp32.npz", "two_turn.npz")


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One trajectory: ``routes`` is uint8 ``[prompt + completion - 1, layers, topk]``, as the engine sent it."""

    name: str
    prompt_length: int
    sequence_length: int
    routes: NDArray[Any]


def read_rollouts() -> dict[str, list[Rollout]]:
    """Return the trajectories of each file."""
    return {file: _read(file) for file in FILES}


def _read(file: str) -> list[Rollout]:
    stem = file.partition(".")[0]
    with (
        importlib.resources.as_file(importlib.resources.files("r3numba") / "data" / file) as path,
        np.load(path) as data,
    ):
        if "routes" in data:
            return [Rollout(stem, int(data["prompt_len"]), len(data["tokens"]), data["routes"])]
        count = sum(name.startswith("p") for name in data.files)
        return [
            Rollout(
                f"{stem}[{i}]", len(data[f"p{i}"]), len(data[f"p{i}"]) + len(data[f"c{i}"]), data[f"r{i}"]
            )
            for i in range(count)
        ]  # fmt: skip


def routes_of(rollouts: Sequence[Rollout]) -> list[NDArray[Any]]:
    """Return the routes of each."""
    return [rollout.routes for rollout in rollouts]


def lengths_of(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the tokens of each."""
    return [rollout.sequence_length for rollout in rollouts]
