"""Figure 11 for the README: bars from zero of Punica and of policies that batch one adapter, beside the paper's."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.facts.systems import SYSTEMS
from experiments.plots import style
from experiments.plots.frames import beside, centre
from experiments.plots.serving_bars import (
    GROUP,
    REFERENCE,
    SPAN,
    comparable,
    place,
    short,
    under_our_names,
    words,
    write_speedups,
)

SHOWN = (REFERENCE, *(name for name in SYSTEMS.names() if SYSTEMS.get(name).policy))
"""Punica, and the systems that have another system's policy on this engine."""


def draw_hero(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw throughput of those of `SHOWN` that were measured, in one axis per panel (model) of ``rows``."""
    rows = centre(rows[(rows["metric"] == "throughput") & rows["system"].isin(SHOWN)])
    paper = under_our_names(paper[paper["metric"] == "throughput"])
    paper = paper[paper["system"].isin(rows["system"])]
    panels, systems = list(dict.fromkeys(rows["panel"])), [name for name in SHOWN if name in set(rows["system"])]
    figure, axes = style.grid(1, max(len(panels), 1), style.PAGE, 3.0, sharex=False)
    for axis, panel in zip(axes[0], panels, strict=False):
        mine, papers = rows[rows["panel"] == panel], paper[paper["panel"] == panel]
        theirs = comparable(mine, papers)
        workloads = list(dict.fromkeys(mine["workload"]))
        slots = [(name, one) for name in systems for one in (False, True) if not one or name in set(theirs["system"])]
        cell: Any
        for is_paper, frame in ((False, mine), (True, theirs)):
            for cell in frame[frame["workload"].isin(workloads)].itertuples():
                at = place(workloads.index(cell.workload), slots.index((cell.system, is_paper)), len(slots))
                span = [float(getattr(cell, name, cell.value)) for name in SPAN]
                about = {"paper": is_paper, "disturbed": getattr(cell, "disturbed", None) is True, "span": span}
                looks = {"looks": {"fontsize": 6, "rotation": 90, "va": "bottom"}}
                style.bar(
                    axis, at, cell.value, 0.9 * GROUP / len(slots), cell.system, short(cell.value), **about, **looks
                )
        write_speedups(axis, mine, papers)
        axis.set_xticks(range(len(workloads)), workloads)
        axis.grid(axis="x", visible=False)
        axis.set_title(", ".join(f"{model}{beside(model)}" for model in dict.fromkeys(mine["model"])))
    drawn = comparable(rows, paper)
    axes[0, 0].set_ylim(0, 1.35 * pd.concat([rows["value"], drawn["value"]]).max())
    axes[0, 0].set_ylabel("throughput (token/s)")
    handles = style.patches(systems)
    handles += [] if drawn.empty else [style.Patch(label=f"{style.PAPER_LABEL}: open", **style.patch(REFERENCE, True))]
    style.finish(figure, words("Figure 11: text generation", rows, paper), handles, 4)
    return figure
