"""Figures 11 and 12: throughput per popularity, ours and the paper's, Punica over the best baseline, steps of ranks.
Dots on a logarithmic axis show all systems; for the README bars from zero show `SHOWN`.
"""

from collections.abc import Sequence
from typing import Any, cast

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.facts.systems import (
    OTHER_STREAMS,
    STAND_INS,
    SYSTEMS,
    baselines,
    by_paper_name,
    entries,
    name_of,
    policies,
)
from experiments.plots import style
from experiments.plots.frames import beside, centre, measured, role_of

PAPER_NAMES = {ours: theirs for theirs, ours in reversed(by_paper_name().items())}
"""Our system -> the paper's that stands beside it."""
REFERENCE = "punica"
SHOWN = (REFERENCE, *(name for name in SYSTEMS.names() if SYSTEMS.get(name).policy))
"""Punica, and the systems that have another system's policy on this engine."""
WRONG = [entry.name for entry in entries() if not entry.exact]
"""Systems with wrong tokens, which are not drawn."""
SPAN = ("lowest", "highest")
"""Columns of the span over repeats, where there are several (`harness.counted.merged`)."""
GROUP = 0.86  # of the distance between groups
LONE = {"linestyle": "", "markersize": 4.5}
COLLECTIVES: dict[str, Any] = {"facecolor": "black", "edgecolor": "white", "linewidth": 0.3}
SERVED = {"step_latency": "decode step (ms)", "prompt_latency": "prompts (ms)", "output_throughput": "output token/s"}
"""Metrics of engines and servers, and labels."""


def draw_serving(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw a row of axes per panel (model): dots over popularities on a logarithmic axis."""
    rows, paper = rows[rows["metric"] == "throughput"], under_our_names(paper)
    rows = without(rows, rows["panel"].str.contains(OTHER_STREAMS))
    rows = centre(without(rows, rows["system"].isin(WRONG)))
    panels = list(dict.fromkeys(rows["panel"]))
    figure, axes = style.grid(len(panels), 1, style.PAGE, 2.0 * len(panels) + 1.6, sharex=False)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        mine, theirs = rows[rows["panel"] == panel], paper[paper["panel"] == panel]
        dots(axis, mine, comparable(mine, theirs), list(rows["system"]))
        write_speedups(axis, mine, theirs)
        axis.set_ylabel(f"{models_of(mine)}\ntoken/s")
    title = f"Figure {', '.join(dict.fromkeys(rows['figure']))}: text generation"
    style.finish(figure, words(title, rows, paper), handles_of(rows, comparable(rows, paper)), 4)
    return figure


def draw_hero(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw bars of those of `SHOWN` that were measured, in one axis per panel (model) of ``rows``."""
    rows = rows[(rows["metric"] == "throughput") & rows["system"].isin(SHOWN)]
    rows = centre(without(rows, rows["panel"].str.contains(OTHER_STREAMS)))
    paper = under_our_names(paper)
    paper = paper[paper["system"].isin(rows["system"])]
    drawn = comparable(rows, paper)
    panels, systems = list(dict.fromkeys(rows["panel"])), [name for name in SHOWN if name in set(rows["system"])]
    figure, axes = style.grid(1, max(len(panels), 1), style.PAGE, 3.0, sharex=False)
    for axis, panel in zip(axes[0], panels, strict=False):
        mine, theirs = rows[rows["panel"] == panel], drawn[drawn["panel"] == panel]
        slots = [(name, one) for name in systems for one in (False, True) if not one or name in set(theirs["system"])]
        for is_paper, frame in ((False, mine), (True, theirs)):
            for at, cell in placed(frame, mine, [name for name, one in slots if one == is_paper], slots, is_paper):
                top = bar(axis, at, cell, GROUP / len(slots), is_paper)
                style.note(axis, short(cell.value), at, top, zorder=5, fontsize=6, rotation=90, va="bottom")
        group_names(axis, mine)
        write_speedups(axis, mine, paper[paper["panel"] == panel])
        axis.set_title(models_of(mine))
    axes[0, 0].set_ylim(0, 1.35 * pd.concat([rows["value"], drawn["value"]]).max())
    axes[0, 0].set_ylabel("throughput (token/s)")
    handles = style.patches(systems)
    handles += [] if drawn.empty else [Patch(label=f"{style.PAPER_LABEL}: open", **style.patch(REFERENCE, True))]
    style.finish(figure, words("Figure 11: text generation", rows, paper), handles, 4)
    return figure


def draw_ranks(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """A column per number of ranks: throughput; steps and their collectives."""
    rows, paper = centre(rows), under_our_names(paper)
    panels = list(dict.fromkeys(rows["panel"]))
    figure, axes = style.grid(2, len(panels), style.PAGE, 5.2, sharex=False, sharey=False)
    shown, rates = paper.iloc[:0], rows[rows["metric"] == "throughput"]
    for (above, below), panel in zip(axes.T, panels, strict=True):
        mine = rates[rates["panel"] == panel]
        model = mine["model"].iloc[0]
        alike = role_of(model) == "70B"  # tokens of another model are no match for its
        theirs = paper if alike else paper.iloc[:0]
        shown = theirs if alike else shown
        dots(above, mine, theirs, list(rows.loc[rows["panel"] == panel, "system"]))
        write_speedups(above, mine, theirs, narrow=True)
        style.headroom(above, 0.1)
        _steps(below, rows[rows["panel"] == panel])
        above.set_title(f"{model} on {panel.rpartition(', tp ')[2]} ranks" + "\n(paper: 70B on 8 GPUs)" * alike)
    axes[0, 0].set_ylabel("throughput (token/s)")
    axes[1, 0].set_ylabel("step (ms)")
    handles = [*handles_of(rates, shown), Patch(label="collectives within the step", **COLLECTIVES)]
    style.finish(figure, words("Figure 12: text generation on tensor-parallel ranks", rates, shown), handles, 4)
    return figure


def draw_servers(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Draw a row of axes per panel, batch and context: bars of engines and servers by popularity."""
    rows = centre(rows[rows["panel"].isin(["decode", "prompt", "stream"]) & rows["metric"].isin([*SERVED])])
    rows = rows.assign(workload=rows["workload"].replace("", "no adapter"))
    cells = list(rows.groupby(["panel", "batch_size", "seq_len"], dropna=False))
    systems = list(dict.fromkeys(rows["system"]))
    figure, axes = style.grid(max(1, len(cells)), 1, style.PAGE, 1.6 * len(cells) + 1.7, sharex=False)
    for axis, (_key, mine) in zip(axes[:, 0], cells, strict=False):
        for at, cell in placed(mine, mine, systems, systems):
            style.note(axis, short(cell.value), at, bar(axis, at, cell, GROUP / len(systems)), zorder=5)
        axis.margins(y=0.2)
        one = mine.iloc[0]
        if one.seq_len > 0:
            axis.set_title(f"{one.batch_size:.0f} requests at {one.seq_len:.0f} tokens, rank {one['rank']:.0f} or less")
        axis.set_ylabel(SERVED[one.metric])
        group_names(axis, mine)
    engines = "; ".join(dict.fromkeys(rows["system"] + ": " + rows["engine"]))
    style.finish(figure, f"Engines and servers. {measured(rows)} {engines}.", style.patches(systems), 4)
    return figure


def _steps(axis: Axes, mine: pd.DataFrame) -> None:
    steps = mine[mine["metric"] == "step_latency"]
    shares = mine[mine["metric"] == "collective_share"].set_index(["system", "workload"])["value"]
    systems = list(dict.fromkeys(steps["system"]))
    for at, cell in placed(steps, steps, systems, systems):
        style.note(axis, short(cell.value), at, bar(axis, at, cell, GROUP / len(systems), spans=False), zorder=5)
        if (share := shares.get((cell.system, cell.workload))) is not None:
            axis.bar(at, share * cell.value, 0.9 * GROUP / len(systems), zorder=4, **COLLECTIVES)
    axis.margins(y=0.12)
    group_names(axis, steps)


def handles_of(rows: pd.DataFrame, paper: pd.DataFrame) -> list[Any]:
    """Legend entries of dots: measured systems, and the paper's alone."""
    names = dict.fromkeys([*rows["system"], *paper["system"]])
    found: list[Any] = [Line2D([], [], label=name_of(one), **style.measured_style(one) | LONE) for one in names]
    return found + style.sides(not paper.empty)


def dots(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, order: Sequence[str]) -> None:
    """A filled dot with its value per row of `mine`, and an open one per row of `theirs`, on a logarithmic axis."""
    here = {*mine["system"], *theirs["system"]}
    systems = [name for name in dict.fromkeys([*order, *theirs["system"]]) if name in here]
    ours, papers = (frame.set_index(["workload", "system"])["value"].to_dict() for frame in (mine, theirs))
    for frame, others, looks in ((theirs, ours, style.paper_style), (mine, papers, style.measured_style)):
        for at, cell in placed(frame, mine, systems, systems):
            low, high = _span(cell)
            axis.vlines(at, low, high, color=style.look(cell.system).colour, linewidth=0.8)
            axis.plot([at], [cell.value], **looks(cell.system) | LONE)
            if getattr(cell, "disturbed", None) is True:
                style.crossed(axis, [at], [cell.value])
            above = cell.value >= others.get((cell.workload, cell.system), 0)
            side: dict[str, Any] = {"lift": 4, "va": "bottom"} if above else {"lift": -4, "va": "top"}
            style.note(axis, short(cell.value), at, cell.value, fontsize=6, rotation=90, zorder=5, **side)
    style.log_y(axis)
    axis.margins(y=0.2)
    style.headroom(axis, 0.14)
    group_names(axis, mine)


def bar(axis: Axes, at: float, cell: Any, width: float, paper: bool = False, spans: bool = True) -> float:
    """Draw the bar of a row with its span over repeats, 0.9 of `width` wide; return their upper end."""
    axis.bar(at, cell.value, 0.9 * width, zorder=3, **style.patch(cell.system, paper))
    low, high = _span(cell) if spans else (cell.value, cell.value)
    if low < high:
        axis.vlines(at, low, high, color="0.1", linewidth=0.8, zorder=4)
    if getattr(cell, "disturbed", None) is True:
        style.crossed(axis, [at], [cell.value])
    return float(max(cell.value, high))


def _span(cell: Any) -> list[float]:
    return [float(getattr(cell, name, cell.value)) for name in SPAN]


def placed(
    frame: pd.DataFrame, of: pd.DataFrame, names: Sequence[str], slots: Sequence[Any], paper: bool | None = None
) -> list[tuple[float, Any]]:
    """Return the place of each row of ``frame``: the group of its popularity in ``of``, the slot of its system."""
    workloads, found = list(dict.fromkeys(of["workload"])), []
    cell: Any
    for cell in frame[frame["workload"].isin(workloads) & frame["system"].isin(names)].itertuples():
        slot = slots.index(cell.system if paper is None else (cell.system, paper))
        found.append((workloads.index(cell.workload) + GROUP * ((slot + 0.5) / len(slots) - 0.5), cell))
    return found


def group_names(axis: Axes, rows: pd.DataFrame) -> None:
    workloads = list(dict.fromkeys(rows["workload"]))
    axis.set_xlim(-0.5, len(workloads) - 0.5)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.grid(axis="x", visible=False)


def models_of(rows: pd.DataFrame) -> str:
    return ", ".join(f"{model}{beside(model)}" for model in dict.fromkeys(rows["model"]))


def without(rows: pd.DataFrame, left_out: pd.Series) -> pd.DataFrame:
    """Leave out rows, unless there are no others."""
    return rows if left_out.all() else rows[~left_out]


def comparable(mine: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """The paper's values, whose model ours has the size of; none beside a smaller one, whose tokens cost less."""
    return theirs.iloc[:0] if mine["model"].isin([*STAND_INS]).any() else theirs


def under_our_names(paper: pd.DataFrame) -> pd.DataFrame:
    """The paper's throughputs, its systems by the names of their counterparts here."""
    paper = paper[paper["metric"] == "throughput"]
    return paper.assign(system=paper["system"].map(by_paper_name())).dropna(subset=["system"])


def words(title: str, rows: pd.DataFrame, paper: pd.DataFrame) -> str:
    """The caption of a figure of throughputs."""
    limit = ", ".join(str(int(size)) for size in sorted(set(rows["batch_size"])))
    drawn = comparable(rows, paper)
    alone = [PAPER_NAMES[one] for one in dict.fromkeys(drawn["system"]) if one not in set(rows["system"])]
    parts = [
        f"{title}, at most {limit} requests per batch",
        f"Above each popularity {REFERENCE} over the best baseline of one adapter per batch, ours (the paper's)"
        if speedups(rows) else "",
        policies(rows["system"]),
        "The paper's values are of a larger model and not drawn" if drawn.empty and len(paper) else "",
        f"In the paper alone: {', '.join(alone)}" if alone else "",
        not_measured(rows),
        measured(rows).removesuffix("."),
    ]  # fmt: skip
    return ". ".join(part[0].upper() + part[1:] for part in parts if part) + "."


def write_speedups(axis: Axes, mine: pd.DataFrame, theirs: pd.DataFrame, narrow: bool = False) -> None:
    """Write above each group how many times the best baseline's throughput Punica reaches; two lines if `narrow`."""
    ours, papers = speedups(mine), speedups(theirs)
    looks: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 7, "fontweight": "bold", "in_layout": False}
    for group, workload in enumerate(dict.fromkeys(mine["workload"])):
        if workload in ours:
            beside = [f"({short(papers[workload])}x)"] if workload in papers else []
            text = ("\n" if narrow else " ").join([f"{short(ours[workload])}x", *beside])
            axis.text(group, 0.98, text, transform=axis.get_xaxis_transform(), **looks)


def speedups(frame: pd.DataFrame) -> dict[str, float]:
    """Popularity -> throughput of Punica over the best baseline's; none where one was not measured."""
    table = frame.pivot_table(index="workload", columns="system", values="value")
    rivals = [name for name in baselines() if name in table]
    if REFERENCE not in table or not rivals:
        return {}
    found = (table[REFERENCE] / table[rivals].max(axis="columns", skipna=False)).dropna()
    return {str(workload): float(ratio) for workload, ratio in found.items()}


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


def short(value: float) -> str:
    """No digit behind the point from 20 on, one from 2 on, two below, as many as it takes for less than 0.1."""
    digits = 0 if value >= 19.95 else 1 if value >= 2 else 2
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:.2g}"
