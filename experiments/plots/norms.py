"""Section 6: latency of both forms of the norm over the rows of a step, and what fusing saves."""

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.facts.paper import paper_file
from experiments.harness.schema import REPOSITORY
from experiments.plots import style
from experiments.plots.floors import FLOOR
from experiments.plots.frames import centre, disturbed_at, measured, series
from experiments.plots.overlay import band, y_label

NAMES = ("unfused", "fused")


def text_numbers() -> dict[str, float]:
    """The paper's microseconds by system."""
    frame = pd.read_csv(paper_file(REPOSITORY / "paper_results", "text_other_numbers.csv"))
    frame = frame[frame["metric"] == "norm_latency"]
    return dict(zip(frame["system"], frame["value"].astype(float), strict=True))


def draw_norms(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Draw latency over rows, axes per clock, with the least and largest saving."""
    said, clocks = text_numbers(), list(dict.fromkeys(rows["timer"]))
    figure, axes = style.grid(len(clocks), 1, style.COLUMN, 1.6 * len(clocks) + 1.4)
    for axis, clock in zip(axes[:, 0], clocks, strict=True):
        timed = rows[rows["timer"] == clock]
        lines = {}
        for name in NAMES:
            mine = timed[(timed["system"] == name) & (timed["metric"] != FLOOR)]
            xs, ys = series(centre(mine), "batch_size")
            lines[name] = pd.Series(ys, xs)
            axis.plot(xs, ys, label=name, **style.measured_style(name))
            band(axis, mine, "batch_size", style.look(name).colour)
            style.crossed(axis, xs, ys, disturbed_at(mine, "batch_size"))
            axis.axhline(said[name], color=style.look(name).colour, linestyle="--", linewidth=0.9)
        axis.plot(*series(timed[timed["metric"] == FLOOR], "batch_size"), **style.FLOOR)
        saved = (lines["unfused"] / lines["fused"]).dropna()
        paper = said["unfused"] / said["fused"]
        style.log_x(axis)
        style.log_y(axis)
        style.headroom(axis, 0.12)
        style.corner(axis, f"unfused / fused {saved.min():.3g} to {saved.max():.3g} ({paper:.3g})")
        axis.set_ylabel(y_label(timed[timed["metric"] == "norm_latency"], clock))
    axes[-1, 0].set_xlabel("rows")
    handles: list[Artist] = [Line2D([], [], label=name, **style.measured_style(name)) for name in NAMES]
    handles.append(Line2D([], [], color="0.3", linestyle="--", label="paper, no shape given"))
    words = "Section 6: RMSNorm, one operation after the other and in one kernel."
    handles += style.sides(False, FLOOR in set(rows["metric"]))
    style.finish(figure, f"{words} {measured(rows[rows['metric'] != FLOOR], 'bands')}", handles, 2)
    return figure
