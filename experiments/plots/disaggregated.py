"""Maps of `ext_disaggregated`: request rate with LoRA servers over that without, by the link between the GPUs."""

import textwrap
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from experiments.cluster.link_map import CLAIMED, COUPLED, MADE_WITH, ROUTED, ratios
from experiments.plots import style
from experiments.plots.frames import distinct

BASELINES: dict[str, tuple[Any, str]] = {
    COUPLED: ("-", "LoRA on every GPU"),
    ROUTED: ("--", "the same, requests routed by adapter"),
}
"""System -> line and name of what LoRA servers are compared with."""
LEVELS: dict[float, Any] = {1.0: "-", CLAIMED: ":"}
"""Ratio -> line where a map has it."""
CLIP = 8.0
"""Ratio at which colours end, as they do at its inverse."""
LATENCY = 5
"""Microseconds one way, or the nearest there are, of the lines over adapters."""
HEIGHT, WIDTH = 1.5, int(style.LETTERS_PER_INCH * 7.0)
"""Inches of a row of axes; letters of a line of the title."""
DARK, TICKS = 4.0, (0.125, 0.25, 0.5, 1, 2, 4, 8)
"""Ratio beyond which colours are dark, as beyond its inverse; labels of the colours."""


def draw_map(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Draw a map per model and rank, at the popularity of the claim; below, ratios over numbers of adapters."""
    table = ratios(rows, COUPLED)
    if table.empty:
        return plt.figure(figsize=(7.0, 0.3))  # of systems without LoRA servers
    models, ranks = list(dict.fromkeys(table["model"])), list(dict.fromkeys(table["rank"]))
    adapters, exponent = (_nearest(table[name], MADE_WITH[name]) for name in ("adapters", "exponent"))
    figure = plt.figure(figsize=(7.0, 1.3 + HEIGHT * (len(models) + 1)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(len(models), 1.15), squeeze=False)[:, 0]
    axes = above.subplots(len(models), len(ranks), sharex=True, sharey=True, squeeze=False)
    for line, model in zip(axes, models, strict=True):
        for axis, rank in zip(line, ranks, strict=True):
            cells = _at(table, model=model, rank=rank, adapters=adapters, exponent=exponent)
            image = _draw_cells(axis, cells.set_index(["bandwidth", "latency"])["ratio"].unstack())
            axis.set_title(f"rank {rank:g}" if model == models[0] else "")
        line[0].set_ylabel(f"{model}\nlink, GB/s each way")
    above.supxlabel("latency one way, µs", fontsize=8)
    label = f"requests/s over LoRA on every GPU,\n{adapters} adapters, Zipf {exponent}"
    above.colorbar(image, ax=axes, label=label, pad=0.01, ticks=TICKS, format=style.PLAIN).minorticks_off()
    lines = below.subplots(1, len(models), squeeze=False)[0]
    for axis, model in zip(lines, models, strict=True):
        _draw_adapters(axis, rows[rows["model"] == model])
    lines[0].set_ylabel("requests/s over those\nwithout LoRA servers")
    below.legend(handles=_handles(ranks), loc="outside lower center", ncols=4, frameon=False)
    costs = textwrap.wrap(f"simulated, not measured: {', '.join(distinct(rows, 'cost_model'))}", WIDTH)
    figure.suptitle("\n".join(["LoRA servers: requests/s within targets, over those without", *costs]), fontsize=8.5)
    return figure


def _draw_cells(axis: Axes, cells: pd.DataFrame) -> AxesImage:
    """Draw ratios by bandwidth and latency, and lines where they are one, and what is claimed."""
    shown = np.clip(cells.to_numpy(), 1 / CLIP, CLIP)
    image = axis.imshow(shown, norm=LogNorm(1 / CLIP, CLIP), cmap="RdBu", aspect="auto", origin="lower")
    for (row, column), ratio in np.ndenumerate(cells.to_numpy()):
        colour = "white" if ratio > DARK or ratio < 1 / DARK else "black"
        said = "-" if np.isnan(ratio) else "only" if np.isinf(ratio) else f"{ratio:.{1 if ratio >= 1 else 2}f}"
        axis.text(column, row, said, ha="center", va="center", fontsize=6, color=colour)
    for level, line in LEVELS.items():
        if min(shown.shape) > 1 and (shown < level).any() and (shown > level).any():
            axis.contour(shown, levels=[level], colors="black", linestyles=line, linewidths=0.9)
    axis.set_xticks(range(len(cells.columns)), cells.columns)
    axis.set_yticks(range(len(cells)), cells.index)
    axis.grid(visible=False)
    return image


def _draw_adapters(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw ratios of a model over numbers of adapters, a line per rank and baseline, at one link."""
    for baseline, (line, _) in BASELINES.items():
        table = ratios(rows, baseline)
        link = {"bandwidth": MADE_WITH["bandwidth"], "latency": LATENCY, "exponent": MADE_WITH["exponent"]}
        shown = {name: _nearest(table[name], wanted) for name, wanted in link.items()}
        table = _at(table, **shown)
        for place, (_, part) in enumerate(table.groupby("rank", sort=False)):
            axis.plot(part["adapters"], part["ratio"], line, color=style.PALETTE[place], marker="o", markersize=2.5)
    for level, line in LEVELS.items():
        axis.axhline(level, color="0.3", linestyle=line, linewidth=0.8)
    axis.set_title(f"{rows['model'].iloc[0]}, {shown['bandwidth']} GB/s, {shown['latency']} µs")
    axis.set_xlabel("adapters")
    style.log_x(axis)
    style.log_y(axis)
    axis.set_xticks(sorted(set(table["adapters"])))


def _handles(ranks: list[float]) -> list[Line2D]:
    """Make a legend: colours of ranks, and lines of baselines and levels."""
    colours = [Line2D([], [], color=style.PALETTE[i], label=f"rank {rank:g}") for i, rank in enumerate(ranks)]
    lines = [Line2D([], [], color="0.5", linestyle=line, label=f"over {name}") for line, name in BASELINES.values()]
    levels = [Line2D([], [], color="black", linestyle=line, label=f"ratio {level:g}") for level, line in LEVELS.items()]
    return [*colours, *lines, *levels]


def _nearest(values: pd.Series, wanted: float) -> float:
    return min(values, key=lambda value: abs(value - wanted))


def _at(table: pd.DataFrame, **where: object) -> pd.DataFrame:
    """Return the rows whose columns have these values."""
    return table[(table[list(where)] == pd.Series(where)).all(axis=1)]
