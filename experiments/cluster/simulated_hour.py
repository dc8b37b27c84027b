"""Figure 13's world on a virtual clock, and what else its cost models predict.

Panels: the hour; the same with slower steps; the stream of Figure 11 on one GPU; residuals of the cost models; recorded
windows of Figure 11, half of them predicted from the other half; and, with the same constant, first tokens of requests
that arrived by the clock. Of a cluster of another size than the paper's, with as much more load, the hour's totals
alone.

Every simulation runs for some seeds, the slower steps for one: the first one's are the rows, `_mean`, `_low` and
`_high` are over all.

Slower steps: Figures 1 and 10 give an active GPU more tokens than Figure 13 shows. Every step is longer by that factor,
which is fitted to Figure 13, so this hour is a sensitivity and no prediction.
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cluster.costs import (
    Fitted,
    chosen_cost,
    model_bytes,
    panel_of,
    paper_a100,
    recorded_costs,
    recorded_load_costs,
)
from experiments.cluster.hour import DURATION_S, MEMORY_FRACTION, NUM_GPUS, RANK, paper_cluster, paper_hour
from experiments.cluster.hour_numbers import Windows, number_readings, windows_of
from experiments.cluster.predicted import (
    Load,
    first_token_readings,
    fitted_to,
    predicted_half,
    recorded_loads,
    recorded_windows,
)
from experiments.cluster.served import (
    COSTS,
    FIRST_TOKEN,
    HOUR,
    SIMULATED,
    SLOWED,
    STREAM,
    WINDOWS,
    ServedHour,
    over_seeds,
    readings,
    summary,
)
from experiments.facts.paper import read_figure
from experiments.facts.systems import MODELS
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from experiments.harness.settings import folders
from experiments.simulator import LoadCost, SimulationResult, StepCost, Trace, simulate
from experiments.workload import MAX_BATCH, PAPER_WORKLOADS, RELEASED_SEED, popularity, released_lengths
from punica.cluster import ClusterPolicy

MODEL = MODELS["7B"][0]
PAPER_GPU_BYTES = 80e9
"""Memory of testbed 1, which Figure 11 was measured on."""


def points(cfg: Config) -> list[Point]:
    """List the hour under each chosen scheduling rule, then the rest."""
    figure: Any = cfg.figure
    paper, results, chosen = _places(cfg)
    seeds = {"seeds": figure.seeds}
    about = {"gpus": figure.gpus, "seconds": figure.seconds, **seeds}
    panel = panel_of(HOUR if figure.gpus == NUM_GPUS else f"{HOUR}, {figure.gpus} GPUs", figure.cost)
    found = [_point(panel, rule, "Skewed", MODEL, chosen, **about) for rule in cfg.system.names]
    # the published peak is in the middle of the hour
    if panel == HOUR and figure.seconds >= DURATION_S:
        found.append(_point(SLOWED, "punica", "Skewed", MODEL, chosen, **{**about, "seeds": 1}))
    for role in ("7B", "13B"):
        for workload in PAPER_WORKLOADS:
            cost = paper_a100(paper, role).cost
            found.append(_point(STREAM, "punica", workload, MODELS[role][0], cost, requests=figure.requests, **seeds))
    costs, loads = _costs(paper, results), recorded_load_costs(results)
    for machine, fitted in costs.items():
        beside = {"loads": asdict(loads[machine].cost)} if machine in loads else {}
        found.append(_point(COSTS, machine[0], "", machine[1], fitted.cost, **beside))
    for machine, windows in recorded_windows(results).items():
        if machine in costs:
            told = [asdict(window) for window in windows]
            found.append(_point(WINDOWS, machine[0], "", machine[1], costs[machine].cost, windows=told))
    for hardware, model, load, cost in _loads(paper, results):
        panel = f"{FIRST_TOKEN}, {load.panel}, repeat {load.repeat}"
        found.append(_point(panel, hardware, load.workload, model, cost, load=asdict(load), **seeds))
    return found


def measure(cfg: Config, point: Point) -> list[Reading]:
    """Simulate or predict the panel of ``point``."""
    paper, results, chosen = _places(cfg)
    machine = point.system, point.model
    if point.panel.startswith(HOUR):
        return _hours(paper, chosen, point)
    if point.panel == STREAM:
        role = next(role for role, names in MODELS.items() if point.model in names)
        return over_seeds(
            point.settings["seeds"], lambda seed: stream_readings(point, paper_a100(paper, role).cost, seed)
        )
    if point.panel.startswith(FIRST_TOKEN):
        asked = point.settings["load"]
        load, cost = next((load, cost) for *_, load, cost in _loads(paper, results) if asdict(load) == asked)
        return first_token_readings(load, cost, point.settings["seeds"])
    fitted, loads = _costs(paper, results)[machine], recorded_load_costs(results)
    if point.panel == WINDOWS:
        return predicted_half(recorded_windows(results)[machine], fitted.cost)
    return [*fit_readings("cost", fitted), *(fit_readings("load", loads[machine]) if machine in loads else [])]


def _places(cfg: Config) -> tuple[Path, Path, StepCost]:
    """Return the paper's results, the recorded rows of all machines, and the chosen steps."""
    places, figure = folders(cfg), cfg.figure
    results = places.recorded_rows.parent
    return places.paper, results, chosen_cost(figure.cost, MODEL, places.paper, results)  # type: ignore[attr-defined]


def _costs(paper: Path, results: Path) -> Mapping[tuple[str, str], Fitted[StepCost]]:
    """Cost models of the paper's A100 and of every machine with recorded rows that give one."""
    papers = {("a100-80g", MODELS[role][0]): paper_a100(paper, role) for role in ("7B", "13B")}
    return {**papers, **recorded_costs(results)}


def _loads(paper: Path, results: Path) -> list[tuple[str, str, Load, StepCost]]:
    """Hardware, model, load and cost model of every machine that was loaded by the clock; the cost model has the
    constant of half of the machine's windows, if any.
    """
    costs, windows, found = _costs(paper, results), recorded_windows(results), []
    for key, loads in recorded_loads(results).items():
        if key in costs:
            cost = fitted_to(windows[key], costs[key].cost) if key in windows else costs[key].cost
            found += [(*key, load, cost) for load in loads]
    return found


def _point(panel: str, system: str, workload: str, model: str, cost: StepCost, **settings: Any) -> Point:
    """Build a point whose settings hold the cost model."""
    batch, rank = (MAX_BATCH, RANK) if workload else (None, None)
    return Point(panel, system, workload, model, batch, None, rank, {**settings, "cost": asdict(cost)})


def _hours(paper: Path, cost: StepCost, point: Point) -> list[Reading]:
    """Return the hour of the first seed, with mean and span of its totals over all seeds."""
    about = point.settings["seconds"], point.settings["gpus"], point.system

    def run(seed: int) -> list[Reading]:
        served = _hour(paper, cost, *about, seed)
        if point.panel == SLOWED:
            factor = slowness(served, paper)
            return slowed_readings(_hour(paper, slowed(cost, factor), *about, seed), factor)
        whole = seed == RELEASED_SEED and about[1] == NUM_GPUS
        return [*(readings(served) if whole else summary(served)), *number_readings(served)]

    return over_seeds(point.settings["seeds"], run)


@cache
def _hour(paper: Path, cost: StepCost, seconds: float, gpus: int, rule: str, seed: int) -> ServedHour:
    asked = paper_hour(paper, seconds, seed, load=gpus / NUM_GPUS)
    return seen(asked, simulate(asked, paper_cluster(rule, model_bytes(MODEL), gpus), cost), seconds)


def seen(asked: Trace, result: SimulationResult, seconds: float) -> ServedHour:
    """Convert a simulation to a served hour. GPUs are numbered from the one that the rule prefers, as in the paper."""
    return ServedHour(
        seconds, asked.arrivals, result.first_token_s, result.finish_s, result.tokens, result.batch[::-1],
        result.seconds_by_batch, SIMULATED, result.cost_model,
    )  # fmt: skip


def slowness(served: ServedHour, paper: Path) -> float:
    """Divide the tokens per second of an active GPU around the peak of ``served`` by the published ones."""
    return windows_of(served).pace() / Windows.of(read_figure(paper, "13")).pace()


def slowed(cost: StepCost, factor: float) -> StepCost:
    """Make every step of ``cost`` ``factor`` times as long, and say so in its name."""
    return cost.slowed(factor, f"{cost.name}; every step {factor:.2f} times as long, fitted to Figure 13's peak")


def slowed_readings(served: ServedHour, factor: float) -> list[Reading]:
    """Return the totals of the slowed hour, and the factor."""
    return [served.reading("step_time_factor", factor, "ratio"), *summary(served)]


def stream_readings(point: Point, cost: StepCost, seed: int = RELEASED_SEED) -> list[Reading]:
    """Simulate the released requests, all waiting from the start, on one GPU of testbed 1: tokens per second."""
    count = point.settings["requests"]
    lengths = released_lengths(count, seed=seed)
    adapters = popularity(point.workload).requests(count, seed=seed) + 1
    asked = Trace(np.zeros(count), lengths, adapters, 0 * adapters + RANK)
    policy = ClusterPolicy()
    pages = model_bytes(point.model).pages(MEMORY_FRACTION * PAPER_GPU_BYTES, policy.page_size, MAX_BATCH, RANK)
    policy.add_gpu("gpu", pages)
    value = lengths.total_tokens / float(simulate(asked, policy, cost).finish_s.max())
    return [Reading("throughput", value, "token/s", kind=SIMULATED, cost_model=cost.name)]


def fit_readings(what: str, fitted: Fitted[StepCost] | Fitted[LoadCost]) -> list[Reading]:
    """Return the coefficients (microseconds), and the residuals by kind of row, as parts of the time."""
    cost = fitted.cost
    found = [(f"{what}_{name}", 1e6 * value, "us") for name, value in asdict(cost).items() if name != "name"]
    for kind, one in fitted.residuals.items():
        for name in ("rms", "median", "largest"):
            found.append((f"residual_{name}_{kind}", getattr(one, name), "fraction"))
    return [Reading(*one, kind=SIMULATED, cost_model=cost.name) for one in found]
