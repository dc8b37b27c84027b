"""Figure 7: FLOP/s over arithmetic intensity under the machine's roofs, and latency over the batch, for each clock."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.experiment import Overlay
from experiments.plots import style
from experiments.plots.floors import FLOOR
from experiments.plots.frames import centre, disturbed_at, measured
from experiments.plots.overlay import fill, finish, y_label

ROOF, SHEET = "roof", "data sheet"
"""Prefix of the panels of roofs, and end of the one that was not measured."""
STEPS = (
    " Ours steps up from 32 to 48 rows of Identical and Uniform, and from 48 to 64 of Skewed, where its schedule "
    "changes from one row to 16 rows a program."
)
"""Choice of `choose_expand` (`punica.ops.triton_ops.schedules`) at these shapes for an H200."""
SPEC = Overlay(title="", metric="latency", line="workload")


def draw_roofline(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw rooflines above latencies, a column per clock; side by side where there is one clock."""
    launches = rows[~rows["panel"].str.startswith(ROOF)]
    clocks = list(dict.fromkeys(launches["timer"])) or [""]  # a cut run may have the roof alone
    shape = (2, len(clocks)) if len(clocks) > 1 else (1, 2)
    figure, axes = style.grid(*shape, style.PAGE, 2.5 * shape[0] + 1.0, sharex=False, sharey=shape[0] > 1 and "row")
    above, below = axes if shape[0] > 1 else axes.T
    for roof, axis, clock in zip(above, below, clocks, strict=True):
        timed = launches[launches["timer"] == clock]
        _roofline(roof, timed, rows[rows["panel"].str.startswith(ROOF) & rows["timer"].isin([clock, ""])], paper)
        if timed.empty:
            axis.set_axis_off()
            continue
        fill(axis, timed[timed["metric"].isin(["latency", FLOOR])], paper[paper["metric"] == "latency"], SPEC)
        axis.set_ylabel(y_label(timed[timed["metric"] == "latency"], clock))
        axis.set_xlabel("batch size")
        style.headroom(axis, 0.12)
    words = (
        "Figure 7: one SGMV launch (expand, 16 to 4096) under the roofs, each path from batch 1 to 64, and its latency."
    )
    printed = "Printed: growth over the batch, ours (the paper's)."
    printed += STEPS if (rows["hardware"] == "h200").any() else ""
    finish(
        figure, f"{words} {printed} {measured(launches, 'bands')}", launches, paper[paper["panel"] != ROOF], "workload"
    )
    return figure


def _roofline(axis: Axes, rows: pd.DataFrame, roofs: pd.DataFrame, paper: pd.DataFrame) -> None:
    for name in dict.fromkeys(rows["workload"]):
        for frame, look, every in (
            (paper[paper["workload"] == name], style.paper_style(name), 9),
            (centre(rows[rows["workload"] == name]), style.measured_style(name), 1),
        ):
            wide = frame.pivot_table(index="batch_size", columns="metric", values="value").sort_index()
            if {"arithmetic_intensity", "achieved_flops"} <= set(wide):
                axis.plot(wide["arithmetic_intensity"], wide["achieved_flops"], markevery=every, **look)
                loud = wide[wide.index.isin(disturbed_at(frame, "batch_size"))]
                style.crossed(axis, loud["arithmetic_intensity"], loud["achieved_flops"])
    for panel, frame in roofs.groupby("panel", sort=False):
        kind = SHEET if (frame["kind"] == "datasheet").any() else "measured"
        _roof(axis, frame, {"color": "black", "linestyle": ":" if SHEET in str(panel) else "-"}, kind)
    _roof(axis, paper[paper["panel"] == ROOF], {"color": style.PAPER_GREY, "linestyle": "--"}, style.PAPER_LABEL)
    axis.legend(loc="upper left", frameon=False, fontsize=6, handlelength=1.4)
    axis.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="achieved FLOP/s")


def _roof(axis: Axes, frame: pd.DataFrame, looks: dict[str, Any], name: str) -> None:
    """Draw one roof, named in the legend by its bandwidth and peak; nothing where these are not known."""
    bandwidth = frame.loc[frame["metric"] == "memory_bandwidth_line", "value"]
    peak = frame.loc[frame["metric"].str.startswith("peak_"), "value"]
    if bandwidth.empty or peak.empty:
        return
    slope, flat = float(bandwidth.iloc[0]) * 1e12, float(peak.iloc[0]) * 1e12
    xs = np.geomspace(0.3, 600, 200)
    text = f"{name}: {slope / 1e12:.3g} TB/s, {flat / 1e12:.3g} TFLOP/s"
    axis.plot(xs, np.minimum(slope * xs, flat), linewidth=1.0, zorder=1, label=text, **looks)
