"""The demo's picture: the batch as rows of tokens, the load of each expert, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .console import figure_module, require, size
from .rollouts import EXPERTS, Rollout

INK: Final = "#1f2933"
MUTED: Final = "#8494a3"
CAPTURED: Final = "#2a78b5"
PROMPT: Final = "#9cc7e6"
PADDING: Final = "#eef1f4"
UNCAPTURED: Final = "#e4572e"
OURS: Final = "#2a78b5"
BASELINE: Final = "#b8c2cc"


def classes(rollouts: Sequence[Rollout], batch: Any) -> NDArray[np.int8]:
    """Return what each row of the rectangle is: 0 padding, 1 prompt, 2 completion, 3 uncaptured."""
    picture = np.zeros(batch.padding_mask.shape, np.int8)
    for index, rollout in enumerate(rollouts):
        begin = int(batch.starts[index])
        picture[index, begin : begin + rollout.prompt_length] = 1
        picture[index, begin + rollout.prompt_length : begin + rollout.sequence_length] = 2
        tokens = slice(begin, begin + rollout.sequence_length)
        picture[index, tokens][batch.padding_mask[index, tokens]] = 3
    return picture


def expert_load(batch: Any) -> NDArray[np.float64]:
    """Return the share of captured tokens that each expert of each layer serves, ``[layers, experts]``."""
    captured = batch.array[~batch.padding_mask]
    layers = captured.shape[1]
    counts = [np.bincount(captured[:, layer].reshape(-1), minlength=EXPERTS) for layer in range(layers)]
    return np.stack(counts) / len(captured)


def draw(path: Path, rollouts: Sequence[Rollout], batch: Any, case: Mapping[str, Any]) -> None:
    """Write the picture."""
    figure = figure_module().Figure(figsize=(13, 8.4), dpi=120, facecolor="white")
    grid = figure.add_gridspec(
        2, 2, height_ratios=(1.35, 1), width_ratios=(1.2, 1), left=0.07, right=0.97, top=0.86, bottom=0.07,
        hspace=0.46, wspace=0.52,
    )  # fmt: skip
    figure.text(0.07, 0.955, "From captured rollouts to the training batch", fontsize=17, weight="bold", color=INK)
    figure.text(
        0.07, 0.925, "Routes that vLLM recorded for every token, collated by r3numba in one pass", fontsize=11,
        color=MUTED,
    )  # fmt: skip
    _draw_batch(figure.add_subplot(grid[0, :]), rollouts, batch)
    _draw_load(figure.add_subplot(grid[1, 0]), batch)
    _draw_times(figure.add_subplot(grid[1, 1]), case)
    figure.savefig(path, format="png")


def plain_axes(axes: Any, text: str) -> None:
    """Give a panel its title, and take frame and tick marks away."""
    axes.set_title(text, loc="left", fontsize=11, weight="bold", color=INK, pad=8)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=9, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_batch(axes: Any, rollouts: Sequence[Rollout], batch: Any) -> None:
    colours = require("matplotlib.colors").ListedColormap([PADDING, PROMPT, CAPTURED, UNCAPTURED])
    axes.imshow(
        classes(rollouts, batch), cmap=colours, vmin=-0.5, vmax=3.5, aspect="auto", interpolation="nearest",
    )  # fmt: skip
    for line in range(1, len(rollouts)):
        axes.axhline(line - 0.5, color="white", linewidth=0.8)
    count, width, layers, topk = batch.array.shape
    plain_axes(axes, f"The rectangle [{count}, {width}, {layers}, {topk}] {batch.array.dtype}, left-padded")
    axes.set_xlabel("token column", fontsize=9, color=MUTED, loc="left")
    axes.set_ylabel("trajectory", fontsize=9, color=MUTED)
    patch = require("matplotlib.patches").Patch
    entries = (
        (PADDING, "padding (dummy route)"), (PROMPT, "prompt, captured"), (CAPTURED, "completion, captured"),
        (UNCAPTURED, "uncaptured: the last sampled token"),
    )  # fmt: skip
    axes.legend(
        handles=[patch(facecolor=colour, edgecolor=MUTED, linewidth=0.4, label=label) for colour, label in entries],
        loc="upper right", bbox_to_anchor=(1.0, -0.1), ncols=4, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=1.1, borderaxespad=0, columnspacing=1.4,
    )  # fmt: skip


def _draw_load(axes: Any, batch: Any) -> None:
    load = expert_load(batch)
    axes.imshow(load, cmap="Blues", vmin=0, aspect="auto")
    dark = load.max() * 0.6
    for layer, expert in np.ndindex(*load.shape):
        value = float(load[layer, expert])
        colour = "white" if value > dark else INK
        axes.text(expert, layer, f"{value * 100:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
    even = batch.array.shape[-1] / load.shape[1]
    plain_axes(axes, f"Expert load: % of captured tokens that choose it (even: {even:.0%})")
    axes.set_xlabel("expert", fontsize=9, color=MUTED)
    axes.set_ylabel("layer", fontsize=9, color=MUTED)
    axes.set_xticks(range(load.shape[1]))
    axes.set_yticks(range(load.shape[0]))


def _draw_times(axes: Any, case: Mapping[str, Any]) -> None:
    records = list(case["arms"].values())
    names = [
        f"{record['label']} ({threads} thread{'s' if threads > 1 else ''})"
        for record in records
        for threads in [(record["ran"] or record)["threads"]]
    ]
    values = [record["median"] * 1e3 for record in records]
    places = range(len(records))
    colours = [OURS if record["ours"] else BASELINE for record in records]
    axes.barh(places, values, color=colours, height=0.68)
    for place, value, record in zip(places, values, records, strict=True):
        note = " ms (noisy)" if record["noisy"] else " ms"
        axes.text(value + max(values) * 0.015, place, f"{value:.1f}{note}", va="center", fontsize=9, color=INK)
    plain_axes(axes, f"Time per step, these rollouts tiled to {size(case['nbytes'])}")
    axes.set_yticks(places, names)
    axes.set_xlim(0, max(values) * 1.4)
    axes.set_xticks([])
    axes.invert_yaxis()
