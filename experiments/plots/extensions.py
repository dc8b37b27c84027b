"""Figures of the extensions, which have no counterpart in the paper.

One column of axes per popularity or panel: absolute latency above, ratios to the system of reference below.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.plots import style
from experiments.plots.frames import centre, described, disturbed_at

Lines = Mapping[str, pd.Series]
"""Legend -> values by batch size (or what else is drawn to the right), ascending."""
Marks = Mapping[str, set[float]]
"""Legend -> where other work disturbed it."""
LOOKS = {
    "true rank": (0, "o"), "padded": (3, "s"), "mean of uniform ranks": (2, "D"), "padded / true rank": (3, "s"),
    "true rank / mean of uniform ranks": (0, "o"), "bytes, padded / true rank": (7, "^"),
    "deterministic": (0, "o"), "deterministic, no PDL": (9, "v"), "batch invariant": (2, "D"), "atomics": (3, "s"),
    "atomics, finer split": (1, "P"), "apart": (2, "D"), "FP8 e4m3": (1, "P"), "FP8 e5m2": (2, "D"),
    "FP8 w8a8": (3, "s"),
}  # fmt: skip
"""Legend -> place in the palette, and marker, where `style.look` has no other."""
EXPERTS = (
    ("latency", "w13 and w2", "alignment", "w13 and w2 LoRA (µs)"),
    ("layer_latency", "layer", "backbone layer", "layer (µs)"),
    ("throughput", "model", "backbone model", "decode (token/s)"),
    ("step_latency", "engine", "backbone engine", "engine step (ms)"),
)
"""Metric, system, reference system, and label of each row of axes of `draw_moe`."""
SLOTS = ", by slots"
"""End of the name of a column of `draw_moe` whose x axis is the number of slots."""
DODGE = 1.08
"""Factor on the batch size between lines of equal values."""
GREY: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1.0, "zorder": 1}
"""Look of a bound or a scale beside the measured lines."""


def draw_padding(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency at true rank, padded, and the mean of the uniform ranks; below, what padding costs and saves."""
    workloads, figure, axes = _columns(rows, 2)
    for workload, (above, below) in zip(workloads, axes.T, strict=True):
        mine = rows[rows["workload"] == workload]
        latency, read = _wide(mine, "latency"), _wide(mine, "bytes_read")
        _fill(above, latency, marks=_marks(mine))
        costs = _ratio(latency, "padded", "true rank")
        savings = _ratio(latency, "true rank", "mean of uniform ranks")
        _fill(below, {**costs, **savings, **_ratio(read, "padded", "true rank", "bytes, ")}, dashed="bytes")
        below.axhline(1.0, color="0.3", linewidth=0.8)
    title = "Cost of padding: ranks of one batch mixed in slots of the largest"
    return _finish(figure, axes, title, rows, "latency (µs)", "ratio")


def draw_determinism(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency of each variant; below, relative to the faster atomics; last, the shares of outputs whose bits change:
    with the batch around a row, and between runs. A variant whose outputs never change is named, not drawn at 0.
    """
    workloads, figure, axes = _columns(rows, 4)
    for workload, (above, middle, *shares) in zip(workloads, axes.T, strict=True):
        mine = rows[rows["workload"] == workload]
        latency = _wide(mine, "latency")
        _fill(above, latency, marks=_marks(mine))
        atomics = [line for name, line in latency.items() if name.startswith("atomics")]
        if atomics:
            faster = pd.concat(atomics, axis=1).min(axis=1)
            prices = {n: (line / faster).dropna() for n, line in latency.items() if not n.startswith("atomics")}
            _fill(middle, prices, log=False)
        middle.axhline(1.0, color="0.3", linewidth=0.8)
        for axis, asked in zip(shares, ("from_row_alone", "between_runs"), strict=True):
            _changes(axis, _wide(mine, f"outputs_differing_{asked}"))
    for below in axes[2:]:
        below[0].set_ylim(0, max(0.001, below[0].get_ylim()[1]))  # one scale for all workloads
    changing = "outputs that change\n"
    labels = "latency (µs)", "relative to the\nfaster atomics", f"{changing}with the batch", f"{changing}between runs"
    return _finish(figure, axes, "Price of determinism", rows, *labels)


def draw_paper_step(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency over the rows of the prompt, with the time of the bytes; below, relative to two calls for both parts."""
    panels, figure, axes = _columns(rows, 2, "panel")
    for panel, (above, below) in zip(panels, axes.T, strict=True):
        mine = rows[rows["panel"] == panel]
        latency, floors = _by(mine, "latency", "seq_len", "system"), mine[mine["metric"] == "floor"]
        _fill(above, latency, marks=_marks(mine, x="seq_len"))
        if not floors.empty:
            floor = floors.groupby("seq_len")["value"].first()
            above.plot(floor.index.astype(float), floor.astype(float), label="floor of the bytes", **GREY)
        if "apart" in latency:
            ratios = {name: (line / latency["apart"]).dropna() for name, line in latency.items() if name != "apart"}
            _fill(below, ratios)
        below.axhline(1.0, color="0.3", linewidth=0.8)
    title = "The paper's step: one prompt and decodes of other adapters"
    return _finish(figure, axes, title, rows, "latency (µs)", "relative to apart", x_label="rows of the prompt")


def draw_added_latency(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Draw the latency that LoRA adds to the projection, and the projection's; below, their ratio."""
    panels, figure, axes = _columns(rows, 2, "panel")
    for panel, (above, below) in zip(panels, axes.T, strict=True):
        mine = rows[rows["panel"] == panel]
        added, base = (_by(mine, metric, "batch_size", "workload") for metric in ("added_latency", "base_latency"))
        positive = all((line > 0).all() for line in added.values())  # the difference of two large times may be below 0
        _fill(above, added, log=positive, marks=_marks(mine, "workload"))
        alone = pd.concat(base.values(), axis=1).mean(axis=1)
        above.plot(alone.index.astype(float), alone, label="the projection alone", **GREY)
        _fill(below, {name: line / base[name] for name, line in added.items()}, log=False)
        below.set_ylim(bottom=min(0.0, below.get_ylim()[0]))
    title = "Latency that LoRA adds to a projection"
    return _finish(figure, axes, title, rows, "added latency (µs)", "relative to\nthe projection alone")


def draw_fp8(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency, relative to SGMV, and error of an operator by batch; of a model logit error, changed tokens by rank."""
    panels, figure, axes = _columns(rows, 3, "panel")
    for panel, (above, middle, below) in zip(panels, axes.T, strict=True):
        mine = rows[rows["panel"] == panel]
        if panel == "quality":
            above.set_visible(False)
            _fill(middle, _by(mine, "changed_greedy_tokens", "rank", "system"), log=False)
            _fill(below, _by(mine, "logit_error", "rank", "system"))
            middle.set_title("a model: share of greedy\ntokens that change")
            continue
        latency = _by(mine, "latency", "batch_size", "system")
        _fill(above, latency, marks=_marks(mine))
        if "SGMV" in latency:
            _fill(middle, {n: (line / latency["SGMV"]).dropna() for n, line in latency.items() if n != "SGMV"})
        middle.axhline(1.0, color="0.3", linewidth=0.8)
        _fill(below, {n: line for n, line in _by(mine, "error", "batch_size", "system").items() if n != "SGMV"})
    labels = "latency (µs)", "relative to SGMV", "relative error"
    return _finish(figure, axes, "Adapters in FP8", rows, *labels, x_label="batch size (model: rank)")


def draw_moe(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Per model, by popularity: both LoRA products, the layer, throughput, and a step of the engine, where measured.

    Panels of different numbers of slots share a column, whose x axis is the number of slots.
    """
    rows = _by_slots(rows)
    shown = [line for line in EXPERTS if line[1] in set(rows["system"])]
    models, figure, axes = _columns(rows, len(shown), "panel", sharex="col")
    for model, column in zip(models, axes.T, strict=True):
        mine = rows[rows["panel"] == model]
        for axis, sought in zip(column, shown, strict=True):
            metric, system, reference = sought[:3]
            timed = mine[mine["metric"] == metric]
            own, other = (_by(timed[timed["system"] == name], metric, "batch_size", "workload")
                          for name in (system, reference))  # fmt: skip
            _fill(axis, own, marks=_marks(timed[timed["system"] == system], "workload"))
            if other:
                line = centre(timed[timed["system"] == reference]).groupby("batch_size")["value"].mean()
                label = "grouping alone" if reference == "alignment" else "without LoRA"
                axis.plot(line.index.astype(float), line.astype(float), label=label, **GREY)
            if not own and not other:
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.5")
        column[0].set_title(model.replace(", ", ",\n"))
    _finish(figure, axes, "LoRA on experts", rows, *(label for *_, label in shown))
    for model, axis in zip(models, axes[-1], strict=True):
        if model.endswith(SLOTS):
            axis.set_xlabel("slots")
    return figure


def _by_slots(rows: pd.DataFrame) -> pd.DataFrame:
    """Put the panels "model, N slots" of one batch size together, with N in its place."""
    found = rows["panel"].str.extract(r"^(.+), (\d+) slots$")
    slots, place = found[1].notna(), found[1].astype(float)
    batches = rows.loc[slots, "batch_size"].astype(int).astype(str)
    names = found[0] + ", batch " + batches + SLOTS
    return rows.assign(panel=rows["panel"].mask(slots, names), batch_size=rows["batch_size"].mask(slots, place))


def _changes(axis: Axes, lines: Lines) -> None:
    """Lines that leave 0, beside one another where they agree; the names of the others."""
    leaving = {name: line for name, line in lines.items() if (line > 0).any()}
    for place, name in enumerate(leaving):
        line = leaving[name]
        leaving[name] = pd.Series(line.to_numpy(), line.index * DODGE ** (place - (len(leaving) - 1) / 2))
    _fill(axis, leaving, log=False)
    never = [name for name in lines if name not in leaving]
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    if never:
        text = "\n".join(["0 at every batch:", *never])
        axis.text(0.03, 0.95, text, transform=axis.transAxes, va="top", fontsize=6.5, color="0.3")


def _columns(
    rows: pd.DataFrame, depth: int, column: str = "workload", sharex: style.Shared = True
) -> tuple[list[str], Figure, Any]:
    """The values of `column`, and a figure with a column of `depth` axes for each."""
    names = list(dict.fromkeys(rows[column]))
    width = max(style.PANEL_WIDTH * len(names), 4.2) + 0.6
    figure, axes = style.grid(depth, len(names), width, depth * style.PANEL_HEIGHT + 1.2, sharex=sharex)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name)
    return names, figure, axes


def _ratio(lines: Lines, over: str, under: str, what: str = "") -> Lines:
    """Legend -> the line `over` divided by the line `under`; nothing where one of them was not measured."""
    if over not in lines or under not in lines:
        return {}
    return {f"{what}{over} / {under}": (lines[over] / lines[under]).dropna()}


def _wide(rows: pd.DataFrame, metric: str) -> dict[str, pd.Series]:
    """System -> `metric` by batch size; the uniform ranks are averaged over ranks, where all of them are there."""
    rows = centre(rows[rows["metric"] == metric])
    lines = {}
    for system in dict.fromkeys(rows["system"]):
        table = rows[rows["system"] == system].pivot_table(index="batch_size", columns="rank", values="value")
        name = "mean of uniform ranks" if system == "uniform rank" else system
        lines[name] = table.mean(axis=1, skipna=False).dropna().sort_index()
    return lines


def _marks(rows: pd.DataFrame, line: str = "system", x: str = "batch_size") -> dict[str, set[float]]:
    """Value of column `line` -> where on column `x` other work disturbed it."""
    found = {str(name): disturbed_at(rows[rows[line] == name], x) for name in dict.fromkeys(rows[line])}
    return {"mean of uniform ranks" if name == "uniform rank" else name: where for name, where in found.items()}


def _by(rows: pd.DataFrame, metric: str, x: str, line: str) -> dict[str, pd.Series]:
    """Value of column `line` -> `metric` by column `x`."""
    rows = centre(rows[rows["metric"] == metric])
    return {str(name): rows[rows[line] == name].groupby(x)["value"].mean() for name in dict.fromkeys(rows[line])}


def _fill(axis: Axes, lines: Lines, dashed: str = "", log: bool = True, marks: Marks | None = None) -> None:
    """Every line in its own colour and marker; those with `dashed` in their legend dashed, and points in `marks`
    hollow.
    """
    for name, line in lines.items():
        place, marker = LOOKS.get(name, (None, ""))
        colour, marker = style.look(name) if place is None else (style.PALETTE[place], marker)
        looks: dict[str, Any] = {"linestyle": "-"}
        if dashed and dashed in name:
            looks = {"linestyle": "--"}
        looks |= {"color": colour, "marker": marker}
        axis.plot(line.index.astype(float), line.astype(float), label=name, **looks)
        style.hollow(axis, line.index, line, looks, (marks or {}).get(name, ()))
    style.log_x(axis)
    if log:
        style.log_y(axis)


def _finish(
    figure: Figure, axes: Any, title: str, rows: pd.DataFrame, *labels: str, x_label: str = "batch size"
) -> Figure:
    """Title, a label for each row of axes, and a legend of everything that is drawn, each entry once."""
    for line, label in zip(axes, labels, strict=True):
        line[0].set_ylabel(label)
    for axis in axes[-1]:
        axis.set_xlabel(x_label)
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, names = axis.get_legend_handles_labels()
        entries.update(zip(names, handles, strict=True))
    style.caption(figure, title, described(rows), list(entries.values()), min(4, len(entries)))
    return figure
