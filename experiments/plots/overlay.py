"""Measured lines beside the paper's: a column per panel, a row per clock. Figure 10: Identical, and differences."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.facts.paper import text_numbers
from experiments.harness.experiment import Overlay
from experiments.harness.schema import REPOSITORY
from experiments.plots import style
from experiments.plots.floors import FLOOR
from experiments.plots.frames import centre, distinct, disturbed_at, interval, measured, role_of, series

SAID = ("SGMV", "backbone X@W", "Distinct", "Identical", "len 128", "len 2048")
"""Lines whose growth is printed and whose floor is drawn."""
AT_HOST, X = "host_clock", "batch_size"
WITHOUT_LAUNCHES = "in graphs: ours without\nlaunches, the paper with"
GATHER = "Gather falls above 16 rows, where torch's index_select changes its kernel."
ONE, REFERENCE = "Identical", "layer_latency"
"""The line that others are compared with, where the metric is `REFERENCE`."""
ROOF, SHEET = "roof", "data sheet"
"""Prefix of the panels of Figure 7's roofs, and end of the one that was not measured."""
STEPS = (
    " Ours steps up from 32 to 48 rows of Identical and Uniform, and from 48 to 64 of Skewed, where its schedule "
    "changes from one row to 16 rows a program."
)
"""Choice of `choose_expand` (`punica.ops.triton_ops.schedules`) at Figure 7's shapes for an H200."""


def panels(rows: pd.DataFrame, paper: pd.DataFrame, spec: Overlay) -> Figure:
    rows, paper = rows[rows["metric"].isin([spec.metric, FLOOR])], paper[paper["metric"] == spec.metric]
    names = list(dict.fromkeys(rows[spec.panel])) if spec.panel else [""]
    clocks, apart = list(dict.fromkeys(rows["timer"])), spec.metric == REFERENCE
    depth = len(clocks) * (2 if apart else 1)
    steps = spec.line == "length"  # prompts take a hundred times as long as decodes
    width, height = style.PAGE if len(names) > 1 else style.COLUMN, (1.5 if depth > 1 else 1.9) * depth + 1.2
    figure, axes = style.grid(depth, len(names), width, height, sharey=not steps and "row")
    cut: set[str] = set()
    for column, name in zip(axes.T, names, strict=True):
        mine, theirs = (frame[frame[spec.panel] == name] if spec.panel else frame for frame in (rows, paper))
        for place, clock in enumerate(clocks):
            timed = mine[mine["timer"] == clock]
            if apart:
                ours, papers = (frame[frame[spec.line] == ONE] for frame in (timed, theirs))
                cut |= fill(column[2 * place], ours, papers, spec)
                differences(column[2 * place + 1], timed, theirs, spec)
            else:
                cut |= fill(column[place], timed, theirs, spec)
        column[0].set_title(named(name, mine, beside=not theirs.empty))
        column[-1].set_xlabel("batch size")
    for line, clock in zip(axes[:: 2 if apart else 1], clocks, strict=True):
        label = y_label(rows[rows["metric"] == spec.metric], clock, f", {ONE}" * apart)
        line[0].set_ylabel(label if len(paper) else label.replace(WITHOUT_LAUNCHES, "in graphs"))
        for axis in line if steps else line[:1]:
            style.headroom(axis, 0.12 if apart else 0.2)
    for axis in axes[1::2, 0] if apart else ():
        style.headroom(axis, 0.35)
    least = "; the least ratio of Gather-BMM to SGMV" * ("Gather-BMM" in set(rows[spec.line]))
    words = [
        f"{spec.title}: {ONE}, and how much longer the other popularities take." if apart else f"{spec.title}.",
        f"Printed: growth over the batch{least}; ours (the paper's)." if {*rows[spec.line]} & {*SAID} else "",
        f"Dash-dotted: {spec.part} alone, of Distinct." if spec.part else "",
        GATHER if "Gather" in set(rows[spec.line]) and clocks != [AT_HOST] else "",
        f"Cut off in the paper: {', '.join(sorted(cut))}." if cut else "",
    ]
    _finish(figure, " ".join([*filter(None, words), measured(rows, "bands")]), rows, paper, spec.line)
    return figure


def y_label(rows: pd.DataFrame, clock: str, of: str = "") -> str:
    """Name of a vertical axis: the metric, `of` what, and what `clock` counts."""
    units = ", ".join("µs" if unit == "us" else unit for unit in distinct(centre(rows), "unit"))
    metric = rows["metric"].iloc[0].replace("_", " ")
    return f"{metric} ({units}){of}\n{'host clock' if clock == AT_HOST else WITHOUT_LAUNCHES}"


def named(panel: str, rows: pd.DataFrame, beside: bool = True) -> str:
    """The title of a panel: where it is called by the paper's model, by the one that was measured, and by the paper's
    too if that has lines `beside` it.

    >>> named("7B, len=512", pd.DataFrame({"model": ["llama-small"]}))
    'llama-small, len=512\\n(paper: 7B)'
    """
    models = distinct(rows, "model")
    role = role_of(models[0]) if len(models) == 1 else ""
    if not role or not panel.startswith(role):
        return panel
    return panel.replace(role, models[0], 1) + (f"\n(paper: {role})" if beside else "")


def curve(axis: Axes, rows: pd.DataFrame, x: str, **looks: Any) -> pd.Series:
    """Draw medians over column `x`, p10 to p90 as a band, and crosses on what is disturbed; return the medians."""
    xs, ys = series(centre(rows), x)
    found = interval(rows, x).astype(float)
    axis.plot(xs, ys, **looks)
    axis.fill_between(found[x], found["p10"], found["p90"], color=looks["color"], alpha=0.15, linewidth=0)
    style.crossed(axis, xs, ys, disturbed_at(centre(rows), x))
    return pd.Series(ys, xs)


def fill(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, spec: Overlay) -> set[str]:
    """Draw every line of one panel with floors and growth; return the lines that the paper cut off."""
    floor, mine = mine[mine["metric"] == FLOOR], mine[mine["metric"] != FLOOR]
    part = mine["system"] == spec.part if spec.part else pd.Series(False, index=mine.index)
    said, ends, cut = [], theirs[X].max(), set()
    for name in dict.fromkeys(mine[spec.line]):
        ours, papers = mine[~part & (mine[spec.line] == name)], theirs[theirs[spec.line] == name]
        xs, ys = series(papers.dropna(subset=[X]), X)
        if xs:
            axis.plot(xs, ys, markevery=_marked(xs), **style.paper_style(name))
            cut |= {name} if xs[-1] < ends else set()
        curve(axis, ours, X, markevery=_marked(series(centre(ours), X)[0]), **style.measured_style(name))
        if name in SAID:
            said.append(f"{name} {_ratios(_growth(centre(ours), papers))}")
            if len(least := floor[floor[spec.line] == name]):
                axis.plot(*series(least, X), **style.FLOOR | {"color": style.look(name).colour})
    if part.any():
        alone = centre(mine[part & (mine["workload"] == "Distinct")])
        axis.plot(*series(alone, X), color=style.look("Distinct").colour, linestyle="-.", linewidth=0.9, zorder=2)
    wide = (frame.pivot_table(index=X, columns="system", values="value") for frame in (centre(mine), theirs))
    rivals = [(one["Gather-BMM"] / one["SGMV"]).min() for one in wide if {"SGMV", "Gather-BMM"} <= set(one)]
    style.log_x(axis)
    style.log_y(axis)
    style.corner(axis, "\n".join([*said, *([f"Gather-BMM ≥ {_ratios(rivals, '.2f')}"] if rivals else [])]))
    return cut


def differences(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, spec: Overlay) -> None:
    """Draw how much longer the other lines take than `ONE`, in percent; print the largest of each."""
    said = []
    for name in dict.fromkeys(mine[spec.line]):
        largest = []
        for frame, look in ((centre(mine), style.measured_style(name)), (theirs, style.paper_style(name))):
            frame = frame[frame["metric"] == spec.metric]
            wide = frame.pivot_table(index=X, columns=spec.line, values="value")
            if name == ONE or not {name, ONE} <= set(wide):
                continue
            percent = (100 * (wide[name] / wide[ONE] - 1)).dropna()
            axis.plot(percent.index, percent, markevery=_marked(list(percent.index)), **look)
            largest.append(percent.max())
        if largest:
            said.append(f"{name} {_ratios(largest, '+.1f', '')} %")
    axis.axhline(0, color="0.3", linewidth=0.8)
    style.log_x(axis)
    axis.set_ylabel(f"over {ONE} (%)\nprinted: largest")
    axis.label_outer()
    style.corner(axis, "\n".join(said))


def _growth(mine: pd.DataFrame, theirs: pd.DataFrame) -> list[float]:
    """Last value over first of both, at the ends that both have; of ours alone where the paper has none."""
    frames = [dict(zip(*series(frame.dropna(subset=[X]), X), strict=True)) for frame in (mine, theirs)]
    ends = sorted(frames[0].keys() & frames[1].keys() or frames[0].keys())
    return [frame[ends[-1]] / frame[ends[0]] for frame in frames if ends and ends[-1] in frame]


def _ratios(found: Sequence[float], digits: str = ".3g", unit: str = "x") -> str:
    """Ours, and the paper's in brackets."""
    return " (".join(f"{value:{digits}}{unit}" for value in found) + ")" * (len(found) - 1)


def _marked(xs: Sequence[float]) -> list[int]:
    """Positions of the powers of two, or of every point where there are few."""
    powers = [i for i, value in enumerate(xs) if value > 0 and math.log2(value).is_integer()]
    return powers if len(xs) > 10 and powers else list(range(len(xs)))


def _finish(figure: Figure, words: str, rows: pd.DataFrame, paper: pd.DataFrame, line: str) -> None:
    names = [name for name in dict.fromkeys(rows[line]) if name]
    if lacking := [name for name in names if not (paper[line] == name).any()] if len(paper) else []:
        words = f"{words} Not in the paper: {', '.join(lacking)}."
    handles = [Line2D([], [], label=name, **style.measured_style(name)) for name in names]
    style.finish(figure, words, [*handles, *style.sides(not paper.empty, FLOOR in set(rows["metric"]))], 5)


def draw_roofline(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Figure 7: rooflines above latencies, a column per clock; side by side where there is one clock."""
    launches = rows[~rows["panel"].str.startswith(ROOF)]
    clocks = list(dict.fromkeys(launches["timer"])) or [""]  # a cut run may have the roof alone
    shape = (2, len(clocks)) if len(clocks) > 1 else (1, 2)
    figure, axes = style.grid(*shape, style.PAGE, 2.5 * shape[0] + 1.0, sharex=False, sharey=shape[0] > 1 and "row")
    spec = Overlay(title="", metric="latency", line="workload")
    for roof, axis, clock in zip(*(axes if shape[0] > 1 else axes.T), clocks, strict=True):
        timed = launches[launches["timer"] == clock]
        _roofline(roof, timed, rows[rows["panel"].str.startswith(ROOF) & rows["timer"].isin([clock, ""])], paper)
        if timed.empty:
            axis.set_axis_off()
            continue
        fill(axis, timed[timed["metric"].isin(["latency", FLOOR])], paper[paper["metric"] == "latency"], spec)
        axis.set(xlabel="batch size", ylabel=y_label(timed[timed["metric"] == "latency"], clock))
        style.headroom(axis, 0.12)
    words = "Figure 7: one SGMV launch (expand, 16 to 4096) under the roofs, each path from batch 1 to 64, and its "
    words += "latency. Printed: growth over the batch, ours (the paper's)."
    words += STEPS if (rows["hardware"] == "h200").any() else ""
    _finish(figure, f"{words} {measured(launches, 'bands')}", launches, paper[paper["panel"] != ROOF], "workload")
    return figure


def _roofline(axis: Axes, rows: pd.DataFrame, roofs: pd.DataFrame, paper: pd.DataFrame) -> None:
    for name in dict.fromkeys(rows["workload"]):
        for frame, look, every in (
            (paper[paper["workload"] == name], style.paper_style(name), 9),
            (centre(rows[rows["workload"] == name]), style.measured_style(name), 1),
        ):
            wide = frame.pivot_table(index="batch_size", columns="metric", values="value").sort_index()
            if {"arithmetic_intensity", "achieved_flops"} <= set(wide):
                axis.plot(wide["arithmetic_intensity"], wide["achieved_flops"], markevery=every, **look)
                loud = wide[wide.index.isin(disturbed_at(frame, "batch_size"))]
                style.crossed(axis, loud["arithmetic_intensity"], loud["achieved_flops"])
    for panel, frame in [*roofs.groupby("panel", sort=False), ("", paper[paper["panel"] == ROOF])]:
        bandwidth = frame.loc[frame["metric"] == "memory_bandwidth_line", "value"]
        peak = frame.loc[frame["metric"].str.startswith("peak_"), "value"]
        if bandwidth.empty or peak.empty:
            continue
        kind = SHEET if panel and (frame["kind"] == "datasheet").any() else "measured" if panel else style.PAPER_LABEL
        dash = "--" if not panel else ":" if SHEET in str(panel) else "-"
        looks: dict[str, Any] = {"color": "black" if panel else style.PAPER_GREY, "linestyle": dash}
        xs, slope, flat = np.geomspace(0.3, 600, 200), float(bandwidth.iloc[0]), float(peak.iloc[0])
        label = f"{kind}: {slope:.3g} TB/s, {flat:.3g} TFLOP/s"
        axis.plot(xs, 1e12 * np.minimum(slope * xs, flat), linewidth=1.0, zorder=1, label=label, **looks)
    axis.legend(loc="upper left", frameon=False, fontsize=6, handlelength=1.4)
    axis.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="achieved FLOP/s")


def draw_norms(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Section 6: latency of both forms of the norm over rows, axes per clock, with the least and largest saving."""
    clocks, said = list(dict.fromkeys(rows["timer"])), text_numbers(REPOSITORY / "paper_results", "6", by="system")
    figure, axes = style.grid(len(clocks), 1, style.COLUMN, 1.6 * len(clocks) + 1.4)
    for axis, clock in zip(axes[:, 0], clocks, strict=True):
        timed, lines = rows[rows["timer"] == clock], {}
        for name, paper in said.items():
            mine = timed[(timed["system"] == name) & (timed["metric"] != FLOOR)]
            lines[name] = curve(axis, mine, "batch_size", **style.measured_style(name))
            axis.axhline(paper, color=style.look(name).colour, linestyle="--", linewidth=0.9)
        axis.plot(*series(timed[timed["metric"] == FLOOR], "batch_size"), **style.FLOOR)
        saved = (lines["unfused"] / lines["fused"]).dropna()
        paper = said["unfused"] / said["fused"]
        style.log_x(axis)
        style.log_y(axis)
        style.headroom(axis, 0.12)
        style.corner(axis, f"unfused / fused {saved.min():.3g} to {saved.max():.3g} ({paper:.3g})")
        axis.set_ylabel(y_label(timed[timed["metric"] == "norm_latency"], clock))
    axes[-1, 0].set_xlabel("rows")
    handles = [Line2D([], [], label=name, **style.measured_style(name)) for name in said]
    handles.append(Line2D([], [], color="0.3", linestyle="--", label="paper, no shape given"))
    words = "Section 6: RMSNorm, one operation after the other and in one kernel."
    words = f"{words} {measured(rows[rows['metric'] != FLOOR], 'bands')}"
    style.finish(figure, words, [*handles, *style.sides(False, FLOOR in set(rows["metric"]))], 2)
    return figure
