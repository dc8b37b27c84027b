"""Figure 13: one hour on a cluster (C46 to C50), from the simulated hour or the paper's own rows.

Rows of a cluster of another size or of other models (a run on Ray) are not judged: the claims are about 16 GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.claims.fig11 import PUNICA, Serving
from experiments.claims.finding import MEASURED, SIMULATED, Finding, claim, why
from experiments.claims.rows import NotMeasured, Rows, pick
from experiments.cluster.served import HOUR, SHARE, STREAM, at_the_peak, mean_from
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import REPOSITORY

STRICTER = {
    "seconds capped at 32 requests": f"{SHARE}_capped_seconds",
    "share of GPU time in steps": "share_of_step_time_batch_ge_31",
}
"""Counts of full batches other than the paper's, which counts different requests in a second."""
BATCH = 32
IDLE = 0.5
"""Mean requests of a minute below which a GPU counts as idle, as where the paper's heat map was read."""
HOUR_S, WINDOW_S, LOW_S, RATE_S = 3600, 300, 300, 200


@dataclass(frozen=True)
class Hour:
    """Rows of one hour: simulated, or the paper's."""

    frame: pd.DataFrame
    kind: str
    cost_model: str = ""

    @classmethod
    def of(cls, rows: Rows) -> "Hour":
        """Choose the simulated hour under Punica's rule, or the paper's; NotMeasured without either."""
        frame = rows.figure("13")
        mine = frame[(frame["panel"] == HOUR) & (frame["system"] == PUNICA)]
        if len(mine):
            seconds = mine.loc[mine["metric"] == "active_gpus_60s_mean", "t_s"].max() + 60
            if not seconds >= HOUR_S:
                raise NotMeasured(f"no rows of the whole hour on 16 GPUs (its first {seconds:g} s alone)")
            return cls(mine, SIMULATED, str(mine["cost_model"].iloc[0]))
        paper = frame[frame["kind"] == "paper"]
        if paper.empty:
            raise NotMeasured(f"no rows of the hour on 16 GPUs ({HOUR})")
        return cls(paper, MEASURED)

    def over_time(self, metric: str) -> pd.Series:
        """Return values of ``metric`` by the start of their window."""
        return pick(self.frame, metric=metric).set_index("t_s")["value"].sort_index().astype(float)

    @property
    def batches(self) -> pd.DataFrame:
        """Mean requests of a minute: one line per GPU, one column per start."""
        return pick(self.frame, metric="gpu_batch_size_60s_mean").pivot_table(
            index="gpu", columns="t_s", values="value"
        )

    def one(self, metric: str) -> float:
        """Return a single number."""
        return float(pick(self.frame, metric=metric)["value"].iloc[0])

    def has(self, metric: str) -> bool:
        """Check whether its rows have ``metric``."""
        return bool((self.frame["metric"] == metric).any())

    @property
    def pace(self) -> float:
        """Tokens per second of an active GPU around the peak."""
        return at_the_peak(self.over_time("throughput_10s_mean"), self.over_time("active_gpus_60s_mean"))[0]

    @property
    def full_minutes(self) -> float:
        """Share of the active minutes of the heat map with at least 31 requests on the mean."""
        minutes = self.batches.to_numpy()
        return float((minutes[minutes >= IDLE] >= BATCH - 1).mean())

    def finding(self, quantities: dict[str, float], text: str) -> Finding:
        """Build a finding that names the cost model of a simulation."""
        return Finding(quantities, text, self.kind, cost_model=self.cost_model)


def published() -> Hour:
    """Return the paper's hour."""
    return Hour(as_rows(read_figure(REPOSITORY / "paper_results", "13")), MEASURED)


def beside_the_paper(hour: Hour, name: str, value: Callable[[Hour], float]) -> str:
    """Word a number of an hour, with the paper's where the hour is not the paper's own."""
    told = f"{name} {value(hour):.3g}"
    return told if hour.kind == MEASURED else f"{told} (paper {value(published()):.3g})"


def excess(hour: Hour) -> pd.Series:
    """Divide active GPUs by the least that the requests need, by five minutes."""
    active, held = hour.over_time("active_gpus_60s_mean"), hour.batches.sum()
    starts = sorted({WINDOW_S * int(t // WINDOW_S) for t in active.index})
    return pd.Series(
        {t: mean_from(active, t, WINDOW_S) / np.ceil(mean_from(held, t, WINDOW_S) / BATCH) for t in starts}
    )


def woken(hour: Hour) -> pd.Series:
    """Count how often each GPU became active after an idle minute."""
    active = hour.batches >= IDLE
    return (active & ~active.shift(1, axis=1, fill_value=True)).sum(axis=1)


@claim("C46")
def gpus_run_full(rows: Rows) -> Finding:
    """Share of the active cells of the heat map with at least 31 requests."""
    hour = Hour.of(rows)
    full, mean = hour.one(SHARE), hour.one("mean_batch_size_of_active_cells")
    nearly = hour.one("share_of_active_cells_batch_ge_28")
    stricter = [beside_the_paper(hour, "of minute means", lambda one: one.full_minutes)]
    stricter += [f"{name} {hour.one(metric):.3f}" for name, metric in STRICTER.items() if hour.has(metric)]
    return hour.finding({"share": full}, "; ".join([f"{full:.3f} (>= 28: {nearly:.3f}); mean {mean:.1f}", *stricter]))


@claim("C47")
def throughput_follows_the_load(rows: Rows) -> Finding:
    """Correlation of tokens per second with the request rate, means over the same 200 s."""
    hour = Hour.of(rows)
    rate, speed = hour.over_time("request_rate"), hour.over_time("throughput_10s_mean")
    both = [(value, mean_from(speed, start, RATE_S)) for start, value in rate.items()]
    correlation = float(np.corrcoef(*zip(*both, strict=True))[0, 1])
    return hour.finding({"correlation": correlation}, f"{correlation:.4f} over {len(both)} windows")


@claim("C48")
def gpus_are_consolidated(rows: Rows) -> Finding:
    """Active GPUs at both ends and at the peak, beside the least that the requests need and beside the throughput."""
    hour = Hour.of(rows)
    active, speed = hour.over_time("active_gpus_60s_mean"), hour.over_time("throughput_10s_mean")
    end = active.index.max() + 60
    first, last = mean_from(active, 0, LOW_S), mean_from(active, end - LOW_S, LOW_S)
    peak = hour.one("max_active_gpus")
    correlation = float(np.corrcoef(active, [mean_from(speed, start, 60) for start in active.index])[0, 1])
    most = float(excess(hour).max())
    quantities = {"first": first, "last": last, "peak": peak, "correlation": correlation, "largest_excess": most}
    mean = beside_the_paper(hour, "mean", lambda one: one.one("mean_active_gpus"))
    ends = f"{first:.1f}, {last:.1f}, {peak:g}; {mean}"
    text = f"{ends}; {correlation:.3f}; at most {most:.2f} times the GPUs that requests need"
    return hour.finding(quantities, text)


@claim("C49")
def idle_gpus_stay_idle(rows: Rows) -> Finding:
    """Changes from idle to active, by minutes of the heat map; the median over the GPUs."""
    hour = Hour.of(rows)
    changes = woken(hour)
    median = float(changes.median())
    return hour.finding({"median": median}, f"{changes.min()} to {changes.max()}, median {median:g}")


@claim("C50")
def peak_of_the_cluster(rows: Rows) -> Finding:
    """Best minute; tokens per second of an active GPU around the peak, and over what one GPU does alone."""
    hour = Hour.of(rows)
    peak, per_gpu = hour.one("peak_throughput_60s"), hour.pace
    alone = single_gpu(rows, hour)
    quantities = {"peak": peak, "per_gpu": per_gpu, "share_of_single": per_gpu / alone}
    each = beside_the_paper(hour, "per active GPU", lambda one: one.pace)
    text = f"{peak:.4g} token/s; {each}, {per_gpu / alone:.2f} of the {alone:.4g} of one alone"
    return hour.finding(quantities, text)


def single_gpu(rows: Rows, hour: Hour) -> float:
    """Return tokens per second of 7B, Skewed, on one GPU: of the same simulation, or Figure 11."""
    if hour.kind == SIMULATED:
        stream = pick(rows.figure("13"), panel=STREAM, workload="Skewed", model="llama2-7b", metric="throughput")
        return float(stream["value"].iloc[0])
    return Serving(rows, "7B").get(PUNICA, "Skewed")


@why("C46")
def batches_are_not_full(rows: Rows) -> str:
    batches = Hour.of(rows).batches
    active, filling = (batches >= IDLE).sum(), ((batches >= IDLE) & (batches < BATCH - 1)).sum()
    return (
        f"of {active.mean():.3g} active GPUs {filling.mean():.2g} hold fewer than {BATCH - 1} requests; one "
        f"alone that fills or empties would be {1 / active.mean():.2f} of them"
    )


@why("C47")
def throughput_leaves_the_load(rows: Rows) -> str:
    hour = Hour.of(rows)
    rate, speed = hour.over_time("request_rate"), hour.over_time("throughput_10s_mean")
    means = {start: mean_from(speed, start, RATE_S) for start in rate.index}
    each = sum(means.values()) / rate.sum()
    worst = max(means, key=lambda start: abs(means[start] - each * rate[start]))
    return (
        f"at {each:.4g} tokens per request, the {RATE_S} s from {worst:g} s on would give {each * rate[worst]:.4g} "
        f"token/s and give {means[worst]:.4g}"
    )


@why("C48")
def gpus_are_spread(rows: Rows) -> str:
    hour = Hour.of(rows)
    ratio = excess(hour)
    start = float(ratio.idxmax())
    active = mean_from(hour.over_time("active_gpus_60s_mean"), start, WINDOW_S)
    held = mean_from(hour.batches.sum(), start, WINDOW_S)
    return (
        f"from {start:g} s on {active:.3g} GPUs are active for {held:.4g} requests, which {np.ceil(held / BATCH):g} "
        "could hold"
    )


@why("C49")
def idle_gpus_wake(rows: Rows) -> str:
    changes = woken(Hour.of(rows))
    often = (changes > 3).sum()
    return f"GPU {changes.idxmax():g} changes {changes.max()} times, {often} of {len(changes)} more than 3"


@why("C50")
def gpus_are_slower_together(rows: Rows) -> str:
    hour = Hour.of(rows)
    each, gpus = at_the_peak(hour.over_time("throughput_10s_mean"), hour.over_time("active_gpus_60s_mean"))
    return f"around the peak {gpus:.3g} GPUs are active and give {each:.4g} token/s each"
