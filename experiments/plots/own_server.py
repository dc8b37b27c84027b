"""Bars of our server beside its engine: throughput of both, and the server's waits for first tokens under load."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, described

THROUGHPUT, RATIO = "output_throughput", "throughput_over_engine"
WAITS = {"time_to_first_token": "median", "time_to_first_token_p95": "p95", "time_to_first_token_p99": "p99"}
LABELS = {"punica_engine": "engine alone", "punica_server": "server over HTTP"}
_WIDTH = 0.8  # of a group of bars


def draw_own_server(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Two axes with a group of bars per popularity; hollow where the client was the bottleneck."""
    drawn = centre(rows)
    loaded = drawn["panel"].str.startswith("load")
    figure, axes = style.grid(1, 2, 8.0, 3.4, sharex=False, sharey=False)
    late = drawn[(drawn["metric"] == "client_is_bottleneck") & (drawn["value"] > 0)]
    places = set(zip(late["panel"], late["workload"], strict=True))
    _bars(axes[0, 0], drawn[~loaded & (drawn["metric"] == THROUGHPUT)], "system", LABELS, places)
    _bars(axes[0, 1], drawn[loaded & drawn["metric"].isin(list(WAITS))], "metric", WAITS, places)
    ratios = drawn[drawn["metric"] == RATIO]
    said = "; ".join(f"{name}: {ratio:.3f}" for name, ratio in zip(ratios["workload"], ratios["value"], strict=True))
    axes[0, 0].set_ylabel("output token/s")
    axes[0, 0].set_title(f"server / engine {said}" if said else "")
    axes[0, 1].set_ylabel("time to first token (ms)")
    axes[0, 1].set_title(", ".join(sorted(set(drawn.loc[loaded, "panel"]))))
    handles = [Patch(color=style.PALETTE[place], label=label) for place, label in enumerate(LABELS.values())]
    words = described(rows) + ("; hollow: the client was the bottleneck" if places else "")
    style.caption(figure, "Our server beside its engine", words, handles, len(handles))
    return figure


def _bars(
    axis: Axes, rows: pd.DataFrame, column: str, labels: dict[str, str], late: set[tuple[str, str]]
) -> None:
    """Draw a bar for each of `labels` and popularity."""
    workloads = list(dict.fromkeys(rows["workload"]))
    shown = [name for name in labels if (rows[column] == name).any()]
    row: Any
    for row in rows.itertuples():
        name, place = getattr(row, column), shown.index(getattr(row, column))
        at = workloads.index(row.workload) - _WIDTH / 2 + (place + 0.5) * _WIDTH / len(shown)
        colour = style.PALETTE[place if column == "system" else 1]
        is_late = row.system == "punica_server" and (row.panel, row.workload) in late
        axis.bar(at, row.value, 0.92 * _WIDTH / len(shown), edgecolor=colour, facecolor="white" if is_late else colour)
        style.note(axis, f"{row.value:.4g}" if column == "system" else f"{labels[name]} {row.value:.4g}", at, row.value)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.grid(axis="x", visible=False)
