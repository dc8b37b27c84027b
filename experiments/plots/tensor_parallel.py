"""Figure 12: serving systems on tensor-parallel ranks, one column per number of ranks; last what the layouts of
adapters cost in memory, and what they reach of the ratio that bytes allow.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, role_of
from experiments.plots.serving_bars import (
    GROUP,
    dots,
    group_names,
    handles_of,
    placed,
    regime,
    short,
    under_our_names,
    words,
    write_speedups,
)  # fmt: skip

COLLECTIVES: dict[str, Any] = {"facecolor": "black", "edgecolor": "white", "linewidth": 0.3}
RATIO = "distinct_over_backbone_identical"
ALLOWED = "bytes_ratio"


def draw_ranks(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Throughput above, of 70B beside the paper's; steps and the collectives in them below."""
    about, rows, paper = regime(rows), centre(rows), under_our_names(paper)
    panels = [panel for panel in dict.fromkeys(rows["panel"]) if not panel.endswith("ratios")]
    width = [2.4] * len(panels) + [1.5]
    figure, axes = style.grid(2, len(width), style.PAGE, 5.2, sharex=False, sharey=False, width_ratios=width)
    shown = paper.iloc[:0]
    for column, panel in enumerate(panels):
        mine = rows[rows["panel"] == panel]
        model = mine["model"].iloc[0]
        alike = role_of(model) == "70B"  # tokens of another model are no match for its
        theirs = paper if alike else paper.iloc[:0]
        shown = theirs if alike else shown
        rates = mine[mine["metric"] == "throughput"]
        dots(axes[0, column], rates, theirs, list(mine["system"]))
        write_speedups(axes[0, column], rates, theirs, 5.5)
        _steps(axes[1, column], mine)
        title = f"{model} on {panel.rpartition(', tp ')[2]} ranks"
        axes[0, column].set_title(title + "\n(paper: 70B on 8 GPUs)" * alike)
    axes[0, 0].set_ylabel("throughput (token/s)")
    axes[1, 0].set_ylabel("step (ms)")
    memory = rows[rows["metric"] == "adapter_memory"].drop_duplicates(["panel", "system"])  # the same for all workloads
    _side_by_side(axes[0, -1], memory.assign(value=memory["value"] / 1e9))
    axes[0, -1].set_ylabel("adapter slots (GB per rank)")
    reached = rows[rows["metric"] == RATIO]
    allowed = rows[rows["metric"] == ALLOWED].set_index(["panel", "system"])["value"]
    _side_by_side(axes[1, -1], reached)
    for at, cell in enumerate(zip(reached["panel"], reached["system"], strict=True)):
        if cell in allowed.index:
            axes[1, -1].hlines(allowed[cell], at - 0.45, at + 0.45, color="0.2", linewidth=1.4, zorder=5)
    axes[1, -1].set_ylabel("Distinct / backbone Identical\n(lines: of bytes, computed)")
    rates = rows[rows["metric"] == "throughput"]
    handles = [*handles_of(rates, shown), Patch(label="collectives within the step", **COLLECTIVES)]
    title = "Figure 12: text generation on tensor-parallel ranks"
    style.finish(figure, words(title, rates, shown, about), handles, 4)
    return figure


def _steps(axis: Axes, mine: pd.DataFrame) -> None:
    """Mean steps, and the share of each in collectives."""
    steps = mine[mine["metric"] == "step_latency"]
    shares = mine[mine["metric"] == "collective_share"].set_index(["system", "workload"])["value"]
    systems = list(dict.fromkeys(steps["system"]))
    width = 0.9 * GROUP / len(systems)
    for at, cell in placed(steps, steps, systems, systems):
        loud = getattr(cell, "disturbed", None) is True
        top = style.bar(axis, at, cell.value, width, cell.system, disturbed=loud)
        style.note(axis, short(cell.value), at, top, zorder=5)
        if (share := shares.get((cell.system, cell.workload))) is not None:
            axis.bar(at, share * cell.value, width, zorder=4, **COLLECTIVES)
    axis.margins(y=0.12)
    group_names(axis, steps)


def _side_by_side(axis: Axes, cells: pd.DataFrame) -> None:
    """A bar for each of `cells`, named by its model and ranks."""
    for at, (value, system) in enumerate(zip(cells["value"], cells["system"], strict=True)):
        top = style.bar(axis, at, value, 0.9, system)
        style.note(axis, f"{value:.2g}", at, top, zorder=5, bbox=style.BEHIND)
    ranks = [str(panel).removesuffix(" ratios").rpartition(", ")[2] for panel in cells["panel"]]
    models = [str(model).rpartition("-")[2] for model in cells["model"]]
    axis.set_xticks(range(len(cells)), ["\n".join(names) for names in zip(models, ranks, strict=True)])
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.15)
