"""The arms before a batch exists: decoding, compaction, a conversation's trace, the audit. Shared by bench and asv."""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .. import _dispatch
from .._policy import DEFAULT_POLICY
from ..audit import audit_routes
from ..collate import collate_routes
from ..collator import RouteCollator
from ..routes import compact_routes
from ..trace import RoutedExpertTrace
from ..wire import decode_routes, encode_routes

#: One long trajectory of a production model: tokens, layers, top-k, experts.
TOKENS: Final = 32_768
LAYERS: Final = 48
TOPK: Final = 8
EXPERTS: Final = 128
TURNS: Final = (1, 32, 512)
_SEED: Final = 20261129


@dataclass(frozen=True, slots=True)
class CaptureArm:
    """Something to time: ``against`` names the arm that its ratio is to, ``nbytes`` what it moves or reads."""

    name: str
    label: str
    run: Callable[[], object]
    nbytes: int
    cold: bool = False
    against: str | None = None


def legal_routes(tokens: int) -> NDArray[np.uint8]:
    """Return routes with distinct ids in every row, uint8 [tokens, 48, 8]; seeded."""
    rng = np.random.default_rng(_SEED)
    # Distinct without sorting 128 numbers a row: a random start and an odd step walk through all residues of 128.
    start = rng.integers(0, EXPERTS, (tokens, LAYERS, 1), dtype=np.uint8)
    step = rng.integers(0, EXPERTS // 2, (tokens, LAYERS, 1), dtype=np.uint8) * 2 + 1
    ids: NDArray[np.uint8] = np.asarray(start + step * np.arange(TOPK, dtype=np.uint8), np.uint8)
    ids %= EXPERTS  # sums wrap at 256, a multiple of it
    return ids


def capture_arms(tokens: int = TOKENS) -> list[CaptureArm]:
    """Return the arms over one trajectory of ``tokens`` tokens, and over four of them for the audit."""
    routes = legal_routes(tokens - 1)
    arms = [*_decode_arms(routes), *_compact_arms(routes), *_trace_arms(routes)]
    batch, lengths = [routes.copy() for _ in range(4)], [tokens] * 4  # as far apart as those of a step
    collator = RouteCollator()
    size = 4 * routes.nbytes
    options: dict[str, Any] = {"num_experts": EXPERTS}
    arms += [
        CaptureArm("max", "NumPy max()", lambda: [array.max() for array in batch], size),
        CaptureArm("audit", "audit_routes", lambda: audit_routes(batch, **options), size, against="max"),
        CaptureArm("fresh", "collate_routes", lambda: collate_routes(batch, lengths, **options), size, cold=True),
        CaptureArm(
            "fresh_audit", "collate_routes(audit=True)",
            lambda: collate_routes(batch, lengths, audit=True, **options), size, cold=True, against="fresh",
        ),
        CaptureArm("recycled", "RouteCollator", lambda: collator.collate_routes(batch, lengths, **options), size),
        CaptureArm(
            "recycled_audit", "RouteCollator, audit=True",
            lambda: collator.collate_routes(batch, lengths, audit=True, **options), size, against="recycled",
        ),
    ]  # fmt: skip
    return arms


def _decode_arms(routes: NDArray[np.uint8]) -> list[CaptureArm]:
    npy, raw = encode_routes(routes, "vllm"), encode_routes(routes, "sglang")
    decoder, label = base64.b64decode, "base64 alone (standard library)"
    if importlib.util.find_spec("pybase64") is not None:
        decoder, label = importlib.import_module("pybase64").b64decode, "base64 alone (pybase64)"
    return [
        CaptureArm("base64", f"{label}, .npy", lambda: decoder(npy, validate=True), len(npy)),
        CaptureArm(
            "decode_npy", "decode_routes, .npy", lambda: decode_routes(npy, start=0), len(npy), against="base64"
        ),
        CaptureArm("base64_raw", f"{label}, raw int32", lambda: decoder(raw, validate=True), len(raw)),
        CaptureArm(
            "decode_raw", "decode_routes, raw int32",
            lambda: decode_routes(raw, num_layers=LAYERS, topk=TOPK, start=0), len(raw),
            against="base64_raw",
        ),
    ]  # fmt: skip


def _compact_arms(routes: NDArray[np.uint8]) -> list[CaptureArm]:
    wide = routes.astype(np.int64)

    def three_passes() -> NDArray[np.uint8]:
        if wide.min() < 0 or wide.max() >= EXPERTS:
            raise ValueError("ids out of range")
        return wide.astype(np.uint8)

    return [
        CaptureArm("three_passes", "int64: NumPy min(), max(), astype()", three_passes, wide.nbytes),
        CaptureArm(
            "compact", "int64: compact_routes", lambda: compact_routes(wide, num_experts=EXPERTS), wide.nbytes,
            against="three_passes",
        ),
    ]  # fmt: skip


def _trace_arms(routes: NDArray[np.uint8]) -> list[CaptureArm]:
    def conversation(turns: int) -> object:
        trace = RoutedExpertTrace()
        edges = np.linspace(0, len(routes), turns + 1).astype(int).tolist()
        for begin, end in itertools.pairwise(edges):
            # One token is generated; everything before it is the prompt.
            trace.record_generation(prompt_token_count=end, generated_token_count=1, routed_experts=routes[begin:end])
        return trace.finalize(token_count=len(routes) + 1, loss_mask=np.zeros(len(routes) + 1, bool))

    arms = [CaptureArm("copy", "one copy of the rows", routes.copy, routes.nbytes)]
    for turns in TURNS:
        label = f"trace of {turns} turn{'s' if turns > 1 else ''}"
        run = functools.partial(conversation, turns)
        arms.append(CaptureArm(f"trace_{turns}", label, run, routes.nbytes, against="copy"))
    return arms


def run_captures(repeat: int, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure all capture arms, interleaved; one record an arm, with the ratio to the arm that it is held against."""
    from .measure import Task, measure

    arms = capture_arms()
    tasks = []
    for arm in arms:
        threads = 1
        if arm.cold:
            threads = _dispatch.thread_count(arm.nbytes, fresh=True, num_threads=None, policy=DEFAULT_POLICY)
        tasks.append(Task(arm.name, arm.run, arm.nbytes if arm.cold else 0, threads=threads))
    timings = measure(tasks, repeat, step=step)
    return [
        {
            "name": arm.name,
            "label": arm.label,
            "nbytes": arm.nbytes,
            "against": arm.against,
            "ratio": None if arm.against is None else timings[arm.name].median / timings[arm.against].median,
            **timings[arm.name].record(),
        }
        for arm in arms
    ]
