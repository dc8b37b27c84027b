"""Section 5.3: moving a request by computing its keys and values again, and by copying them."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, disturbed_at, measured, series
from experiments.plots.overlay import band

STEP = "decode step of a full batch"
LEGENDS = {
    "recompute": "computed again", "copy": "copied on the same GPU or CPU", "copy_host": "copied through host memory",
    "copy_peer": "copied to the next GPU",
}  # fmt: skip
"""Systems in words."""


def draw_migration(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Time to move a request above its context; beside it the bandwidth below which recomputation is faster."""
    figure, ((times, links),) = style.grid(1, 2, style.PAGE, 3.2, sharey=False)
    for name in dict.fromkeys(rows["system"]):
        mine = rows[(rows["system"] == name) & (rows["metric"] == "migration_latency")]
        computed = bool((mine["kind"] == "datasheet").all())
        _line(times, mine, name, computed)
        metric = "break_even_bandwidth" if name == "recompute" else "bandwidth"
        _line(links, rows[(rows["system"] == name) & (rows["metric"] == metric)], name, computed)
    _line(times, rows[rows["metric"] == "decode_step_latency"], STEP, False)
    steps = centre(rows[rows["metric"] == "decode_steps"])["value"]
    if len(steps):
        style.corner(times, f"computing again: {steps.min():.2g} to {steps.max():.2g} decode steps")
    times.set_ylabel("time (ms)")
    links.set_ylabel("bandwidth (GB/s)")
    for axis in (times, links):
        style.log_x(axis)
        style.log_y(axis)
        style.headroom(axis, 0.1)
        axis.set_xlabel("tokens of the request")
    words = (
        "Section 5.3: migrating a request; dotted links are the floor of the bytes at datasheet bandwidth, and a link "
        f"below the line of computing again is slower than that. {measured(rows, 'bands')}"
    )
    style.finish(figure, words, [line for line in times.get_lines() if not str(line.get_label()).startswith("_")], 3)
    return figure


def _line(axis: Axes, mine: pd.DataFrame, name: str, computed: bool) -> None:
    if mine.empty:
        return
    looks: dict[str, Any] = style.measured_style(name)
    looks |= {"linestyle": ":", "linewidth": 1.0, "marker": ""} if computed else {}
    looks |= {"color": "0.35", "linestyle": "--"} if name == STEP else {}
    xs, ys = series(centre(mine), "seq_len")
    axis.plot(xs, ys, label=LEGENDS.get(name, name), **looks)
    if not computed:
        band(axis, mine, "seq_len", looks["color"])
        style.crossed(axis, xs, ys, disturbed_at(centre(mine), "seq_len"))
