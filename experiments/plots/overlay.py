"""Measured lines beside the paper's: absolute values above, both relative to their own first batch below.

The machines differ by orders of magnitude, so absolute values share a logarithmic axis and the comparison of *shape*,
which is what the claims are about, is the lower row: every line divided by its own value at the smallest batch.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.harness.experiment import Overlay
from experiments.plots import style
from experiments.plots.frames import centre, described_with_bands, distinct, disturbed_at, interval, role_of, series


def panels(rows: pd.DataFrame, paper: pd.DataFrame, spec: Overlay) -> Figure:
    """One column of axes per panel: values above, values relative to the first batch below."""
    rows, paper = rows[rows["metric"] == spec.metric], paper[paper["metric"] == spec.metric]
    names = list(dict.fromkeys(rows[spec.panel])) if spec.panel else [""]
    width = max(style.PANEL_WIDTH * len(names), 4.2, 1.15 * rows[spec.line].nunique()) + 0.6  # room for the legend
    figure, axes = style.grid(2, len(names), width, 2 * style.PANEL_HEIGHT + 1.0)
    for column, name in enumerate(names):
        mine = rows[rows[spec.panel] == name] if spec.panel else rows
        theirs = paper[paper[spec.panel] == name] if spec.panel else paper
        fill(axes[0, column], axes[1, column], mine, theirs, spec)
        axes[0, column].set_title(named(name, mine, beside=not theirs.empty))
    label(axes[0, 0], axes[1, 0], rows, spec)
    finish(figure, spec.title, rows, paper, spec.line, spec.part)
    return figure


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


def fill(above: Axes, below: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, spec: Overlay) -> None:
    """Draw every line of one panel: absolute values into `above`, relative ones into `below`."""
    part = mine["system"] == spec.part if spec.part else pd.Series(False, index=mine.index)
    for name in dict.fromkeys(mine[spec.line]):
        pair = mine[~part & (mine[spec.line] == name)], theirs[theirs[spec.line] == name]
        for axis in (above, below):
            _line(axis, *pair, spec.x, name, relative=axis is below)
        if (alone := centre(mine[part & (mine[spec.line] == name)])).size:
            above.plot(*series(alone, spec.x), color=style.look(name)[0], linestyle=":", linewidth=1.0, zorder=2)
    for axis in (above, below):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(style.PLAIN)
        axis.yaxis.set_minor_formatter(plt.FuncFormatter(partial(_minor_label, axis)))
        style.log_x(axis)
    below.set_xlabel(spec.x_label)


def label(above: Axes, below: Axes, rows: pd.DataFrame, spec: Overlay) -> None:
    """Name the vertical axes."""
    units = ", ".join("µs" if unit == "us" else unit for unit in distinct(rows, "unit"))
    above.set_ylabel(f"{spec.metric.replace('_', ' ')} ({units})")
    below.set_ylabel("relative to its own\nsmallest batch")


def _line(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, x: str, name: str, relative: bool) -> None:
    """Draw both sides of one line; `relative` divides each by its own first value."""
    for frame, look in ((theirs, style.paper_style(name)), (centre(mine), style.measured_style(name))):
        xs, ys = series(frame.dropna(subset=[x]), x)
        if not xs:
            continue
        divisor = ys[0] if relative else 1.0
        ys = [y / divisor for y in ys]
        axis.plot(xs, ys, markevery=_marked(xs), **look)
        if frame is not theirs:
            band(axis, mine, x, style.look(name)[0], divisor)
            style.hollow(axis, xs, ys, look, disturbed_at(frame, x))


def band(axis: Axes, mine: pd.DataFrame, x: str, colour: Any, divisor: float = 1.0) -> None:
    """Shade p10 to p90 over column `x`, divided by `divisor`."""
    found = interval(mine, x).astype(float)
    low, high = found["p10"] / divisor, found["p90"] / divisor
    axis.fill_between(found[x], low, high, color=colour, alpha=0.15, linewidth=0)


def _marked(xs: Sequence[float]) -> list[int]:
    """Positions of the powers of two, or of every point where there are few."""
    powers = [i for i, value in enumerate(xs) if value > 0 and math.log2(value).is_integer()]
    return powers if len(xs) > 10 and powers else list(range(len(xs)))


def _minor_label(axis: Axes, value: float, _: int) -> str:
    """2 and 5 between the powers of ten, where those alone would leave an axis of under two decades nearly bare."""
    low, high = axis.get_ylim()
    return f"{value:g}" if high / low < 100 and f"{value:e}"[0] in "25" else ""


def finish(figure: Figure, title: str, rows: pd.DataFrame, paper: pd.DataFrame, line: str, part: str = "") -> None:
    """Title with the machine, and a legend that has a column per line: measured in colour above, the paper below.

    `part` is the system whose lines are dotted.
    """
    handles: list[Line2D] = []
    for name in dict.fromkeys(rows[line]):
        handles.append(Line2D([], [], label=name, **style.measured_style(name)))
        known = (paper[line] == name).any()
        grey: dict[str, Any] = style.paper_style(name) if known else {"linestyle": ""}
        handles.append(Line2D([], [], label=style.PAPER_LABEL if known else "not in the paper", **grey))
    dotted = f"; dotted: {part} alone" if part and (rows["system"] == part).any() else ""
    measured = f"{described_with_bands(rows)}{dotted}"
    style.caption(figure, title, measured, handles, len(handles) // 2, handlelength=2.6, columnspacing=1.4)
