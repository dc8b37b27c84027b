"""Figure 13: one hour on a cluster (C46 to C50), from the simulated hour or the paper's own rows.

A simulation is judged on the mean over its seeds, beside their span; rows of an hour by minutes and GPUs are the first
seed's. Rows of a cluster of another size or of other models (a run on Ray) are not judged: the claims are about 16
GPUs.
"""

from functools import cache, cached_property
from pathlib import Path

import pandas as pd

from experiments.claims.bounds import read_bounds
from experiments.claims.fig11 import PUNICA, Serving
from experiments.claims.finding import MEASURED, SIMULATED, Finding, claim
from experiments.claims.rows import MET, NotMeasured, Rows, markdown, pick
from experiments.cluster import hour_numbers as hn
from experiments.cluster.served import HIGH, HOUR, LOW, MEAN, RAY, SEEDS, SHARE, SIMULATED_RAY, STREAM
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import REPOSITORY

STRICTER = {
    "seconds capped at 32 requests": f"{SHARE}_capped_seconds",
    "share of GPU time in steps": "share_of_step_time_batch_ge_31",
}
"""Counts of full batches other than the paper's, which counts different requests in a second."""
ASKED = {
    ("C46", "share"): SHARE, ("C47", "correlation"): hn.FOLLOWS, ("C48", "largest_excess"): hn.EXCESS,
    ("C48", "correlation"): hn.CONSOLIDATED, ("C49", "median"): hn.WOKEN,
}  # fmt: skip
"""(claim, quantity of its bound) -> number of an hour."""


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

    def over_time(self, metric: str) -> pd.Series:
        """Return values of ``metric`` by the start of their window."""
        return hn.over_time(self.frame, metric)

    @cached_property
    def windows(self) -> hn.Windows:
        """Windows of the hour; of a simulation, of its first seed."""
        return hn.Windows.of(self.frame)

    @cached_property
    def _numbers(self) -> dict[str, float]:
        return self.windows.numbers()

    def has(self, metric: str) -> bool:
        """Check whether its rows have ``metric``."""
        return metric in self._values

    def one(self, metric: str) -> float:
        """Return a single number: of a simulation the mean over its seeds, where rows have it, else the first one's."""
        mean = f"{metric}{MEAN}"
        if metric in hn.UNITS and mean not in self._values:
            return self._numbers[metric]
        for name in (mean, metric):
            if name in self._values:
                return float(self._values[name])
        raise NotMeasured(f"no rows with metric={metric}")

    def told(self, metric: str, form: str = ".3g") -> str:
        """Word `one`, with the span over the seeds that rows have."""
        ends = [self._values[name] for end in (LOW, HIGH) if (name := f"{metric}{end}") in self._values]
        return format(self.one(metric), form) + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")

    def beside_the_paper(self, name: str, metric: str) -> str:
        """Word a number, with the paper's where the hour is not the paper's own."""
        paper = f", paper {published().one(metric):.3g}" if self.kind == SIMULATED else ""
        return f"{name} {self.told(metric)}{paper}"

    def finding(self, quantities: dict[str, float], text: str) -> Finding:
        """Build a finding that names the seeds and the cost model of a simulation."""
        if self.kind == SIMULATED:
            seeds = f"means and spans over {self.one(SEEDS):g} seeds" if self.has(f"{SHARE}{MEAN}") else "one seed"
            text = f"{text}; {seeds}"
        return Finding(quantities, text, self.kind, cost_model=self.cost_model)


@cache
def published() -> Hour:
    """Return the paper's hour."""
    return Hour(as_rows(read_figure(REPOSITORY / "paper_results", "13")), MEASURED)


@claim("C46")
def gpus_run_full(rows: Rows) -> Finding:
    """Share of the active cells of the heat map with at least 31 requests."""
    hour = Hour.of(rows)
    nearly, mean = hour.one("share_of_active_cells_batch_ge_28"), hour.one("mean_batch_size_of_active_cells")
    stricter = [hour.beside_the_paper("of minute means", hn.FULL_MINUTES)]
    stricter += [f"{name} {hour.told(metric, '.3f')}" for name, metric in STRICTER.items() if hour.has(metric)]
    text = "; ".join([f"{hour.told(SHARE, '.3f')}; >= 28: {nearly:.3f}; mean {mean:.1f}", *stricter])
    return hour.finding({"share": hour.one(SHARE)}, text)


@claim("C47")
def throughput_follows_the_load(rows: Rows) -> Finding:
    """Correlation of tokens per second with the request rate, means over the same 200 s."""
    hour = Hour.of(rows)
    text = f"{hour.told(hn.FOLLOWS, '.4f')} over {len(hour.windows.rate)} windows"
    return hour.finding({"correlation": hour.one(hn.FOLLOWS)}, text)


@claim("C48")
def gpus_are_consolidated(rows: Rows) -> Finding:
    """Active GPUs at both ends and at the peak, beside the least that the requests need and beside the throughput."""
    hour = Hour.of(rows)
    metrics = {"first": hn.FIRST, "last": hn.LAST, "peak": "max_active_gpus", "correlation": hn.CONSOLIDATED,
               "largest_excess": hn.EXCESS}  # fmt: skip
    first, last, peak = (hour.told(metric) for metric in (hn.FIRST, hn.LAST, "max_active_gpus"))
    ends = f"first {first}, last {last}, peak {peak}; {hour.beside_the_paper('mean', 'mean_active_gpus')}"
    most = f"at most {hour.told(hn.EXCESS)} times the GPUs that requests need"
    text = f"{ends}; correlation {hour.told(hn.CONSOLIDATED)}; {most}"
    return hour.finding({name: hour.one(metric) for name, metric in metrics.items()}, text)


@claim("C49")
def idle_gpus_stay_idle(rows: Rows) -> Finding:
    """Changes from idle to active, by minutes of the heat map; the median over the GPUs."""
    hour = Hour.of(rows)
    least, most = hour.one(hn.LEAST_WOKEN), hour.one(hn.MOST_WOKEN)
    return hour.finding({"median": hour.one(hn.WOKEN)}, f"{least:.3g} to {most:.3g}, median {hour.told(hn.WOKEN)}")


@claim("C50")
def peak_of_the_cluster(rows: Rows) -> Finding:
    """Best minute; tokens per second of an active GPU around the peak, and over what one GPU does alone."""
    hour = Hour.of(rows)
    peak = "peak_throughput_60s"
    if hour.kind == SIMULATED:  # one GPU of the same simulation
        alone = Hour(pick(rows.figure("13"), panel=STREAM, workload="Skewed", model="llama2-7b"), SIMULATED)
        single = alone.one("throughput")
    else:
        single = Serving(rows, "7B").get(PUNICA, "Skewed")
    share = hour.one(hn.PACE) / single
    quantities = {"peak": hour.one(peak), "per_gpu": hour.one(hn.PACE), "share_of_single": share}
    each = hour.beside_the_paper("per active GPU", hn.PACE)
    text = f"{hour.told(peak, '.4g')} token/s; {each}, {share:.2f} of the {single:.4g} of one alone"
    return hour.finding(quantities, text)


def runners_table(rows: pd.DataFrame, folder: str | Path) -> list[str]:
    """Build lines of Markdown, one per rule and bound; none without a whole hour on Ray.

    ``folder``: path of ``paper_results``, which has the bounds.
    """
    try:
        frame = Rows(rows[rows["figure"] == "13"]).figure("13")
    except NotMeasured:
        return []
    lines, bounds = [], read_bounds(folder)
    for (system, model), part in frame[frame["panel"] == RAY].groupby(["system", "model"], sort=False):
        other = frame[(frame["panel"] == SIMULATED_RAY) & (frame["system"] == system) & (frame["model"] == model)]
        measured, simulated = Hour(part, MEASURED), Hour(other, SIMULATED)
        for (id, quantity), name in ASKED.items() if measured.is_whole else ():
            value, beside = measured.one(name), f"{simulated.one(name):.3g}" if simulated.is_whole else "-"
            bound = next(one for one in bounds[id]["shape"] if one.quantity == quantity)
            what = f"{model}, rule {system}", name.replace("_", " ")
            lines.append([id, *what, f"{value:.3g}", beside, str(bound), MET[bound.holds(value)]])
    return markdown(("claim", "runners", "number", "measured", "simulated", "bound", "met"), lines) if lines else []
