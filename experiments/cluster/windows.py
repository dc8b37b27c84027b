"""Recorded windows of Figure 11: a cost model fitted to half of them predicts the throughput of the other half.

The steps of a window are alike, so windows give one coefficient, the constant; the others are those of the machine's
cost model, from other figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from experiments.harness.points import Reading
from experiments.simulator import StepCost, TimedStep, fit_step_cost
from experiments.workload import popularity
from punica.cluster import StepWork

LEAST = 4
"""Least windows of which a half is fitted."""
CONSTANT = "_of_a_constant"
"""Suffix of an error: what a constant, which is fitted to the same rows, would have had."""
MILLI = 1e3
NEEDED = ("throughput", "step_latency", "tokens_per_step", "mean_batch_size", "mean_context")


@dataclass(frozen=True)
class Window:
    """Mean step of a window: tokens (prompts included), requests, cached tokens per request, summed ranks of the
    different adapters; and its seconds.
    """

    workload: str
    repeat: int
    tokens: float
    batch: float
    context: float
    ranks: float
    seconds: float

    @property
    def step(self) -> TimedStep:
        """Mean step, whose cost is the mean cost, as costs are linear."""
        work = StepWork(self.batch, self.batch * self.context, self.tokens - self.batch, self.ranks)  # type: ignore[arg-type]
        return TimedStep(work, self.seconds)


def windows_of(rows: pd.DataFrame) -> list[Window]:
    """Read Punica's windows in ``rows`` of Figure 11 of one model, in order; none disturbed or of a whole stream."""
    punica = (rows["system"] == "punica") & rows["metric"].isin(NEEDED) & rows["statistic"].eq("value")
    chosen = rows[punica & ~rows["disturbed"].eq(True) & rows["panel"].str.endswith(" Model")]
    found = []
    for key, one in chosen.groupby(["workload", "repeat"], sort=False):
        workload, repeat = cast("tuple[str, int]", key)
        value = one.drop_duplicates("metric", keep="last").set_index("metric")["value"]
        if set(NEEDED) <= set(value.index):
            batch = value["mean_batch_size"]
            ranks = float(one["rank"].iloc[0]) * popularity(workload).number_of_adapters(max(1, round(batch)))
            seconds = value["step_latency"] / MILLI
            mean = value["tokens_per_step"], batch, value["mean_context"], ranks, seconds
            found.append(Window(workload, int(repeat), *map(float, mean)))
    return found if len(found) >= LEAST else []


def fitted_to(windows: Sequence[Window], cost: StepCost) -> StepCost:
    """Replace the constant of ``cost`` by that of ``windows``."""
    known = {"row": cost.row, "kv": cost.kv, "prefill": cost.prefill, "rank": cost.rank}
    return fit_step_cost(f"{cost.name}, constant of windows", [one.step for one in windows], known)


def halves(windows: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Split windows alternately into fitted and predicted ones."""
    return list(windows[::2]), list(windows[1::2])


def predicted_half(windows: Sequence[Window], cost: StepCost) -> list[Reading]:
    """Return the errors of predicted steps per second: of all together, and the largest; and the same of a constant
    (``_of_a_constant``), the mean step of the fitted half.
    """
    seen, held_out = halves(windows)
    fitted = fitted_to(seen, cost)
    constant = float(np.mean([one.seconds for one in seen]))
    about: dict[str, Any] = {"kind": "simulated", "cost_model": fitted.name}
    found = [
        Reading("windows_fitted", len(seen), "windows", "count", **about),
        Reading("windows_predicted", len(held_out), "windows", "count", **about),
    ]
    ways = {"": [fitted.seconds(one.step.work) for one in held_out], CONSTANT: [constant] * len(held_out)}
    for suffix, told in ways.items():
        whole = sum(one.seconds for one in held_out) / sum(told) - 1
        errors = [one.seconds / seconds - 1 for one, seconds in zip(held_out, told, strict=True)]
        found += [
            Reading(f"throughput_error{suffix}", whole, "fraction", **about),
            Reading(f"largest_throughput_error{suffix}", float(np.abs(errors).max()), "fraction", **about),
        ]
    return found
