"""Measured lines beside the paper's: a column per panel, a row of axes per clock.

The paper's clock is the host's, which counts launches; beside times inside CUDA graphs its lines contain what ours do
not. Figure 10's lines coincide, so that it shows Identical alone and, below, what the others differ from it.
"""

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.harness.experiment import Overlay
from experiments.plots import style
from experiments.plots.floors import FLOOR
from experiments.plots.frames import centre, distinct, disturbed_at, interval, measured, role_of, series

SAID = ("SGMV", "backbone X@W", "Distinct", "Identical", "len 128", "len 2048")
"""Lines whose growth is printed and whose floor is drawn."""
AT_HOST = "host_clock"
WITHOUT_LAUNCHES = "in graphs: ours without\nlaunches, the paper with"
GATHER = "Gather falls above 16 rows, where torch's index_select changes its kernel."
ONE, REFERENCE = "Identical", "layer_latency"
"""The line that others are compared with, where the metric is `REFERENCE`."""


def panels(rows: pd.DataFrame, paper: pd.DataFrame, spec: Overlay) -> Figure:
    """Draw one column of axes per panel."""
    rows, paper = rows[rows["metric"].isin([spec.metric, FLOOR])], paper[paper["metric"] == spec.metric]
    names = list(dict.fromkeys(rows[spec.panel])) if spec.panel else [""]
    clocks, apart = list(dict.fromkeys(rows["timer"])), spec.metric == REFERENCE
    depth = len(clocks) * (2 if apart else 1)
    width = style.PAGE if len(names) > 1 else style.COLUMN
    steps = spec.line == "length"  # prompts take a hundred times as long as decodes
    height = (1.5 if depth > 1 else 1.9) * depth + 1.2
    figure, axes = style.grid(depth, len(names), width, height, sharey=not steps and "row")
    cut: set[str] = set()
    for column, name in enumerate(names):
        mine, theirs = (frame[frame[spec.panel] == name] if spec.panel else frame for frame in (rows, paper))
        for place, clock in enumerate(clocks):
            timed = mine[mine["timer"] == clock]
            if apart:
                cut |= fill(axes[2 * place, column], _only(timed, spec), _only(theirs, spec), spec)
                differences(axes[2 * place + 1, column], timed, theirs, spec)
            else:
                cut |= fill(axes[place, column], timed, theirs, spec)
        axes[0, column].set_title(named(name, mine, beside=not theirs.empty))
        axes[-1, column].set_xlabel(spec.x_label)
    for line, clock in zip(axes[:: 2 if apart else 1], clocks, strict=True):
        line[0].set_ylabel(y_label(rows[rows["metric"] == spec.metric], clock, f", {ONE}" * apart))
        for axis in line if steps else line[:1]:
            style.headroom(axis, 0.12 if apart else 0.2)
    for axis in axes[1::2, 0] if apart else ():
        style.headroom(axis, 0.35)
    words = [f"{spec.title}."]
    if apart:
        words = [f"{spec.title}: {ONE}, and how much longer the other popularities take."]
    least = "; the least ratio of Gather-BMM to SGMV" * ("Gather-BMM" in set(rows[spec.line]))
    words += [f"Printed: growth over the batch{least}; ours (the paper's)."]
    words += [f"Dash-dotted: {spec.part} alone, of Distinct."] if spec.part else []
    words += [GATHER] if "Gather" in set(rows[spec.line]) and clocks != [AT_HOST] else []
    words += [f"Cut off in the paper: {', '.join(sorted(cut))}."] if cut else []
    finish(figure, " ".join([*words, measured(rows, "bands")]), rows, paper, spec.line)
    return figure


def _only(frame: pd.DataFrame, spec: Overlay) -> pd.DataFrame:
    return frame[frame[spec.line] == ONE]


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


def fill(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, spec: Overlay) -> set[str]:
    """Draw every line of one panel with floors and growth; return the lines that the paper cut off."""
    floor, mine = mine[mine["metric"] == FLOOR], mine[mine["metric"] != FLOOR]
    part = mine["system"] == spec.part if spec.part else pd.Series(False, index=mine.index)
    said, ends, cut = [], theirs[spec.x].max(), set()
    for name in dict.fromkeys(mine[spec.line]):
        ours, papers = mine[~part & (mine[spec.line] == name)], theirs[theirs[spec.line] == name]
        for frame, look in ((papers, style.paper_style(name)), (centre(ours), style.measured_style(name))):
            xs, ys = series(frame.dropna(subset=[spec.x]), spec.x)
            if xs:
                axis.plot(xs, ys, markevery=_marked(xs), **look)
                cut |= {name} if frame is papers and xs[-1] < ends else set()
        band(axis, ours, spec.x, style.look(name).colour)
        style.crossed(axis, *series(centre(ours), spec.x), disturbed_at(ours, spec.x))
        if name in SAID:
            said.append(f"{name} {_ratios(_growth(centre(ours), papers, spec.x))}")
            if len(least := floor[floor[spec.line] == name]):
                axis.plot(*series(least, spec.x), **style.FLOOR | {"color": style.look(name).colour})
    if part.any():
        alone = centre(mine[part & (mine["workload"] == "Distinct")])
        axis.plot(*series(alone, spec.x), color=style.look("Distinct").colour, linestyle="-.", linewidth=0.9, zorder=2)
    if rivals := _least(centre(mine), theirs, spec):
        said.append(rivals)
    style.log_x(axis)
    style.log_y(axis)
    style.corner(axis, "\n".join(said))
    return cut


def differences(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, spec: Overlay) -> None:
    """Draw how much longer the other lines take than `ONE`, in percent; print the largest of each."""
    said = []
    for name in dict.fromkeys(mine[spec.line]):
        largest = []
        for frame, look in ((centre(mine), style.measured_style(name)), (theirs, style.paper_style(name))):
            frame = frame[frame["metric"] == spec.metric]
            wide = frame.pivot_table(index=spec.x, columns=spec.line, values="value")
            if name == ONE or not {name, ONE} <= set(wide):
                continue
            percent = (100 * (wide[name] / wide[ONE] - 1)).dropna()
            axis.plot(percent.index, percent, markevery=_marked(list(percent.index)), **look)
            largest.append(percent.max())
        if largest:
            said.append(f"{name} {_ratios(largest, '+.1f')} %")
    axis.axhline(0, color="0.3", linewidth=0.8)
    style.log_x(axis)
    axis.set_ylabel(f"over {ONE} (%)\nprinted: largest")
    axis.label_outer()
    style.corner(axis, "\n".join(said))


def _growth(mine: pd.DataFrame, theirs: pd.DataFrame, x: str) -> list[float]:
    """Last value over first of both, at the ends that both have; of ours alone where the paper has none."""
    frames = [dict(zip(*series(frame.dropna(subset=[x]), x), strict=True)) for frame in (mine, theirs)]
    ends = sorted(frames[0].keys() & frames[1].keys() or frames[0].keys())
    return [frame[ends[-1]] / frame[ends[0]] for frame in frames if ends and ends[-1] in frame]


def _least(mine: pd.DataFrame, theirs: pd.DataFrame, spec: Overlay) -> str:
    """The least ratio of Gather-BMM to SGMV over all batches, the paper's in brackets; empty without both."""
    found = []
    for frame in (mine, theirs):
        wide = frame.pivot_table(index=spec.x, columns="system", values="value")
        if {"SGMV", "Gather-BMM"} <= set(wide):
            found.append((wide["Gather-BMM"] / wide["SGMV"]).min())
    return f"Gather-BMM ≥ {_ratios(found, '.2f')}" if found else ""


def _ratios(found: Sequence[float], digits: str = ".3g", unit: str = "x") -> str:
    """Ours, and the paper's in brackets."""
    unit = "" if "+" in digits else unit
    return " (".join(f"{value:{digits}}{unit}" for value in found) + ")" * (len(found) - 1)


def band(axis: Axes, mine: pd.DataFrame, x: str, colour: style.Look | tuple[float, float, float]) -> None:
    """Shade p10 to p90 over column `x`."""
    found = interval(mine, x).astype(float)
    axis.fill_between(found[x], found["p10"], found["p90"], color=colour, alpha=0.15, linewidth=0)


def _marked(xs: Sequence[float]) -> list[int]:
    """Positions of the powers of two, or of every point where there are few."""
    powers = [i for i, value in enumerate(xs) if value > 0 and math.log2(value).is_integer()]
    return powers if len(xs) > 10 and powers else list(range(len(xs)))


def finish(figure: Figure, words: str, rows: pd.DataFrame, paper: pd.DataFrame, line: str) -> None:
    """Write the caption, and a legend of lines before one of looks."""
    names = [name for name in dict.fromkeys(rows[line]) if name]
    handles: list[Artist] = [Line2D([], [], label=name, **style.measured_style(name)) for name in names]
    if lacking := [name for name in names if not (paper[line] == name).any()] if len(paper) else []:
        words = f"{words} Not in the paper: {', '.join(lacking)}."
    handles += style.sides(not paper.empty, FLOOR in set(rows["metric"]))
    style.finish(figure, words, handles, 5)
