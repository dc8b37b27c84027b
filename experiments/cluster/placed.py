"""One scheduling rule on one load, simulated, for `ext_placement`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.cluster.hour import RANK, paper_cluster, paper_hour
from experiments.cluster.recorded import chosen_cost
from experiments.cluster.seeds import over_seeds
from experiments.cluster.served import SIMULATED_LENGTH, ServedHour, summary
from experiments.cluster.step_costs import model_bytes
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from experiments.harness.settings import folders
from punica.cluster import SimulationResult, StepCost, Trace, simulate

MODEL = "llama2-7b"
KEPT = ("gpu_seconds", "mean_active_gpus", "max_active_gpus", "p99_time_to_first_token", "mean_throughput")
RAMP, TAIL = 0.1, 0.5
"""Parts of a run with all requests waiting: before RAMP the GPUs fill, after TAIL some may run empty."""


def settings(cfg: Config, figure: Any) -> dict[str, Any]:
    """Return what decides a row beside its columns."""
    return {
        "gpus": figure.gpus, "seconds": figure.seconds, "waiting": figure.waiting, "ranks": list(figure.ranks),
        "seeds": figure.seeds, "cost": asdict(_cost(cfg)),
    }  # fmt: skip


def served(cfg: Config, point: Point, ranks: Sequence[int], padded: bool) -> list[Reading]:
    """Simulate the rule of ``point`` on its load of adapters of ``ranks``, and with requests that all wait."""
    return over_seeds(point.settings["seeds"], lambda seed: _served(cfg, point, ranks, padded, seed))


def _served(cfg: Config, point: Point, ranks: Sequence[int], padded: bool, seed: int) -> list[Reading]:
    about = point.settings
    cost = _cost(cfg)
    asked = paper_hour(folders(cfg).paper, about["seconds"], seed, point.workload, ranks)
    result = _run(asked, point, cost, padded)
    hour = ServedHour(
        about["seconds"], asked.arrivals, result.first_token_s, result.finish_s, result.tokens, result.batch,
        result.seconds_by_batch, "simulated", result.cost_model,
    )  # fmt: skip
    each = (result.finish_s - result.first_token_s) / np.maximum(asked.lengths.output - 1, 1)
    found = {
        "time_per_output_token": (1e3 * float(each.mean()), "ms"),
        SIMULATED_LENGTH: (about["seconds"], "s"),
        "capacity": (_capacity(cfg, point, padded, ranks, seed), "token/s"),
    }
    kept = [reading for reading in summary(hour) if reading.metric in KEPT]
    marks = {"kind": "simulated", "cost_model": result.cost_model}
    return [*kept, *(Reading(name, value, unit, **marks) for name, (value, unit) in found.items())]


def _cost(cfg: Config) -> StepCost:
    figure: Any = cfg.figure
    return chosen_cost(figure.cost, MODEL, folders(cfg).paper, folders(cfg).recorded_rows.parent)


def _run(asked: Trace, point: Point, cost: StepCost, padded: bool) -> SimulationResult:
    policy = paper_cluster(point.system, model_bytes(MODEL), point.settings["gpus"], int(asked.ranks.max(initial=RANK)))
    return simulate(asked, policy, cost, padded)


def _capacity(cfg: Config, point: Point, padded: bool, ranks: Sequence[int], seed: int) -> float:
    """Simulate tokens per second while all GPUs are full, of another hour's requests that wait from the start."""
    hour = paper_hour(folders(cfg).paper, seed=seed + 1, workload=point.workload, ranks=ranks)
    count = point.settings["waiting"]
    lengths = type(hour.lengths)(hour.lengths.prompt[:count], hour.lengths.output[:count])
    waiting = Trace(np.zeros(count), lengths, hour.adapters[:count], hour.ranks[:count])
    tokens = _run(waiting, point, _cost(cfg), padded).tokens
    return float(tokens[int(RAMP * len(tokens)) : max(1, int(TAIL * len(tokens)))].mean())
