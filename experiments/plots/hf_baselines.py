"""Decode steps of Hugging Face with PEFT: a bar per way, and within it what the device and the launches need."""

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, described

STEP, DEVICE, LAUNCHES = style.PALETTE[3], style.PALETTE[0], "black"


def draw_hf_baselines(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """One column per model, one row of axes per batch; times in ms."""
    counts = rows[rows["statistic"] == "count"]
    counts = counts[counts["metric"].isin(["launches_per_step", "kernels_per_step"])]
    rows = pd.concat([centre(rows), counts])
    panels, models = list(dict.fromkeys(rows["panel"])), list(dict.fromkeys(rows["model"]))
    width, height = 3.4 * len(models) + 0.6, (0.24 * rows["system"].nunique() + 0.6) * len(panels) + 1.2
    figure, axes = style.grid(len(panels), len(models), width, height, sharex=False)
    for line, panel in zip(axes, panels, strict=True):
        for axis, model in zip(line, models, strict=True):
            mine = rows[(rows["panel"] == panel) & (rows["model"] == model)]
            _fill(axis, mine.pivot_table(index="system", columns="metric", values="value", sort=False))
            axis.set_title(f"{panel}, {model}")
    for axis in axes[-1]:
        axis.set_xlabel("time of a decode step (ms)")
    handles: list[Artist] = [Patch(color=STEP, alpha=0.45, label="step")]
    if (rows["metric"] == "device_time").any():
        handles += [
            Patch(color=DEVICE, label="device runs a kernel"),
            Line2D([], [], color=LAUNCHES, marker="|", linestyle="", markersize=9, label="launches x an empty launch"),
        ]
    style.caption(figure, "Hugging Face with PEFT: decode steps", described(rows), handles, 3)
    return figure


def _fill(axis: Axes, table: pd.DataFrame) -> None:
    """The bars of one batch; where launches were counted, their number and time."""
    for place, (_, case) in enumerate(table.iterrows()):
        axis.barh(place, case["step_latency"], 0.8, color=STEP, alpha=0.45)
        if not pd.notna(case.get("device_time")):
            continue
        axis.barh(place, case["device_time"], 0.4, color=DEVICE)
        launching = case["launches_per_step"] * case["launch_time"] / 1e3
        axis.plot([launching] * 2, [place - 0.4, place + 0.4], color=LAUNCHES, linewidth=1.4)
        said = f" {case['launches_per_step']:.0f} launches"
        axis.text(max(case["step_latency"], launching), place, said, va="center", fontsize=6.5)
    axis.set_yticks(range(len(table)), list(table.index))
    axis.invert_yaxis()
    axis.margins(x=0.38)
    axis.set_xlim(left=0)
    axis.grid(axis="y", visible=False)
