"""Bars of our server beside its engine: throughput of both, and the server's waits for first tokens under load."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, measured
from experiments.plots.serving_bars import place

THROUGHPUT, RATIO = "output_throughput", "throughput_over_engine"
WAITS = {"time_to_first_token": "median", "time_to_first_token_p95": "p95", "time_to_first_token_p99": "p99"}
LABELS = {"punica_engine": "engine alone", "punica_server": "server over HTTP"}


def draw_own_server(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Two axes with a group of bars per popularity; crossed where the client was the bottleneck."""
    drawn = centre(rows)
    loaded = drawn["panel"].str.startswith("load")
    figure, axes = style.grid(1, 2, style.COLUMN, 2.9, sharey=False)
    late = drawn[(drawn["metric"] == "client_is_bottleneck") & (drawn["value"] > 0)]
    places = set(zip(late["panel"], late["workload"], strict=True))
    _bars(axes[0, 0], drawn[~loaded & (drawn["metric"] == THROUGHPUT)], "system", LABELS, places)
    _bars(axes[0, 1], drawn[loaded & drawn["metric"].isin(list(WAITS))], "metric", WAITS, places)
    ratios = drawn[drawn["metric"] == RATIO]
    said = "; ".join(f"{name}: {ratio:.3f}" for name, ratio in zip(ratios["workload"], ratios["value"], strict=True))
    axes[0, 0].set_ylabel("output token/s")
    axes[0, 0].set_title(f"server / engine\n{said}" if said else "")
    axes[0, 1].set_ylabel("time to first token (ms)")
    axes[0, 1].set_title(", ".join(sorted(set(drawn.loc[loaded, "panel"]))))
    shown = rows.assign(disturbed=None)
    words = (
        f"Our server beside its engine. {measured(shown)}{' Crosses: the client was the bottleneck.' if places else ''}"
    )
    style.finish(figure, words, [], 1)
    return figure


def _bars(axis: Axes, rows: pd.DataFrame, column: str, labels: dict[str, str], late: set[tuple[str, str]]) -> None:
    """Draw a bar for each of `labels` and popularity."""
    workloads = list(dict.fromkeys(rows["workload"]))
    shown = [name for name in labels if (rows[column] == name).any()]
    row: Any
    for row in rows.itertuples():
        name = getattr(row, column)
        at = place(workloads.index(row.workload), shown.index(name), len(shown))
        is_late = row.system == "punica_server" and (row.panel, row.workload) in late
        text = f"{labels[name].replace(' ', chr(10), 1)}\n{row.value:.4g}"
        style.bar(axis, at, row.value, 0.7 / len(shown), row.system, text, disturbed=is_late)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_ylim(0, 1.35 * rows["value"].max() if len(rows) else 1)
    axis.grid(axis="x", visible=False)
