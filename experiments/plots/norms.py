"""Section 6: latency of both forms of the norm over the rows of a step, and what fusing saves; the paper gives one
number for each, of no stated shape.
"""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from experiments.facts.paper import paper_file
from experiments.harness.schema import REPOSITORY
from experiments.plots import style
from experiments.plots.frames import centre, described, disturbed_at, interval

LOOKS = {"unfused": (3, "s"), "fused": (0, "o")}
"""System -> place in the palette, and marker."""


def text_numbers() -> dict[str, float]:
    """The paper's microseconds by system."""
    frame = pd.read_csv(paper_file(REPOSITORY / "paper_results", "text_other_numbers.csv"))
    frame = frame[frame["metric"] == "norm_latency"]
    return dict(zip(frame["system"], frame["value"].astype(float), strict=True))


def draw_norms(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency to the left, unfused over fused to the right."""
    figure, (times, ratios) = plt.subplots(1, 2, figsize=(5.4, 2.9), layout="constrained")
    said, lines = text_numbers(), {}
    for name, (place, marker) in LOOKS.items():
        mine, colour = rows[rows["system"] == name], style.PALETTE[place]
        lines[name] = centre(mine).set_index("batch_size")["value"].astype(float).sort_index()
        looks = {"color": colour, "marker": marker, "linestyle": "-"}
        times.plot(lines[name].index, lines[name], label=name, **looks)
        spread = interval(mine, "batch_size")
        times.fill_between(spread["batch_size"], spread["p10"], spread["p90"], color=colour, alpha=0.2, linewidth=0)
        style.hollow(times, lines[name].index, lines[name], looks, disturbed_at(mine, "batch_size"))
        times.axhline(said[name], color=colour, linestyle="--", linewidth=0.9, label=f"{name}, {style.PAPER_LABEL}")
    saved = (lines["unfused"] / lines["fused"]).dropna()
    ratios.plot(saved.index, saved, color="0.2", marker="D", label="unfused / fused")
    paper = said["unfused"] / said["fused"]
    ratios.axhline(paper, color=style.PAPER_GREY, linestyle="--", linewidth=0.9, label=f"the same, {style.PAPER_LABEL}")
    for axis, label in ((times, "norm latency (µs)"), (ratios, "unfused / fused")):
        style.log_x(axis)
        style.log_y(axis)
        axis.set_xlabel("rows")
        axis.set_ylabel(label)
    handles = [*times.get_legend_handles_labels()[0], *ratios.get_legend_handles_labels()[0]]
    style.caption(figure, "RMSNorm, one operation after the other and in one kernel", described(rows), handles, 3)
    return figure
