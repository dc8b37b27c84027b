"""Figure 13: one hour on a cluster (C46 to C50), from the simulated hour or the paper's own rows.

A simulation is judged on the mean over its seeds, beside their span; rows of an hour by minutes and GPUs are the first
seed's. Rows of a cluster of another size or of other models (a run on Ray) are not judged: the claims are about 16
GPUs.
"""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from experiments.claims.fig11 import PUNICA, Serving
from experiments.claims.finding import MEASURED, SIMULATED, Finding, claim
from experiments.claims.rows import NotMeasured, Rows, pick
from experiments.cluster.hour_numbers import (
    CONSOLIDATED,
    EXCESS,
    FIRST,
    FOLLOWS,
    FULL_MINUTES,
    HOUR_S,
    LAST,
    LEAST_WOKEN,
    MOST_WOKEN,
    PACE,
    UNITS,
    WOKEN,
    Windows,
    over_time,
)
from experiments.cluster.seeds import HIGH, LOW, MEAN, SEEDS
from experiments.cluster.served import HOUR, SHARE, STREAM
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import REPOSITORY

STRICTER = {
    "seconds capped at 32 requests": f"{SHARE}_capped_seconds",
    "share of GPU time in steps": "share_of_step_time_batch_ge_31",
}
"""Counts of full batches other than the paper's, which counts different requests in a second."""


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
            hour = cls(mine, SIMULATED, str(mine["cost_model"].iloc[0]))
            if not hour.is_whole:
                raise NotMeasured(f"no rows of the whole hour on 16 GPUs (its first {hour.seconds:g} s alone)")
            return hour
        paper = frame[frame["kind"] == "paper"]
        if paper.empty:
            raise NotMeasured(f"no rows of the hour on 16 GPUs ({HOUR})")
        return cls(paper, MEASURED)

    @property
    def seconds(self) -> float:
        """Return the end of its last minute; NaN without one."""
        return self.frame.loc[self.frame["metric"] == "active_gpus_60s_mean", "t_s"].max() + 60

    @property
    def is_whole(self) -> bool:
        """Check whether its rows reach to the end of the hour."""
        return bool(self.seconds >= HOUR_S)

    def over_time(self, metric: str) -> pd.Series:
        """Return values of ``metric`` by the start of their window."""
        return over_time(self.frame, metric)

    @cached_property
    def windows(self) -> Windows:
        """Windows of the hour; of a simulation, of its first seed."""
        return Windows.of(self.frame)

    @cached_property
    def _numbers(self) -> dict[str, float]:
        return self.windows.numbers()

    def one(self, metric: str) -> float:
        """Return a single number: of a simulation the mean over its seeds, where rows have it, else the first one's."""
        if metric in UNITS and not self.has(f"{metric}{MEAN}"):
            return self._numbers[metric]
        name = f"{metric}{MEAN}" if self.has(f"{metric}{MEAN}") else metric
        return float(pick(self.frame, metric=name)["value"].iloc[0])

    def told(self, metric: str, form: str = ".3g") -> str:
        """Word `one`, with the span over the seeds that rows have."""
        if not self.has(f"{metric}{MEAN}"):
            return format(self.one(metric), form)
        low, high = (pick(self.frame, metric=f"{metric}{end}")["value"].iloc[0] for end in (LOW, HIGH))
        return f"{self.one(metric):{form}} ({low:{form}} to {high:{form}})"

    def has(self, metric: str) -> bool:
        """Check whether its rows have ``metric``."""
        return bool((self.frame["metric"] == metric).any())

    @property
    def full_minutes(self) -> float:
        """Share of the active minutes of the heat map with at least 31 requests on the mean."""
        return self.one(FULL_MINUTES)

    def finding(self, quantities: dict[str, float], text: str) -> Finding:
        """Build a finding that names the seeds and the cost model of a simulation."""
        if self.kind == SIMULATED:
            seeds = f"means and spans over {self.one(SEEDS):g} seeds" if self.has(f"{SHARE}{MEAN}") else "one seed"
            text = f"{text}; {seeds}"
        return Finding(quantities, text, self.kind, cost_model=self.cost_model)


def published() -> Hour:
    """Return the paper's hour."""
    return Hour(as_rows(read_figure(REPOSITORY / "paper_results", "13")), MEASURED)


def beside_the_paper(hour: Hour, name: str, metric: str) -> str:
    """Word a number of an hour, with the paper's where the hour is not the paper's own."""
    told = f"{name} {hour.told(metric)}"
    return told if hour.kind == MEASURED else f"{told}, paper {published().one(metric):.3g}"


@claim("C46")
def gpus_run_full(rows: Rows) -> Finding:
    """Share of the active cells of the heat map with at least 31 requests."""
    hour = Hour.of(rows)
    nearly, mean = hour.one("share_of_active_cells_batch_ge_28"), hour.one("mean_batch_size_of_active_cells")
    stricter = [beside_the_paper(hour, "of minute means", FULL_MINUTES)]
    stricter += [f"{name} {hour.told(metric, '.3f')}" for name, metric in STRICTER.items() if hour.has(metric)]
    text = "; ".join([f"{hour.told(SHARE, '.3f')}; >= 28: {nearly:.3f}; mean {mean:.1f}", *stricter])
    return hour.finding({"share": hour.one(SHARE)}, text)


@claim("C47")
def throughput_follows_the_load(rows: Rows) -> Finding:
    """Correlation of tokens per second with the request rate, means over the same 200 s."""
    hour = Hour.of(rows)
    text = f"{hour.told(FOLLOWS, '.4f')} over {len(hour.windows.rate)} windows"
    return hour.finding({"correlation": hour.one(FOLLOWS)}, text)


@claim("C48")
def gpus_are_consolidated(rows: Rows) -> Finding:
    """Active GPUs at both ends and at the peak, beside the least that the requests need and beside the throughput."""
    hour = Hour.of(rows)
    metrics = {"first": FIRST, "last": LAST, "peak": "max_active_gpus", "correlation": CONSOLIDATED,
               "largest_excess": EXCESS}  # fmt: skip
    first, last, peak = (hour.told(metric) for metric in (FIRST, LAST, "max_active_gpus"))
    ends = f"first {first}, last {last}, peak {peak}; {beside_the_paper(hour, 'mean', 'mean_active_gpus')}"
    most = f"at most {hour.told(EXCESS)} times the GPUs that requests need"
    text = f"{ends}; correlation {hour.told(CONSOLIDATED)}; {most}"
    return hour.finding({name: hour.one(metric) for name, metric in metrics.items()}, text)


@claim("C49")
def idle_gpus_stay_idle(rows: Rows) -> Finding:
    """Changes from idle to active, by minutes of the heat map; the median over the GPUs."""
    hour = Hour.of(rows)
    least, most = hour.one(LEAST_WOKEN), hour.one(MOST_WOKEN)
    return hour.finding({"median": hour.one(WOKEN)}, f"{least:.3g} to {most:.3g}, median {hour.told(WOKEN)}")


@claim("C50")
def peak_of_the_cluster(rows: Rows) -> Finding:
    """Best minute; tokens per second of an active GPU around the peak, and over what one GPU does alone."""
    hour = Hour.of(rows)
    peak, alone = "peak_throughput_60s", single_gpu(rows, hour)
    share = hour.one(PACE) / alone
    quantities = {"peak": hour.one(peak), "per_gpu": hour.one(PACE), "share_of_single": share}
    each = beside_the_paper(hour, "per active GPU", PACE)
    text = f"{hour.told(peak, '.4g')} token/s; {each}, {share:.2f} of the {alone:.4g} of one alone"
    return hour.finding(quantities, text)


def single_gpu(rows: Rows, hour: Hour) -> float:
    """Return tokens per second of 7B, Skewed, on one GPU: of the same simulation, the mean over its seeds where rows
    have it; or Figure 11.
    """
    if hour.kind != SIMULATED:
        return Serving(rows, "7B").get(PUNICA, "Skewed")
    stream = pick(rows.figure("13"), panel=STREAM, workload="Skewed", model="llama2-7b")
    return Hour(stream, SIMULATED).one("throughput")
