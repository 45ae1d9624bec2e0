"""The picture of ``r3numba inspect``: which experts work, layers x experts, and how uneven each layer is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .console import figure_module
from .demo_figure import CAPTURED, INK, MUTED, plain_axes

if TYPE_CHECKING:
    from .inspection import Report


def draw(path: Path, reports: Sequence[Report]) -> None:
    """Write a heat map and the imbalance of each layer, one line of panels for each shape of routes."""
    heights = [max(2.2, min(9.0, 0.24 * len(report.load))) for report in reports]
    figure = figure_module().Figure(figsize=(13, 1.5 + sum(heights) + 1.0 * len(reports)), dpi=120, facecolor="white")
    total = figure.get_figheight()
    grid = figure.add_gridspec(
        len(reports), 2, width_ratios=(4, 1), height_ratios=heights, left=0.06, right=0.97, top=1 - 1.25 / total,
        bottom=0.6 / total, hspace=0.5, wspace=0.08,
    )  # fmt: skip
    rows = sum(report.audit.rows for report in reports)
    found = sum(len(report.audit.findings) for report in reports)
    figure.text(
        0.06, 1 - 0.45 / total, "Which experts the captured tokens chose", fontsize=17, weight="bold", color=INK
    )
    verdict = "the audit found nothing" if not found else f"the audit found {found} faults"
    figure.text(0.06, 1 - 0.75 / total, f"{rows:,} captured rows; {verdict}", fontsize=11, color=MUTED)
    for line, report in enumerate(reports):
        _heat_map(figure, figure.add_subplot(grid[line, 0]), report)
        _imbalance(figure.add_subplot(grid[line, 1]), report)
    figure.savefig(path, format="png")


def _heat_map(figure: Any, axes: Any, report: Report) -> None:
    even = report.audit.topk / report.num_experts
    relative = np.where(report.moe_layers[:, None], report.load / even, np.nan)
    # An even layer is white: blue experts get less than their share, red ones more, up to four times.
    image = axes.imshow(
        np.log2(np.clip(relative, 0.25, 4.0)), cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto", interpolation="nearest"
    )
    layers, experts = report.load.shape
    if layers * experts <= 400:
        for layer, expert in np.argwhere(~np.isnan(relative)).tolist():
            strong = not 0.45 < relative[layer, expert] < 2.2
            axes.text(
                expert, layer, f"{report.load[layer, expert] * 100:.0f}", ha="center", va="center", fontsize=8,
                color="white" if strong else INK,
            )  # fmt: skip
    plain_axes(axes, f"Load of each expert, % of tokens (even: {even:.1%})" if layers * experts <= 400 else
               f"Load of each expert against its even share of {even:.2%}")  # fmt: skip
    axes.set_xlabel("expert", fontsize=9, color=MUTED)
    axes.set_ylabel("layer", fontsize=9, color=MUTED)
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    axes.set_xticks(range(0, experts, max(1, experts // 16)))
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["¼", "½", "even", "2x", "4x"], fontsize=8, color=INK)
    bar.outline.set_visible(False)


def _imbalance(axes: Any, report: Report) -> None:
    layers = np.flatnonzero(report.moe_layers)
    values = report.imbalance[layers]
    axes.barh(layers, values, color=CAPTURED, height=0.7)
    axes.axvline(1.0, color=MUTED, linewidth=0.8)
    if len(layers) <= 32:
        for layer, value in zip(layers.tolist(), values.tolist(), strict=True):
            axes.text(value + values.max() * 0.02, layer, f"{value:.2f}", va="center", fontsize=8, color=INK)
    plain_axes(axes, "Busiest expert / mean")
    axes.set_ylim(len(report.load) - 0.5, -0.5)
    axes.set_xlim(0, max(1.0, values.max()) * 1.25)
    axes.set_yticks([])
    axes.set_xticks([])
