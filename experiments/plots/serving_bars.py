"""Bars of serving systems, grouped by popularity, each beside the paper's bar; below, everything relative to Punica."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.claims.paper import SYSTEMS
from experiments.plots import style
from experiments.plots.frames import centre, described

PAPER_NAMES = {ours: theirs for theirs, ours in reversed(SYSTEMS.items())}
"""Our system -> the paper's that it stands for. The paper's DeepSpeed has the policy of FasterTransformer and is not
drawn."""
REFERENCE = "punica"
SHADES = {"punica_static": 0.6, "punica_last_admitted": 0.3}
"""Variants of Punica are lighter shades of its colour."""
GROUP = 0.86  # of the distance between groups


def draw_serving(rows: pd.DataFrame, paper: pd.DataFrame, title: str) -> Figure:
    """One column of axes per panel (model): throughput above, throughput relative to Punica's below."""
    rows, paper = centre(rows[rows["metric"] == "throughput"]), paper[paper["metric"] == "throughput"]
    panels, systems = list(dict.fromkeys(rows["panel"])), list(dict.fromkeys(rows["system"]))
    figure, axes = plt.subplots(
        2,
        len(panels),
        figsize=(7.2 * len(panels), 5.0),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, panel in enumerate(panels):
        mine, theirs = rows[rows["panel"] == panel], paper[paper["panel"] == panel]
        workloads = list(dict.fromkeys(mine["workload"]))
        for axis, relative in zip(axes[:, column], (False, True), strict=True):
            _bars(axis, by_cell(mine, relative), systems, workloads, relative)
            _paper_bars(axis, paper_cells(theirs, relative), systems, workloads, relative)
            axis.set_yscale("log")
            axis.set_xticks(range(len(workloads)), workloads)
            axis.grid(axis="x", visible=False)
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.12)  # room for the labels
        axes[0, column].set_title(f"{panel}; measured on {', '.join(dict.fromkeys(mine['model']))}")
        axes[1, column].axhline(1.0, color="0.3", linewidth=0.8)
    axes[0, 0].set_ylabel("throughput (token/s)")
    axes[1, 0].set_ylabel("relative to Punica\non the same workload")
    _finish(figure, title, rows, systems)
    return figure


def by_cell(frame: pd.DataFrame, relative: bool) -> dict[tuple[str, str], float]:
    """Throughput by (system, workload); `relative` divides by Punica's on that workload and drops what has none."""
    cells = zip(frame["system"], frame["workload"], frame["value"], strict=True)
    values = {(str(system), str(workload)): float(value) for system, workload, value in cells}
    if not relative:
        return values
    return {
        (system, workload): value / values[REFERENCE, workload]
        for (system, workload), value in values.items()
        if (REFERENCE, workload) in values
    }


def paper_cells(frame: pd.DataFrame, relative: bool) -> dict[tuple[str, str], float]:
    """The same of the paper, under our names."""
    known = frame[frame["system"].isin(list(SYSTEMS))]
    return by_cell(known.assign(system=known["system"].map(SYSTEMS)), relative)


def _colour(system: str) -> tuple[float, float, float]:
    """The system's colour, or a mixture of Punica's and white."""
    if system not in SHADES:
        return style.look(system)[0]
    red, green, blue = (1 - SHADES[system] * (1 - channel) for channel in style.look(REFERENCE)[0])
    return red, green, blue


def _place(systems: list[str], system: str, group: int) -> tuple[float, float]:
    """Left edge and width of the two bars (measured, paper) of `system` in a group; others get one."""
    widths = [2.0 if name in PAPER_NAMES else 1.0 for name in systems]
    unit, index = GROUP / sum(widths), systems.index(system)
    return group - GROUP / 2 + unit * sum(widths[:index]), unit


def _bars(
    axis: Axes, cells: dict[tuple[str, str], float], systems: list[str], workloads: list[str], relative: bool
) -> None:
    for (system, workload), value in cells.items():
        left, width = _place(systems, system, workloads.index(workload))
        axis.bar(left, value, 0.9 * width, align="edge", color=_colour(system), zorder=3)
        _label(axis, left + 0.45 * width, value, relative)


def _paper_bars(
    axis: Axes, cells: dict[tuple[str, str], float], systems: list[str], workloads: list[str], relative: bool
) -> None:
    for (system, workload), value in cells.items():
        if system in systems and workload in workloads:
            left, width = _place(systems, system, workloads.index(workload))
            axis.bar(left + width, value, 0.9 * width, align="edge", zorder=2, **_PAPER)
            _label(axis, left + 1.45 * width, value, relative, style.PAPER_GREY)


_PAPER: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": style.PAPER_GREY,
    "linestyle": "--",
    "linewidth": 0.8,
    "hatch": "////",
}


def _label(axis: Axes, x: float, value: float, relative: bool, colour: str = "0.2") -> None:
    text = f"{value:.2f}" if relative else f"{value:.0f}"
    axis.annotate(
        text, (x, value), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom", rotation=90,
        fontsize=5.5, color=colour,
    )  # fmt: skip


def _finish(figure: Figure, title: str, rows: pd.DataFrame, systems: list[str]) -> None:
    handles = [
        Patch(color=_colour(name), label=f"{name} ({PAPER_NAMES[name]})" if name in PAPER_NAMES else name)
        for name in systems
    ]
    handles.append(Patch(label=style.PAPER_LABEL, **_PAPER))
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    figure.suptitle(f"{title}, at most {limit} requests per batch\nmeasured: {described(rows)}", fontsize=8.5)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, columnspacing=1.4)
