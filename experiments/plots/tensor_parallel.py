"""Figure 12: serving systems on tensor-parallel ranks, one column per number of ranks; last what the layouts of
adapters cost in memory, and what they reach of the ratio that bytes allow.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.facts.systems import name_of
from experiments.plots import style
from experiments.plots.frames import centre, role_of
from experiments.plots.serving_bars import (
    GROUP,
    LONE,
    dots,
    legend_order,
    place,
    regime,
    short,
    under_our_names,
    words,
    write_speedups,
)

COLLECTIVES: dict[str, Any] = {"facecolor": "black", "edgecolor": "white", "linewidth": 0.3}
RATIO = "distinct_over_backbone_identical"
ALLOWED = "bytes_ratio"


def draw_ranks(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Throughput above, of 70B beside the paper's; steps and the collectives in them below."""
    about, rows = regime(rows), centre(rows)
    paper = under_our_names(paper[paper["metric"] == "throughput"])
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
    _memory(axes[0, -1], rows)
    _ratios(axes[1, -1], rows)
    rates = rows[rows["metric"] == "throughput"]
    names = legend_order(rates, shown)
    handles: list[Any] = [Line2D([], [], label=name_of(one), **style.measured_style(one) | LONE) for one in names]
    handles += [*style.sides(not shown.empty), Patch(label="collectives within the step", **COLLECTIVES)]
    title = "Figure 12: text generation on tensor-parallel ranks"
    style.finish(figure, words(title, rates, shown, about), handles, 4)
    return figure


def _steps(axis: Axes, mine: pd.DataFrame) -> None:
    """Mean steps, and the share of each in collectives."""
    steps = mine[mine["metric"] == "step_latency"]
    shares = mine[mine["metric"] == "collective_share"].set_index(["system", "workload"])["value"]
    workloads, systems = (list(dict.fromkeys(steps[name])) for name in ("workload", "system"))
    cell: Any
    for cell in steps.itertuples():
        at = place(workloads.index(cell.workload), systems.index(cell.system), len(systems))
        width, loud = 0.9 * GROUP / len(systems), getattr(cell, "disturbed", None) is True
        style.bar(axis, at, cell.value, width, cell.system, short(cell.value), disturbed=loud)
        if (share := shares.get((cell.system, cell.workload))) is not None:
            axis.bar(at, share * cell.value, width, zorder=4, **COLLECTIVES)
    axis.margins(y=0.12)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.grid(axis="x", visible=False)


def _memory(axis: Axes, rows: pd.DataFrame) -> None:
    """Adapter slots of the fullest rank; the same for all workloads."""
    found = rows[rows["metric"] == "adapter_memory"].drop_duplicates(["panel", "system"])
    found = found.assign(value=found["value"] / 1e9)
    _side_by_side(axis, found, [f"{value:.3g}" for value in found["value"]])
    axis.set_ylabel("adapter slots (GB per rank)")


def _ratios(axis: Axes, rows: pd.DataFrame) -> None:
    """Punica on Distinct over backbone-only on Identical; a line where bytes would have it (computed)."""
    found = rows[rows["metric"] == RATIO]
    allowed = rows[rows["metric"] == ALLOWED].set_index(["panel", "system"])["value"]
    _side_by_side(axis, found, [""] * len(found))
    for at, cell in enumerate(found.itertuples()):
        style.note(axis, f"{cell.value:.2f}", at, 0.0, va="bottom", zorder=5, bbox=style.BEHIND)
        if (value := allowed.get((cell.panel, cell.system))) is not None:
            axis.plot([at - 0.45, at + 0.45], [value, value], color="0.2", linewidth=1.4, zorder=5)
    axis.set_ylabel("Distinct / backbone Identical\n(lines: of bytes, computed)")


def _side_by_side(axis: Axes, cells: pd.DataFrame, texts: list[str]) -> None:
    """A bar for each of `cells`, named by its model and ranks."""
    for at, (value, system, text) in enumerate(zip(cells["value"], cells["system"], texts, strict=True)):
        style.bar(axis, at, value, 0.9, system, text)
    ranks = [str(panel).removesuffix(" ratios").rpartition(", ")[2] for panel in cells["panel"]]
    models = [str(model).rpartition("-")[2] for model in cells["model"]]
    axis.set_xticks(range(len(cells)), ["\n".join(names) for names in zip(models, ranks, strict=True)])
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.15)
