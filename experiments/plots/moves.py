"""Sections 5.2 and 5.3: loading an adapter, and migrating a request, with the arithmetic of the bytes (D03)."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.facts.paper import text_numbers
from experiments.harness.schema import REPOSITORY
from experiments.plots import style
from experiments.plots.frames import centre, measured, series
from experiments.plots.overlay import curve

PAPER_RANK = 16  # of D03; the text names none
NAMES = {
    "punica": "punica", "per_tensor": "set_lora per layer, pinned", "pageable": "set_lora per layer, pageable",
    "link": "link: one plain copy",
}  # fmt: skip
"""Systems that load in words; the link is a roof, not a system."""
PAPER = {**style.paper_style("punica"), "linestyle": "", "markersize": 5, "label": "paper's text, A100"}
ARITHMETIC = {"color": style.PAPER_GREY, "linestyle": "", "marker": "*", "markersize": 6, "label": "7B at 25 GB/s"}
LOADING = (
    "Section 5.2: loading one adapter from host memory; the link copies the 16-bit bytes, and the star is what 7B's "
    "bytes take over the paper's PCIe Gen4 x16 (D03)."
)
STEP = "decode step of a full batch"
WAYS = {
    "recompute": "computed again", "copy": "copied on the same GPU or CPU", "copy_host": "copied through host memory",
    "copy_peer": "copied to the next GPU",
}  # fmt: skip
"""Ways of migration in words."""
MIGRATION = (
    "Section 5.3: migrating a request; dotted links are the floor of the bytes at datasheet bandwidth, and a link "
    "below the line of computing again is slower than that."
)


def draw_loading(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Columns: one layer, whole model, beside decode. Above: times; below: bandwidth, and what the step loses."""
    figure, axes = style.grid(2, 3, style.PAGE, 4.6, sharex=False, sharey=False, width_ratios=(1, 1, 1.35))
    said = text_numbers(REPOSITORY / "paper_results", "5.2")
    model, layer = said["lora_bytes_model_fp16"], said["lora_bytes_per_layer_fp16"]
    copied = said["load_time_at_25GBps"]
    for (above, below), (panel, title, unit, size, time, arithmetic) in zip(
        axes.T,
        (("layer", "one layer", "µs", layer, said["load_one_layer"], 1e3 * copied * layer / model),
         ("model", "whole model", "ms", model, said["load_one_model"], copied)), strict=False,
    ):  # fmt: skip
        mine = rows[rows["panel"] == panel]
        for name in _systems(mine):
            for axis, shown in ((above, "load_time"), (below, "bandwidth")):
                curve(axis, mine[(mine["system"] == name) & (mine["metric"] == shown)], "rank", **_look(name))
        for value, look in ((time, PAPER), (arithmetic, ARITHMETIC)):
            above.plot([PAPER_RANK], [value], **look | {"zorder": 5})
            below.plot([PAPER_RANK], [size / value / (1e3 if unit == "µs" else 1e6)], **look | {"zorder": 5})
        bytes_ = mine.loc[(mine["metric"] == "bytes") & (mine["rank"] == PAPER_RANK), "value"]
        ours = ", ".join(dict.fromkeys(mine["model"])) + "".join(f": {one / 1e6:.3g} MB" for one in bytes_[:1])
        above.set(title=f"{title}, {ours}\n(paper's 7B: {size / 1e6:.3g} MB)", ylabel=f"load time ({unit})")
        below.set(ylabel="bandwidth (GB/s)", xlabel="rank")
        ranks = sorted(set(mine["rank"].dropna().astype(int)))
        for axis in (above, below):
            axis.set_xscale("log", base=2)
            axis.set_xticks(ranks, [str(rank) for rank in ranks])
            style.log_y(axis)
    _beside_decode(axes[0, 2], axes[1, 2], rows, said)
    handles = [Line2D([], [], **_look(name) | {"label": NAMES[name]}) for name in _systems(rows)]
    handles += [Line2D([], [], **look) for look in (PAPER, ARITHMETIC)]
    style.finish(figure, f"{LOADING} {measured(rows, 'bands')}", handles, 3)
    return figure


def _systems(rows: pd.DataFrame) -> list[str]:
    return [name for name in NAMES if (rows["system"] == name).any()]


def _look(name: str) -> dict[str, Any]:
    roof = {"color": "black", "marker": "", "linestyle": ":", "linewidth": 1.2, "zorder": 2}
    return roof if name == "link" else style.measured_style(name)


def _beside_decode(above: Axes, below: Axes, rows: pd.DataFrame, said: dict[str, float]) -> None:
    """Above: each load beside a decode step, that step (dashed), and the paper's load. Below: the step's delay."""
    mine = centre(rows[rows["panel"] == "overlap"])
    systems = _systems(mine)
    if not systems:
        above.set_axis_off()
        below.set_axis_off()
        return
    rank, batch, length = (int(mine[name].iloc[0]) for name in ("rank", "batch_size", "seq_len"))
    step = float(mine.loc[mine["metric"] == "step_latency_alone", "value"].iloc[0])
    for axis, metric, scale, unit in ((above, "load_time", 1.0, ""), (below, "stall", 100 / step, " %")):
        values = scale * mine[mine["metric"] == metric].drop_duplicates("system").set_index("system")["value"]
        for place, name in enumerate(systems):
            if name in values:
                axis.plot([values[name]], [place], **_look(name) | {"marker": _look(name)["marker"] or "d"})
                style.note(axis, f"{values[name]:.3g}{unit}", values[name], place, lift=4)
    above.plot([said["load_one_model"]], [len(systems)], **PAPER)
    above.axvline(step, color="0", linestyle="--", linewidth=1.0)
    above.set_xscale("log")
    style.label_decades(above.xaxis)
    title = f"beside a decode step of {batch} rows,\nlen {length}, rank {rank}"
    above.set(title=title, xlabel=f"ms; dashed: the step, {step:.3g}")
    below.set_xscale("symlog", linthresh=1.0)  # linear within 1 %, so that small delays are seen beside large ones
    below.xaxis.set_major_formatter(style.PLAIN)
    below.set_xlabel("the step's delay (% of the step)")
    for axis, names in ((above, [*systems, "paper"]), (below, systems)):
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.4, -0.7)
        axis.margins(x=0.15)
        axis.grid(axis="y", visible=False)


def draw_migration(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Time to move a request above its context; beside it the bandwidth below which recomputation is faster."""
    figure, ((times, links),) = style.grid(1, 2, style.PAGE, 3.2, sharey=False)
    for name in dict.fromkeys(rows["system"]):
        mine = rows[rows["system"] == name]
        bandwidth = "break_even_bandwidth" if name == "recompute" else "bandwidth"
        for axis, metric in ((times, "migration_latency"), (links, bandwidth)):
            _way(axis, mine[mine["metric"] == metric], WAYS.get(name, name), style.measured_style(name))
    step = style.measured_style(STEP) | {"color": "0.35", "linestyle": "--"}
    _way(times, rows[rows["metric"] == "decode_step_latency"], STEP, step)
    steps = centre(rows[rows["metric"] == "decode_steps"])["value"]
    if len(steps):
        style.corner(times, f"computing again: {steps.min():.2g} to {steps.max():.2g} decode steps")
    for axis, label in ((times, "time (ms)"), (links, "bandwidth (GB/s)")):
        style.log_x(axis)
        style.log_y(axis)
        style.headroom(axis, 0.1)
        axis.set(xlabel="tokens of the request", ylabel=label)
    style.finish(figure, f"{MIGRATION} {measured(rows, 'bands')}", style.labelled([times]), 3)
    return figure


def _way(axis: Axes, rows: pd.DataFrame, label: str, looks: dict[str, Any]) -> None:
    """A line, dotted where it is computed from a data sheet."""
    if len(rows) and (rows["kind"] == "datasheet").all():
        looks = looks | {"linestyle": ":", "linewidth": 1.0, "marker": ""}
        axis.plot(*series(centre(rows), "seq_len"), label=label, **looks)
    elif len(rows):
        curve(axis, rows, "seq_len", label=label, **looks)
