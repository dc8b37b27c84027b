"""Figure 11: throughput of serving systems per popularity, ours and the paper's, with Punica over the best baseline."""

from collections.abc import Sequence
from typing import Any, cast

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.facts.models import STAND_INS
from experiments.facts.systems import baselines, by_paper_name, entries, name_of, policies
from experiments.plots import style
from experiments.plots.frames import beside, centre, measured

PAPER_NAMES = {ours: theirs for theirs, ours in reversed(by_paper_name().items())}
"""Our system -> the paper's that stands beside it."""
REFERENCE = "punica"
WRONG = [entry.name for entry in entries() if not entry.exact]
"""Systems with wrong tokens, which are not drawn."""
SPAN = ("lowest", "highest")
"""Columns of the span over repeats, where there are several (`harness.counted.merged`)."""
GROUP = 0.86  # of the distance between groups


def draw_serving(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw a row of axes per panel (model): dots over popularities on a logarithmic axis."""
    about = regime(rows)
    rows = centre(rows[(rows["metric"] == "throughput") & ~rows["system"].isin(WRONG)])
    paper = under_our_names(paper[paper["metric"] == "throughput"])
    panels = list(dict.fromkeys(rows["panel"]))
    figure, axes = style.grid(len(panels), 1, style.PAGE, 2.0 * len(panels) + 1.6, sharex=False)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        mine, theirs = rows[rows["panel"] == panel], paper[paper["panel"] == panel]
        dots(axis, mine, comparable(mine, theirs), list(rows["system"]))
        write_speedups(axis, mine, theirs)
        axis.set_ylabel(f"{', '.join(f'{model}{beside(model)}' for model in dict.fromkeys(mine['model']))}\ntoken/s")
    name = ", ".join(dict.fromkeys(rows["figure"]))
    names = legend_order(rows, comparable(rows, paper))
    handles: list[Any] = [Line2D([], [], label=name_of(one), **style.measured_style(one) | LONE) for one in names]
    handles += style.sides(not comparable(rows, paper).empty)
    style.finish(figure, words(f"Figure {name}: text generation", rows, paper, about), handles, 4)
    return figure


LONE = {"linestyle": ""}


def comparable(mine: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """The paper's values, whose model ours has the size of; none beside a smaller one, whose tokens cost less."""
    return theirs.iloc[:0] if mine["model"].isin([*STAND_INS]).any() else theirs


def words(title: str, rows: pd.DataFrame, paper: pd.DataFrame, about: str = "") -> str:
    """The caption of a figure of throughputs."""
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    drawn = comparable(rows, paper)
    alone = [one for one in dict.fromkeys(drawn["system"]) if one not in set(rows["system"])]
    parts = [
        f"{title}, at most {limit} requests per batch" + (f"; {about}" if about else ""),
        f"Above each popularity {REFERENCE} over the best baseline drawn, ours (the paper's)"
        if _has_rival(rows)
        else "",
        policies(rows["system"]),
        "The paper's values are of a larger model and not drawn" if drawn.empty and len(paper) else "",
        f"In the paper alone: {', '.join(PAPER_NAMES[one] for one in alone)}" if alone else "",
        not_measured(rows),
        measured(rows).removesuffix("."),
    ]
    return ". ".join(part[0].upper() + part[1:] for part in parts if part) + "."


def _has_rival(rows: pd.DataFrame) -> bool:
    return REFERENCE in set(rows["system"]) and bool(set(rows["system"]) & set(baselines()))


def legend_order(rows: pd.DataFrame, paper: pd.DataFrame) -> list[str]:
    """Measured systems, then the paper's alone."""
    return list(dict.fromkeys([*rows["system"], *paper["system"]]))


def dots(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, order: Sequence[str]) -> None:
    """A filled dot with its value per row of `mine`, and an open one per row of `theirs`, on a logarithmic axis."""
    workloads, systems = list(dict.fromkeys(mine["workload"])), list(dict.fromkeys([*order, *theirs["system"]]))
    systems = [name for name in systems if name in {*mine["system"], *theirs["system"]}]
    both = {name: frame.set_index(["workload", "system"])["value"].to_dict()
            for name, frame in (("ours", mine), ("paper", theirs))}  # fmt: skip
    for frame, others, looks in (
        (theirs, both["ours"], style.paper_style),
        (mine, both["paper"], style.measured_style),
    ):
        cell: Any
        for cell in frame[frame["workload"].isin(workloads)].itertuples():
            at = place(workloads.index(cell.workload), systems.index(cell.system), len(systems))
            low, high = (float(getattr(cell, name, cell.value)) for name in SPAN)
            axis.vlines(at, low, high, color=style.look(cell.system).colour, linewidth=0.8)
            axis.plot([at], [cell.value], **looks(cell.system) | LONE | {"markersize": 4.5})
            if getattr(cell, "disturbed", None) is True:
                style.crossed(axis, [at], [cell.value])
            above = cell.value >= others.get((cell.workload, cell.system), 0)
            side: dict[str, Any] = {"lift": 4, "va": "bottom"} if above else {"lift": -4, "va": "top"}
            style.note(axis, short(cell.value), at, cell.value, fontsize=6, rotation=90, zorder=5, **side)
    style.log_y(axis)
    axis.margins(y=0.2)
    style.headroom(axis, 0.14)
    axis.set_xlim(-0.5, len(workloads) - 0.5)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.grid(axis="x", visible=False)


def write_speedups(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, size: float = 7) -> None:
    """Write above each group how many times the throughput of the best baseline Punica reaches."""
    ours, papers = speedups(mine), speedups(theirs)
    for group, workload in enumerate(dict.fromkeys(mine["workload"])):
        if workload in ours:
            text = f"{short(ours[workload])}x" + (f" ({short(papers[workload])}x)" if workload in papers else "")
            looks = {"ha": "center", "fontsize": size, "fontweight": "bold", "va": "top"}
            axis.text(group, 0.98, text, transform=axis.get_xaxis_transform(), in_layout=False, **looks)


def speedups(frame: pd.DataFrame) -> dict[str, float]:
    """Popularity -> throughput of Punica over that of the best baseline in `frame`."""
    table = frame.pivot_table(index="workload", columns="system", values="value")
    rivals = [name for name in baselines() if name in table]
    if REFERENCE not in table or not rivals:
        return {}
    return (table[REFERENCE] / table[rivals].max(axis="columns")).dropna().to_dict()


def place(group: int, slot: int, slots: int) -> float:
    """Centre of a slot in a group."""
    return group + GROUP * ((slot + 0.5) / slots - 0.5)


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
    """Name the cells without a value among the models, systems and popularities that have some."""
    cells = rows.pivot_table(index=["panel", "system"], columns="workload", values="value", sort=False)
    gaps = []
    for cell, values in cells.iterrows():
        panel, system = cast("tuple[str, str]", cell)
        if lacking := [str(name) for name in values.index[values.isna()]]:
            model = f", {rows.loc[rows['panel'] == panel, 'model'].iloc[0]}" if rows["panel"].nunique() > 1 else ""
            gaps.append(f"{name_of(system)} on {' and '.join(lacking)}{model}")
    return f"not measured: {'; '.join(gaps)}" if gaps else ""


def under_our_names(paper: pd.DataFrame) -> pd.DataFrame:
    """Rename the paper's systems to their counterparts here."""
    return paper.assign(system=paper["system"].map(by_paper_name())).dropna(subset=["system"])


def short(value: float) -> str:
    """All digits before the point, one behind it below 10 and two below 2, as many as it takes for less than 0.1."""
    digits = 0 if value >= 19.95 else 1 if value >= 2 else 2
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:.2g}"
