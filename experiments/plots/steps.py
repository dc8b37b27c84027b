"""Parts of the time of a step, as stacked bars."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.frames import centre, measured

PARTS: dict[str, tuple[str, Any, str]] = {
    "base_gemm": ("base products", style.PALETTE[0], ""),
    "attention": ("attention", style.PALETTE[9], "////"),
    "lora": ("LoRA", style.PALETTE[3], "xxxx"),
    "lora_shrink": ("LoRA shrink", style.PALETTE[3], "xxxx"),
    "lora_expand": ("LoRA expand", style.PALETTE[3], ""),
    "small_kernels": ("norms, rotation, activation", style.PALETTE[8], "...."),
    "head_and_sampling": ("head and sampling", style.PALETTE[2], "||||"),
    "copies": ("copies", style.PALETTE[5], "----"),
    "rest": ("rest", "0.6", ""),
    "schedule": ("scheduling", style.PALETTE[4], "++++"),
    "metadata": ("metadata of the step", style.PALETTE[6], "oo"),
    "gaps": ("nothing runs", "white", ""),
}
"""Part -> its name, colour and hatch; in drawing order."""
CASES = {"": "no adapter", "Identical": "Identical", "Distinct": "Distinct"}
READABLE = 0.07
"""Share of the longest bar from which a part carries its share of the step in percent."""
BAR = 0.8


def draw_breakdown(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """One column per model, one row of axes per kind of step; each bar a case, its parts in ms and percent."""
    rows = centre(rows[rows["system"] == "punica"])  # what switches cost is among the findings
    models = list(dict.fromkeys(rows["model"]))
    kinds = list(dict.fromkeys(zip(rows["panel"], rows["batch_size"], rows["seq_len"], strict=True)))
    height = 0.2 * rows["workload"].nunique() + 0.5
    width = style.PAGE if len(models) > 1 else style.COLUMN + 0.7
    figure, axes = style.grid(len(kinds), len(models), width, height * len(kinds) + 1.7, sharex=False)
    watched = [1.0]
    for line, (panel, batch, length) in zip(axes, kinds, strict=True):
        mine = rows[(rows["panel"] == panel) & (rows["batch_size"] == batch) & (rows["seq_len"] == length)]
        for axis, model in zip(line, models, strict=True):
            here = mine[mine["model"] == model]
            axis.set_visible(not here.empty)  # a model may lack a kind of step
            if not here.empty:
                watched += _cases(axis, here)
                axis.set_title(_named(panel, int(batch), int(length)) + (f", {model}" if len(models) > 1 else ""))
    for column in axes.T:
        [axis for axis in column if axis.get_visible()][-1].set_xlabel("time of a step (ms)")
    drawn = [part for part in PARTS if (rows["metric"] == f"time_{part}").any()]
    handles: list[Any] = [Patch(label=PARTS[part][0], **_patch(part)) for part in drawn]
    handles.append(Line2D([], [], label="bytes / bandwidth", **style.FLOOR | {"color": "black"}))
    words = "Where the time of a step goes: a bar is the step as a server sees it, its parts are those of watched "
    words += "steps."
    if longer := [one for one in watched if one > 1.005]:
        words += f" Where the parts of watched steps take longer ({min(longer):.2f} to {max(longer):.2f} times; why is "
        words += "not known) they are scaled to it."
    style.finish(figure, f"{words} {measured(rows)}", handles, 4)
    return figure


def _named(panel: str, batch: int, length: int) -> str:
    decodes = f"{batch} decode{'s' * (batch > 1)}, context {length}"
    others = {"prefill": f"a prompt of {length}", "mixed": f"a prompt of {length} and {batch - 1} decodes"}
    return others.get(panel, decodes)


def _patch(part: str) -> dict[str, Any]:
    _, colour, hatch = PARTS[part]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "0.3" if colour == "white" else "white", "linewidth": 0.4}


def scaled(case: pd.Series) -> tuple[dict[str, float], float]:
    """Parts that end where the step ends; what runs keeps its time, the rest is a gap, what is longer is scaled."""
    step = float(case["step_latency"])
    parts = {name: float(case.get(f"time_{name}", 0.0)) for name in PARTS if case.get(f"time_{name}", 0.0) > 0}
    gaps = parts.pop("gaps", None)
    longer = sum(parts.values()) / step
    if gaps is not None and longer < 1:
        return parts | {"gaps": step * (1 - longer)}, 1.0
    return {name: value / longer for name, value in parts.items()}, longer


def _cases(axis: Axes, rows: pd.DataFrame) -> list[float]:
    """Draw the bars of one kind of step on one model; return how much longer their watched parts take."""
    table = rows.pivot_table(index="workload", columns="metric", values="value", sort=False)
    table = table.reindex([name for name in CASES if name in table.index])
    longest, watched = table["step_latency"].max(), []
    loud = set(rows.loc[rows["disturbed"].eq(True), "workload"]) if "disturbed" in rows else set()
    for place, (name, case) in enumerate(table.iterrows()):
        left, step = 0.0, float(case["step_latency"])
        parts, longer = scaled(case)
        watched.append(longer)
        for part, value in parts.items():
            axis.barh(place, value, BAR, left, zorder=2, **_patch(part))
            if value > READABLE * longest:
                look: dict[str, Any] = {"fontsize": 6, "zorder": 4, "bbox": style.BEHIND, "ha": "center"}
                axis.text(left + value / 2, place, f"{value / step:.0%}", va="center", **look)
            left += value
        style.note(axis, f" {step:.4g} ms", step, place, lift=0, ha="left", va="center", zorder=4)
        ends = [place - BAR / 2, place + BAR / 2]
        axis.plot([case["floor"]] * 2, ends, **style.FLOOR | {"color": "black", "zorder": 3})
        if name in loud:
            style.crossed(axis, [step], [place])
    axis.set_yticks(range(len(table)), [CASES[str(name)] for name in table.index])
    axis.set(ylim=(len(table) - 0.5, -0.5), xlim=(0, 1.3 * longest))
    axis.grid(axis="y", visible=False)
    return watched
