"""The hour of Figure 13, the paper's beside each world that served it."""

import textwrap
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from experiments.cluster.served import KILLED
from experiments.plots import style
from experiments.plots.frames import distinct, measured, series

PAPER: dict[str, Any] = {"color": style.look("punica").colour, "linestyle": "--", "linewidth": 0.9, "alpha": 0.6}
LINES = (("request_rate", "requests/s"), ("throughput_10s_mean", "token/s"), ("active_gpus_60s_mean", "active GPUs"))
HEAT = "gpu_batch_size_60s_mean"
MINUTE = 60.0
ON_RAY = "ray hour"
"""In the panels of runners on Ray, and of what simulates them."""
HEIGHT, LOW_HEIGHT = 4.4, 3.4  # inches of a cluster, and of one of a few runners
TITLE = 100
"""Letters of all titles of maps together."""


def draw_hour(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure | None:
    """The hour beside the paper's; below, those on Ray, rule by rule. None: no rows over time, as of 1000 GPUs."""
    on_ray = rows["panel"].str.contains(ON_RAY)
    worlds = [(rows[~on_ray], paper), *((part, None) for _, part in rows[on_ray].groupby("system", sort=False))]
    clusters = [(part, beside) for part, beside in worlds if (part["metric"] == HEAT).any()]
    if not clusters:
        return None
    heights = [HEIGHT if beside is not None else LOW_HEIGHT for _, beside in clusters]
    figure = plt.figure(figsize=(style.PAGE, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(clusters), 1, squeeze=False, height_ratios=heights)[:, 0]
    for place, (part, beside) in zip(parts, clusters, strict=True):
        _draw_cluster(place, part, beside)
    return figure


def _draw_cluster(figure: SubFigure, rows: pd.DataFrame, paper: pd.DataFrame | None) -> None:
    """Request rate, throughput and active GPUs over the hour; below, the batch of every GPU: the paper's first."""
    hours = {str(panel): part for panel, part in rows.groupby("panel", sort=False) if (part["metric"] == HEAT).any()}
    maps: dict[str, pd.DataFrame] = {**({} if paper is None else {style.PAPER_LABEL: paper}), **hours}
    places = figure.add_gridspec(2, len(LINES) * len(maps), height_ratios=(1.0, 1.25 if paper is not None else 0.6))
    for i, (metric, label) in enumerate(LINES):
        axis = figure.add_subplot(places[0, i * len(maps) : (i + 1) * len(maps)])
        if paper is not None:
            _line(axis, paper, metric, PAPER)
        for panel, part in hours.items():
            _line(axis, part, metric, {**_looks(panel), "linewidth": 1.0, "zorder": 2.5 if panel == KILLED else 3})
        axis.set(title=label, xlabel="minutes", ylim=(0, None))
        if paper is not None:
            style.headroom(axis, 0.22)
            style.corner(axis, "\n".join(_summary(axis, end) for end in ("mean", "max")))
    below = [figure.add_subplot(places[1, i * len(LINES) : (i + 1) * len(LINES)]) for i in range(len(maps))]
    for axis, (name, part) in zip(below, maps.items(), strict=True):
        image = _heat(axis, part, textwrap.fill(name, TITLE // (2 * len(maps))))
    figure.colorbar(image, ax=below, label="requests on a GPU", pad=0.01)
    handles = [Line2D([], [], label=style.PAPER_LABEL, **PAPER)] if paper is not None else []
    handles += [Line2D([], [], **_looks(panel), label=panel) for panel in hours]
    rules = ", ".join(distinct(pd.concat(hours.values()), "system"))
    worlds = " ".join(_world(panel, part) for panel, part in hours.items())
    printed = " Printed: ours (the paper's)." if paper is not None else ""
    style.finish(figure, f"One hour on a cluster under the rule {rules}.{printed} {worlds}", handles)


def _summary(axis: Axes, what: str) -> str:
    paper, *ours = (getattr(np.asarray(line.get_ydata()), what)() for line in axis.get_lines())
    first, *_ = said = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in (paper, *ours)]
    return f"{what} {', '.join(said[1:])} ({first})"


def _world(panel: str, rows: pd.DataFrame) -> str:
    """Describe a panel: the cost model of a simulation, or where it was measured."""
    models = ", ".join(distinct(rows, "cost_model"))
    if models:
        return f"{panel[0].upper()}{panel[1:]}: not measured but computed by the cost model {models}."
    said = measured(rows.assign(disturbed=None)).removeprefix("Measured: ").removesuffix(".")
    marks = "; disturbed by other work" if rows["disturbed"].eq(True).any() else ""
    return f"{panel[0].upper()}{panel[1:]}: measured, {said}{marks}."


def _looks(panel: str) -> dict[str, Any]:
    """Return the looks of a line; simulated ones are dotted beside a measured one of the same cluster."""
    if ON_RAY not in panel:
        return {"color": style.look("punica").colour}
    place = 0 if panel.startswith("simulated") else 1 + ("killed" in panel)
    return {"color": style.PALETTE[(1, 0, 2)[place]], "linestyle": ":" if place == 0 else "-"}


def _line(axis: Axes, rows: pd.DataFrame, metric: str, looks: dict[str, Any]) -> None:
    seconds, values = series(rows[rows["metric"] == metric], "t_s")
    axis.plot([second / MINUTE for second in seconds], values, **looks)


def _heat(axis: Axes, rows: pd.DataFrame, title: str) -> AxesImage:
    """Batch of each GPU, the first at the bottom, over minutes."""
    cells = rows[rows["metric"] == HEAT].pivot_table(index="gpu", columns="t_s", values="value")
    end = (float(max(cells.columns)) + MINUTE) / MINUTE
    extent = (0.0, end, -0.5, len(cells) - 0.5)
    image = axis.imshow(
        cells, aspect="auto", origin="lower", extent=extent, vmin=0, vmax=32, cmap="viridis", interpolation="nearest"
    )
    axis.grid(visible=False)
    axis.set(title=title, xlabel="minutes", ylabel="GPU")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image
