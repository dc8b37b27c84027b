"""Predictions of simulations beside what was published or measured, and beside a simpler guess: a constant, or for
active GPUs the request rate; and scheduling rules beside one another. Fitted to what is compared is the constant of
steps with a prompt (88b0140).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.claims.fig13 import STRICTER, Hour
from experiments.claims.rows import MET, NO_BOUND, SIMULATED, NotMeasured, Rows, correlation, curve, markdown
from experiments.cluster import served
from experiments.cluster.served import CAPACITY, FROM_DISK, FROM_HOST, FULL_MINUTES, HIGH, LOW, RATE_S
from experiments.facts.paper import as_rows, read_figure
from experiments.facts.systems import MODELS

PLACEMENT, PUNICA = "ext placement", "punica"
ACTIVE, SPEED = "active_gpus_60s_mean", "throughput_10s_mean"
AT_31, MEAN_ACTIVE = "share at batch >= 31", "mean of active GPUs"
POINTS, SAME = 5, 0.9
"""Bounds asked of shares, in percentage points, and of the correlation over time."""
PACE = "Figure 13, token/s of an active GPU around the peak"
LEVELS = {
    "requests (input)": "total_requests", "tokens (follow from the input)": "total_tokens",
    MEAN_ACTIVE: "mean_active_gpus",
}  # fmt: skip
RULES = {
    CAPACITY: "throughput of full GPUs", "gpu_seconds": "GPU time", "p99_time_to_first_token": "p99 of first tokens",
    FROM_HOST: "loads", FROM_DISK: "loads",
}  # fmt: skip
"""Metrics by which scheduling rules are compared, in words; those of one name are added up."""


class Prediction(NamedTuple):
    """A predicted number, the published or measured one, the difference, the bound asked for (``-``: none); ``span`` of
    seeds; ``guess``: how far a simpler one is off, and whether it is ``closer``.
    """

    what: str
    predicted: float
    published: float
    off: str
    asked: str = NO_BOUND
    met: bool | None = None
    span: str = ""
    guess: str = NO_BOUND
    closer: bool = False


def predictions(rows: pd.DataFrame, folder: str | Path) -> list[Prediction]:
    """Compare the simulated rows in ``rows`` (of one machine) with ``folder``, the path of `paper_results`."""
    chosen = Rows(rows[rows["figure"] == "13"])
    try:
        ours = Hour.of(chosen)
    except NotMeasured:
        return []
    if ours.kind != SIMULATED:
        return []
    frame, theirs = chosen.figure("13"), Hour.of(Rows(as_rows(read_figure(folder, "13"))))
    return [*_stream(frame, folder), *_hour(ours, theirs)]


def _relative(
    what: str, predicted: float, published: float, within: float | None = None, guess: float | None = None,
    span: str = "",
) -> Prediction:  # fmt: skip
    """Compare in percent; ``guess``: the relative error of a constant."""
    off = predicted / published - 1
    return Prediction(
        what, predicted, published, f"{100 * off:+.1f} %", span=span,
        asked=NO_BOUND if within is None else f"within {100 * within:.0f} %",
        met=None if within is None else abs(off) <= within,
        guess=NO_BOUND if guess is None else f"a constant {100 * guess:+.1f} %",
        closer=guess is not None and abs(guess) < abs(off),
    )  # fmt: skip


def _stream(frame: pd.DataFrame, folder: str | Path) -> Iterator[Prediction]:
    """Figure 11, Punica's bars of both models; the constant is the mean of the model's other popularities."""
    stream, paper = frame[frame["panel"] == served.STREAM], as_rows(read_figure(folder, "11"))
    for role in ("7B", "13B"):
        bars = curve(paper, "throughput", over="workload", system="punica", model=role)
        for workload, part in stream[stream["model"] == MODELS[role][0]].groupby("workload", sort=False):
            value, published = curve(part, "throughput", over="workload").iloc[0], float(bars.loc[workload])
            guess = float(bars.drop(workload).mean()) / published - 1
            what = f"Figure 11, {role} {workload} (token/s)"
            yield _relative(what, value, published, 0.15, guess, _over_seeds(part, "throughput"))


def _hour(ours: Hour, theirs: Hour) -> Iterator[Prediction]:
    """Figure 13: predictions with a bound, those that follow from the input, and the level of active GPUs."""
    ways = {"different requests in a second, as the paper's code counts": served.SHARE, **STRICTER}
    known = [(name, metric, served.SHARE) for name, metric in ways.items() if ours.has(metric)]  # not all in old rows
    for name, metric, published in (*known, ("of minute means, on both sides", FULL_MINUTES, FULL_MINUTES)):
        share, paper = ours.one(metric), theirs.one(published)
        points, asked, span = 100 * (share - paper), f"within {POINTS} points", _over_seeds(ours.frame, metric)
        what, met = f"Figure 13, {AT_31} ({name})", abs(points) <= POINTS
        yield Prediction(what, share, paper, f"{points:+.1f} points", asked, met, span)
    active, speed = ([served.over_time(hour.frame, metric) for hour in (ours, theirs)] for metric in (ACTIVE, SPEED))
    same, tokens = _correlation(*active), _correlation(*speed)
    later, guess = _shifted_rate(theirs)
    yield Prediction(
        "Figure 13, active GPUs over time (correlation)", same, 1.0, f"{same - 1:+.3f}", f"at least {SAME}",
        same >= SAME, guess=f"the request rate {later} s before {guess - 1:+.3f}", closer=guess > same,
    )  # fmt: skip
    for name, metric in LEVELS.items():
        span = _over_seeds(ours.frame, metric)
        yield _relative(f"Figure 13, {name}", ours.one(metric), theirs.one(metric), span=span)
    yield _relative(PACE, ours.windows.pace(), theirs.windows.pace())
    follows = "Figure 13, throughput over time (correlation; follows from the input)"
    yield Prediction(follows, tokens, 1.0, f"{tokens - 1:+.3f}")


def _shifted_rate(hour: Hour) -> tuple[int, float]:
    """Seconds by which active GPUs follow the request rate, fitted to them, and their correlation then."""
    rate, active = hour.windows.rate, served.over_time(hour.frame, ACTIVE)
    centres, minutes = rate.index + RATE_S / 2, active.index + 30
    found = {later: correlation(np.interp(minutes - later, centres, rate), active) for later in range(0, 301, 20)}
    best = max(found, key=found.__getitem__)
    return best, found[best]


def _over_seeds(frame: pd.DataFrame, metric: str) -> str:
    """Word the lowest and highest of all seeds; empty where rows have none."""
    low, high = (frame.loc[frame["metric"] == f"{metric}{end}", "value"] for end in (LOW, HIGH))
    return "" if low.empty or high.empty else f" ({float(low.iloc[-1]):.4g} to {float(high.iloc[-1]):.4g})"


def _correlation(ours: pd.Series, theirs: pd.Series) -> float:
    both = pd.concat([ours, theirs], axis=1, join="inner").to_numpy()
    return correlation(*both.T) if len(both) > 1 else float("nan")


def prediction_table(found: list[Prediction]) -> list[str]:
    """Build lines of Markdown: a table, and a sentence on where the simpler guesses are closer."""
    head = "predicted", "simulated (all seeds)", "published or measured", "off", "simpler guess off by", "asked", "met"
    lines = [
        [
            one.what, f"{one.predicted:.4g}{one.span}", f"{one.published:.4g}", one.off,
            one.guess + (", closer" if one.closer else ""), one.asked, MET[one.met],
        ]
        for one in found
    ]  # fmt: skip
    guessed = [one for one in found if one.guess != NO_BOUND]
    closer = sum(one.closer for one in guessed)
    said = f"Of {len(guessed)} predictions beside a simpler guess, the guess is closer in {closer}."
    return [*markdown(head, lines), *(["", said] if guessed else [])]


def rules_table(rows: pd.DataFrame) -> list[str]:
    """Build lines of Markdown: each scheduling rule over Punica's, lowest and highest of all loads; none without."""
    rows = rows[rows["figure"] == PLACEMENT]
    named = rows.assign(what=rows["metric"].map(RULES), value=rows["value"].astype(float)).dropna(subset="what")
    last = named.drop_duplicates(["system", "panel", "metric"], keep="last")
    value = last.pivot_table(index=["what", "panel"], columns="system", values="value", aggfunc="sum", sort=False)
    if PUNICA not in value:
        return []
    over = value.drop(columns=PUNICA).div(value[PUNICA], axis=0).groupby(level="what", sort=False)
    low, high = (ends.reindex(list(dict.fromkeys(RULES.values()))) for ends in (over.min(), over.max()))
    spans = low.map("{:.2f}".format) + " to " + high.map("{:.2f}".format)
    loads = len(value.index.unique("panel"))
    head = ("rule", *(f"{name} / Punica's" for name in spans.index))
    return [*markdown(head, spans.T.itertuples(name=None)), "", f"Lowest and highest of {loads} loads."]
