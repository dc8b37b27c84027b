"""Engines under load: latencies over the rate of arrivals, and what many adapters do to throughput and waits."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.facts.systems import name_of, policies
from experiments.plots import style
from experiments.plots.frames import centre, distinct, measured
from experiments.workload.traces import TRACE

LATENCIES = {
    "time_to_first_token": "time to first\ntoken (ms)", "time_per_output_token": "time per output\ntoken (ms)",
    "inter_token_latency": "between two\ntokens (ms)", "request_latency": "request\nlatency (ms)",
    "throughput": "throughput\n(token/s)",
}  # fmt: skip
CAPACITY = "capacity"
PLACES = {"resident": ("in a slot", "o"), "from_memory": ("in host memory", "s"), "from_disk": ("on disk", "v")}
HITS = {"slot_hit_rate": ("in a slot", 7), "memory_hit_rate": ("in memory", 2)}


def draw_load(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column per popularity; latencies over the offered rate, median (line) to p99 (dashed), and throughput."""
    drawn = centre(rows[rows["panel"] != CAPACITY])
    words, rows = _words(rows, drawn) + measured(rows), drawn
    workloads, systems = (list(dict.fromkeys(rows[name])) for name in ("workload", "system"))
    width, depth = style.PAGE if len(workloads) > 1 else style.COLUMN, len(LATENCIES)
    figure, axes = style.grid(depth, max(len(workloads), 1), width, 1.15 * depth + 2.4)
    for workload, column in zip(workloads, axes.T, strict=False):  # capacities alone have no popularity to draw
        for system in systems:
            looks, table = style.measured_style(system), _table(rows, workload, system)
            table = table.sort_values("offered_rate") if "offered_rate" in table else table
            for axis, metric in zip(column, LATENCIES, strict=True):
                if metric in table:
                    known = table.dropna(subset=[metric])
                    rates, low, high = known["offered_rate"], known[metric], _far(known, metric)
                    axis.plot(rates, low, **looks)
                    axis.plot(rates, high, color=looks["color"], linestyle="--", linewidth=0.9)
                    axis.fill_between(rates, low, high, color=looks["color"], alpha=0.12, linewidth=0)
                    style.crossed(axis, rates[known["loud"]], low[known["loud"]])
        column[0].set_title(workload)
        column[-1].set_xlabel("requests per second that arrive")
        for axis in column:
            axis.set_xscale("log")
            style.label_decades(axis.xaxis)
            style.log_y(axis)
    for axis, label in zip(axes[:, 0], LATENCIES.values(), strict=True):
        axis.set_ylabel(label)
    handles = [Line2D([], [], label=name_of(system), **style.measured_style(system)) for system in systems]
    style.finish(figure, words, handles, 2)
    return figure


def _words(rows: pd.DataFrame, drawn: pd.DataFrame) -> str:
    """Word the caption: percentiles, rates of a trace and what its other requests are, policies."""
    number, whose = drawn["metric"].value_counts(), policies(drawn["system"])
    few = any(number.get(name, 0) > number.get(f"{name}_p99", 0) for name in [*LATENCIES][:-1])
    words = f"Latency under load, median (solid) to p99 (dashed{'; p95 of too few requests' * few}), and throughput. "
    if TRACE in set(drawn["workload"]):
        loads = sorted({int(panel.split()[1]) for panel in drawn["panel"]})
        first = ", ".join(distinct(rows[rows["panel"] == CAPACITY], "workload"))
        words += f"Rates: {' and '.join(map(str, loads))} % of the capacity on {first}, which each repeat found first. "
        if others := ", ".join(name for name in distinct(drawn, "workload") if name != TRACE):
            words += f"{others}: {TRACE}'s lengths in random order, as many adapters, Poisson arrivals at its rate. "
    return words + (f"Here, {whose}. " if whose else "")


def draw_many(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column per popularity; over the panels throughput, first tokens by where the adapter was, and hits."""
    words, rows = f"Many adapters: throughput, waits, and where adapters were found. {measured(rows)}", centre(rows)
    workloads, systems, panels = (list(dict.fromkeys(rows[name])) for name in ("workload", "system", "panel"))
    figure, axes = style.grid(3, len(workloads), style.PAGE, 5.6)
    for workload, (above, middle, below) in zip(workloads, axes.T, strict=True):
        for place, system in enumerate(systems):
            table = _table(rows, workload, system).reindex(panels)
            shift, share = (place + 0.5) / len(systems) - 0.5, 0.8 / len(systems)
            if "throughput" in table:
                places = [at + 0.8 * shift for at in range(len(table))]
                above.bar(places, table["throughput"], share, **style.patch(system))
            _waits(middle, table, system, 0.7 * shift)
            for rate, (_name, colour) in HITS.items() if place == 0 else ():
                for metric, line in ((rate, "-"), (f"{rate}_at_join", "--")):
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
    known = [look for name, look in PLACES.items() if (rows["metric"] == f"time_to_first_token_{name}").any()]
    handles = [
        *style.patches(systems),
        *(Line2D([], [], marker=marker, ls="", color="0.3", label=f"adapter {name}") for name, marker in known),
        *(Line2D([], [], color=style.PALETTE[colour], label=name) for name, colour in HITS.values()),
        Line2D([], [], linestyle="--", color="0.3", label="at its turn (line: on arrival)"),
    ]
    style.finish(figure, words, handles, 4)
    return figure


def _table(rows: pd.DataFrame, workload: str, system: str) -> pd.DataFrame:
    """One line per panel, a column per metric, and ``loud``: whether other work disturbed it."""
    rows = rows[(rows["workload"] == workload) & (rows["system"] == system)]
    table = rows.pivot_table(index="panel", columns="metric", values="value", sort=False)
    loud = rows[rows["disturbed"].eq(True)] if "disturbed" in rows else rows.iloc[:0]
    return table.assign(loud=table.index.isin(loud["panel"]))


def _far(table: pd.DataFrame, metric: str) -> pd.Series:
    """The p99 of `metric`, or where there were too few samples for it the p95."""
    p95 = table.get(f"{metric}_p95", pd.Series(float("nan"), index=table.index))
    return table.get(f"{metric}_p99", p95).fillna(p95)


def _waits(axis: Axes, table: pd.DataFrame, system: str, shift: float) -> None:
    """Median to p99, or p95 of too few requests, by where the adapter was when it was the request's turn."""
    colour = style.look(system).colour
    for order, (name, (_, marker)) in enumerate(PLACES.items()):
        if (metric := f"time_to_first_token_{name}") in table:
            known = table.assign(at=range(len(table))).dropna(subset=[metric])
            places, low = known["at"] + shift + 0.09 * (order - 1), known[metric]
            axis.vlines(places, low, _far(known, metric), color=colour, linewidth=0.9)
            axis.plot(places, low, color=colour, marker=marker, linestyle="", markersize=3.2)
            loud = known["loud"].eq(True)
            style.crossed(axis, places[loud], low[loud])
