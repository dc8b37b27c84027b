"""The figure of `ext_moe`: adapters on experts, one column of axes per model."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, described, disturbed_at

GREY: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1.0, "zorder": 1}


def draw_moe(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency of both LoRA products (and of the grouping, dashed), of the layer, and throughput, per popularity; grey:
    without LoRA.
    """
    models = list(dict.fromkeys(rows["panel"]))
    width = max(style.PANEL_WIDTH * len(models), 4.2) + 0.6
    figure, axes = style.grid(3, len(models), width, 3 * style.PANEL_HEIGHT + 1.2)
    for model, column in zip(models, axes.T, strict=True):
        mine = rows[rows["panel"] == model]
        column[0].set_title(model)
        _lines(column[0], mine, "latency", "w13 and w2", "alignment")
        _lines(column[1], mine, "layer_latency", "layer", "backbone layer")
        _lines(column[2], mine, "throughput", "model", "backbone model")
        column[2].set_xlabel("batch size")
    labels = ("w13 and w2 LoRA (µs)", "layer (µs)", "decode (token/s)")
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label)
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
