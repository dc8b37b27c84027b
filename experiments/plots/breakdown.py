"""Breakdown of a step's time: stacked bars without and with adapters, a group per kind of step."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, described

PARTS: dict[str, tuple[str, Any, str]] = {
    "base_gemm": ("base products", style.PALETTE[0], ""),
    "attention": ("attention", style.PALETTE[9], ""),
    "lora": ("LoRA", style.PALETTE[3], ""),
    "lora_shrink": ("LoRA shrink", style.PALETTE[3], "////"),
    "lora_expand": ("LoRA expand", style.PALETTE[3], ""),
    "small_kernels": ("norms, rotation, activation", style.PALETTE[8], ""),
    "head_and_sampling": ("head and sampling", style.PALETTE[2], ""),
    "copies": ("copies", style.PALETTE[5], ""),
    "rest": ("rest", "0.6", ""),
    "schedule": ("scheduling", style.PALETTE[4], ""),
    "metadata": ("metadata of the step", style.PALETTE[6], ""),
    "gaps": ("nothing runs", "white", "...."),
}
"""Part -> its name, colour and hatch; in drawing order."""
CASES = {"": "no adapter", "Identical": "Identical", "Distinct": "Distinct"}
SWITCHED = {"batch invariant": "D", "fp8 cache": "s"}
"""Systems whose steps are marks on the bars of `punica`."""
READABLE = 0.06
"""Share of the longest bar from which a part carries its share of the step in percent."""
BAR = 0.8


def draw_breakdown(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """One column per model, one row of axes per kind of step; each bar a case, its parts in ms and percent."""
    rows = centre(rows)
    models = list(dict.fromkeys(rows["model"]))
    kinds = list(dict.fromkeys(zip(rows["panel"], rows["batch_size"], rows["seq_len"], strict=True)))
    height = 0.24 * rows["workload"].nunique() + 0.55
    figure, axes = style.grid(len(kinds), len(models), 7.0, height * len(kinds) + 1.3, sharex=False)
    for line, (panel, batch, length) in zip(axes, kinds, strict=True):
        mine = rows[(rows["panel"] == panel) & (rows["batch_size"] == batch) & (rows["seq_len"] == length)]
        for axis, model in zip(line, models, strict=True):
            title = f"{_named(panel, int(batch), int(length))}" + (f", {model}" if len(models) > 1 else "")
            here = mine[mine["model"] == model]
            axis.set_visible(not here.empty)  # a model may lack a kind of step
            if not here.empty:
                _fill(axis, here, title)
    for column in axes.T:
        lowest = [axis for axis in column if axis.get_visible()][-1]
        lowest.set_xlabel("time of a step (ms)")
    handles: list[Any] = [_patch(part) for part in PARTS if (rows["metric"] == f"time_{part}").any()]
    handles += [
        Line2D([], [], color="black", marker="|", linestyle="", markersize=9, label="step (median)"),
        Line2D([], [], color="black", linestyle=":", label="floor of the bytes"),
    ]
    handles += [
        Line2D([], [], color="black", marker=marker, linestyle="", markersize=4, markerfacecolor="white", label=name)
        for name, marker in SWITCHED.items() if (rows["system"] == name).any()
    ]  # fmt: skip
    style.caption(figure, "Where the time of a step goes", described(rows), handles, 4)
    return figure


def _named(panel: str, batch: int, length: int) -> str:
    """A kind of step in words."""
    decodes = f"{batch} decode{'s' * (batch > 1)}, context {length}"
    others = {"prefill": f"a prompt of {length}", "mixed": f"a prompt of {length} and {batch - 1} decodes"}
    return others.get(panel, decodes)


def _patch(part: str) -> Patch:
    name, colour, hatch = PARTS[part]
    return Patch(facecolor=colour, hatch=hatch, edgecolor="0.3", linewidth=0.4, label=name)


def _fill(axis: Axes, rows: pd.DataFrame, title: str) -> None:
    """The bars of one kind of step on one model."""
    mine = rows[~rows["system"].isin([*SWITCHED])]
    table = mine.pivot_table(index="workload", columns="metric", values="value", sort=False)
    table = table.reindex([name for name in CASES if name in table.index])
    longest = max(table.filter(like="time_").sum(axis=1).max(), 1e-12)
    loud = set(mine.loc[mine["disturbed"].eq(True), "workload"]) if "disturbed" in mine else set()
    for place, (name, case) in enumerate(table.iterrows()):
        _bar(axis, place, case, longest)
        ends = [place - BAR / 2, place + BAR / 2]
        axis.plot([case["step_latency"]] * 2, ends, color="black", linewidth=1.4, zorder=3)
        axis.plot([case["floor"]] * 2, ends, color="black", linewidth=1.2, linestyle=":", zorder=3)
        if name in loud:
            style.hollow(axis, [case["step_latency"]], [place], {"color": "black", "marker": "o"})
    steps = rows[(rows["metric"] == "step_latency") & rows["workload"].isin(table.index)]
    for system, marker in SWITCHED.items():
        here = steps[steps["system"] == system]
        places = [list(table.index).index(name) + BAR / 2 for name in here["workload"]]
        axis.plot(here["value"], places, marker, color="black", markerfacecolor="white", markersize=4, zorder=5)
    axis.set_yticks(range(len(table)), [CASES[str(name)] for name in table.index])
    axis.set_ylim(len(table) - 0.5, -0.5)
    axis.set_xlim(0, 1.14 * max(longest, table["step_latency"].max()))
    axis.grid(axis="y", visible=False)
    axis.set_title(title)


def _bar(axis: Axes, place: int, case: pd.Series, longest: float) -> None:
    """The parts of one case, side by side, and the time of its step where nothing watched it."""
    left, whole = 0.0, float(case.filter(like="time_").sum())
    for part, (_, colour, hatch) in PARTS.items():
        value = case.get(f"time_{part}")
        if value is None or not value > 0:
            continue
        axis.barh(place, value, BAR, left, color=colour, hatch=hatch, edgecolor="0.3", linewidth=0.4, zorder=2)
        if value > READABLE * longest:
            pale = colour == "white" or bool(hatch)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if pale else None
            axis.text(left + value / 2, place, f"{value / whole:.0%}", ha="center", va="center", fontsize=6, zorder=4,
                      bbox=box)  # fmt: skip
        left += value
    end = max(left, float(case["step_latency"]))
    style.note(axis, f"  {case['step_latency']:.4g} ms", end, place, lift=0, ha="left", va="center", zorder=4)
