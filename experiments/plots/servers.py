"""Bars of engines and servers side by side; above each case how much faster ours is than the fastest vLLM."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, measured
from experiments.plots.serving import group_names, placed
from experiments.servers.systems import PUNICA, SYSTEMS

SHOWN = {
    "decode": ("step_latency", "decode step (ms)"),
    "prompt": ("prompt_latency", "prompts (ms)"),
    "stream": ("output_throughput", "output token/s"),
}
"""Panel -> metric and label; more is better of the stream alone."""


def draw_servers(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Draw one row of axes per panel and context; groups of bars are popularities."""
    metrics = rows["panel"].map({panel: metric for panel, (metric, _) in SHOWN.items()})
    rows = rows[(rows["metric"] == metrics) & rows["system"].isin(list(SYSTEMS))]
    rows = rows.assign(workload=rows["workload"].replace("", "no adapter"))
    cells: list[Any] = list(centre(rows).groupby(["panel", "seq_len"], dropna=False))
    systems = [name for name in SYSTEMS if name in set(rows["system"])]
    figure, axes = style.grid(max(1, len(cells)), 1, style.PAGE, 1.3 * len(cells) + 1.9, sharex=False)
    for axis, ((panel, context), part) in zip(axes[:, 0], cells, strict=False):
        _bars(axis, part, systems, panel == "stream")
        axis.set_ylabel(SHOWN[panel][1] + ("" if pd.isna(context) else f"\ncontext {context:.0f}"))
    about = "; ".join(dict.fromkeys(f"{one.system}: {one.engine}" for one in rows.itertuples()))
    title = f"Printed: ours over the fastest vLLM, which is named. {measured(rows, 'lines')} {about}."
    style.finish(figure, title, style.patches(systems), 4)
    return figure


def gains(table: pd.DataFrame, more_is_better: bool) -> dict[str, tuple[float, str]]:
    """Map a popularity to how many times as fast ours is as the fastest vLLM, and which that is.

    `table`: values by popularity and system. Cases that one side lacks are left out.
    """
    speed = table if more_is_better else 1 / table
    mine = [name for name in table if SYSTEMS[str(name)].engine == PUNICA]
    ours, theirs = speed[mine].max(axis="columns"), speed.drop(columns=mine).dropna(how="all")
    ratios = (ours / theirs.max(axis="columns")).dropna()
    best = theirs.idxmax(axis="columns")
    return {str(case): (float(ratio), str(best[str(case)])) for case, ratio in ratios.items()}


def _bars(axis: Axes, rows: pd.DataFrame, systems: list[str], more_is_better: bool) -> None:
    """Draw one bar per popularity and system, and the ratios."""
    table = rows.pivot_table(index="workload", columns="system", values="value", sort=False)
    for at, cell in placed(rows, table.reset_index(), systems, systems):
        about: dict[str, Any] = {"disturbed": cell.disturbed is True}
        top = style.bar(axis, at, cell.value, 0.8 / len(systems), cell.system, **about)
        style.note(axis, f"{cell.value:.4g}", at, top, zorder=5, bbox=style.BEHIND)
    for case, (ratio, other) in gains(table, more_is_better).items():
        place, top = list(table.index).index(case), float(table.max(axis="columns")[case])
        style.note(axis, f"{ratio:.2f}x ({other})", place, top, lift=11, fontweight="bold")
    axis.set_ylim(0, 1.45 * float(table.max().max()))
    group_names(axis, table.reset_index())
