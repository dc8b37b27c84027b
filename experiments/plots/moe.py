"""The figure of `ext_moe`: adapters on experts, one column of axes per model."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, described, disturbed_at

LINES = (
    ("latency", "w13 and w2", "alignment", "w13 and w2 LoRA (µs)"),
    ("layer_latency", "layer", "backbone layer", "layer (µs)"),
    ("throughput", "model", "backbone model", "decode (token/s)"),
    ("step_latency", "engine", "backbone engine", "engine step (ms)"),
)
"""Metric, system, what stands beside it, and label of each row of axes."""
GREY: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1.0, "zorder": 1}


def draw_moe(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency of both LoRA products (and of the grouping, dashed), of the layer, throughput, and a step of the engine,
    per popularity; grey: without LoRA. Axes for what was measured.
    """
    models, systems = list(dict.fromkeys(rows["panel"])), set(rows["system"])
    lines = [line for line in LINES if line[1] in systems]
    width = max(style.PANEL_WIDTH * len(models), 4.2) + 0.6
    figure, axes = style.grid(len(lines), len(models), width, len(lines) * style.PANEL_HEIGHT + 1.2)
    for model, column in zip(models, axes.T, strict=True):
        mine = rows[rows["panel"] == model]
        column[0].set_title(model.replace(", ", ",\n"))
        for axis, (metric, system, beside, _) in zip(column, lines, strict=True):
            _lines(axis, mine, metric, system, beside)
        column[-1].set_xlabel("batch size")
    for axis, line in zip(axes[:, 0], lines, strict=True):
        axis.set_ylabel(line[3])
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, names = axis.get_legend_handles_labels()
        entries.update(zip(names, handles, strict=True))
    style.caption(figure, "LoRA on experts", described(rows), list(entries.values()), min(4, len(entries)))
    return figure


def _lines(axis: Axes, rows: pd.DataFrame, metric: str, system: str, beside: str) -> None:
    """`system` by popularity, and the mean over popularities of what stands beside it."""
    rows = centre(rows[rows["metric"] == metric])
    own, other = rows[rows["system"] == system], rows[rows["system"] == beside]
    if own.empty and other.empty:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.5")
    for workload in dict.fromkeys(own["workload"]):
        points = own[own["workload"] == workload]
        line = points.groupby("batch_size")["value"].mean()
        colour, marker = style.look(workload)
        looks = {"color": colour, "marker": marker}
        axis.plot(line.index.astype(float), line.astype(float), label=workload, **looks)
        loud = line[line.index.isin(disturbed_at(points, "batch_size"))]
        style.hollow(axis, loud.index.astype(float).tolist(), loud.astype(float).tolist(), looks)
    if not other.empty:
        line = other.groupby("batch_size")["value"].mean()
        label = "grouping alone" if beside == "alignment" else "without LoRA"
        axis.plot(line.index.astype(float), line.astype(float), label=label, **GREY)
    style.log_x(axis)
    style.log_y(axis)
