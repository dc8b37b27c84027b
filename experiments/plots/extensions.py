"""Figures of the extensions: latency above, ratios below, a column per panel; and parts of a step, stacked."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.facts.paper import paper_file
from experiments.harness.schema import REPOSITORY
from experiments.plots import style
from experiments.plots.floors import FLOOR
from experiments.plots.frames import centre, disturbed_at, measured

Lines = Mapping[str, pd.Series]
"""Legend -> values by batch size (or what else is drawn to the right), ascending."""
EXPERTS = (
    ("latency", "w13 and w2", "alignment", "w13 and w2\nLoRA (µs)"),
    ("layer_latency", "layer", "backbone layer", "layer (µs)"),
    ("step_latency", "engine", "backbone engine", "engine\nstep (ms)"),
)
"""Metric, system, reference system, and label of each row of axes of `draw_moe`."""
SLOTS = ", by slots"
"""End of the name of a column of `draw_moe` whose x axis is the number of slots."""


def draw_fp8(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency, relative to SGMV, and error of an operator by batch; of a model logit error, changed tokens by rank."""

    def column(mine: pd.DataFrame, above: Axes, middle: Axes, below: Axes) -> None:
        if mine["panel"].iloc[0] == "quality":
            above.set_visible(False)
            _fill(middle, _by(mine, "changed_greedy_tokens", "rank"), log=False)
            _fill(below, _by(mine, "logit_error", "rank"))
            middle.set_title("a model: share of\nchanged tokens")
            return
        latency = _by(mine, "latency")
        _fill(above, latency, mine)
        floor = mine[(mine["system"] != "SGMV") & (mine["metric"] == FLOOR)].groupby("batch_size")["value"].min()
        if len(floor):
            above.plot(floor.index.astype(float), floor.astype(float), label="bytes / bandwidth, FP8", **style.FLOOR)
        _relative(middle, latency, "SGMV")
        _fill(below, {n: line for n, line in _by(mine, "error").items() if n != "SGMV"})

    labels = "latency (µs)", "relative to SGMV", "relative error"
    return _drawn(rows, "Adapters in FP8", column, labels, x_label="batch size\n(model: rank)")


def draw_moe(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Per model, by popularity: both LoRA products, layer, engine's step; slots share a column."""
    found = rows["panel"].str.extract(r"^(.+), (\d+) slots$")
    slots, batches = found[1].notna(), rows["batch_size"].fillna(0).astype(int).astype(str)
    names = rows["panel"].mask(slots, found[0] + ", batch " + batches + SLOTS)
    rows = rows.assign(panel=names, batch_size=rows["batch_size"].mask(slots, found[1].astype(float)))
    shown = [line for line in EXPERTS if line[1] in set(rows["system"])]

    def column(mine: pd.DataFrame, *axes: Axes) -> None:
        for axis, (metric, system, reference, _) in zip(axes, shown, strict=True):
            own, beside = (mine[mine["system"] == name] for name in (system, reference))
            _fill(axis, _by(own, metric, line="workload"), own[own["metric"] == metric], "workload")
            for line in _by(beside, metric, line="system").values():
                label = "grouping alone" if reference == "alignment" else "without LoRA"
                axis.plot(line.index.astype(float), line.astype(float), label=label, **style.GREY)
            if not axis.lines:
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.5", fontsize=7)
        if mine["panel"].iloc[0].endswith(SLOTS):
            axes[-1].set_xlabel("slots")

    return _drawn(rows, "LoRA on experts", column, [label for *_, label in shown])


def draw_prefix_cache(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """First tokens, pipelines and blocks in use over the context, a column per number of adapters."""

    def column(mine: pd.DataFrame, *axes: Axes) -> None:
        for axis, metric in zip(axes, ("first_token", "pipeline", "blocks"), strict=True):
            lines = _by(mine, metric, x="seq_len")
            _fill(axis, lines, mine[mine["metric"] == metric], x="seq_len")
            if metric == "first_token" and {"no cache", "activated LoRA, cached"} <= set(lines):
                ratio = lines["no cache"] / lines["activated LoRA, cached"]
                ends = dict.fromkeys(f"{end:.1f}" for end in (ratio.min(), ratio.max()))
                style.corner(axis, f"{' to '.join(ends)} times sooner")

    cached = {"plain_lora_cached": "plain LoRA, cached", "activated_cached": "activated LoRA, cached"}
    rows = rows.assign(system=rows["system"].replace({"recompute": "no cache"} | cached))
    timed = rows[rows["panel"] != "trace"]  # hit rates are findings
    rows = rows if timed.empty else timed
    labels = "first token of\na turn (ms)", "pipeline (ms)", "blocks in use"
    return _drawn(rows, "Adapters that continue a context", column, labels, x_label="tokens of context")


def draw_price_of_lora(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Step, what adapters add to it and their share of it over requests, a column per form of weights and cache."""

    def column(mine: pd.DataFrame, *axes: Axes) -> None:
        for axis, metric in zip(axes, ("step_latency", "added_latency", "share_of_step"), strict=True):
            _fill(axis, _by(mine, metric), mine[mine["metric"] == metric], log=metric == "step_latency")
        for name, line in _by(mine, FLOOR).items():
            label = "bytes / bandwidth of a copy" if name == "no adapter" else "_"
            look = style.FLOOR | {"color": style.look(name).colour, "marker": "_" if len(line) == 1 else ""}
            axes[0].plot(line.index, line, label=label, **look)

    labels = "step (ms)", "added by\nLoRA (ms)", "LoRA's share\nof a step (%)"
    return _drawn(rows, "The price of LoRA on cheaper bases", column, labels, x_label="requests")


def draw_training(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Time of a layer over tokens of an adapter, and relative to SGMV, a column per number of adapters."""

    def column(mine: pd.DataFrame, above: Axes, below: Axes) -> None:
        lines = {name: line / 1e3 for name, line in _by(mine, "latency", "seq_len").items()}
        _fill(above, lines, mine[mine["metric"] == "latency"], x="seq_len")
        _relative(below, lines, "SGMV")

    layers = rows[rows["panel"].str.contains(", layer, ")]  # projections are findings
    labels = "forward and\nbackward (ms)", "relative to SGMV"
    return _drawn(rows if layers.empty else layers, "Training adapters", column, labels, x_label="tokens of an adapter")


def draw_mixtures(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Latency over the adapters of a row, and relative to the mixture, a column per workload and rank."""
    parts = rows["panel"].str.extract(r"(?P<case>.*), k = (?P<k>\d+)")
    rows = rows.assign(case=parts["case"], k=parts["k"].astype(int))

    def column(mine: pd.DataFrame, above: Axes, below: Axes) -> None:
        latency = _by(mine, "latency", x="k")
        _fill(above, latency, mine, x="k")
        _relative(below, latency, "mixture")

    labels = "latency (µs)", "relative to mixture"
    return _drawn(rows, "Mixtures of adapters", column, labels, by="case", x_label="adapters of a row")


def draw_speculation(rows: pd.DataFrame, _: pd.DataFrame) -> Figure:
    """Step and break-even over requests, a line per number of drafts, a column per adapters; published acceptances."""
    published = pd.read_csv(paper_file(REPOSITORY / "paper_results", "accept_lengths.csv"))
    lengths = published.loc[published["adapters"] != "none", "tokens_per_step"].tolist()

    def column(mine: pd.DataFrame, above: Axes, below: Axes) -> None:
        _fill(above, _by(mine, "step_latency"), mine)
        _fill(below, _by(mine[mine["system"] != "0 drafts"], "break_even"), log=False)
        label = "tokens a step published with adapters (SGLang #34337)"
        below.axhspan(min(lengths), max(lengths), color="0.85", zorder=0, label=label)
        below.axhline(1.0, color="0.3", linewidth=0.8)

    labels = "step (ms)", "tokens a step\nat which drafts pay"
    return _drawn(rows, "Drafts of each request in a step", column, labels, x_label="requests")


def _drawn(
    rows: pd.DataFrame, title: str, column: Callable[..., None], labels: Any, by: str = "panel",
    x_label: str = "batch size",
) -> Figure:  # fmt: skip
    """A figure with a column of axes for each value of `by`, drawn by `column`, and a row for each of `labels`."""
    names = list(dict.fromkeys(rows[by]))
    width = style.PAGE if len(names) > 1 else style.COLUMN
    figure, axes = style.grid(len(labels), len(names), width, 1.3 * len(labels) + 1.5, sharex="col")
    for name, line in zip(names, axes.T, strict=True):
        line[0].set_title(str(name).replace(", ", ",\n").replace(" adapters", ""))
        column(rows[rows[by] == name], *line)
        line[-1].set_xlabel(line[-1].get_xlabel() or x_label)
    for line, label in zip(axes, labels, strict=True):
        line[0].set_ylabel(label)
        if any(axis.texts for axis in line):
            style.headroom(line[0], 0.15)
    style.finish(figure, f"{title}. {measured(rows[rows['metric'] != FLOOR])}", style.labelled(axes.T.flat), 4)
    return figure


def _by(rows: pd.DataFrame, metric: str, x: str = "batch_size", line: str = "system") -> dict[str, pd.Series]:
    """Value of column `line` -> mean of `metric` by column `x`."""
    rows = centre(rows[rows["metric"] == metric])
    return {str(name): rows[rows[line] == name].groupby(x)["value"].mean() for name in dict.fromkeys(rows[line])}


def _fill(
    axis: Axes, lines: Lines, rows: pd.DataFrame | None = None, line: str = "system", x: str = "batch_size",
    log: bool = True,
) -> None:  # fmt: skip
    """Every line in its own colour and marker; disturbed points of `rows` crossed."""
    for name, values in lines.items():
        axis.plot(values.index.astype(float), values.astype(float), label=name, **style.measured_style(name))
        if rows is not None:
            style.crossed(axis, values.index, values, disturbed_at(rows[rows[line] == name], x))
    style.log_x(axis)
    if log:
        style.log_y(axis)


def _relative(axis: Axes, lines: Lines, reference: str) -> None:
    """Draw the lines relative to that of `reference`, where it was measured, a line at 1, and their ends in words."""
    if reference in lines:
        ratios = {name: (line / lines[reference]).dropna() for name, line in lines.items() if name != reference}
        _fill(axis, ratios)
        axis.axhline(1.0, color="0.3", linewidth=0.8)
        if ends := [end for line in ratios.values() for end in line]:
            style.corner(axis, f"{min(ends):.2f} to {max(ends):.2f}")


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
