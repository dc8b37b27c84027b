"""Figure 7: FLOP/s over arithmetic intensity, under the machine's roof, with the paper's points and roof behind."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre
from experiments.plots.overlay import Overlay, fill, finish, label

MOSAIC = "RRA;RRB"  # roofline, absolute latency, relative latency


def draw_roofline(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Left: the roofline, measured and paper. Right: latency over batch, absolute above and relative below."""
    launches = rows[rows["panel"] != "roof"]
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
    for name in dict.fromkeys(rows.loc[rows["panel"] != "roof", "workload"]):
        _path(axis, paper[paper["workload"] == name], style.paper_style(name), every=9)
        _path(axis, centre(rows[rows["workload"] == name]), style.measured_style(name))
    _roof(axis, rows[rows["panel"] == "roof"], "black", "measured device", "-")
    _roof(axis, paper[paper["panel"] == "roof"], style.PAPER_GREY, style.PAPER_LABEL, "--")
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


def _roof(axis: Axes, frame: pd.DataFrame, colour: str, name: str, dash: str) -> None:
    bandwidth = frame.loc[frame["metric"] == "memory_bandwidth_line", "value"]
    peak = frame.loc[frame["metric"].str.startswith("peak_"), "value"]
    if bandwidth.empty or peak.empty:
        return
    slope, flat = float(bandwidth.iloc[0]) * 1e12, float(peak.iloc[0]) * 1e12
    xs = np.geomspace(0.3, 600, 200)
    axis.plot(xs, np.minimum(slope * xs, flat), color=colour, linestyle=dash, linewidth=1.0, zorder=1)
    text = f"{name}: {slope / 1e9:,.0f} GB/s, {flat / 1e12:.3g} TFLOP/s"
    style.note(axis, text, 600, flat, lift=4, ha="right", fontsize=7, color=colour)
