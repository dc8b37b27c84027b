"""Seeds of a simulation: the first one's run gives the rows, and all runs their mean and span."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from experiments.harness.points import Reading
from experiments.workload import RELEASED_SEED

LOW, MEAN, HIGH = "_low", "_mean", "_high"
"""Suffixes of a metric: the lowest of all seeds, their mean, and the highest."""
SEEDS = "seeds"


def over_seeds(count: int, run: Callable[[int], Sequence[Reading]]) -> list[Reading]:
    """Return the readings of ``run`` of the released seed, and mean and span of each over ``count`` seeds."""
    return spanned([run(RELEASED_SEED + place) for place in range(count)])


def spanned(runs: Sequence[Sequence[Reading]]) -> list[Reading]:
    """Return the first run's readings, mean and span over all runs of those that are single numbers, and how many runs.
    """
    values: dict[str, list[float]] = {}
    for one in (reading for run in runs for reading in run if reading.t_s is None and reading.gpu is None):
        values.setdefault(one.metric, []).append(one.value)
    found, about = list(runs[0]), dict[str, Any]()
    for one in runs[0]:
        if one.metric in values and one.t_s is None and one.gpu is None:
            about = {"kind": one.kind, "cost_model": one.cost_model}
            mine = values[one.metric]
            told = ((LOW, min(mine)), (MEAN, fmean(mine)), (HIGH, max(mine)))
            found += [Reading(f"{one.metric}{suffix}", value, one.unit, **about) for suffix, value in told]
    return [*found, Reading(SEEDS, len(runs), "seeds", "count", **about)]
