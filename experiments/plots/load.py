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
    "time_to_first_token": "time to first\ntoken (ms)",
    "time_per_output_token": "time per output\ntoken (ms)",
    "inter_token_latency": "between two\ntokens (ms)",
    "request_latency": "request\nlatency (ms)",
}
CAPACITY, AT_BASELINE = "capacity", "baseline capacity"
PLACES = {"resident": ("in a slot", "o"), "from_memory": ("in host memory", "s"), "from_disk": ("on disk", "v")}


def draw_load(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column per popularity; latencies over the offered rate, median (line) to p99 (dashed; p95, dotted, where there
    were too few requests for a p99), and throughput.
    """
    rows = centre(rows)
    workloads = list(dict.fromkeys(rows["workload"]))
    systems = list(dict.fromkeys(rows.loc[rows["panel"] != CAPACITY, "system"]))
    depth = len(LATENCIES) + 1
    width = style.PAGE if len(workloads) > 1 else style.COLUMN
    figure, axes = style.grid(depth, len(workloads), width, 1.15 * depth + 2.4)
    for workload, column in zip(workloads, axes.T, strict=True):
        for system in systems:
            mine = rows[(rows["workload"] == workload) & (rows["system"] == system)]
            table = _table(mine)
            for axis, metric in zip(column, LATENCIES, strict=False):
                _latency(axis, table, metric, _look(system))
            _line(column[-1], table, "throughput", _look(system))
            _mark_baseline(column[0], table, _look(system)["color"])
        column[0].set_title(workload)
        column[-1].set_xlabel("requests per second that arrive")
        for axis in column:
            axis.set_xscale("log")
            style.label_decades(axis.xaxis)
            style.log_y(axis)
    for axis, label in zip(axes[:, 0], [*LATENCIES.values(), "throughput\n(token/s)"], strict=True):
        axis.set_ylabel(label)
    handles = [Line2D([], [], label=name_of(system), **_look(system)) for system in systems]
    handles += [
        Line2D([], [], color="0.3", linestyle=line, label=label) for label, line in (("p99", "--"), ("p95", ":"))
    ]
    handles.append(Line2D([], [], color="0.3", marker="x", linestyle="", label="bound"))
    words = ["Latency under load: median (solid) to p99 (dashed; p95, dotted, of too few requests), and throughput."]
    words.append("Bound: of the first token's p99 at the best baseline's saturation.")
    words += [f"{said[0].upper()}{said[1:]}."] if (said := policies(systems)) else []
    style.finish(figure, " ".join([*words, measured(rows)]), handles, 4)
    return figure


def draw_many(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column per popularity; over the panels throughput, first tokens by where the adapter was, and hits."""
    rows = centre(rows)
    workloads, systems, panels = (list(dict.fromkeys(rows[name])) for name in ("workload", "system", "panel"))
    figure, axes = style.grid(3, len(workloads), style.PAGE, 5.6)
    for workload, column in zip(workloads, axes.T, strict=True):
        for place, system in enumerate(systems):
            mine = rows[(rows["workload"] == workload) & (rows["system"] == system)]
            table = mine.pivot_table(index="panel", columns="metric", values="value", sort=False).reindex(panels)
            table["loud"] = table.index.isin(_loud(mine))
            _throughput(column[0], table, system, (place + 0.5) / len(systems) - 0.5, 0.8 / len(systems))
            _waits(column[1], table, system, 0.7 * ((place + 0.5) / len(systems) - 0.5))
            if place == 0:
                _hits(column[2], table)
        column[0].set_title(workload)
        style.log_y(column[1])
        column[2].set_ylim(0, 1.05)
        column[2].yaxis.set_major_formatter(PercentFormatter(1))
        column[2].set_xticks(range(len(panels)), [_short(panel) for panel in panels], rotation=40, ha="right")
    labels = "throughput\n(token/s)", "time to first token,\nmedian to p99 or p95 (ms)", f"found there\n({systems[0]})"
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label)
    handles = style.patches(systems)
    handles += [
        Line2D([], [], color="0.3", marker=marker, linestyle="", label=f"adapter {name}")
        for metric, (name, marker) in PLACES.items()
        if (rows["metric"] == f"time_to_first_token_{metric}").any()
    ]
    handles += [
        Line2D([], [], color=style.PALETTE[i], label=f"in {name}") for i, name in ((7, "a slot"), (2, "host memory"))
    ]
    handles += [Line2D([], [], color="0.3", linestyle="--", label="at its turn (line: on arrival)")]
    style.finish(
        figure, f"Many adapters: throughput, waits, and where adapters were found. {measured(rows)}", handles, 4
    )
    return figure


def _look(system: str) -> dict[str, Any]:
    colour, marker, _ = style.look(system)
    return {"color": colour, "marker": marker}


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per load, by offered rate, with its panel and whether other work disturbed it."""
    loads = rows[rows["panel"] != CAPACITY]
    table = loads.pivot_table(index="panel", columns="metric", values="value", sort=False).reset_index()
    table["loud"] = table["panel"].isin(_loud(loads))
    return table.sort_values("offered_rate") if "offered_rate" in table else table


def _loud(rows: pd.DataFrame) -> set[str]:
    """The panels of `rows` that other work on the machine disturbed."""
    return set(rows.loc[rows["disturbed"].eq(True), "panel"]) if "disturbed" in rows else set()


def _latency(axis: Axes, table: pd.DataFrame, metric: str, looks: dict[str, Any]) -> None:
    """Draw the median as a line, p99 dashed or else p95 dotted, with a band between."""
    if metric not in table:
        return
    table = table.dropna(subset=[metric])
    rates, low, high, is_p99 = table["offered_rate"], table[metric], *_far(table, metric)
    axis.plot(rates, low, **looks)
    for chosen, line in ((is_p99, "--"), (~is_p99, ":")):
        axis.plot(rates, high.where(chosen), color=looks["color"], linestyle=line, linewidth=0.9)
    style.crossed(axis, rates[table["loud"]], low[table["loud"]])
    axis.fill_between(rates, low, high, color=looks["color"], alpha=0.12, linewidth=0)


def _far(table: pd.DataFrame, metric: str) -> tuple[pd.Series, pd.Series]:
    """The p99 of `metric`, or where there were too few samples for it the p95; and where it is the p99."""
    p99 = table.get(f"{metric}_p99", pd.Series(float("nan"), index=table.index))
    return p99.fillna(table[f"{metric}_p95"]), p99.notna()


def _line(axis: Axes, table: pd.DataFrame, metric: str, looks: dict[str, Any]) -> None:
    if metric in table:
        axis.plot(table["offered_rate"], table[metric], **looks)


def _mark_baseline(axis: Axes, table: pd.DataFrame, colour: Any) -> None:
    """The bound on Punica's p99 at the rate at which the best baseline saturates."""
    if "ttft_bound" in table:
        mine = table[table["panel"] == AT_BASELINE].dropna(subset=["ttft_bound"])
        axis.plot(mine["offered_rate"], mine["ttft_bound"], color=colour, marker="x", linestyle="", markersize=5)


def _throughput(axis: Axes, table: pd.DataFrame, system: str, shift: float, width: float) -> None:
    if "throughput" in table:
        places = [place + 0.8 * shift for place in range(len(table))]
        axis.bar(places, table["throughput"], width, **style.patch(system))
    axis.grid(axis="x", visible=False)


def _waits(axis: Axes, table: pd.DataFrame, system: str, shift: float) -> None:
    """Median to p99, or p95 of too few requests, by where the adapter was when it was the request's turn."""
    for order, (name, (_, marker)) in enumerate(PLACES.items()):
        metric = f"time_to_first_token_{name}"
        if metric not in table:
            continue
        known = table[metric].notna().to_numpy().nonzero()[0]
        places = [place + shift + 0.09 * (order - 1) for place in known]
        low, high = table[metric].iloc[known], _far(table, metric)[0].iloc[known]
        colour = _look(system)["color"]
        axis.vlines(places, low, high, color=colour, linewidth=0.9)
        axis.plot(places, low, color=colour, marker=marker, linestyle="", markersize=3.2)
        loud = table["loud"].iloc[known]
        style.crossed(axis, places, low, {place for place, one in zip(places, loud, strict=True) if one})


def _hits(axis: Axes, table: pd.DataFrame) -> None:
    """On arrival (lines) and at its turn (dashed)."""
    for metric, colour in (("slot_hit_rate", 7), ("memory_hit_rate", 2)):
        for name, line in ((metric, "-"), (f"{metric}_at_join", "--")):
            if name in table:
                axis.plot(range(len(table)), table[name], line, color=style.PALETTE[colour], marker=".")


def _short(panel: str) -> str:
    """A panel in the room of a tick."""
    number, _, rest = panel.partition(" adapters")
    return f"{number}{rest}"
