"""Bars of serving systems, grouped by popularity, each beside the paper's bar; below, everything relative to the best
system on Identical, so that what a system loses by mixing adapters is seen.
"""

from collections.abc import Sequence
from typing import Any, cast

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from experiments.facts.systems import by_paper_name, entries, name_of, policies
from experiments.plots import style
from experiments.plots.frames import beside, centre, described

PAPER_NAMES = {ours: theirs for theirs, ours in reversed(by_paper_name().items())}
"""Our system -> the paper's whose bar stands beside it. DeepSpeed (same policy as FasterTransformer) is the paper's
alone.
"""
INITIALS = {system: "".join(letter for letter in name if letter.isupper()) for system, name in PAPER_NAMES.items()}
"""Label of a bar that the paper alone has."""
REFERENCE = "punica"
ONE_MODEL = "Identical"
SHADES = {entry.name: entry.shade for entry in entries() if entry.shade < 1}
"""Variants of Punica -> lighter shade of its colour."""
WRONG = [entry.name for entry in entries() if not entry.exact]
"""Systems with wrong tokens, which have no bar."""
SPAN = ("lowest", "highest")
"""Columns of the span over repeats, where there are several (`harness.counted.merged`)."""
GROUP = 0.86  # of the distance between groups
FOOT = 1.5
"""The lowest bar over the lower end of its logarithmic axis: shorter ones look missing."""


def draw_serving(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Figure 11: one column of axes per panel (model): throughput above, relative to the best on Identical below."""
    about = regime(rows)
    rows = rows[~rows["system"].isin(WRONG)]
    rows, paper = centre(rows[rows["metric"] == "throughput"]), paper[paper["metric"] == "throughput"]
    panels, order = (list(dict.fromkeys(rows[name])) for name in ("panel", "system"))
    figure, axes = style.grid(2, len(panels), 7.6 * len(panels), 5.2, sharex="col")
    for column, panel in enumerate(panels):
        mine, theirs = rows[rows["panel"] == panel], under_our_names(paper[paper["panel"] == panel])
        places = Places(mine, theirs, order)
        for axis, relative in zip(axes[:, column], (False, True), strict=True):
            for frame, paper_bar in ((mine, False), (theirs, True)):
                bars(axis, relative_to_best(frame) if relative else frame, places, paper_bar)
            axis.set_yscale("log")
            axis.set_xticks(range(len(places.workloads)), places.workloads)
            axis.grid(axis="x", visible=False)
        models = ", ".join(f"{model}{beside(model)}" for model in dict.fromkeys(mine["model"]))
        axes[0, column].set_title(models)
        axes[1, column].axhline(1.0, color="0.3", linewidth=0.8)
    for depth in axes:
        frame_bars(depth)
    axes[0, 0].set_ylabel("throughput (token/s)")
    axes[1, 0].set_ylabel(f"relative to the best\nsystem on {ONE_MODEL}")
    _finish(figure, rows, paper, about)
    return figure


def regime(rows: pd.DataFrame) -> str:
    """Describe the work of a bar: requests, tokens, their share of prompts, and windows of steps."""
    cells = rows[~rows["panel"].str.endswith("ratios")]

    def span(metric: str) -> str:
        values = sorted(set(cells.loc[cells["metric"] == metric, "value"]))
        ends = " to ".join(f"{value:,.0f}" for value in dict.fromkeys(values[:1] + values[-1:]))
        return f"{ends} {metric.split('_')[-1]}" if values else ""

    wide = cells.pivot_table(index=["system", "workload"], columns="metric", values="value")
    prompts = ""
    if {"total_tokens", "new_tokens"} <= set(wide.columns):
        prompts = f"{100 * (1 - wide['new_tokens'] / wide['total_tokens']).median():.1f} % of them of prompts"
    windows = f"windows of {steps} of it" if (steps := span("window_steps")) else ""
    return ", ".join(part for part in (span("requests"), span("total_tokens"), prompts, windows) if part)


def not_measured(rows: pd.DataFrame) -> str:
    """Name the cells without a bar among the models, systems and popularities that have some."""
    cells = rows.pivot_table(index=["panel", "system"], columns="workload", values="value", sort=False)
    gaps = []
    for cell, values in cells.iterrows():
        panel, system = cast("tuple[str, str]", cell)
        if lacking := [str(name) for name in values.index[values.isna()]]:
            model = f", {rows.loc[rows['panel'] == panel, 'model'].iloc[0]}" if rows["panel"].nunique() > 1 else ""
            gaps.append(f"{name_of(system)} on {' and '.join(lacking)}{model}")
    return f"not measured: {'; '.join(gaps)}" if gaps else ""


def relative_to_best(frame: pd.DataFrame) -> pd.DataFrame:
    """Values divided by the largest on Identical, of the same machine; nothing where a system lacks that."""
    at_one = frame[frame["workload"] == ONE_MODEL]
    if set(frame["system"]) - set(at_one["system"]):
        return frame.iloc[:0]  # the best may be among those
    best = at_one["value"].max()
    values = [name for name in ("value", *SPAN) if name in frame]
    return frame.assign(**{name: frame[name] / best for name in values}).dropna(subset=["value"])


def under_our_names(paper: pd.DataFrame) -> pd.DataFrame:
    """Rename the paper's systems to their counterparts here."""
    return paper.assign(system=paper["system"].map(by_paper_name())).dropna(subset=["system"])


def colour_of(system: str) -> tuple[float, float, float]:
    """The system's colour, or a mixture of Punica's and white."""
    if system not in SHADES:
        return style.look(system)[0]
    red, green, blue = (1 - SHADES[system] * (1 - channel) for channel in style.look(REFERENCE)[0])
    return red, green, blue


class Places:
    """Places of bars in a group: measured systems in the figure's order, each beside the paper's, then the paper's."""

    def __init__(self, mine: pd.DataFrame, theirs: pd.DataFrame, order: Sequence[str]) -> None:
        self.workloads = list(dict.fromkeys(mine["workload"]))
        measured = [system for system in dict.fromkeys(order) if system in set(mine["system"])]
        known = list(dict.fromkeys(theirs["system"]))
        slots = [(name, paper) for name in measured for paper in (False, True) if not paper or name in known]
        self.slots = [*slots, *((name, True) for name in known if name not in measured)]
        self.width = GROUP / len(self.slots)

    def left(self, system: str, workload: str, paper: bool) -> float | None:
        """Left edge of a bar; None where it has no place."""
        if workload not in self.workloads or (system, paper) not in self.slots:
            return None
        return self.workloads.index(workload) - GROUP / 2 + self.width * self.slots.index((system, paper))

    def alone(self, system: str) -> bool:
        """Tell whether only the paper has it."""
        return (system, False) not in self.slots


def bars(axis: Axes, cells: pd.DataFrame, places: Places, paper: bool) -> None:
    """One bar with its value per row of `cells`, and a line over the span of its repeats; a disturbed one hollow."""
    cell: Any
    for cell in cells.itertuples():
        left, value, width = places.left(cell.system, cell.workload, paper), float(cell.value), places.width
        if left is None:
            continue
        look: dict[str, Any] = {**PAPER_BAR, "zorder": 2} if paper else {"color": colour_of(cell.system), "zorder": 3}
        if getattr(cell, "disturbed", None) is True:
            look = {"facecolor": "white", "edgecolor": colour_of(cell.system), "linewidth": 1.2, "zorder": 3}
        axis.bar(left, value, 0.9 * width, align="edge", **look)
        low, high = (float(getattr(cell, name, value)) for name in SPAN)
        if low < high:
            axis.vlines(left + 0.45 * width, low, high, color="0.1", linewidth=0.8, zorder=4)
        name = f" {INITIALS[cell.system]}" if paper and places.alone(cell.system) else ""
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}  # over the line of the best system
        look = {"va": "bottom", "rotation": 90, "fontsize": 5.5, "color": style.PAPER_GREY if paper else "0.2"}
        style.note(axis, f"{short(value)}{name}", left + 0.45 * width, max(value, high), bbox=behind, **look)


def frame_bars(axes: Sequence[Axes]) -> None:
    """One range for all of `axes`, logarithmic: from below the lowest bar, with room for a label above the highest."""
    tops = [bar.get_height() for axis in axes for bar in axis.patches if isinstance(bar, Rectangle)]
    if not tops:
        return
    low, high = min(tops), max(axis.dataLim.y1 for axis in axes)  # spans reach above their bars
    for axis in axes:
        axis.set_ylim(low / FOOT, high * (high * FOOT / low) ** 0.2)


def short(value: float) -> str:
    """All digits before the point, one behind it below 10 and two below 2, as many as it takes for less than 0.1."""
    digits = 0 if value >= 9.95 else 1 if value >= 2 else 2
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:.2g}"


PAPER_BAR: dict[str, Any] = {
    "facecolor": "white", "edgecolor": style.PAPER_GREY, "linestyle": "--", "linewidth": 0.8, "hatch": "////",
}  # fmt: skip


def _finish(figure: Figure, rows: pd.DataFrame, paper: pd.DataFrame, about: str) -> None:
    ours = list(dict.fromkeys(rows["system"]))
    known = [system for system in PAPER_NAMES if (paper["system"] == PAPER_NAMES[system]).any()]
    handles = [Patch(color=colour_of(system), label=name_of(system)) for system in ours]
    alone = [f"{INITIALS[system]}: {PAPER_NAMES[system]}" for system in known if system not in ours]
    if not paper.empty:
        handles.append(Patch(label="; ".join([style.PAPER_LABEL, *alone]), **PAPER_BAR))
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    name = ", ".join(dict.fromkeys(rows["figure"]))
    name = f"Figure {name}" if name.isdigit() else name.removeprefix("ext ").capitalize()
    title = f"{name}: text generation, at most {limit} requests per batch"
    words = [described(rows), about, policies(ours), beside_ours(known, ours), not_measured(rows)]
    style.caption(figure, title, "; ".join(filter(None, words)), handles, 3, columnspacing=1.4)


def beside_ours(known: Sequence[str], ours: Sequence[str]) -> str:
    """Which of the paper's systems have the bars beside ours; empty where it has none."""
    names = [PAPER_NAMES[system] for system in ours if system in known]
    return f"the paper's bars, in this order: {', '.join(names)}" if names else ""
