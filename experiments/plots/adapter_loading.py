"""Section 5.2: load time and achieved bandwidth over rank, for a layer and a model, and a load beside a decode step.

The paper gives its numbers in the text, at one rank; disagreement D03 says that 7B's bytes cannot arrive that fast, so
the arithmetic is drawn as well. Bandwidth is what compares machines whose models differ in size.
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.facts.paper import paper_file
from experiments.harness.schema import REPOSITORY
from experiments.plots import style
from experiments.plots.frames import FEWEST_FOR_BAND, centre, described_with_bands, disturbed_at, series
from experiments.plots.overlay import band

PAPER_RANK = 16  # of D03; the text names none
LINK = "link"
LOOKS = {"punica": (0, "o"), "punica fp8": (2, "P"), "per_tensor": (1, "s"), "pageable": (3, "D"), LINK: (7, "")}
"""System -> place in the palette, and marker; the link is a roof, not a system."""
NAMES = {
    "punica": "punica", "punica fp8": "punica, FP8 slots", "per_tensor": "set_lora per layer, pinned",
    "pageable": "set_lora per layer, pageable", LINK: "link: one plain copy (roofline)",
}  # fmt: skip
GREY: dict[str, Any] = {"color": style.PAPER_GREY, "linestyle": "", "markersize": 5.5}
PAPER = {**GREY, "marker": "o", "markerfacecolor": "white"}
ARITHMETIC = {**GREY, "marker": "x", "markeredgewidth": 1.4}
WIDTH = 0.38  # of a bar


def text_numbers() -> dict[str, float]:
    """The paper's numbers of section 5.2, and those derived for Llama-2 7B at rank 16, by metric."""
    frame = pd.read_csv(paper_file(REPOSITORY / "paper_results", "text_other_numbers.csv"))
    frame = frame[(frame["figure"] == "text section 5.2") & (frame["model"].isna() | (frame["model"] == "7B"))]
    return dict(zip(frame["metric"], frame["value"], strict=True))


def draw_loading(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Columns: one layer, whole model, beside decode. Above: times; below: bandwidth, and what the step loses."""
    figure, axes = plt.subplots(
        2, 3, figsize=(8.4, 5.2), layout="constrained", gridspec_kw={"width_ratios": (1, 1, 1.2)}
    )
    said = text_numbers()
    layers = said["lora_bytes_model_fp16"] / said["lora_bytes_per_layer_fp16"]
    columns = (
        ("layer", "one layer", "load_one_layer", 1e3 * said["load_time_at_25GBps"] / layers, 1e6),
        ("model", "whole model", "load_one_model", said["load_time_at_25GBps"], 1e3),
    )
    for column, (panel, title, metric, arithmetic, per_second) in enumerate(columns):
        mine = rows[rows["panel"] == panel]
        size = said["lora_bytes_per_layer_fp16" if panel == "layer" else "lora_bytes_model_fp16"]
        above, below = axes[:, column]
        for name in _systems(mine):
            for axis, shown in ((above, "load_time"), (below, "bandwidth")):
                _line(axis, mine[(mine["system"] == name) & (mine["metric"] == shown)], name)
        for value, look in ((said[metric], PAPER), (arithmetic, ARITHMETIC)):
            above.plot([PAPER_RANK], [value], zorder=4, **look)
            below.plot([PAPER_RANK], [size / value * per_second / 1e9], zorder=4, **look)
        above.set_title(f"{title}: {_size(mine)}\n(paper's 7B: {size / 1e6:.3g} MB at rank {PAPER_RANK})")
        above.set_ylabel("load time (µs)" if panel == "layer" else "load time (ms)")
        below.set_ylabel("bandwidth (GB/s)")
        below.set_xlabel("rank")
        for axis in (above, below):
            ranks = sorted(set(mine["rank"].dropna().astype(int)))
            axis.set_xscale("log", base=2)
            axis.set_xticks(ranks, [str(rank) for rank in ranks])
            style.log_y(axis)
    _beside_decode(axes[0, 2], axes[1, 2], rows, said)
    _finish(figure, rows)
    return figure


def _systems(rows: pd.DataFrame) -> list[str]:
    return [name for name in LOOKS if (rows["system"] == name).any()]


def _look(name: str) -> dict[str, Any]:
    roof = name == LINK
    return {
        "color": "black" if roof else style.PALETTE[LOOKS[name][0]],
        "marker": LOOKS[name][1],
        "linewidth": 1.0 if roof else 1.3,
    }


def _line(axis: Axes, mine: pd.DataFrame, name: str) -> None:
    xs, ys = series(centre(mine), "rank")
    axis.plot(xs, ys, zorder=2 if name == LINK else 3, **_look(name))
    looks = {**_look(name), "marker": LOOKS[name][1] or "o"}
    style.hollow(axis, xs, ys, looks, disturbed_at(centre(mine), "rank"))
    band(axis, mine, "rank", _look(name)["color"])


def _size(rows: pd.DataFrame) -> str:
    """The model and its bytes at the paper's rank, if that was measured."""
    found = rows[(rows["metric"] == "bytes") & (rows["rank"] == PAPER_RANK)]
    models = ", ".join(dict.fromkeys(rows["model"]))
    return f"{models}, {found['value'].iloc[0] / 1e6:.3g} MB" if len(found) else models


def _beside_decode(above: Axes, below: Axes, rows: pd.DataFrame, said: dict[str, float]) -> None:
    """Above: each load alone and beside a step, under the step's own time. Below: what the load adds to the step."""
    mine = rows[rows["panel"] == "overlap"]
    systems = _systems(mine)
    if not systems:
        above.set_axis_off()
        below.set_axis_off()
        return
    rank, batch, length = (int(mine[name].iloc[0]) for name in ("rank", "batch_size", "seq_len"))
    alone = rows[(rows["panel"] == "model") & (rows["rank"] == rank)]
    for place, name in enumerate(systems):
        own, colour = mine[mine["system"] == name], _look(name)["color"]
        for shift, frame, alpha in ((-0.5, alone[alone["system"] == name], 0.45), (0.5, own, 1.0)):
            for value in _medians(frame, "load_time")[:1]:
                above.bar(place + shift * WIDTH, value, WIDTH, color=colour, zorder=3, alpha=alpha)
                _write(above, place + shift * WIDTH, value)
        _stall(below, place, own, colour)
    step = _medians(mine, "step_latency_alone").median()
    end = len(systems)
    above.bar(end, said["load_one_model"], WIDTH, facecolor="white", edgecolor=style.PAPER_GREY, hatch="////", zorder=3)
    _write(above, end, said["load_one_model"])
    above.hlines(step, -0.5, end - 0.5, color="black", linestyle="--", linewidth=1.0)
    style.note(above, f"step {step:.3g}", -0.45, step, ha="left")
    above.hlines(said["decode_step"], end - 0.5, end + 0.5, color=style.PAPER_GREY, linestyle="--", linewidth=1.0)
    _write(above, end, said["decode_step"])
    style.log_y(above)
    low, high = above.get_ylim()
    above.set_ylim(low, high * (high / low) ** 0.1)
    above.set_ylabel("time (ms)")
    above.set_title(f"beside a decode step, rank {rank}\n({batch} rows, len {length}; pale: alone)")
    below.axhline(0.0, color="0.3", linewidth=0.8)
    below.set_yscale("symlog", linthresh=1.0)  # linear within 1 %, so that small delays are seen beside large ones
    below.yaxis.set_major_formatter(style.PLAIN)
    below.set_ylabel("the step's delay\n(% of the step)")
    for axis, names in ((above, [*systems, "paper"]), (below, systems)):
        axis.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
        axis.grid(axis="x", visible=False)
    below.set_xlim(-0.6, len(systems) - 0.4)
    below.margins(y=0.14)  # room for the numbers


def _stall(axis: Axes, place: int, own: pd.DataFrame, colour: Any) -> None:
    """Median and p10 to p90 of the step with a load in flight minus the step alone, in percent of the latter."""
    step = _medians(own, "step_latency_alone")
    values = own[own["metric"] == "stall"].set_index("statistic")["value"].astype(float)
    if step.empty or values.empty:
        return
    low, middle, high = (100 * values[name] / step.iloc[0] for name in ("p10", "median", "p90"))
    axis.bar(place, middle, WIDTH, color=colour, zorder=3)
    if values.get("count", 0) >= FEWEST_FOR_BAND:
        axis.vlines(place, low, high, color="0.2", linewidth=1.0, zorder=4)
    style.note(axis, f"{middle:.1f} %", place, high)


def _medians(frame: pd.DataFrame, metric: str) -> pd.Series:
    return frame.loc[(frame["metric"] == metric) & (frame["statistic"] == "median"), "value"].astype(float)


def _write(axis: Axes, x: float, value: float) -> None:
    style.note(axis, f"{value:.2g}", x, value, zorder=5)


def _finish(figure: Figure, rows: pd.DataFrame) -> None:
    handles = [Line2D([], [], label=NAMES[name], **_look(name)) for name in _systems(rows)]
    handles.append(Line2D([], [], label="paper's text, A100: 50 µs, 2 ms", **PAPER))
    handles.append(Line2D([], [], label="7B's bytes at 25 GB/s, PCIe Gen4 x16 (D03)", **ARITHMETIC))
    title = "Section 5.2: loading one adapter from host memory"
    style.caption(figure, title, described_with_bands(rows), handles, 3, columnspacing=1.4)
