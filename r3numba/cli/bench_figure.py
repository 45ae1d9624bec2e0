"""The picture of ``r3numba bench``: milliseconds per step at each size against the limit, and tiny batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .bench_report import threads_of
from .console import figure_module, milliseconds, size
from .demo_figure import BASELINE, INK, MUTED, OURS, UNCAPTURED, plain_axes

_LINES: Final = {"single": BASELINE, "prefill": "#6b7785", "bare": "#e0a458", "default": OURS}


def draw(path: Path, record: Mapping[str, Any]) -> None:
    """Write the picture."""
    cases = record["cases"]
    panels = max(1, len(cases))
    figure = figure_module().Figure(figsize=(3.4 + 4.6 * panels, 10.5), dpi=110, facecolor="white")
    grid = figure.add_gridspec(
        2, panels, height_ratios=(2.1, 1), left=2.6 / (3.4 + 4.6 * panels), right=0.97, top=0.9, bottom=0.07,
        hspace=0.28, wspace=0.12,
    )  # fmt: skip
    host = record["host"]
    left = 0.35 / (3.4 + 4.6 * panels)
    title = "Routes to the training batch: milliseconds per step"
    made = f"{host['cpu']}, {host['permitted_cpus']} CPUs; {record['date'][:10]}"
    subtitle = f"{made}; medians and quartiles; grey figures: noisy"
    figure.text(left, 0.965, title, fontsize=17, weight="bold", color=INK)
    figure.text(left, 0.943, subtitle, fontsize=10.5, color=MUTED)
    for column, case in enumerate(cases):
        _draw_case(figure.add_subplot(grid[0, column]), case, names=column == 0)
    _draw_tiny(figure.add_subplot(grid[1, :]), record["tiny"])
    figure.savefig(path, format="png")


def _draw_case(axes: Any, case: Mapping[str, Any], *, names: bool) -> None:
    arms = list(case["arms"].values())
    values = [arm["median"] * 1e3 for arm in arms]
    spans = [
        [value - arm["quartiles"][0] * 1e3 for value, arm in zip(values, arms, strict=True)],
        [arm["quartiles"][1] * 1e3 - value for value, arm in zip(values, arms, strict=True)],
    ]
    places = range(len(arms))
    colours = [OURS if arm["ours"] else BASELINE for arm in arms]
    axes.barh(places, values, color=colours, height=0.7, xerr=spans, error_kw={"ecolor": MUTED, "elinewidth": 1})
    limits = case["limits"]
    for place, value, arm in zip(places, values, arms, strict=True):
        limit = limits.get(f"{'fresh' if arm['cold'] else 'warm'}_{min(2, threads_of(arm))}")
        share = ""
        if limit is not None:
            mark = limit["median"] * 1e3
            axes.plot([mark, mark], [place - 0.35, place + 0.35], color=UNCAPTURED, linewidth=1.6)
            share = f"  {mark / value:.0%}" if arm["ours"] else ""
        edge = max(value, arm["quartiles"][1] * 1e3)
        axes.text(edge + max(values) * 0.02, place, f"{milliseconds(value / 1e3)}{share}", va="center", fontsize=9,
                  color=MUTED if arm["noisy"] else INK)  # fmt: skip
    plain_axes(axes, case["name"])
    labels = [f"{arm['label']}, {threads_of(arm)} thread{'s' if threads_of(arm) > 1 else ''}" for arm in arms]
    axes.set_yticks(places, labels if names else [])
    axes.set_xticks([])
    axes.set_xlim(0, max(*values, *(arm["quartiles"][1] * 1e3 for arm in arms)) * 1.3)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    if names:
        axes.plot([], [], color=UNCAPTURED, linewidth=1.6, label="this host's limit (%: the share of it that we reach)")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.01), frameon=False, fontsize=9, labelcolor=INK,
                    borderaxespad=0)  # fmt: skip


def _draw_tiny(axes: Any, tiny: Mapping[str, Any]) -> None:
    cases = sorted(tiny["cases"], key=lambda case: (case["nbytes"], case["trajectories"]))
    places = range(len(cases))
    names = [name for name in _LINES if name in cases[0]["arms"]]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [case["arms"][name]["median"] * 1e6 for case in cases]
        at = [place + (index - (len(names) - 1) / 2) * width for place in places]
        axes.bar(at, heights, width * 0.92, color=_LINES[name], label=cases[0]["arms"][name]["label"])
        for x, height in zip(at, heights, strict=True):
            axes.text(
                x,
                height * 1.06,
                f"{height / 1e3:.1f}k" if height >= 9999.5 else f"{height:.0f}",
                ha="center",
                fontsize=8,
                color=INK,
            )
    plain_axes(axes, "Tiny batches: microseconds a call (logarithmic)")
    axes.set_yscale("log")
    axes.set_yticks([])
    axes.minorticks_off()
    labels = [f"{case['trajectories']} x {case['tokens']} tokens\n{size(case['nbytes'])}" for case in cases]
    axes.set_xticks(places, labels)
    axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK, ncols=len(names))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 3)
