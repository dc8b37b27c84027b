"""Section 5.3: moving a request by computing its keys and values again, and by copying them."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.frames import centre, described, disturbed_at, series
from experiments.plots.overlay import band

COMPUTED = {"linestyle": ":", "linewidth": 1.0, "marker": ""}
"""Lines of links, which are computed from their datasheets."""
STEP = "decode step of a full batch"
LEGENDS = {
    "recompute": "computed again", "copy": "copied on the same GPU or CPU", "copy_host": "copied through host memory",
    "copy_peer": "copied to the next GPU",
}  # fmt: skip
"""Systems in words."""


def draw_migration(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Time to move a request above its context; beside it the bandwidth below which recomputation is faster."""
    figure, (times, links) = plt.subplots(1, 2, figsize=(7.4, 3.3), layout="constrained")
    for name in dict.fromkeys(rows["system"]):
        mine = rows[(rows["system"] == name) & (rows["metric"] == "migration_latency")]
        computed = bool((mine["kind"] == "datasheet").all())
        _line(times, mine, name, computed)
        metric = "break_even_bandwidth" if name == "recompute" else "bandwidth"
        _line(links, rows[(rows["system"] == name) & (rows["metric"] == metric)], name, computed)
    _line(times, rows[rows["metric"] == "decode_step_latency"], STEP, False)
    times.set_ylabel("time (ms)")
    links.set_ylabel("bandwidth (GB/s); a link below\nthe line of computing again\nis slower than that")
    for axis in (times, links):
        style.log_x(axis)
        style.log_y(axis)
        axis.set_xlabel("tokens of the request")
    handles = [line for line in times.get_lines() if not str(line.get_label()).startswith("_")]
    title = "Section 5.3: migrating a request (dotted: computed from datasheets)"
    style.caption(figure, title, described(rows), handles, 4)
    return figure


def _line(axis: Axes, mine: pd.DataFrame, name: str, computed: bool) -> None:
    if mine.empty:
        return
    looks: dict[str, Any] = {**style.measured_style(name), **(COMPUTED if computed else {})}
    if name == STEP:
        looks |= {"color": "0.35", "linestyle": "--"}
    xs, ys = series(centre(mine), "seq_len")
    axis.plot(xs, ys, label=LEGENDS.get(name, name), **looks)
    if not computed:
        band(axis, mine, "seq_len", looks["color"])
        style.hollow(axis, xs, ys, looks, disturbed_at(centre(mine), "seq_len"))
