"""Predictions of simulations beside what was published or measured.

Cost models are fitted to Figures 1 and 10, to datasheets, to the windows that are not predicted, and to steps with a
prompt at rates that are not predicted. Two exceptions were fitted to what is compared: the simulator's
constant for such steps (88b0140), and the simulator of the rows on Ray, to steps of its runners in a rehearsal. What
a constant would have given, the mean of the rows that may tell it, is beside each.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pandas as pd

from experiments.claims.fig13 import STRICTER, Hour
from experiments.claims.finding import SIMULATED
from experiments.claims.rows import MET, NO_BOUND, NotMeasured, Rows, correlation, markdown, pick
from experiments.cluster.seeds import HIGH, LOW
from experiments.cluster.served import (
    COSTS,
    FIRST_TOKEN,
    RAY,
    SHARE,
    SIMULATED_RAY,
    SLOWED,
    STEADY,
    STREAM,
    WINDOWS,
    at_the_peak,
)  # fmt: skip
from experiments.cluster.windows import CONSTANT
from experiments.facts.models import MODELS
from experiments.facts.paper import as_rows, read_figure

AT_31, MEAN_ACTIVE = "share at batch >= 31", "mean of active GPUs"
PACE = "Figure 13, token/s of an active GPU around the peak"
RAY_TOO = {
    "mean_throughput": "token/s", "mean_batch_size_of_active_cells": "mean batch of active runners",
    "mean_active_gpus": "mean of active runners",
}  # fmt: skip
STEADY_TOO = {
    "mean_throughput": ("token/s", 0.03), "mean_batch_size_of_steps": ("mean batch of steps", 0.05),
    "p99_time_to_first_token": ("p99 of first tokens", 0.1),
}  # fmt: skip
"""Predicted numbers of streams of a constant rate, and the bounds asked for."""
LEVELS = {
    "requests (input)": "total_requests", "tokens (follow from the input)": "total_tokens",
    MEAN_ACTIVE: "mean_active_gpus",
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A predicted number, the published or measured one, the difference, and the bound asked for (``-``: none).

    ``span``: the lowest and highest of all seeds; ``constant``: the difference of a constant, fitted to the same rows.
    ``panel`` of rows of runners, and the number's ``name`` without them.
    """

    what: str
    predicted: float
    published: float
    off: str
    asked: str = NO_BOUND
    met: bool | None = None
    span: str = ""
    constant: str = NO_BOUND
    panel: str = ""
    name: str = ""


def predictions(rows: pd.DataFrame, folder: str | Path) -> list[Prediction]:
    """Compare the simulated rows in ``rows`` (of one machine) with ``folder``, the path of `paper_results`."""
    chosen = Rows(rows[rows["figure"] == "13"])
    try:
        frame = chosen.figure("13")
    except NotMeasured:
        return []
    try:
        ours = Hour.of(chosen)
    except NotMeasured:
        return _runners(frame)
    if ours.kind != SIMULATED:
        return _runners(frame)
    theirs = Hour.of(Rows(as_rows(read_figure(folder, "13"))))
    return [*_stream(frame, folder), *_hour(ours, theirs), *_windows(frame), *_runners(frame)]


def _relative(what: str, predicted: float, published: float, within: float | None = None) -> Prediction:
    off = predicted / published - 1
    bound = {} if within is None else {"asked": f"within {100 * within:.0f} %", "met": abs(off) <= within}
    return Prediction(what, predicted, published, f"{100 * off:+.1f} %", **bound)  # type: ignore[arg-type]


def _stream(frame: pd.DataFrame, folder: str | Path) -> list[Prediction]:
    """Figure 11, Punica's bars of both models; the constant is the mean of the model's other popularities."""
    stream = frame[frame["panel"] == STREAM]
    paper = as_rows(read_figure(folder, "11"))
    found = []
    for role in ("7B", "13B"):
        mine = stream[(stream["model"] == MODELS[role][0]) & (stream["metric"] == "throughput")]
        for _, row in mine.iterrows():
            cell = {"system": "punica", "model": role, "workload": row["workload"], "metric": "throughput"}
            published = float(pick(paper, **cell)["value"].iloc[0])
            what = f"Figure 11, {role} {row['workload']} (token/s)"
            part = stream[(stream["model"] == row["model"]) & (stream["workload"] == row["workload"])]
            one = _relative(what, float(row["value"]), published, 0.15)
            others = pick(paper, **{name: value for name, value in cell.items() if name != "workload"})
            mean = float(others.loc[others["workload"] != row["workload"], "value"].mean())
            constant = f"{100 * (mean / published - 1):+.1f} %"
            found.append(replace(one, span=_over_seeds(part, "throughput"), constant=constant))
    return found


def _hour(ours: Hour, theirs: Hour) -> list[Prediction]:
    """Figure 13: predictions with a bound, then those that follow from the input, and the level of active GPUs."""
    active = [hour.over_time("active_gpus_60s_mean") for hour in (ours, theirs)]
    speed = [hour.over_time("throughput_10s_mean") for hour in (ours, theirs)]
    pace = [at_the_peak(fast, gpus)[0] for fast, gpus in zip(speed, active, strict=True)]
    same = _correlation(*active)
    return [
        *_shares(ours, theirs),
        Prediction(
            "Figure 13, active GPUs over time (correlation)", same, 1.0, f"{same - 1:+.3f}", "at least 0.9", same >= 0.9
        ),
        *(
            replace(
                _relative(f"Figure 13, {name}", ours.one(metric), theirs.one(metric)),
                span=_over_seeds(ours.frame, metric),
            )
            for name, metric in LEVELS.items()
        ),
        _relative(PACE, *pace),
        Prediction(
            "Figure 13, throughput over time (correlation; follows from the input)", _correlation(*speed), 1.0,
            f"{_correlation(*speed) - 1:+.3f}",
        ),
    ]  # fmt: skip


def _shares(ours: Hour, theirs: Hour) -> list[Prediction]:
    """Full batches by the paper's count and by two stricter ones, all held against the published first; and of minute
    means, which both sides have.
    """
    ways = {"different requests in a second, as the paper's code counts": SHARE, **STRICTER}
    published, found = theirs.one(SHARE), []
    for name, metric in ways.items():
        if not ours.has(metric):  # rows that were recorded before it was told
            continue
        points = 100 * (ours.one(metric) - published)
        off = f"{points:+.1f} points"
        what, met = f"Figure 13, {AT_31} ({name})", abs(points) <= 5
        span = _over_seeds(ours.frame, metric)
        found.append(Prediction(what, ours.one(metric), published, off, "within 5 points", met, span))
    minutes = ours.full_minutes, theirs.full_minutes
    off = f"{100 * (minutes[0] - minutes[1]):+.1f} points"
    return [*found, Prediction(f"Figure 13, {AT_31} (of minute means, on both sides)", *minutes, off)]


def _over_seeds(frame: pd.DataFrame, metric: str) -> str:
    """Word the lowest and highest of all seeds; empty where rows have none."""
    low, high = (frame.loc[frame["metric"] == f"{metric}{end}", "value"] for end in (LOW, HIGH))
    return "" if low.empty or high.empty else f" ({float(low.iloc[-1]):.4g} to {float(high.iloc[-1]):.4g})"


def _correlation(ours: pd.Series, theirs: pd.Series) -> float:
    both = pd.concat([ours, theirs], axis=1, join="inner").to_numpy()
    return correlation(*both.T) if len(both) > 1 else float("nan")


def _windows(frame: pd.DataFrame) -> list[Prediction]:
    """Windows that were not fitted, together and the furthest alone; first tokens under load."""
    bounds = {
        (WINDOWS, "throughput_error"): ("throughput, all together,", 0.05),
        (WINDOWS, "largest_throughput_error"): ("throughput, the furthest alone (either way),", None),
        (FIRST_TOKEN, "p99_error"): ("p99 first token", 0.1),
    }
    found = []
    for (panel, metric), (name, within) in bounds.items():
        for _, row in frame[frame["panel"].str.startswith(panel) & (frame["metric"] == metric)].iterrows():
            where = "the windows that were not fitted" if panel == WINDOWS else row["panel"].removeprefix(f"{panel}, ")
            what = f"{row['system']}, {row['model']}: {name} of {where} (over measured{_span(frame, row)})"
            mine = frame[(frame["panel"] == row["panel"]) & (frame["system"] == row["system"])]
            told = mine.loc[(mine["metric"] == f"{metric}{CONSTANT}") & (mine["model"] == row["model"]), "value"]
            constant = NO_BOUND if told.empty else f"{100 * float(told.iloc[-1]):+.1f} %"
            found.append(replace(_relative(what, 1 + float(row["value"]), 1.0, within), constant=constant))
    return found


def _span(frame: pd.DataFrame, row: pd.Series) -> str:
    """Errors of a number by the lowest and highest cost that it rests on, where rows have them."""
    mine = frame[(frame["panel"] == row["panel"]) & (frame["system"] == row["system"])]
    ends = [mine.loc[mine["metric"] == f"{row['metric']}_{end}", "value"] for end in ("low", "high")]
    if any(end.empty for end in ends):
        return ""
    return "; {:+.1f} to {:+.1f} %".format(*(100 * float(end.iloc[-1]) for end in ends))


def _runners(frame: pd.DataFrame) -> list[Prediction]:
    """Hour of runners on Ray, and streams, by the simulator fitted to their steps in a rehearsal."""
    found = []
    for key, part in frame.groupby(["system", "model", "panel"], sort=False):
        system, model, panel = map(str, cast("tuple[str, ...]", key))
        asked = {name: (what, None) for name, what in RAY_TOO.items()} if panel == RAY else STEADY_TOO
        if panel != RAY and not panel.startswith(STEADY):
            continue
        where = panel.removeprefix(RAY)
        other = frame[(frame["panel"] == f"{SIMULATED_RAY}{where}") & (frame["system"] == system)]
        ours, theirs = (
            one.drop_duplicates("metric", keep="last").set_index("metric")["value"]
            for one in (other[other["model"] == model], part)
        )
        for metric, (name, within) in asked.items():
            if metric in ours.index and metric in theirs.index:
                what = f"runners on Ray, {model}, rule {system}{where}: {name}"
                one = _relative(what, float(ours[metric]), float(theirs[metric]), within)
                found.append(replace(one, panel=panel, name=name))
    return found


def prediction_table(found: list[Prediction]) -> list[str]:
    """Build lines of Markdown."""
    return markdown(
        ("predicted", "simulated (all seeds)", "published or measured", "off", "a constant is off", "asked", "met"),
        (
            [
                one.what, f"{one.predicted:.4g}{one.span}", f"{one.published:.4g}", one.off, one.constant, one.asked,
                MET[one.met],
            ]
            for one in found
        ),
    )  # fmt: skip


def residual_table(rows: pd.DataFrame) -> list[str]:
    """Build lines of Markdown: every cost model with the residuals of its fit, in percent; none without such rows."""
    frame = rows[(rows["panel"] == COSTS) & rows["metric"].str.startswith("residual_")]
    if frame.empty:
        return []
    lines = []
    for model, part in frame.groupby("cost_model", sort=False):
        value = part.drop_duplicates("metric", keep="last").set_index("metric")["value"].astype(float)
        for kind in [name.removeprefix("residual_rms_") for name in value.index if name.startswith("residual_rms_")]:
            rms, largest = (100 * value[f"residual_{which}_{kind}"] for which in ("rms", "largest"))
            lines.append([str(model), kind, f"{rms:.1f} %", f"{largest:.1f} %"])
    return markdown(("cost model", "rows", "rms residual", "largest"), lines)


def sensitivity(rows: pd.DataFrame, folder: str | Path) -> str:
    """Describe the hour with slower steps: what one factor explains; empty without its rows."""
    frame = rows[(rows["figure"] == "13") & (rows["panel"] == SLOWED)]
    if frame.empty:
        return ""
    ours = Hour(frame, SIMULATED)
    theirs = Hour.of(Rows(as_rows(read_figure(folder, "13"))))
    beside = (
        f"{name} {ours.one(metric):.3g} (published {theirs.one(metric):.3g})"
        for name, metric in (
            (MEAN_ACTIVE, "mean_active_gpus"), ("most of them", "max_active_gpus"),
            (AT_31, SHARE), ("best minute, token/s", "peak_throughput_60s"),
        )
    )  # fmt: skip
    return (
        f"A sensitivity, simulated and no prediction: with every step {ours.one('step_time_factor'):.2f} times as "
        f"long, one factor fitted to Figure 13's peak, the same simulation gives {'; '.join(beside)}."
    )


def remains(found: list[Prediction]) -> str:
    """Describe the level of active GPUs, which the cost models do not give; empty without the hour on 16 GPUs and the
    stream on one.
    """
    named = {one.what: one for one in found}
    needed = (PACE, f"Figure 13, {MEAN_ACTIVE}", "Figure 11, 7B Skewed (token/s)")
    if not named.keys() >= set(needed):
        return ""
    pace, level, alone = (named[what] for what in needed)
    factor = pace.predicted / pace.published
    return (
        f"What remains: an active GPU of the paper's cluster gives {pace.published:.4g} token/s around the peak where "
        f"Figures 1 and 10 let expect {pace.predicted:.4g}, as if every step took {factor:.2f} times as long; so "
        f"{level.published:.3g} GPUs are active on the mean and not {level.predicted:.3g}. The paper's Figure 11 has "
        f"{alone.published:.4g} token/s on one GPU, on a card with faster memory; no figure times the steps of the "
        "cluster's runner, so its cost is not known, and no coefficient was changed for it."
    )
