"""Decode steps of Hugging Face with PEFT: dots of the step, and of what the device and the launches need."""

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.plots import style
from experiments.plots.frames import centre, measured
from experiments.plots.serving_bars import short

NAME = "launches x an empty launch"
STEP: dict[str, Any] = {"color": style.PALETTE[3], "marker": "s", "linestyle": "", "markersize": 5}
DEVICE: dict[str, Any] = {"color": style.PALETTE[0], "marker": "o", "linestyle": "", "markersize": 4}
LAUNCHES: dict[str, Any] = {"color": "black", "marker": "|", "linestyle": "", "markersize": 9}


def draw_hf_baselines(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """One column per model, one row of axes per batch; times in ms."""
    counts = rows[rows["statistic"] == "count"]
    counts = counts[counts["metric"].isin(["launches_per_step", "kernels_per_step"])]
    rows = pd.concat([centre(rows), counts])
    panels, models = list(dict.fromkeys(rows["panel"])), list(dict.fromkeys(rows["model"]))
    width, height = style.PAGE if len(models) > 1 else style.COLUMN, 0.2 * rows["system"].nunique() + 0.5
    figure, axes = style.grid(len(panels), len(models), width, height * len(panels) + 1.2, sharex=False, sharey=False)
    for line, panel in zip(axes, panels, strict=True):
        for axis, model in zip(line, models, strict=True):
            mine = rows[(rows["panel"] == panel) & (rows["model"] == model)]
            loud = set(mine.loc[mine["disturbed"].eq(True), "system"]) if "disturbed" in mine else set()
            _fill(axis, mine.pivot_table(index="system", columns="metric", values="value", sort=False), loud)
            axis.set_title(f"{panel}, {model}")
    for axis in axes[-1]:
        axis.set_xlabel("time of a decode step (ms)")
    handles: list[Artist] = [Line2D([], [], label="step", **STEP)]
    counted = "; in brackets the launches of a step" if len(counts) else ""
    if (rows["metric"] == "device_time").any():
        handles += [Line2D([], [], label="device runs a kernel", **DEVICE), Line2D([], [], label=NAME, **LAUNCHES)]
    style.finish(figure, f"Hugging Face with PEFT: decode steps{counted}. {measured(rows)}", handles, 3)
    return figure


def _fill(axis: Axes, table: pd.DataFrame, loud: set[str]) -> None:
    """The dots of one batch; where launches were counted, their number and time."""
    names: list[str] = []
    for place, (name, case) in enumerate(table.iterrows()):
        step = end = case["step_latency"]
        axis.plot([step], [place], **STEP)
        if name in loud:
            style.crossed(axis, [step], [place])
        names.append(str(name))
        if pd.notna(case.get("device_time")):
            launching = case["launches_per_step"] * case["launch_time"] / 1e3
            axis.plot([case["device_time"]], [place], **DEVICE)
            axis.plot([launching], [place], **LAUNCHES)
            names[-1], end = f"{name} ({case['launches_per_step']:.0f})", max(step, launching)
        style.note(axis, f"  {short(step)} ms", end, place, lift=0, ha="left", va="center")
    axis.set_yticks(range(len(table)), names)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(right=20 * table["step_latency"].max())
    style.label_decades(axis.xaxis)
