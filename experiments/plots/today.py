"""Bars of engines side by side: decode steps, a stream, registration; above each case how much faster ours is."""

import textwrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, described, interval
from experiments.today.peers import OURS, PEERS

CASES = {"": "no adapter", "Identical": "Identical", "Distinct": "Distinct"}
SHOWN = {
    "decode": ("step_latency", "decode step (ms)"),
    "stream": ("output_throughput", "output token/s"),
    "registration": ("registration", "registration (s)"),
}
"""Panel -> metric and label; more is better of the stream alone."""
COLOURS = {"vllm": 4, "vllm_as_shipped": 7, "vllm_dual_stream": 8, "vllm_tuned": 1}
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}  # of numbers, over the lines of spans
GROUP, WIDEST = 0.84, 0.3  # of the distance between groups: their bars, and one bar at most


def draw_today(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """One row of axes per panel and context; groups of bars are popularities."""
    cells = [
        (panel, context)
        for panel in SHOWN
        for context in sorted(set(rows.loc[rows["panel"] == panel, "seq_len"].dropna())) or [None]
        if (rows["panel"] == panel).any()
    ]
    systems = [name for name in PEERS if (rows["system"] == name).any()]
    figure, axes = style.grid(len(cells), 1, 7.0, 1.55 * len(cells) + 1.5, sharex=False)
    for axis, (panel, context) in zip(axes[:, 0], cells, strict=True):
        metric, label = SHOWN[panel]
        mine = rows[(rows["panel"] == panel) & (rows["metric"] == metric)]
        mine = mine if context is None else mine[mine["seq_len"] == context]
        _bars(axis, mine, [name for name in systems if (mine["system"] == name).any()])
        axis.set_ylabel(label if context is None else f"{label}\ncontext {context:.0f}")
    labels = [textwrap.fill(f"{name}: {_engine(rows, name)}", 110) for name in systems]
    handles = [Patch(color=_colour(name), label=label) for name, label in zip(systems, labels, strict=True)]
    said = described(rows)
    if any(map(_theirs, systems)):
        said += "; ratio: ours over the fastest setting of vLLM, which is named"
    else:
        said += "; vLLM was not measured"
    style.caption(figure, "The engine of today beside ours", said, handles, 1)
    return figure


def gains(table: pd.DataFrame, more_is_better: bool) -> dict[str, tuple[float, str]]:
    """Popularity -> how many times as fast ours is as the fastest of the others, and which that is.

    `table`: values by popularity and system. Cases that one side lacks are left out.
    """
    found = {}
    for case, values in table.iterrows():
        theirs = values[[name for name in values.index if _theirs(name)]].dropna()
        ours = values[[name for name in values.index if not _theirs(name)]].dropna()
        if len(theirs) and len(ours):
            best = str(theirs.idxmax() if more_is_better else theirs.idxmin())
            ratio = ours.max() / theirs[best] if more_is_better else theirs[best] / ours.min()
            found[str(case)] = float(ratio), best
    return found


def _theirs(system: str) -> bool:
    return PEERS[system].worker != OURS


def _colour(system: str) -> Any:
    return style.PALETTE[COLOURS[system]] if system in COLOURS else style.look(system)[0]


def _engine(rows: pd.DataFrame, system: str) -> str:
    """Versions and settings of a system, as its rows have them."""
    return "; ".join(dict.fromkeys(rows.loc[rows["system"] == system, "engine"]))


def _bars(axis: Axes, rows: pd.DataFrame, systems: list[str]) -> None:
    """Draw one bar per popularity and system with its span of rounds, hollow where disturbed, and the ratios."""
    table = centre(rows).pivot_table(index="workload", columns="system", values="value", sort=False)
    table = table.reindex([case for case in CASES if case in table.index])
    width = min(GROUP / len(systems), WIDEST)
    bar: Any
    span: Any
    for place, system in enumerate(systems):
        mine = rows[rows["system"] == system].assign(at=lambda one: one["workload"].map(list(table.index).index))
        mine = mine.assign(at=mine["at"] + (place + 0.5 - len(systems) / 2) * width)
        for bar in centre(mine).itertuples():
            look = {"edgecolor": _colour(system), "facecolor": "white" if bar.disturbed is True else _colour(system)}
            axis.bar(bar.at, bar.value, 0.92 * width, linewidth=1.0, **look)
            style.note(axis, f"{bar.value:.4g}", bar.at, bar.value, bbox=BEHIND)
        for span in interval(mine, "at").itertuples():
            axis.vlines(span.at, span.p10, span.p90, color="0.1", linewidth=0.8)
    for case, (ratio, other) in gains(table, rows["metric"].iloc[0] == SHOWN["stream"][0]).items():
        top = float(table.max(axis="columns")[case])
        style.note(axis, f"{ratio:.2f}x ({other})", list(table.index).index(case), top, lift=11, fontweight="bold")
    axis.set_ylim(0, 1.3 * float(table.max().max()))
    names = [CASES[str(case)] for case in table.index]
    axis.set_xlim(-0.5, len(table) - 0.5)
    axis.set_xticks(range(len(table)), ["all adapters"] if (rows["panel"] == "registration").any() else names)
    axis.grid(axis="x", visible=False)
