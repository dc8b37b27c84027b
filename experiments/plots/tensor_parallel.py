"""Figure 12: serving systems on tensor-parallel ranks, one column per number of ranks; last what the layouts of
adapters cost in memory, and what they reach of the ratio that bytes allow.
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.facts.systems import name_of, policies
from experiments.plots import style
from experiments.plots.frames import centre, described, role_of
from experiments.plots.serving_bars import (
    PAPER_BAR,
    Places,
    bars,
    beside_ours,
    colour_of,
    frame_bars,
    regime,
    under_our_names,
)

COLLECTIVES: dict[str, Any] = {"facecolor": "none", "edgecolor": "0.15", "hatch": "////", "linewidth": 0.5, "zorder": 4}
RATIO = "distinct_over_backbone_identical"
ALLOWED = "bytes_ratio"


def draw_ranks(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Throughput above, of 70B beside the paper's bars; steps and the collectives in them below."""
    about, rows = regime(rows), centre(rows)
    theirs = under_our_names(paper[paper["metric"] == "throughput"])
    panels = [panel for panel in dict.fromkeys(rows["panel"]) if not panel.endswith("ratios")]
    width = [4.6] * len(panels) + [2.6]
    figure, axes = plt.subplots(
        2, len(width), figsize=(sum(width), 5.2), squeeze=False, layout="constrained", width_ratios=width
    )
    for column, panel in enumerate(panels):
        mine = rows[rows["panel"] == panel]
        model = mine["model"].iloc[0]
        alike = role_of(model) == "70B"  # tokens of another model are no match for its
        _throughput(axes[0, column], mine[mine["metric"] == "throughput"], theirs if alike else theirs.iloc[:0])
        _steps(axes[1, column], mine)
        ranks = panel.rpartition(", tp ")[2]
        axes[0, column].set_title(f"{model} on {ranks} ranks" + ", beside the paper's 70B on 8 GPUs" * alike)
    axes[0, 0].set_ylabel("throughput (token/s)")
    axes[1, 0].set_ylabel("step (ms), hatched: collectives")
    _memory(axes[0, -1], rows)
    _ratios(axes[1, -1], rows)
    shown = any(role_of(model) == "70B" for model in rows["model"])
    _finish(figure, rows, theirs if shown else theirs.iloc[:0], about)
    return figure


def _throughput(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame) -> None:
    places = Places(mine, theirs, list(mine["system"]))
    bars(axis, mine, places, False)
    bars(axis, theirs, places, True)
    style.log_y(axis)
    frame_bars([axis])
    _workloads(axis, places)


def _steps(axis: Axes, mine: pd.DataFrame) -> None:
    """Mean steps, and the share of each in collectives."""
    steps = mine[mine["metric"] == "step_latency"]
    shares = mine[mine["metric"] == "collective_share"].set_index(["system", "workload"])["value"]
    places = Places(steps, steps.iloc[:0], list(steps["system"]))
    bars(axis, steps, places, False)
    for system, workload, value in zip(steps["system"], steps["workload"], steps["value"], strict=True):
        left, share = places.left(system, workload, False), shares.get((system, workload))
        if left is not None and share is not None:
            axis.bar(left, share * value, 0.9 * places.width, align="edge", **COLLECTIVES)
    axis.margins(y=0.12)
    _workloads(axis, places)


def _workloads(axis: Axes, places: Places) -> None:
    axis.set_xticks(range(len(places.workloads)), places.workloads)
    axis.grid(axis="x", visible=False)


def _memory(axis: Axes, rows: pd.DataFrame) -> None:
    """Adapter slots of the fullest rank; the same for all workloads."""
    found = rows[rows["metric"] == "adapter_memory"].drop_duplicates(["panel", "system"])
    found = found.assign(value=found["value"] / 1e9)
    for at, value in zip(_side_by_side(axis, found), found["value"], strict=True):
        style.note(axis, f"{value:.3g}", at, value, va="bottom")
    axis.set_ylabel("adapter slots (GB per rank)")


def _ratios(axis: Axes, rows: pd.DataFrame) -> None:
    """Punica on Distinct over backbone-only on Identical; a line where bytes would have it (computed)."""
    found = rows[rows["metric"] == RATIO]
    allowed = rows[rows["metric"] == ALLOWED].set_index(["panel", "system"])["value"]
    for at, cell in zip(_side_by_side(axis, found), found.itertuples(), strict=True):
        style.note(axis, f"{cell.value:.3f}", at, 0.0, color="white", va="bottom", zorder=5)
        value = allowed.get((cell.panel, cell.system))
        if value is not None:
            axis.plot([at - 0.45, at + 0.45], [value, value], color="0.2", linewidth=1.4, zorder=5)
    axis.set_ylabel("Distinct over backbone-only\nIdentical; lines: bytes (computed)")


def _side_by_side(axis: Axes, cells: pd.DataFrame) -> list[float]:
    """Draw a bar for each of `cells`, named by its model and ranks; return their places."""
    places = [float(place) for place in range(len(cells))]
    for at, value, system in zip(places, cells["value"], cells["system"], strict=True):
        axis.bar(at, value, 0.9, color=colour_of(system), zorder=3)
    ranks = [str(panel).removesuffix(" ratios").rpartition(", ")[2] for panel in cells["panel"]]
    models = [str(model).rpartition("-")[2] for model in cells["model"]]
    axis.set_xticks(places, ["\n".join(names) for names in zip(models, ranks, strict=True)])
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.15)
    return places


def _finish(figure: Figure, rows: pd.DataFrame, theirs: pd.DataFrame, about: str) -> None:
    ours = list(dict.fromkeys(rows["system"]))
    handles = [Patch(color=colour_of(name), label=name_of(name)) for name in ours]
    handles += [] if theirs.empty else [Patch(label=style.PAPER_LABEL, **PAPER_BAR)]
    handles += [Patch(label="collectives", **COLLECTIVES)]
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    title = f"Figure 12: text generation on tensor-parallel ranks, at most {limit} requests per batch"
    words = [described(rows), about, policies(ours), beside_ours(list(theirs["system"]), ours)]
    style.caption(figure, title, "; ".join(filter(None, words)), handles, 5, columnspacing=1.4)
