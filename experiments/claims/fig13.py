"""Figure 13: one hour on a cluster (C46 to C50), simulated or the paper's own rows. A simulation is judged on the mean
over its seeds. Clusters of another size are not judged.
"""

from collections.abc import Mapping
from functools import cache, cached_property

import pandas as pd

from experiments.claims.fig11 import PUNICA, Serving
from experiments.claims.rows import MEASURED, SIMULATED, Finding, NotMeasured, Rows, claim, pick
from experiments.cluster import served as hn
from experiments.cluster.served import HIGH, HOUR, LOW, MEAN, SEEDS, SHARE, STREAM
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import REPOSITORY

STRICTER = {
    "seconds capped at 32 requests": f"{SHARE}_capped_seconds",
    "share of GPU time in steps": "share_of_step_time_batch_ge_31",
}
"""Counts of full batches other than the paper's, which counts different requests in a second."""
NUMBERS = {
    "C46": {"share": SHARE},
    "C47": {"correlation": hn.FOLLOWS},
    "C48": {
        "first": hn.FIRST, "last": hn.LAST, "peak": "max_active_gpus", "correlation": hn.CONSOLIDATED,
        "largest_excess": hn.EXCESS,
    },
    "C49": {"median": hn.WOKEN},
}  # fmt: skip
"""Claim -> quantity -> number of an hour."""
BESIDE = {
    "C46": {"of_minute_means": hn.FULL_MINUTES, "at_least_28": "share_of_active_cells_batch_ge_28", **STRICTER},
    "C48": {"mean": "mean_active_gpus"},
    "C49": {"least": hn.LEAST_WOKEN, "most": hn.MOST_WOKEN},
}
"""Claim -> numbers that are told beside those with bounds."""


class Hour:
    """Rows of one hour: simulated, or the paper's."""

    def __init__(self, frame: pd.DataFrame, kind: str, cost_model: str = "") -> None:
        self.frame, self.kind, self.cost_model = frame, kind, cost_model
        self._values = dict(zip(frame["metric"][::-1], frame["value"][::-1], strict=True))  # the first of each metric
        self.seconds = frame.loc[frame["metric"] == "active_gpus_60s_mean", "t_s"].max() + 60  # NaN without a minute
        self.is_whole = bool(self.seconds >= hn.HOUR_S)

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

    @cached_property
    def windows(self) -> hn.Windows:
        """Windows of the hour; of a simulation, of its first seed."""
        return hn.Windows.of(self.frame)

    @cached_property
    def _numbers(self) -> dict[str, float]:
        return self.windows.numbers()

    def has(self, metric: str) -> bool:
        """Check whether its rows have ``metric``, or those that it follows from."""
        return metric in self._values or metric in hn.UNITS

    def one(self, metric: str) -> float:
        """Return a single number: of a simulation the mean over its seeds, where rows have it, else the first one's."""
        mean = f"{metric}{MEAN}"
        if metric in hn.UNITS and mean not in self._values:
            return self._numbers[metric]
        for name in (mean, metric):
            if name in self._values:
                return float(self._values[name])
        raise NotMeasured(f"no rows with metric={metric}")

    def told(self, metrics: Mapping[str, str]) -> str:
        """Word `one` of each, with the span over the seeds that rows have, and the paper's beside a simulation's."""
        said = []
        for name, metric in metrics.items():
            ends = [self._values[key] for end in (LOW, HIGH) if (key := f"{metric}{end}") in self._values]
            span = " ({:.4g} to {:.4g})".format(*ends) if ends else ""
            beside = self.kind == SIMULATED and published().has(metric)
            paper = f", paper {published().one(metric):.4g}" if beside else ""
            said.append(f"{name.replace('_', ' ')} {self.one(metric):.4g}{span}{paper}")
        return "; ".join(said)

    def finding(self, quantities: dict[str, float], text: str) -> Finding:
        """Build a finding that names the seeds and the cost model of a simulation."""
        if self.kind == SIMULATED:
            seeds = f"means and spans over {self.one(SEEDS):g} seeds" if self.has(f"{SHARE}{MEAN}") else "one seed"
            text = f"{text}; {seeds}"
        return Finding(quantities, text, self.kind, cost_model=self.cost_model)


@cache
def published() -> Hour:
    return Hour(as_rows(read_figure(REPOSITORY / "paper_results", "13")), MEASURED)


@claim("C46", id="C46")
@claim("C47", id="C47")
@claim("C48", id="C48")
@claim("C49", id="C49")
def numbers_of_the_hour(rows: Rows, id: str) -> Finding:
    """Full batches of active cells; how tokens follow requests; active GPUs at ends and peak; changes from idle."""
    metrics = NUMBERS[id]
    hour = Hour.of(rows)
    beside = {name: metric for name, metric in BESIDE.get(id, {}).items() if hour.has(metric)}
    return hour.finding({name: hour.one(metric) for name, metric in metrics.items()}, hour.told({**metrics, **beside}))


@claim("C50")
def peak_of_the_cluster(rows: Rows) -> Finding:
    """Best minute; tokens per second of an active GPU around the peak, and over what one GPU does alone."""
    hour = Hour.of(rows)
    if hour.kind == SIMULATED:  # one GPU of the same simulation
        alone = Hour(pick(rows.figure("13"), panel=STREAM, workload="Skewed", model="llama2-7b"), SIMULATED)
        single = alone.one("throughput")
    else:
        single = Serving(rows, "7B").get(PUNICA, "Skewed")
    metrics = {"peak": "peak_throughput_60s", "per_gpu": hn.PACE}
    quantities = {name: hour.one(metric) for name, metric in metrics.items()}
    quantities["share_of_single"] = share = quantities["per_gpu"] / single
    return hour.finding(quantities, f"{hour.told(metrics)}; {share:.2f} of the {single:.4g} token/s of one alone")
