"""Figures of the extensions, which the paper has nothing to stand beside: one column of axes per popularity, absolute
latency above, ratios to the system of reference below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, described

Lines = Mapping[str, pd.Series]
"""Legend -> values by batch size, ascending."""
BETWEEN_RUNS = ", between runs"
LOOKS = {
    "true rank": (0, "o"), "padded": (3, "s"), "mean of uniform ranks": (2, "D"), "padded / true rank": (3, "s"),
    "true rank / mean of uniform ranks": (0, "o"), "bytes, padded / true rank": (7, "^"),
    "deterministic": (0, "o"), "deterministic, no PDL": (9, "v"), "batch invariant": (2, "D"), "atomics": (3, "s"),
    "atomics, finer split": (1, "P"),
}  # fmt: skip
"""Legend -> place in the palette, and marker."""


def draw_padding(rows: pd.DataFrame) -> Figure:
    """Latency at true rank, padded, and the mean of the uniform ranks; below, what padding costs and saves."""
    figure, axes = _grid(rows, 2, "Cost of padding: ranks of one batch mixed in slots of the largest")
    for column, (workload, mine) in enumerate(_by_workload(rows)):
        latency, read = _wide(mine, "latency"), _wide(mine, "bytes_read")
        _fill(axes[0, column], latency)
        ratios = {}
        for over, under in (("padded", "true rank"), ("true rank", "mean of uniform ranks")):
            if over in latency and under in latency:
                ratios[f"{over} / {under}"] = (latency[over] / latency[under]).dropna()
        if "padded" in read and "true rank" in read:
            ratios["bytes, padded / true rank"] = (read["padded"] / read["true rank"]).dropna()
        _fill(axes[1, column], ratios, dashed="bytes")
        axes[1, column].axhline(1.0, color="0.3", linewidth=0.8)
        axes[0, column].set_title(workload)
    _label(axes, "latency (µs)", "ratio")
    return _finish(figure, axes)


def draw_determinism(rows: pd.DataFrame) -> Figure:
    """Latency of each variant; below, relative to the faster atomics; last, the share of outputs whose bits change."""
    figure, axes = _grid(rows, 3, "Price of determinism")
    for column, (workload, mine) in enumerate(_by_workload(rows)):
        latency = _wide(mine, "latency")
        _fill(axes[0, column], latency)
        atomics = [line for name, line in latency.items() if name.startswith("atomics")]
        if atomics:
            faster = pd.concat(atomics, axis=1).min(axis=1)
            prices = {n: (line / faster).dropna() for n, line in latency.items() if not n.startswith("atomics")}
            _fill(axes[1, column], prices, log=False)
        axes[1, column].axhline(1.0, color="0.3", linewidth=0.8)
        alone = _wide(mine, "outputs_differing_from_row_alone")
        runs = _wide(mine, "outputs_differing_between_runs")
        changes = {**alone, **{f"{name}{BETWEEN_RUNS}": line for name, line in runs.items()}}
        _fill(axes[2, column], changes, dashed=BETWEEN_RUNS, log=False)
        axes[0, column].set_title(workload)
    _label(
        axes,
        "latency (µs)",
        "relative to the\nfaster atomics",
        "share of outputs that change\nwith the batch / between runs",
    )
    return _finish(figure, axes)


def _by_workload(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(name, rows[rows["workload"] == name]) for name in dict.fromkeys(rows["workload"])]


def _wide(rows: pd.DataFrame, metric: str) -> dict[str, pd.Series]:
    """System -> `metric` by batch size; the uniform ranks are averaged over ranks, where all of them are there."""
    rows = centre(rows[rows["metric"] == metric])
    lines = {}
    for system in dict.fromkeys(rows["system"]):
        table = rows[rows["system"] == system].pivot_table(index="batch_size", columns="rank", values="value")
        name = "mean of uniform ranks" if system == "uniform rank" else system
        lines[name] = table.mean(axis=1, skipna=False).dropna().sort_index()
    return lines


def _grid(rows: pd.DataFrame, depth: int, title: str) -> tuple[Figure, Any]:
    count = len(_by_workload(rows))
    figure, axes = plt.subplots(
        depth, count, figsize=(max(style.PANEL_WIDTH * count, 4.2) + 0.6, depth * style.PANEL_HEIGHT + 1.2),
        sharex=True, sharey="row", squeeze=False, layout="constrained",
    )  # fmt: skip
    figure.suptitle(f"{title}\nmeasured: {described(rows)}", fontsize=8.5)
    return figure, axes


def _fill(axis: Axes, lines: Lines, dashed: str = "", log: bool = True) -> None:
    """Every line in its own colour and marker; those with `dashed` in their legend dashed and hollow."""
    for name, line in lines.items():
        place, marker = LOOKS[name.removesuffix(BETWEEN_RUNS)]
        colour = sns.color_palette("colorblind")[place]
        looks: dict[str, Any] = {"linestyle": "-"}
        if dashed and dashed in name:
            looks = {"linestyle": "--", "markerfacecolor": "white"}
        axis.plot(line.index.astype(float), line.astype(float), color=colour, marker=marker, label=name, **looks)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(style.PLAIN)
    if log:
        style.log_y(axis)
    axis.tick_params(which="minor", length=0)


def _label(axes: Any, *labels: str) -> None:
    for line, label in zip(axes, labels, strict=True):
        line[0].set_ylabel(label)
    for axis in axes[-1]:
        axis.set_xlabel("batch size")


def _finish(figure: Figure, axes: Any) -> Figure:
    """A legend of everything that is drawn, each entry once."""
    entries: dict[str, Any] = {}
    for line in axes:
        for axis in line:
            handles, names = axis.get_legend_handles_labels()
            entries.update(zip(names, handles, strict=True))
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=min(4, len(entries)), frameon=False
    )
    return figure
