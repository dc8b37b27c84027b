"""Figure 7: FLOP/s over arithmetic intensity, under the machine's roof, with the paper's points and roof behind."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, disturbed_at
from experiments.plots.overlay import Overlay, fill, finish, label

ROOF = "roof"
"""Prefix of the panels of roofs."""
SHEET = "data sheet"
MOSAIC = "RRA;RRB"  # roofline, absolute latency, relative latency


def draw_roofline(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Left: the roofline, measured and paper. Right: latency over batch, absolute above and relative below."""
    launches = rows[~rows["panel"].str.startswith(ROOF)]
    figure, axes = plt.subplot_mosaic(MOSAIC, figsize=(8.2, 4.8), layout="constrained")
    _roofline(axes["R"], rows, paper)
    spec = Overlay(title="", metric="latency", line="workload")
    mine, theirs = launches[launches["metric"] == "latency"], paper[paper["metric"] == "latency"]
    fill(axes["A"], axes["B"], mine, theirs, spec)
    label(axes["A"], axes["B"], mine, spec)
    axes["A"].set_xticklabels([])
    finish(figure, "Figure 7: one SGMV launch (expand) on the roofline", launches, paper, "workload")
    return figure


def _roofline(axis: Axes, rows: pd.DataFrame, paper: pd.DataFrame) -> None:
    for name in dict.fromkeys(rows.loc[~rows["panel"].str.startswith(ROOF), "workload"]):
        _path(axis, paper[paper["workload"] == name], style.paper_style(name), every=9)
        _path(axis, centre(rows[rows["workload"] == name]), style.measured_style(name))
    own = rows[rows["panel"].str.startswith(ROOF)]
    roofs = [(own[own["panel"] == panel], "black", _roof_name(own, panel)) for panel in dict.fromkeys(own["panel"])]
    roofs.append((paper[paper["panel"] == ROOF], style.PAPER_GREY, style.PAPER_LABEL))
    for frame, colour, name in roofs:
        if lines := _lines(frame):
            _roof(axis, *lines, colour, name)
    axis.legend(loc="lower right", frameon=False, fontsize=7, title="roofs", title_fontsize=7)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("arithmetic intensity (FLOP/byte)")
    axis.set_ylabel("achieved FLOP/s")
    axis.set_title("each path: batch 1 to 64")


def _path(axis: Axes, frame: pd.DataFrame, look: dict[str, Any], every: int = 1) -> None:
    """FLOP/s over intensity, joined in order of batch size."""
    wide = frame.pivot_table(index="batch_size", columns="metric", values="value").sort_index()
    if {"arithmetic_intensity", "achieved_flops"} <= set(wide.columns):
        wide = wide.dropna(subset=["arithmetic_intensity", "achieved_flops"])
        axis.plot(wide["arithmetic_intensity"], wide["achieved_flops"], markevery=every, **look)
        loud = wide[wide.index.isin(disturbed_at(frame, "batch_size"))]
        style.hollow(axis, loud["arithmetic_intensity"], loud["achieved_flops"], look)


def _roof_name(roofs: pd.DataFrame, panel: str) -> str:
    """This device's roof, and how it is known where it is known in two ways."""
    device = ", ".join(dict.fromkeys(roofs["device"]))
    kind = roofs.loc[roofs["panel"] == panel, "kind"].iloc[0]
    if kind == "datasheet":
        return f"{device}, {SHEET}"
    return f"{device}, measured" if roofs["panel"].nunique() > 1 else device


def _lines(frame: pd.DataFrame) -> tuple[float, float] | None:
    """Bandwidth in byte/s and peak in FLOP/s of one roof; None where it is not known."""
    bandwidth = frame.loc[frame["metric"] == "memory_bandwidth_line", "value"]
    peak = frame.loc[frame["metric"].str.startswith("peak_"), "value"]
    return None if bandwidth.empty or peak.empty else (float(bandwidth.iloc[0]) * 1e12, float(peak.iloc[0]) * 1e12)


def _roof(axis: Axes, slope: float, flat: float, colour: str, name: str) -> None:
    """One roof, named in the legend: labels at the lines would cross those of other machines."""
    xs = np.geomspace(0.3, 600, 200)
    dash = "--" if colour == style.PAPER_GREY else ":" if SHEET in name else "-"
    text = f"{name}: {slope / 1e9:,.0f} GB/s, {flat / 1e12:.3g} TFLOP/s"
    axis.plot(xs, np.minimum(slope * xs, flat), color=colour, linestyle=dash, linewidth=1.0, zorder=1, label=text)
