"""Servers under load over HTTP: waits, throughput and errors over arrivals by the clock and requests in flight."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.plots import style
from experiments.plots.frames import centre, described, distinct

SHOWN = {
    "time_to_first_token": "time to first\ntoken (ms)",
    "time_per_output_token": "time per output\ntoken (ms)",
    "output_throughput": "output\n(token/s)",
    "failed": "requests with\nan error",
}
X_LABELS = ("requests per second that arrive", "requests in flight")
DASHES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")


def draw_server(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """A column for arrivals by the clock and one for requests in flight; a colour per popularity, dash and marker per
    server, model and length.

    Waits are medians with a band up to p99, p95 of fewer requests. Hollow: the client was the bottleneck.
    """
    table = _table(rows)
    servers = list(dict.fromkeys(table["server"]))
    workloads = list(dict.fromkeys(table["workload"]))
    loops = [one for one in (False, True) if (table["in_flight"] == one).any()]
    figure, axes = style.grid(len(SHOWN), len(loops), 3.0 * len(loops) + 1.2, 1.45 * len(SHOWN) + 1.4, sharex="col")
    for closed, column in zip(loops, axes.T, strict=True):
        for place, server in enumerate(servers):
            for workload in workloads:
                mine = table[
                    (table["in_flight"] == closed) & (table["server"] == server) & (table["workload"] == workload)
                ]
                for axis, metric in zip(column, SHOWN, strict=True):
                    _line(axis, mine.sort_values("load"), metric, _look(workload, place))
        column[0].set_xscale("log", base=2)
        column[0].set_title("by the clock (Poisson)" if not closed else "closed loop")
        column[-1].set_xlabel(X_LABELS[closed])
        column[-1].xaxis.set_major_formatter(style.PLAIN)
    for axis, label in zip(axes[:, 0], SHOWN.values(), strict=True):
        axis.set_ylabel(label)
    for axis in axes[:3].flat:
        style.log_y(axis)
    axes[3, 0].set_ylim(-0.05, 1.05)
    axes[3, 0].yaxis.set_major_formatter(PercentFormatter(1))
    handles = [Line2D([], [], color=style.look(workload)[0], label=workload) for workload in workloads]
    handles += [
        Line2D([], [], label=server, **_look(workloads[0], place) | {"color": "0.3"})
        for place, server in enumerate(servers)
    ]
    said = "; ".join([described(rows.assign(disturbed=None)), *distinct(rows, "engine")])
    if table.groupby(["server", "workload", "in_flight"]).size().max() > 1:
        said += "; band: median to p99, p95 of fewer than 100 requests"
    if (table["client_is_bottleneck"] > 0).any():
        said += "; hollow: the client was the bottleneck"
    style.caption(figure, "Servers of many adapters", said, handles, 5)
    return figure


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per load, with its value on the horizontal axis and the share of requests with an error."""
    chosen = pd.concat([centre(rows), rows[rows["metric"].isin(["requests", "errors"])]])
    names = chosen["system"] + ", " + chosen["model"].fillna("")
    chosen["server"] = names + ", " + chosen["seq_len"].astype(int).astype(str) + " tokens"
    keys = ["server", "workload", "panel"]
    table = chosen.drop_duplicates([*keys, "metric"]).pivot(index=keys, columns="metric", values="value").reset_index()
    table["in_flight"] = table["panel"].str.endswith("in flight")
    table["load"] = table["panel"].str.split().str[0].astype(float)
    table["failed"] = table["errors"] / table["requests"]
    return table


def _look(workload: str, server: int) -> dict[str, Any]:
    place = server % len(DASHES)
    return {"color": style.look(workload)[0], "marker": MARKERS[place], "linestyle": DASHES[place]}


def _line(axis: Axes, table: pd.DataFrame, metric: str, looks: dict[str, Any]) -> None:
    if metric not in table or table[metric].dropna().empty:
        return
    table = table.dropna(subset=[metric])
    axis.plot(table["load"], table[metric], **looks)
    late = table[table["client_is_bottleneck"] > 0]
    style.hollow(axis, late["load"], late[metric], looks)
    if f"{metric}_p95" in table:
        p99 = table.get(f"{metric}_p99", pd.Series(float("nan"), index=table.index))
        far = p99.fillna(table[f"{metric}_p95"])
        axis.fill_between(table["load"], table[metric], far, color=looks["color"], alpha=0.1, linewidth=0)
