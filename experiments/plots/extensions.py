"""Figures of the extensions: a column of axes per popularity or panel, latency above, ratios below."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

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
UNIFORM, MEAN = "uniform rank", "mean of uniform ranks"
DODGE = 1.08
"""Factor on the batch size between lines of equal values."""


def draw_padding(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency at true rank, padded, and the mean of the uniform ranks; below, what padding costs and saves."""
    uniform = rows["system"].eq(UNIFORM)
    ranks = rows[uniform].groupby(["workload", "batch_size"])["rank"].transform("nunique")
    rows = rows.drop(ranks.index[ranks < rows.loc[uniform, "rank"].nunique()]).replace({"system": {UNIFORM: MEAN}})

    def column(mine: pd.DataFrame, above: Axes, below: Axes) -> None:
        latency, read = (_by(mine, metric) for metric in ("latency", "bytes_read"))
        _fill(above, latency, mine)
        _floor(above, mine[mine["system"] == "true rank"])
        costs = _ratio(latency, "padded", "true rank")
        _fill(below, costs | _ratio(latency, "true rank", MEAN) | _ratio(read, "padded", "true rank", "bytes, "))
        _parity(below, costs)

    title = "Cost of padding: ranks of one batch mixed in slots of the largest"
    return _drawn(rows, title, column, ("latency (µs)", "ratio"), "workload")


def draw_determinism(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency of each variant, relative to the faster atomics; shares of outputs whose bits change."""

    def column(mine: pd.DataFrame, above: Axes, middle: Axes, *shares: Axes) -> None:
        latency = _by(mine, "latency")
        _fill(above, latency, mine)
        _floor(above, mine)
        if atomics := [line for name, line in latency.items() if name.startswith("atomics")]:
            faster = pd.concat(atomics, axis=1).min(axis=1)
            prices = {n: (line / faster).dropna() for n, line in latency.items() if not n.startswith("atomics")}
            _fill(middle, prices, log=False)
            _parity(middle, prices, ["deterministic"])
        for axis, asked in zip(shares, ("from_row_alone", "between_runs"), strict=True):
            lines = _by(mine, f"outputs_differing_{asked}")
            leaving = [name for name, line in lines.items() if (line > 0).any()]
            shifts = {name: DODGE ** (place - (len(leaving) - 1) / 2) for place, name in enumerate(leaving)}
            _fill(axis, {n: pd.Series(lines[n].to_numpy(), lines[n].index * by) for n, by in shifts.items()}, log=False)
            axis.yaxis.set_major_formatter(PercentFormatter(1))
            if never := [name for name in lines if name not in leaving]:
                style.corner(axis, "\n".join(["0 at every batch:", *never]), 6)

    labels = "latency (µs)", "relative to the\nfaster atomics", "outputs changed\nby the batch", "changed\nbetween runs"
    figure = _drawn(rows, "Price of determinism", column, labels, "workload")
    for axis in figure.axes[len(figure.axes) // 2 :]:
        axis.set_ylim(0, max(0.001, axis.get_ylim()[1]))
    return figure


def draw_paper_step(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency over the rows of the prompt, with the time of the bytes; below, relative to two calls for both parts."""

    def column(mine: pd.DataFrame, above: Axes, below: Axes) -> None:
        latency = _by(mine, "latency", "seq_len")
        _fill(above, latency, mine, x="seq_len")
        _floor(above, mine, "seq_len")
        _relative(below, latency, "apart", ["SGMV"])

    title = "The paper's step: one prompt and decodes of other adapters, in one call and apart"
    return _drawn(rows, title, column, ("latency (µs)", "relative to apart"), x_label="rows of the prompt")


def draw_added_latency(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Draw the latency that LoRA adds to the projection, and the projection's; below, their ratio."""

    def column(mine: pd.DataFrame, above: Axes, below: Axes) -> None:
        added, base = (_by(mine, metric, line="workload") for metric in ("added_latency", "base_latency"))
        positive = all((line > 0).all() for line in added.values())  # the difference of two large times may be below 0
        _fill(above, added, mine, "workload", log=positive)
        alone = pd.concat(base.values(), axis=1).mean(axis=1)
        above.plot(alone.index.astype(float), alone, label="the projection alone", **style.GREY)
        _floor(above, mine[mine["workload"] == "Distinct"])
        ratios = {name: line / base[name] for name, line in added.items()}
        _fill(below, ratios, log=False)
        below.set_ylim(bottom=min(0.0, below.get_ylim()[0]))
        style.corner(below, f"at most {100 * max(line.max() for line in ratios.values()):.0f} %")

    title = "Latency that LoRA adds to a projection; the floor is of the bytes of Distinct adapters"
    return _drawn(rows, title, column, ("added latency (µs)", "relative to the\nprojection alone"))


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


def _ratio(lines: Lines, over: str, under: str, what: str = "") -> dict[str, pd.Series]:
    """Legend -> the line `over` divided by the line `under`; nothing where one of them was not measured."""
    known = over in lines and under in lines
    return {f"{what}{over} / {under}": (lines[over] / lines[under]).dropna()} if known else {}


def _by(rows: pd.DataFrame, metric: str, x: str = "batch_size", line: str = "system") -> dict[str, pd.Series]:
    """Value of column `line` -> mean of `metric` by column `x`."""
    rows = centre(rows[rows["metric"] == metric])
    return {str(name): rows[rows[line] == name].groupby(x)["value"].mean() for name in dict.fromkeys(rows[line])}


def _fill(
    axis: Axes, lines: Lines, rows: pd.DataFrame | None = None, line: str = "system", x: str = "batch_size",
    log: bool = True,
) -> None:  # fmt: skip
    """Every line in its own colour and marker, dashed where it is of bytes; disturbed points of `rows` crossed."""
    for name, values in lines.items():
        dash = {"linestyle": "--"} if name.startswith("bytes") else {}
        axis.plot(values.index.astype(float), values.astype(float), label=name, **style.measured_style(name) | dash)
        if rows is not None:
            style.crossed(axis, values.index, values, disturbed_at(rows[rows[line] == name], x))
    style.log_x(axis)
    if log:
        style.log_y(axis)


def _floor(axis: Axes, rows: pd.DataFrame, x: str = "batch_size", label: str = "bytes / bandwidth") -> None:
    """The least time of the bytes that `rows` tell."""
    floor = rows[rows["metric"] == FLOOR].groupby(x)["value"].min()
    if len(floor):
        axis.plot(floor.index.astype(float), floor.astype(float), label=label, **style.FLOOR)


def _relative(axis: Axes, lines: Lines, reference: str, said: Collection[str] = ()) -> None:
    """Draw the lines relative to that of `reference`, where it was measured."""
    if reference in lines:
        ratios = {name: (line / lines[reference]).dropna() for name, line in lines.items() if name != reference}
        _fill(axis, ratios)
        _parity(axis, ratios, said)


def _parity(axis: Axes, ratios: Lines, said: Collection[str] = ()) -> None:
    """A line at 1, and the ends of the `ratios`, or of those in `said`, in words."""
    axis.axhline(1.0, color="0.3", linewidth=0.8)
    if ends := [end for name, line in ratios.items() if not said or name in said for end in line]:
        style.corner(axis, f"{min(ends):.2f} to {max(ends):.2f}")
