"""Figure 13's world on a virtual clock, Figure 11's stream on one GPU, and residuals of cost models. Rows are of the
first seed; `_mean`, `_low`, `_high` of all.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cluster import costs, served
from experiments.cluster.costs import Fitted
from experiments.cluster.hour import MEMORY_FRACTION, NUM_GPUS, RANK, paper_cluster, paper_hour
from experiments.cluster.served import HOUR, SIMULATED, ServedHour, over_seeds, readings, summary
from experiments.facts.systems import MODELS
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from experiments.harness.settings import folders
from experiments.simulator import LoadCost, StepCost, Trace, simulate
from experiments.workload import MAX_BATCH, PAPER_WORKLOADS, RELEASED_SEED, popularity, released_lengths
from punica.cluster import ClusterPolicy

MODEL = MODELS["7B"][0]
PAPER_GPU_BYTES = 80e9  # memory of testbed 1, which Figure 11 was measured on
ServedBy = Callable[[StepCost, int], ServedHour]  # cost of a step, and a seed -> the hour


def points(cfg: Config) -> list[Point]:
    return [point for point, _ in _panels(cfg)]


def measure(cfg: Config, point: Point) -> list[Reading]:
    return next(run for one, run in _panels(cfg) if one.key() == point.key())()


def _panels(cfg: Config) -> Iterator[tuple[Point, Callable[[], list[Reading]]]]:
    figure: Any = cfg.figure
    paper, results = folders(cfg).paper, folders(cfg).recorded_rows.parent
    cost = costs.chosen_cost(figure.cost, MODEL, paper, results)
    seeds = {"seeds": figure.seeds}
    about = {"gpus": figure.gpus, "seconds": figure.seconds}
    panel = costs.panel_of(HOUR if figure.gpus == NUM_GPUS else f"{HOUR}, {figure.gpus} GPUs", figure.cost)
    for rule in cfg.system.names:
        hour = partial(_hour, paper, rule=rule, **about)
        run = partial(over_seeds, figure.seeds, partial(hour_readings, hour, cost, figure.gpus == NUM_GPUS))
        yield _point(panel, rule, "Skewed", MODEL, cost, **about, **seeds), run
    for role in ("7B", "13B"):
        for workload in PAPER_WORKLOADS:
            one, steps = MODELS[role][0], costs.paper_a100(paper, role).cost
            run = partial(over_seeds, figure.seeds, partial(stream_readings, one, workload, figure.requests, steps))
            yield _point(served.STREAM, "punica", workload, one, steps, requests=figure.requests, **seeds), run
    loads = costs.recorded_load_costs(results)
    papers = {("a100-80g", MODELS[role][0]): costs.paper_a100(paper, role) for role in ("7B", "13B")}
    for machine, fitted in {**papers, **costs.recorded_costs(results)}.items():
        fits: dict[str, Fitted[StepCost] | Fitted[LoadCost]] = {"cost": fitted}
        fits |= {"load": loads[machine]} if machine in loads else {}
        settings = {"loads": asdict(loads[machine].cost)} if machine in loads else {}
        yield _point(served.COSTS, machine[0], "", machine[1], fitted.cost, **settings), partial(fit_readings, fits)


def _point(panel: str, system: str, workload: str, model: str, cost: StepCost, **settings: Any) -> Point:
    batch, rank = (MAX_BATCH, RANK) if workload else (None, None)
    return Point(panel, system, workload, model, batch, None, rank, {**settings, "cost": asdict(cost)})


@cache
def _hour(paper: Path, cost: StepCost, seed: int, *, seconds: float, gpus: int, rule: str) -> ServedHour:
    asked = paper_hour(paper, seconds, seed, load=gpus / NUM_GPUS)
    result = simulate(asked, paper_cluster(rule, costs.model_bytes(MODEL), gpus), cost)
    return ServedHour.simulated(asked, result, seconds)


def hour_readings(hour: ServedBy, cost: StepCost, series: bool, seed: int) -> list[Reading]:
    """Return the hour of ``seed``, the ``series`` over time of the first seed alone."""
    found = hour(cost, seed)
    told = readings(found) if series and seed == RELEASED_SEED else summary(found)
    return [*told, *served.number_readings(found)]


def stream_readings(model: str, workload: str, count: int, cost: StepCost, seed: int = RELEASED_SEED) -> list[Reading]:
    """Simulate the released requests, all waiting from the start, on one GPU of testbed 1: tokens per second."""
    lengths = released_lengths(count, seed=seed)
    adapters = popularity(workload).requests(count, seed=seed) + 1
    policy = ClusterPolicy()
    pages = costs.model_bytes(model).pages(MEMORY_FRACTION * PAPER_GPU_BYTES, policy.page_size, MAX_BATCH, RANK)
    policy.add_gpu("gpu", pages)
    result = simulate(Trace(np.zeros(count), lengths, adapters, np.full(count, RANK)), policy, cost)
    value = lengths.total_tokens / float(result.finish_s.max())
    return [Reading("throughput", value, "token/s", kind=SIMULATED, cost_model=cost.name)]


def fit_readings(fits: dict[str, Fitted[StepCost] | Fitted[LoadCost]]) -> list[Reading]:
    """Return the coefficients (microseconds), and the residuals by kind of row, as parts of the time."""
    found = []
    for what, fitted in fits.items():
        cost = asdict(fitted.cost)
        name = cost.pop("name")
        lines = [(f"{what}_{key}", 1e6 * value, "us") for key, value in cost.items()]
        for kind, one in fitted.residuals.items():
            lines += [(f"residual_{part}_{kind}", getattr(one, part), "fraction") for part in ("rms", "largest")]
        found += [Reading(*line, kind=SIMULATED, cost_model=name) for line in lines]
    return found
