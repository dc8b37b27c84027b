"""Figure 11 for the README: Punica and policies that batch one adapter, linear, each beside the paper's bar."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.facts.systems import SYSTEMS, name_of
from experiments.plots import style
from experiments.plots.frames import beside, centre, described
from experiments.plots.serving_bars import PAPER_NAMES, REFERENCE, SPAN, Places, not_measured, short, under_our_names

SHOWN = (REFERENCE, *(name for name in SYSTEMS.names() if SYSTEMS.get(name).policy))
"""Punica, and the systems that have another system's policy on this engine."""
FONT = 8


def draw_hero(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw throughput of those of `SHOWN` that were measured, in one axis per panel (model) of ``rows``."""
    rows = centre(rows[(rows["metric"] == "throughput") & rows["system"].isin(SHOWN)])
    paper = under_our_names(paper[paper["metric"] == "throughput"])
    paper = paper[paper["system"].isin(rows["system"])]
    panels = list(dict.fromkeys(rows["panel"]))
    figure, axes = style.grid(1, max(len(panels), 1), 7, 2.9, sharex=False)
    for axis, panel in zip(axes[0], panels, strict=False):
        mine, theirs = rows[rows["panel"] == panel], paper[paper["panel"] == panel]
        places = Places(mine, theirs, SHOWN)
        _bars(axis, mine, places, paper=False)
        _bars(axis, theirs, places, paper=True)
        axis.set_xticks(range(len(places.workloads)), places.workloads, fontsize=FONT)
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.22)  # labels above the bars
        models = ", ".join(f"{model}{beside(model)}" for model in dict.fromkeys(mine["model"]))
        axis.set_title(models, fontsize=FONT)
    axes[0, 0].set_ylabel("throughput (token/s)", fontsize=FONT)
    _legend(figure, rows, [name for name in SHOWN if name in set(rows["system"])], paper)
    return figure


def _bars(axis: Axes, cells: pd.DataFrame, places: Places, paper: bool) -> None:
    """Draw a bar, its value, and a line over the span of its repeats, per row of ``cells``; the paper's hatched."""
    cell: Any
    for cell in cells.itertuples():
        left, value = places.left(cell.system, cell.workload, paper), float(cell.value)
        if left is None:
            continue
        hollow = paper or getattr(cell, "disturbed", None) is True
        axis.bar(left, value, 0.9 * places.width, align="edge", **_look(cell.system, hollow, paper))
        low, high = (float(getattr(cell, name, value)) for name in SPAN)
        if low < high:
            axis.vlines(left + 0.45 * places.width, low, high, color="0.1", linewidth=0.8, zorder=4)
        middle = left + 0.45 * places.width
        style.note(axis, short(value), middle, max(value, high), fontsize=6, rotation=90, va="bottom")


def _look(system: str, hollow: bool, paper: bool) -> dict[str, Any]:
    colour = style.look(system)[0]
    hatch = {"hatch": "/////"} if paper else {}
    return {"facecolor": "white" if hollow else colour, "edgecolor": colour, "linewidth": 0.8, "zorder": 3, **hatch}


def _legend(figure: Figure, rows: pd.DataFrame, systems: Sequence[str], paper: pd.DataFrame) -> None:
    handles = [Patch(label=name_of(system), **_look(system, False, False)) for system in systems]
    known = [system for system in systems if (paper["system"] == system).any()]
    labels = {system: f"{style.PAPER_LABEL}: {PAPER_NAMES[system]}" for system in known}
    handles += [Patch(label=label, **_look(system, True, True)) for system, label in labels.items()]
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    title = f"Figure 11: text generation, at most {limit} requests per batch"
    words = "; ".join(filter(None, [described(rows), not_measured(rows)]))
    style.caption(figure, title, words, handles, 3, columnspacing=1.4)
