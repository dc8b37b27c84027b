"""One scheduling rule on one load, simulated, for `ext_placement`."""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.cluster.hour import DURATION_S, RANK, paper_cluster, paper_hour
from experiments.cluster.load_costs import load_cost
from experiments.cluster.recorded import chosen_cost
from experiments.cluster.seeds import over_seeds
from experiments.cluster.served import SIMULATED_LENGTH, ServedHour, summary
from experiments.cluster.step_costs import model_bytes
from experiments.harness.points import Point, Reading
from experiments.harness.schema import REPOSITORY, Config
from experiments.harness.settings import folders
from experiments.simulator import LoadCost, ResidencyConfig, SimulationResult, StepCost, Trace, simulate
from experiments.workload import MAX_BATCH, adapter_shares, drifting, flash_crowd, independent_seeds

MODEL = "llama2-7b"
KEPT = ("gpu_seconds", "mean_active_gpus", "max_active_gpus", "p99_time_to_first_token", "mean_throughput")
CAPACITY, FROM_HOST, FROM_DISK = "capacity", "loads_from_host", "loads_from_disk"
LOAD, MIXED, PADDED, CROWD, DRIFT = "paper's load", "mixed ranks", "mixed ranks, padded", "flash crowd", "drift"
"""Panels. All but the first have Zipf popularity and several ranks."""
CROWD_SHARE = 0.5
"""Share of the requests in the middle third that name one adapter, the least popular one before and after."""
DRIFT_MOVES = 6
"""Times that popularity moves on, each time by `MAX_BATCH` adapters: no slot has an adapter that is popular next."""


def settings(cfg: Config, figure: Any) -> dict[str, Any]:
    """Return what decides a row beside its columns."""
    places = folders(cfg)
    results = places.recorded_rows.parent
    loads = load_cost(REPOSITORY / "results", figure.loads, MODEL)  # committed rows, wherever those of this run go
    return {
        "gpus": figure.gpus, "seconds": figure.seconds, "waiting": figure.waiting, "ranks": list(figure.ranks),
        "seeds": figure.seeds, "cost": asdict(chosen_cost(figure.cost, MODEL, places.paper, results)),
        "adapters": figure.adapters, "loads": asdict(loads),
        "host_adapters": figure.host_adapters,
    }  # fmt: skip


def served(paper: Path, point: Point) -> list[Reading]:
    """Simulate the rule of ``point`` on the load of its panel, and with requests that all wait."""
    return over_seeds(point.settings["seeds"], lambda seed: _served(paper, point, seed))


def _served(paper: Path, point: Point, seed: int) -> list[Reading]:
    about = point.settings
    asked = load(paper, point, seed, seconds=about["seconds"])
    result = _run(point, asked)
    hour = ServedHour(
        about["seconds"], asked.arrivals, result.first_token_s, result.finish_s, result.tokens, result.batch,
        result.seconds_by_batch, "simulated", result.cost_model,
    )  # fmt: skip
    each = (result.finish_s - result.first_token_s) / np.maximum(asked.lengths.output - 1, 1)
    found = {
        "time_per_output_token": (1e3 * float(each.mean()), "ms"),
        SIMULATED_LENGTH: (about["seconds"], "s"),
        CAPACITY: (_capacity(paper, point, seed), "token/s"),
        FROM_HOST: (result.loads_from_host, "loads"),
        FROM_DISK: (result.loads_from_disk, "loads"),
        "load_wait": (1e3 * result.load_wait_s / max(1, len(asked.arrivals)), "ms"),
    }
    kept = [reading for reading in summary(hour) if reading.metric in KEPT]
    marks: dict[str, Any] = {"kind": "simulated", "cost_model": result.cost_model}
    return [*kept, *(Reading(name, value, unit, **marks) for name, (value, unit) in found.items())]


def load(paper: Path, point: Point, seed: int, seconds: float = DURATION_S, count: int | None = None) -> Trace:
    """Draw the requests of a panel: of ``seconds`` in the middle of the hour, its peak, or the first ``count`` of them.
    Crowd and drift stretch over all of them.
    """
    panel = _panel(point)
    ranks = tuple(point.settings["ranks"]) if panel in (MIXED, PADDED, CROWD, DRIFT) else (RANK,)
    hour = _hour(paper, DURATION_S, seed, point.workload, ranks)
    start = (DURATION_S - seconds) / 2
    first, end = np.searchsorted(hour.arrivals, (start, start + seconds))
    part = slice(first, end if count is None else first + count)
    lengths = type(hour.lengths)(hour.lengths.prompt[part], hour.lengths.output[part])
    asked = Trace(hour.arrivals[part] - start, lengths, hour.adapters[part], hour.ranks[part])
    if panel not in (CROWD, DRIFT) or not len(asked.arrivals):
        return asked
    adapters = _changing(asked, point, seed)
    of_adapter = np.random.default_rng(seed).choice(np.asarray(ranks), point.settings["adapters"])
    return Trace(asked.arrivals, lengths, adapters + 1, of_adapter[adapters])


_hour = lru_cache(maxsize=32)(paper_hour)  # the same for every rule


def _changing(asked: Trace, point: Point, seed: int) -> NDArray[np.int64]:
    """Draw adapters whose popularity changes over the arrivals of ``asked``."""
    shares = adapter_shares(point.workload, point.settings["adapters"])
    end = float(asked.arrivals[-1])
    drawn = independent_seeds(seed, 5)[-1]  # the fifth, behind those of the hour
    if _panel(point) == CROWD:
        return flash_crowd(asked.arrivals, shares, (end / 3, 2 * end / 3, CROWD_SHARE), drawn)
    return drifting(asked.arrivals, shares, end / DRIFT_MOVES, drawn, MAX_BATCH)


def _panel(point: Point) -> str:
    """Return the panel without its cost model."""
    return point.panel.partition(", cost ")[0]


def _run(point: Point, asked: Trace) -> SimulationResult:
    about = point.settings
    policy = paper_cluster(point.system, model_bytes(MODEL), about["gpus"], int(asked.ranks.max(initial=RANK)))
    adapters = ResidencyConfig(MAX_BATCH, LoadCost(**about["loads"]), about["host_adapters"])
    return simulate(asked, policy, StepCost(**about["cost"]), _panel(point) == PADDED, adapters=adapters)


def _capacity(paper: Path, point: Point, seed: int) -> float:
    """Simulate tokens per second while all GPUs are full, of another hour's requests that wait from the start."""
    hour = load(paper, point, seed + 1, count=point.settings["waiting"])
    waiting = Trace(np.zeros(len(hour.arrivals)), hour.lengths, hour.adapters, hour.ranks)
    result = _run(point, waiting)
    return while_full(result.first_token_s, result.tokens, point.settings["gpus"] * MAX_BATCH)


def while_full(first_token_s: NDArray[np.float64], tokens: NDArray[np.int64], places: int) -> float:
    """Average tokens per second from the first token that fills the last of ``places`` until nothing waits, at the last
    first token. With fewer than two requests per place the GPUs count as full from half of the first tokens on.
    """
    firsts = np.sort(first_token_s)
    start, end = int(firsts[min(places, len(firsts) // 2)]), int(firsts[-1])
    return float(tokens[start : max(start + 1, end)].mean())
