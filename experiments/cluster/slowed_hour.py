"""A sensitivity of the simulated hour: the same once more, its steps as slow as the paper's cluster around its peak.

Steps as the paper's Figures 1 and 10 have them give an active GPU more tokens than Figure 13 shows. Here every step is
longer by that factor, which is fitted to Figure 13: what comes out is no prediction. It says how much of what else
differs in Figure 13 that one factor explains.
"""

from pathlib import Path

import pandas as pd

from experiments.claims.fig13 import Hour, at_the_peak
from experiments.facts.paper import as_rows, read_figure
from experiments.claims.rows import Rows
from experiments.cluster.served import ServedHour, series, summary
from experiments.harness.points import Reading
from punica.cluster import StepCost


def slowness(served: ServedHour, paper: Path) -> float:
    """Tokens per second of an active GPU around the peak of ``served`` over those of the published hour."""
    theirs = Hour.of(Rows(as_rows(read_figure(paper, "13"))))
    published, _ = at_the_peak(theirs.over_time("throughput_10s_mean"), theirs.over_time("active_gpus_60s_mean"))
    lines = pd.DataFrame([{"metric": one.metric, "t_s": one.t_s, "value": one.value} for one in series(served)])
    speed, active = (
        lines[lines["metric"] == metric].set_index("t_s")["value"]
        for metric in ("throughput_10s_mean", "active_gpus_60s_mean")
    )
    return at_the_peak(speed, active)[0] / published


def slowed(cost: StepCost, factor: float) -> StepCost:
    """``cost`` with every step ``factor`` times as long; its name says why."""
    return cost.slowed(factor, f"{cost.name}; every step {factor:.2f} times as long, fitted to Figure 13's peak")


def slowed_readings(served: ServedHour, factor: float) -> list[Reading]:
    """The totals of the slowed hour, and the factor."""
    about = {"kind": served.kind, "cost_model": served.cost_model}
    return [Reading("step_time_factor", factor, "ratio", **about), *summary(served)]
