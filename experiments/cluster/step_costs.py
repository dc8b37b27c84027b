"""Cost models of a step from rows of Figures 1 and 10: the paper's A100 by its own numbers, other GPUs by ours.

Figure 10 times one layer with LoRA, so a decode step is that many layers, and the head is not in it. Figure 1 times
whole steps without LoRA; only its prefills are used, since Figure 10 has none. The paper timed prefill for 7B alone:
for another model a row of a prompt costs in proportion to its weights.

Nothing here is fitted to Figures 11 to 13, which a simulation may therefore predict.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.claims.paper import as_rows, read_figure
from punica.cluster import ModelBytes, Residuals, StepCost, StepWork, TimedStep, fit_step_cost, residuals
from punica.workload import popularity

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class FittedCost:
    """A cost model, and how far it is from what it was fitted to: layers (as steps) and prefills."""

    cost: StepCost
    layers: Residuals
    prefills: Residuals


def timed_layers(rows: pd.DataFrame, model: str, num_layers: int) -> list[TimedStep]:
    """Rows of Figure 10 of ``model`` as decode steps of ``num_layers`` layers; other statistics than the median, and
    other systems than Punica, are left out.
    """
    chosen = rows[(rows["metric"] == "layer_latency") & (rows["model"] == model) & (rows["system"] == "punica")]
    steps = []
    for batch, length, rank, workload, seconds in _values(chosen):
        ranks = rank * popularity(workload).number_of_adapters(batch)
        steps.append(TimedStep(StepWork(batch, batch * length, 0, ranks), num_layers * seconds))
    return steps


def timed_prefills(rows: pd.DataFrame, model: str) -> list[TimedStep]:
    """Rows of Figure 1, panel prefill, of ``model``."""
    chosen = rows[(rows["metric"] == "step_latency") & (rows["model"] == model) & (rows["panel"] == "prefill")]
    return [TimedStep(StepWork(0, 0, batch * length), seconds) for batch, length, _, _, seconds in _values(chosen)]


def paper_a100(folder: str | Path, model: str, num_layers: int, size: ModelBytes, size_7b: ModelBytes) -> FittedCost:
    """The paper's A100 running ``model`` (the paper's name, 7B or 13B), from ``folder``, the path of `paper_results`.

    ``size`` is that of the model, ``size_7b`` that of 7B, whose prefills were timed. ValueError for a model that Figure
    10 does not have.
    """
    layers = timed_layers(as_rows(read_figure(folder, "10")), model, num_layers)
    if not layers:
        raise ValueError(f"Figure 10 of the paper has no layer of {model!r}; it has 7B and 13B")
    prefills = timed_prefills(as_rows(read_figure(folder, "1")), "7B")
    prefill = fit_step_cost("prefill", prefills, {"row": 0.0, "kv": 0.0, "rank": 0.0})
    per_token = prefill.prefill * size.weights / size_7b.weights
    cost = fit_step_cost(f"A100 {model}, paper Figures 1 and 10", layers, {"prefill": per_token})
    return FittedCost(cost, residuals(cost, layers), residuals(prefill, prefills))


def _values(rows: pd.DataFrame) -> Iterator[tuple[int, int, int, str, float]]:
    """Batch size, length, rank (0 where there is none), workload, and seconds, of values and medians."""
    for row in rows[rows["statistic"].isin(("value", "median"))].to_dict("records"):
        rank = 0 if pd.isna(row["rank"]) else int(row["rank"])
        seconds = float(row["value"]) * SECONDS[str(row["unit"])]
        yield int(row["batch_size"]), int(row["seq_len"]), rank, str(row["workload"]), seconds
