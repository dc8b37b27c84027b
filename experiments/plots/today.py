"""Bars of engines side by side: decode steps, a stream, registration; above each case how much faster ours is."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, interval, measured
from experiments.plots.serving import group_names, placed
from experiments.today.peers import OURS, PEERS

CASES = {"": "no adapter", "Identical": "Identical", "Distinct": "Distinct"}
SHOWN = {
    "decode": ("step_latency", "decode step (ms)"),
    "stream": ("output_throughput", "output token/s"),
    "registration": ("registration", "registration (s)"),
}
"""Panel -> metric and label; more is better of the stream alone."""


def draw_today(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """One row of axes per panel and context; groups of bars are popularities."""
    cells = [
        (panel, context)
        for panel in SHOWN
        for context in sorted(set(rows.loc[rows["panel"] == panel, "seq_len"].dropna())) or [None]
        if (rows["panel"] == panel).any()
    ]
    systems = [name for name in PEERS if (rows["system"] == name).any()]
    figure, axes = style.grid(len(cells), 1, style.PAGE, 1.3 * len(cells) + 1.9, sharex=False)
    for axis, (panel, context) in zip(axes[:, 0], cells, strict=True):
        metric, label = SHOWN[panel]
        mine = rows[(rows["panel"] == panel) & (rows["metric"] == metric)]
        mine = mine if context is None else mine[mine["seq_len"] == context]
        _bars(axis, mine, [name for name in systems if (mine["system"] == name).any()])
        axis.set_ylabel(label if context is None else f"{label}\ncontext {context:.0f}")
    engines = "; ".join(
        f"{name}: {'; '.join(dict.fromkeys(rows.loc[rows['system'] == name, 'engine']))}" for name in systems
    )
    said = (
        "printed: ours over the fastest setting of vLLM, which is named"
        if any(map(_theirs, systems))
        else "vLLM was not measured"
    )
    handles = [Patch(label=name, **style.patch(name)) for name in systems]
    style.finish(figure, f"vLLM and our engine; {said}. {measured(rows, 'lines')} {engines}.", handles, 4)
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


def _bars(axis: Axes, rows: pd.DataFrame, systems: list[str]) -> None:
    """Draw one bar per popularity and system with its span of rounds, and the ratios."""
    table = centre(rows).pivot_table(index="workload", columns="system", values="value", sort=False)
    table = table.reindex([case for case in CASES if case in table.index])
    bars = placed(centre(rows), table.reset_index(), systems, systems)
    for at, cell in bars:
        spread = interval(rows[(rows["system"] == cell.system) & (rows["workload"] == cell.workload)], "workload")
        span = spread[["p10", "p90"]].to_numpy().flatten().tolist()
        about: dict[str, Any] = {"disturbed": cell.disturbed is True, "span": span}
        top = style.bar(axis, at, cell.value, 0.8 / len(systems), cell.system, **about)
        style.note(axis, f"{cell.value:.4g}", at, top, zorder=5, bbox=style.BEHIND)
    for case, (ratio, other) in gains(table, rows["metric"].iloc[0] == SHOWN["stream"][0]).items():
        top = float(table.max(axis="columns")[case])
        style.note(axis, f"{ratio:.2f}x ({other})", list(table.index).index(case), top, lift=11, fontweight="bold")
    axis.set_ylim(0, 1.45 * float(table.max().max()))
    group_names(axis, table.reset_index())
    registered = (rows["panel"] == "registration").any()
    axis.set_xticklabels(["all adapters"] if registered else [CASES[str(case)] for case in table.index])
