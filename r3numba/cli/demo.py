"""``r3numba demo``: rollouts of a real engine, collated, checked, timed and drawn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from .console import console, count, gigabytes, milliseconds, progress_bar, require, size, table, writable_file

if TYPE_CHECKING:
    from .checks import Check
    from .rollouts import Rollout

HELP: Final = "collate rollouts captured from vLLM, check every row, time a step, draw the batch"
ARMS: Final = ("prefill", "single", "pool_2", "slices_1", "default", "recycled_2")
_MARKS: Final = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[yellow]not here[/]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--plot", type=writable_file, default="demo.png", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--size", type=gigabytes, default="0.1", metavar="GB", help="of the timed batch (default: 0.1)")
    parser.add_argument("--repeat", type=count, default=5, metavar="N", help="quiet repetitions (default: 5)")


def run(options: argparse.Namespace) -> int:
    """Run the demo; 1 where a check failed."""
    out = console()
    require("matplotlib")  # say what is missing before half a minute has passed
    from .checks import run_checks
    from .demo_figure import draw
    from .rollouts import read_rollouts

    files = read_rollouts()
    out.print(_rollout_table(files))
    rollouts = [rollout for part in files.values() for rollout in part]
    batch = _make_batch(out, rollouts)
    checks = run_checks(rollouts)
    out.print(_check_table(checks))
    failed = any(check.passed is False for check in checks)
    if failed:
        out.print("[bold red]A check failed: the batch is wrong, so it is not timed.[/]")
        return 1
    case = _time_step(out, rollouts, options)
    draw(options.plot, rollouts, batch, case)
    out.print(f"Picture: {options.plot}")
    return 0


def _rollout_table(files: dict[str, list[Rollout]]) -> Any:
    rows = []
    for file, rollouts in files.items():
        tokens = [rollout.sequence_length for rollout in rollouts]
        routes = rollouts[0].routes
        rows.append((
            file,
            str(len(rollouts)),
            f"{min(tokens)} to {max(tokens)}" if len(set(tokens)) > 1 else str(tokens[0]),
            str(sum(tokens)),
            str(sum(len(rollout.routes) for rollout in rollouts)),
            f"[rows, {routes.shape[1]}, {routes.shape[2]}] {routes.dtype}".replace("[", r"\["),
        ))  # fmt: skip
    columns = ("rollouts of vLLM 0.30", "trajectories", "tokens each", "tokens", "captured rows", "routes")
    return table("Rollouts read", columns, rows)


def _make_batch(out: Any, rollouts: Sequence[Rollout]) -> Any:
    from .._dispatch import backend_info
    from ..collate import collate_routes
    from .rollouts import lengths_of, routes_of

    batch = collate_routes(routes_of(rollouts), lengths_of(rollouts))
    info = backend_info()
    padding = int(batch.array.shape[0] * batch.array.shape[1] - sum(lengths_of(rollouts)))
    uncaptured = int(batch.padding_mask.sum()) - padding
    rows = (
        ("shape", str(list(batch.array.shape)).replace("[", r"\[")),
        ("dtype", str(batch.array.dtype)),
        ("size", size(batch.array.nbytes)),
        ("padding", f"{padding / batch.padding_mask.size:.1%} of the rows"),
        ("uncaptured", f"{uncaptured} rows (the last sampled token of each)"),
        ("ran on", f"{info['backend']}, path {info['path']}, threads {info['threads']}"),
    )
    out.print(table("Batch made: collate_routes(routes, lengths)", ("", ""), rows, text_columns=2))
    return batch


def _check_table(checks: Sequence[Check]) -> Any:
    rows = [(_MARKS[check.passed], check.name, check.detail.replace("[", r"\[")) for check in checks]
    return table("Checks, token by token", ("", "check", "seen"), rows, text_columns=3)


def _time_step(out: Any, rollouts: Sequence[Rollout], options: argparse.Namespace) -> dict[str, Any]:
    """Time one step's collation on the captured rollouts, tiled to a training size; print and return the case."""
    from .._bench.arms import available, has_torch
    from .._bench.shapes import tiled
    from .._bench.suite import run_case
    from .rollouts import EXPERTS, routes_of

    batch = tiled("captured rollouts, tiled", EXPERTS, routes_of(rollouts), options.size)
    with progress_bar(out) as bar:
        case = run_case(batch, available(ARMS), options.repeat, bar, limit_threads=())
    ours = case["arms"]["default"]
    rows = []
    for record in case["arms"].values():
        ratio = record["median"] / ours["median"]
        rows.append((
            record["label"],
            str((record["ran"] or record)["threads"]),
            "fresh" if record["cold"] else "recycled",
            milliseconds(record["median"]),
            f"{case['nbytes'] / record['median'] / 1e9:.1f}",
            f"{ratio:.2f}x" if not record["ours"] else "",
            "noisy" if record["noisy"] else f"{record['quiet']} of {len(record['samples'])} quiet",
        ))  # fmt: skip
    trajectories, width, layers, topk = case["result_shape"]
    shape = f"{trajectories} trajectories x {width} tokens x {layers} layers x top-{topk}"
    columns = ("arm", "threads", "pages", "ms", "GB/s", "against collate_routes", "repetitions")
    out.print(table(f"Time per step, these rollouts tiled to {size(case['nbytes'])} ({shape})", columns, rows))
    if not has_torch():
        out.print("[yellow]torch is not installed: the torch baselines (prefill, single write, pool) are left out.[/]")
    return case
