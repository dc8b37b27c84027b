"""Bars of serving systems, grouped by popularity, each beside the paper's bar; below, everything relative to Punica."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.claims.paper import SYSTEMS
from experiments.plots import style
from experiments.plots.frames import centre, described

PAPER_NAMES = {ours: theirs for theirs, ours in reversed(SYSTEMS.items())}
"""Our system -> the paper's that it stands for. The paper's DeepSpeed has the policy of FasterTransformer and is not
drawn."""
REFERENCE = "punica"
SHADES = {"punica_static": 0.6, "punica_last_admitted": 0.3}
"""Variants of Punica are lighter shades of its colour."""
GROUP = 0.86  # of the distance between groups


def draw_serving(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Figure 11: one column of axes per panel (model): throughput above, throughput relative to Punica's below."""
    rows, paper = centre(rows[rows["metric"] == "throughput"]), paper[paper["metric"] == "throughput"]
    panels, systems = list(dict.fromkeys(rows["panel"])), list(dict.fromkeys(rows["system"]))
    figure, axes = style.grid(2, len(panels), 7.2 * len(panels), 5.0, sharex="col")
    for column, panel in enumerate(panels):
        mine, theirs = rows[rows["panel"] == panel], paper[paper["panel"] == panel]
        workloads = list(dict.fromkeys(mine["workload"]))
        for axis, relative in zip(axes[:, column], (False, True), strict=True):
            for frame, paper_bar in ((mine, False), (under_our_names(theirs), True)):
                _bars(axis, relative_to_punica(frame) if relative else frame, systems, workloads, relative, paper_bar)
            axis.set_yscale("log")
            axis.set_xticks(range(len(workloads)), workloads)
            axis.grid(axis="x", visible=False)
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.12)  # room for the labels
        axes[0, column].set_title(f"{panel}; measured on {', '.join(dict.fromkeys(mine['model']))}")
        axes[1, column].axhline(1.0, color="0.3", linewidth=0.8)
    axes[0, 0].set_ylabel("throughput (token/s)")
    axes[1, 0].set_ylabel("relative to Punica\non the same workload")
    _finish(figure, rows, systems)
    return figure


def relative_to_punica(frame: pd.DataFrame) -> pd.DataFrame:
    """Values divided by Punica's on the same workload, without the workloads that Punica did not serve."""
    reference = frame[frame["system"] == REFERENCE].set_index("workload")["value"]
    return frame.assign(value=frame["value"] / frame["workload"].map(reference)).dropna(subset=["value"])


def under_our_names(paper: pd.DataFrame) -> pd.DataFrame:
    """The paper's rows of the systems that one of ours stands for, under its name."""
    return paper.assign(system=paper["system"].map(SYSTEMS)).dropna(subset=["system"])


def _colour(system: str) -> tuple[float, float, float]:
    """The system's colour, or a mixture of Punica's and white."""
    if system not in SHADES:
        return style.look(system)[0]
    red, green, blue = (1 - SHADES[system] * (1 - channel) for channel in style.look(REFERENCE)[0])
    return red, green, blue


def _place(systems: list[str], system: str, group: int) -> tuple[float, float]:
    """Left edge and width of the two bars (measured, paper) of `system` in a group; others get one."""
    widths = [2.0 if name in PAPER_NAMES else 1.0 for name in systems]
    unit, index = GROUP / sum(widths), systems.index(system)
    return group - GROUP / 2 + unit * sum(widths[:index]), unit


def _bars(
    axis: Axes, cells: pd.DataFrame, systems: list[str], workloads: list[str], relative: bool, paper: bool
) -> None:
    """One bar with its value per row of `cells`; the `paper`'s to the right of those that were measured."""
    for system, workload, value in zip(cells["system"], cells["workload"], cells["value"].astype(float), strict=True):
        if system not in systems or workload not in workloads:
            continue
        left, width = _place(systems, system, workloads.index(workload))
        left += width if paper else 0.0
        look = {**_PAPER, "zorder": 2} if paper else {"color": _colour(system), "zorder": 3}
        axis.bar(left, value, 0.9 * width, align="edge", **look)
        text, colour = f"{value:.{2 if relative else 0}f}", style.PAPER_GREY if paper else "0.2"
        style.note(axis, text, left + 0.45 * width, value, va="bottom", rotation=90, fontsize=5.5, color=colour)


_PAPER = {"facecolor": "white", "edgecolor": style.PAPER_GREY, "linestyle": "--", "linewidth": 0.8, "hatch": "////"}


def _finish(figure: Figure, rows: pd.DataFrame, systems: list[str]) -> None:
    handles = [
        Patch(color=_colour(name), label=f"{name} ({PAPER_NAMES[name]})" if name in PAPER_NAMES else name)
        for name in systems
    ]
    handles.append(Patch(label=style.PAPER_LABEL, **_PAPER))
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    title = f"Figure 11: text generation, at most {limit} requests per batch"
    style.caption(figure, title, described(rows), handles, 4, columnspacing=1.4)
