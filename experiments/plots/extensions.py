"""Figures of the extensions: a column of axes per popularity or panel, latency above, ratios below."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.floors import FLOOR
from experiments.plots.frames import centre, disturbed_at, measured

Lines = Mapping[str, pd.Series]
"""Legend -> values by batch size (or what else is drawn to the right), ascending."""
EXPERTS = (
    ("latency", "w13 and w2", "alignment", "w13 and w2\nLoRA (µs)"),
    ("layer_latency", "layer", "backbone layer", "layer (µs)"),
    ("throughput", "model", "backbone model", "decode\n(token/s)"),
    ("step_latency", "engine", "backbone engine", "engine\nstep (ms)"),
)
"""Metric, system, reference system, and label of each row of axes of `draw_moe`."""
SLOTS = ", by slots"
"""End of the name of a column of `draw_moe` whose x axis is the number of slots."""


def draw_fp8(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency, relative to SGMV, and error of an operator by batch; of a model logit error, changed tokens by rank."""

    def column(mine: pd.DataFrame, above: Axes, middle: Axes, below: Axes) -> None:
        if mine["panel"].iloc[0] == "quality":
            above.set_visible(False)
            _fill(middle, _by(mine, "changed_greedy_tokens", "rank"), log=False)
            _fill(below, _by(mine, "logit_error", "rank"))
            middle.set_title("a model: share of\nchanged tokens")
            return
        latency = _by(mine, "latency")
        _fill(above, latency, mine)
        _floor(above, mine[mine["system"] != "SGMV"], label="bytes / bandwidth, FP8")
        _relative(middle, latency, "SGMV")
        _fill(below, {n: line for n, line in _by(mine, "error").items() if n != "SGMV"})

    labels = "latency (µs)", "relative to SGMV", "relative error"
    return _drawn(rows, "Adapters in FP8", column, labels, x_label="batch size\n(model: rank)")


def draw_moe(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Per model, by popularity: both LoRA products, layer, throughput, engine's step; slots share a column."""
    found = rows["panel"].str.extract(r"^(.+), (\d+) slots$")
    slots, batches = found[1].notna(), rows["batch_size"].fillna(0).astype(int).astype(str)
    names = rows["panel"].mask(slots, found[0] + ", batch " + batches + SLOTS)
    rows = rows.assign(panel=names, batch_size=rows["batch_size"].mask(slots, found[1].astype(float)))
    shown = [line for line in EXPERTS if line[1] in set(rows["system"])]

    def column(mine: pd.DataFrame, *axes: Axes) -> None:
        for axis, (metric, system, reference, _) in zip(axes, shown, strict=True):
            own, beside = (mine[mine["system"] == name] for name in (system, reference))
            _fill(axis, _by(own, metric, line="workload"), own[own["metric"] == metric], "workload")
            for line in _by(beside, metric, line="system").values():
                label = "grouping alone" if reference == "alignment" else "without LoRA"
                axis.plot(line.index.astype(float), line.astype(float), label=label, **style.GREY)
            if not axis.lines:
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.5", fontsize=7)
        if mine["panel"].iloc[0].endswith(SLOTS):
            axes[-1].set_xlabel("slots")

    return _drawn(rows, "LoRA on experts", column, [label for *_, label in shown])


def draw_prefix_cache(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """By number of adapters, over the context: first tokens, whole pipelines, and blocks in use."""

    def column(mine: pd.DataFrame, *axes: Axes) -> None:
        for axis, metric in zip(axes, ("first_token", "pipeline", "blocks"), strict=True):
            lines = _by(mine, metric, x="seq_len")
            _fill(axis, lines, mine[mine["metric"] == metric], x="seq_len")
            if metric == "first_token" and {"recompute", "activated_cached"} <= set(lines):
                ratio = lines["recompute"] / lines["activated_cached"]
                style.corner(axis, f"{ratio.min():.1f} to {ratio.max():.1f} times sooner")

    labels = "first token of\na turn (ms)", "pipeline (ms)", "blocks in use"
    return _drawn(rows, "Adapters that continue a context", column, labels, x_label="tokens of context")


def _drawn(
    rows: pd.DataFrame, title: str, column: Callable[..., None], labels: Any, by: str = "panel",
    x_label: str = "batch size",
) -> Figure:  # fmt: skip
    """A figure with a column of axes for each value of `by`, drawn by `column`, and a row for each of `labels`."""
    names = list(dict.fromkeys(rows[by]))
    width = style.PAGE if len(names) > 1 else style.COLUMN
    figure, axes = style.grid(len(labels), len(names), width, 1.3 * len(labels) + 1.5, sharex="col")
    for name, line in zip(names, axes.T, strict=True):
        line[0].set_title(str(name).replace(", ", ",\n").replace(" adapters", ""))
        column(rows[rows[by] == name], *line)
        line[-1].set_xlabel(line[-1].get_xlabel() or x_label)
    for line, label in zip(axes, labels, strict=True):
        line[0].set_ylabel(label)
        if any(axis.texts for axis in line):
            style.headroom(line[0], 0.15)
    handles = style.labelled(axes.T.flat)
    style.finish(figure, f"{title}. {measured(rows[rows['metric'] != FLOOR])}", handles, 4)
    return figure


def _by(rows: pd.DataFrame, metric: str, x: str = "batch_size", line: str = "system") -> dict[str, pd.Series]:
    """Value of column `line` -> mean of `metric` by column `x`."""
    rows = centre(rows[rows["metric"] == metric])
    return {str(name): rows[rows[line] == name].groupby(x)["value"].mean() for name in dict.fromkeys(rows[line])}


def _fill(
    axis: Axes, lines: Lines, rows: pd.DataFrame | None = None, line: str = "system", x: str = "batch_size",
    log: bool = True,
) -> None:  # fmt: skip
    """Every line in its own colour and marker; disturbed points of `rows` crossed."""
    for name, values in lines.items():
        axis.plot(values.index.astype(float), values.astype(float), label=name, **style.measured_style(name))
        if rows is not None:
            style.crossed(axis, values.index, values, disturbed_at(rows[rows[line] == name], x))
    style.log_x(axis)
    if log:
        style.log_y(axis)


def _floor(axis: Axes, rows: pd.DataFrame, label: str = "bytes / bandwidth") -> None:
    """The least time of the bytes that `rows` tell."""
    floor = rows[rows["metric"] == FLOOR].groupby("batch_size")["value"].min()
    if len(floor):
        axis.plot(floor.index.astype(float), floor.astype(float), label=label, **style.FLOOR)


def _relative(axis: Axes, lines: Lines, reference: str) -> None:
    """Draw the lines relative to that of `reference`, where it was measured, a line at 1, and their ends in words."""
    if reference in lines:
        ratios = {name: (line / lines[reference]).dropna() for name, line in lines.items() if name != reference}
        _fill(axis, ratios)
        axis.axhline(1.0, color="0.3", linewidth=0.8)
        if ends := [end for line in ratios.values() for end in line]:
            style.corner(axis, f"{min(ends):.2f} to {max(ends):.2f}")
