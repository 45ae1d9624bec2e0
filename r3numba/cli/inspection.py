"""What ``r3numba inspect`` does: reads captures of any kind, audits them, and says which experts work."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r3numba.audit import RouteAudit, audit_routes
from r3numba.wire import DecodedRoutes, decode_response, decode_routes

from . import console


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Routes of one trajectory: ``tokens`` is None where the file does not say; ``missing`` bool [rows] or None."""

    name: str
    source: str
    routes: NDArray[Any]
    start: int | None
    tokens: int | None
    missing: NDArray[np.bool_] | None

    @property
    def coverage(self) -> float | None:
        """Return the share of rows present among those that an engine captures: one fewer than tokens."""
        if self.tokens is None or self.start is None or self.tokens - 1 - self.start < 1:
            return None
        missing = 0 if self.missing is None else int(self.missing.sum())
        return (len(self.routes) - missing) / (self.tokens - 1 - self.start)


def inspect_files(arguments: argparse.Namespace) -> int:
    """Inspect the files; 1 where the audit found something, else 0. ValueError where a file holds no routes."""
    captures = [capture for path in arguments.files for capture in read_file(path)]
    groups: dict[tuple[int, int], list[Capture]] = {}
    for capture in captures:
        groups.setdefault(capture.routes.shape[1:], []).append(capture)
    reports = [inspect_group(group, arguments) for group in groups.values()]
    if arguments.json:
        print(json.dumps([report.as_dict() for report in reports], indent=2))
    else:
        _print(reports)
    if arguments.plot is not None:
        from .inspect_figure import draw

        draw(arguments.plot, reports)
        if not arguments.json:
            print(f"Picture: {arguments.plot}")
    return int(any(report.audit.findings for report in reports))


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """What was found in captures of one shape; ``load`` [layers, experts] is the share of tokens that choose each."""

    captures: list[Capture]
    audit: RouteAudit
    num_experts: int
    moe_layers: NDArray[np.bool_]
    load: NDArray[np.float64]

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """Return, by layer, the busiest expert's load over the mean: 1 = even."""
        mean = self.load.mean(axis=1)
        uneven: NDArray[np.float64] = np.divide(self.load.max(axis=1), mean, out=np.zeros(len(mean)), where=mean > 0)
        return uneven

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return {
            "captures": [
                {
                    "name": capture.name,
                    "format": capture.source,
                    "rows": len(capture.routes),
                    "layers": capture.routes.shape[1],
                    "topk": capture.routes.shape[2],
                    "dtype": str(capture.routes.dtype),
                    "start": capture.start,
                    "tokens": capture.tokens,
                    "missing": 0 if capture.missing is None else int(capture.missing.sum()),
                    "coverage": capture.coverage,
                }
                for capture in self.captures
            ],
            "findings": [
                {
                    "kind": finding.kind,
                    "capture": self.captures[finding.trajectory].name,
                    "token": finding.token,
                    "layer": finding.layer,
                    "count": finding.count,
                    "longest": finding.longest,
                }
                for finding in self.audit.findings
            ],
            "not_seen": list(self.audit.blind_spots),
            "num_experts": self.num_experts,
            "load": self.load.round(6).tolist(),
            "imbalance": self.imbalance.round(4).tolist(),
            "unused_experts": (self.load == 0).sum(axis=1).tolist(),
        }


def inspect_group(captures: list[Capture], arguments: argparse.Namespace) -> Report:
    """Return the report on captures that have the same layers and top-k."""
    layers = captures[0].routes.shape[1]
    moe = np.ones(layers, np.bool_)
    for text in filter(None, arguments.dense_layers.split(",")):
        if not text.strip().isdecimal() or int(text) >= layers:
            raise ValueError(f"--dense-layers has {text!r}, need layer numbers from 0 to {layers - 1}")
        moe[int(text)] = False
    routes_of = [capture.routes for capture in captures]
    present = [_present(capture) for capture in captures]
    largest = max((int(routes.max()) for routes in present if len(routes)), default=0)
    experts = arguments.num_experts or max(largest + 1, captures[0].routes.shape[2])
    missing = [capture.missing for capture in captures]
    audit = audit_routes(routes_of, num_experts=arguments.num_experts, moe_layers=moe, missing=missing)
    counts = np.zeros((layers, max(experts, largest + 1)), np.int64)
    for routes in present:
        for layer in range(layers):
            counts[layer] += np.bincount(routes[:, layer].reshape(-1), minlength=counts.shape[1])
    tokens = max(1, sum(len(routes) for routes in present))
    counts[~moe] = 0
    return Report(captures, audit, experts, moe, counts[:, :experts] / tokens)


def _present(capture: Capture) -> NDArray[Any]:
    return capture.routes if capture.missing is None else capture.routes[~capture.missing]


# --- Reading ------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> list[Capture]:
    """Return the captures of one file; ValueError where it holds none."""
    readers: dict[str, Callable[[Path], Iterator[Capture]]] = {
        ".npz": _read_npz, ".npy": _read_npy, ".safetensors": _read_safetensors
    }  # fmt: skip
    captures = list(readers.get(path.suffix, _read_body)(path))
    if not captures:
        raise ValueError(f"{path} holds no integer array [rows, layers, topk], need at least one")
    return captures


def _is_routes(array: NDArray[Any]) -> bool:
    return array.ndim == 3 and array.dtype.kind in "iu" and min(array.shape[1:]) > 0


def _capture(name: str, source: str, array: NDArray[Any], tokens: int | None = None) -> Capture:
    decoded = decode_routes(array, start=0)
    return Capture(name, source, decoded.indices, 0, tokens, decoded.missing)


def _read_npz(path: Path) -> Iterator[Capture]:
    with np.load(path, allow_pickle=False) as data:
        arrays = {name: data[name] for name in data.files}
    numbers = re.compile(r"\d+")
    order = sorted(arrays, key=lambda name: [int(number) for number in numbers.findall(name)] or [-1])
    for name in order:
        if _is_routes(arrays[name]):
            yield _capture(f"{path.name}:{name}", "npz", arrays[name], _tokens_beside(arrays, name))


def _tokens_beside(arrays: dict[str, NDArray[Any]], name: str) -> int | None:
    """Return the tokens that an archive holds beside its routes: p and c (prompt, completion), t, or tokens."""
    number = name.removeprefix("r")
    if f"p{number}" in arrays and f"c{number}" in arrays:
        return len(arrays[f"p{number}"]) + len(arrays[f"c{number}"])
    beside = arrays.get(f"t{number}", arrays.get("tokens"))
    return None if beside is None or beside.ndim != 1 else len(beside)


def _read_npy(path: Path) -> Iterator[Capture]:
    array = np.load(path, allow_pickle=False)
    if array.ndim == 4:
        for index, one in enumerate(array):
            yield _capture(f"{path.name}:{index}", "npy", one)
    elif _is_routes(array):
        yield _capture(path.name, "npy", array)


def _read_safetensors(path: Path) -> Iterator[Capture]:
    load = console.require("safetensors.numpy").load_file
    for name, array in load(path).items():
        if _is_routes(array):
            yield _capture(f"{path.name}:{name}", "safetensors", array)


def _read_body(path: Path) -> Iterator[Capture]:
    text = path.read_text()
    try:
        decoded: list[DecodedRoutes] = decode_response(text)
    except (TypeError, ValueError) as body_error:
        try:
            decoded = [decode_routes(json.loads(text))]
        except (TypeError, ValueError) as payload_error:
            raise ValueError(f"{path}: as a response {body_error}; as a payload {payload_error}") from None
    for index, one in enumerate(decoded):
        counts = (one.prompt_token_count, one.generated_token_count)
        tokens = None if None in counts else sum(count for count in counts if count is not None)
        yield Capture(f"{path.name}:{index}", one.format, one.indices, one.start, tokens, one.missing)


# --- Printing -----------------------------------------------------------------------------------------------------


def _print(reports: list[Report]) -> None:
    target = console.console()
    for report in reports:
        rows = [
            (
                capture.name, capture.source, f"{list(capture.routes.shape)} {capture.routes.dtype}",
                "?" if capture.start is None else str(capture.start),
                "?" if capture.tokens is None else str(capture.tokens),
                "0" if capture.missing is None else str(int(capture.missing.sum())),
                "?" if capture.coverage is None else f"{capture.coverage:.1%}",
            )
            for capture in report.captures
        ]  # fmt: skip
        target.print(
            console.table(
                "Captures",
                ("capture", "format", "routes", "start", "tokens", "missing", "coverage"),
                rows,
                text_columns=3,
            )
        )
        target.print("[bold]Audit[/bold]")
        for finding in report.audit.findings:
            text = str(finding).partition(": ")[2]
            target.print(f"  found: {report.captures[finding.trajectory].name}: {text}", markup=False)
        if not report.audit.findings:
            target.print("  nothing found")
        for spot in report.audit.blind_spots:
            target.print(f"  not seen: {spot}", markup=False)
        load = [
            (
                str(layer), f"{report.imbalance[layer]:.2f}", str(int(report.load[layer].argmax())),
                f"{report.load[layer].max():.1%}", str(int((report.load[layer] == 0).sum())),
            )
            for layer in np.flatnonzero(report.moe_layers).tolist()
        ]  # fmt: skip
        target.print(
            console.table(
                f"Expert load over {report.num_experts} experts (share of tokens that choose it; even: "
                f"{report.audit.topk / report.num_experts:.1%})",
                ("layer", "busiest / mean", "busiest expert", "its load", "never chosen"),
                load,
            )
        )
