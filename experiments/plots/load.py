"""Engines under load: latencies over the rate of arrivals, and what many adapters do to throughput and waits."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.facts.systems import name_of, policies
from experiments.plots import style
from experiments.plots.frames import centre, measured

LATENCIES = {
    "time_to_first_token": "time to first\ntoken (ms)", "time_per_output_token": "time per output\ntoken (ms)",
    "inter_token_latency": "between two\ntokens (ms)", "request_latency": "request\nlatency (ms)",
    "throughput": "throughput\n(token/s)",
}  # fmt: skip
CAPACITY, AT_BASELINE = "capacity", "baseline capacity"
PLACES = {"resident": ("in a slot", "o"), "from_memory": ("in host memory", "s"), "from_disk": ("on disk", "v")}


def draw_load(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column per popularity; latencies over the offered rate, median (line) to p99 (dashed), and throughput."""
    note, rows = measured(rows), centre(rows[rows["panel"] != CAPACITY])
    workloads, systems = (list(dict.fromkeys(rows[name])) for name in ("workload", "system"))
    width, depth = style.PAGE if len(workloads) > 1 else style.COLUMN, len(LATENCIES)
    figure, axes = style.grid(depth, max(len(workloads), 1), width, 1.15 * depth + 2.4)
    for workload, column in zip(workloads, axes.T, strict=False):
        for system in systems:
            table = _table(rows[(rows["workload"] == workload) & (rows["system"] == system)], "panel")
            table = table.sort_values("offered_rate") if "offered_rate" in table else table
            for axis, metric in zip(column, LATENCIES, strict=True):
                _latency(axis, table, metric, style.measured_style(system))
            if "ttft_bound" in table:
                bound = table[table.index == AT_BASELINE].dropna(subset=["ttft_bound"])
                look = {"color": style.look(system).colour, "marker": "x", "linestyle": "", "markersize": 5}
                column[0].plot(bound["offered_rate"], bound["ttft_bound"], **look)
        column[0].set_title(workload)
        column[-1].set_xlabel("requests per second that arrive")
        for axis in column:
            axis.set_xscale("log")
            style.label_decades(axis.xaxis)
            style.log_y(axis)
    for axis, label in zip(axes[:, 0], LATENCIES.values(), strict=True):
        axis.set_ylabel(label)
    handles = [Line2D([], [], label=name_of(system), **style.measured_style(system)) for system in systems]
    words = "Latency under load, median (solid) to p99 (dashed; p95 of too few requests), and throughput; the x is the "
    words += "bound of the first token's p99 at the best baseline's saturation. "
    style.finish(figure, words + (f"Here, {whose}. " if (whose := policies(systems)) else "") + note, handles, 2)
    return figure


def draw_many(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column per popularity; over the panels throughput, first tokens by where the adapter was, and hits."""
    words, rows = f"Many adapters: throughput, waits, and where adapters were found. {measured(rows)}", centre(rows)
    workloads, systems, panels = (list(dict.fromkeys(rows[name])) for name in ("workload", "system", "panel"))
    figure, axes = style.grid(3, len(workloads), style.PAGE, 5.6)
    for workload, (above, middle, below) in zip(workloads, axes.T, strict=True):
        for place, system in enumerate(systems):
            mine = rows[(rows["workload"] == workload) & (rows["system"] == system)]
            table, shift = _table(mine, "panel").reindex(panels), (place + 0.5) / len(systems) - 0.5
            if "throughput" in table:
                places = [at + 0.8 * shift for at in range(len(table))]
                above.bar(places, table["throughput"], 0.8 / len(systems), **style.patch(system))
            _waits(middle, table, system, 0.7 * shift)
            for name, colour in (("slot_hit_rate", 7), ("memory_hit_rate", 2)) if place == 0 else ():
                for metric, line in ((name, "-"), (f"{name}_at_join", "--")):
                    if metric in table:
                        below.plot(range(len(table)), table[metric], line, color=style.PALETTE[colour], marker=".")
        above.set_title(workload)
        above.grid(axis="x", visible=False)
        style.log_y(middle)
        below.set_ylim(0, 1.05)
        below.yaxis.set_major_formatter(PercentFormatter(1))
        below.set_xticks(range(len(panels)), [one.replace(" adapters", "") for one in panels], rotation=40, ha="right")
    labels = "throughput\n(token/s)", "time to first token,\nmedian to p99 or p95 (ms)", f"found there\n({systems[0]})"
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label)
    grey: dict[str, Any] = {"color": "0.3"}
    handles = style.patches(systems)
    known = {name: look for name, look in PLACES.items() if (rows["metric"] == f"time_to_first_token_{name}").any()}
    handles += [Line2D([], [], marker=one, ls="", label=f"adapter {name}", **grey) for name, one in known.values()]
    handles += [Line2D([], [], color=style.PALETTE[i], label=f"in {it}") for i, it in ((7, "a slot"), (2, "memory"))]
    handles += [Line2D([], [], linestyle="--", label="at its turn (line: on arrival)", **grey)]
    style.finish(figure, words, handles, 4)
    return figure


def _table(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """One line per value of column `by`, a column per metric, and ``loud``: whether other work disturbed it."""
    table = rows.pivot_table(index=by, columns="metric", values="value", sort=False)
    loud = rows[rows["disturbed"].eq(True)] if "disturbed" in rows else rows.iloc[:0]
    return table.assign(loud=table.index.isin(loud[by]))


def _far(table: pd.DataFrame, metric: str) -> pd.Series:
    """The p99 of `metric`, or where there were too few samples for it the p95."""
    p95 = table.get(f"{metric}_p95", pd.Series(float("nan"), index=table.index))
    return table.get(f"{metric}_p99", p95).fillna(p95)


def _latency(axis: Axes, table: pd.DataFrame, metric: str, looks: dict[str, Any]) -> None:
    if metric not in table:
        return
    table = table.dropna(subset=[metric])
    rates, low, high = table["offered_rate"], table[metric], _far(table, metric)
    axis.plot(rates, low, **looks)
    axis.plot(rates, high, color=looks["color"], linestyle="--", linewidth=0.9)
    axis.fill_between(rates, low, high, color=looks["color"], alpha=0.12, linewidth=0)
    style.crossed(axis, rates[table["loud"]], low[table["loud"]])


def _waits(axis: Axes, table: pd.DataFrame, system: str, shift: float) -> None:
    """Median to p99, or p95 of too few requests, by where the adapter was when it was the request's turn."""
    for order, (name, (_, marker)) in enumerate(PLACES.items()):
        metric, colour = f"time_to_first_token_{name}", style.look(system).colour
        if metric not in table:
            continue
        known = table[metric].notna().to_numpy().nonzero()[0]
        places = [place + shift + 0.09 * (order - 1) for place in known]
        low, high = table[metric].iloc[known], _far(table, metric).iloc[known]
        axis.vlines(places, low, high, color=colour, linewidth=0.9)
        axis.plot(places, low, color=colour, marker=marker, linestyle="", markersize=3.2)
        loud = table["loud"].iloc[known].eq(True)
        style.crossed(axis, places, low, {place for place, one in zip(places, loud, strict=True) if one})
