"""Figure 13's world on a virtual clock, and what else its cost models predict.

Panels: the hour; the same with slower steps; the stream of Figure 11 on one GPU; residuals of the cost models; recorded
windows of Figure 11, half of them predicted from the other half; and, with the same constant, first tokens of requests
that arrived by the clock.

Every simulation runs for some seeds, the slower steps for one: the first one's are the rows, `_mean`, `_low` and
`_high` are over all.

Slower steps: Figures 1 and 10 give an active GPU more tokens than Figure 13 shows. Every step is longer by that factor,
which is fitted to Figure 13, so this hour is a sensitivity and no prediction.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cluster.hour import DURATION_S, MEMORY_FRACTION, RANK, paper_cluster, paper_hour
from experiments.cluster.hour_numbers import Windows, number_readings, windows_of
from experiments.cluster.load_costs import FittedLoads, recorded_load_costs
from experiments.cluster.loads import Load, first_token_readings, recorded_loads
from experiments.cluster.recorded import chosen_cost, panel_of, recorded_costs, recorded_windows
from experiments.cluster.seeds import over_seeds
from experiments.cluster.served import (
    COSTS,
    FIRST_TOKEN,
    HOUR,
    SLOWED,
    STREAM,
    WINDOWS,
    ServedHour,
    at_the_peak,
    readings,
    summary,
)
from experiments.cluster.step_costs import FittedCost, model_bytes, paper_a100
from experiments.cluster.windows import fitted_to, halves, predicted_half
from experiments.facts.models import MODELS
from experiments.facts.paper import read_figure
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from experiments.harness.settings import folders
from experiments.simulator import LoadCost, Residuals, SimulationResult, StepCost, Trace, simulate
from experiments.workload import MAX_BATCH, PAPER_WORKLOADS, RELEASED_SEED, popularity, released_lengths
from punica.cluster import ClusterPolicy

MODEL = MODELS["7B"][0]
PAPER_GPU_BYTES = 80e9
"""Memory of testbed 1, which Figure 11 was measured on."""


def points(cfg: Config) -> list[Point]:
    """List the hour under each chosen scheduling rule, then the rest."""
    figure, paper = cfg.figure, folders(cfg).paper
    seeds = {"seeds": figure.seeds}  # type: ignore[attr-defined]
    about = {"gpus": figure.gpus, "seconds": figure.seconds, **seeds}  # type: ignore[attr-defined]
    named: str = figure.cost  # type: ignore[attr-defined]
    panel = panel_of(HOUR, named)
    found = [_point(panel, rule, "Skewed", MODEL, _chosen(cfg), **about) for rule in cfg.system.names]
    # the published peak is in the middle of the hour
    if panel == HOUR and figure.seconds >= DURATION_S:  # type: ignore[attr-defined]
        found.append(_point(SLOWED, "punica", "Skewed", MODEL, _chosen(cfg), **{**about, "seeds": 1}))
    for role in ("7B", "13B"):
        for workload in PAPER_WORKLOADS:
            cost, requests = _paper_cost(paper, role).cost, figure.requests  # type: ignore[attr-defined]
            found.append(_point(STREAM, "punica", workload, MODELS[role][0], cost, requests=requests, **seeds))
    for machine, fitted in _costs(cfg).items():
        loads = {"loads": asdict(_load_costs(cfg)[machine].cost)} if machine in _load_costs(cfg) else {}
        found.append(_point(COSTS, machine[0], "", machine[1], fitted.cost, **loads))
    for hardware, model, windows in _windows(cfg):
        cost = _costs(cfg)[hardware, model].cost
        found.append(_point(WINDOWS, hardware, "", model, cost, windows=[asdict(window) for window in windows]))
    for hardware, model, load, cost in _loads(cfg):
        panel = f"{FIRST_TOKEN}, {load.panel}, repeat {load.repeat}"
        found.append(_point(panel, hardware, load.workload, model, cost, load=asdict(load), **seeds))
    return found


def measure(cfg: Config, point: Point) -> list[Reading]:
    """Simulate or predict the panel of ``point``."""
    paper = folders(cfg).paper
    if point.panel.startswith(HOUR):
        return _hours(paper, _chosen(cfg), point)
    if point.panel == STREAM:
        cost = _paper_cost(paper, next(role for role, names in MODELS.items() if point.model in names)).cost
        return over_seeds(
            point.settings["seeds"],
            lambda seed: [_simulated("throughput", stream_throughput(point, cost, seed), "token/s", cost)],
        )
    if point.panel == COSTS:
        key = point.system, point.model
        loads = load_readings(_load_costs(cfg)[key]) if key in _load_costs(cfg) else []
        return [*cost_readings(_costs(cfg)[key]), *loads]
    if point.panel.startswith(FIRST_TOKEN):
        asked = point.settings["load"]
        load, cost = next((load, cost) for *_, load, cost in _loads(cfg) if asdict(load) == asked)
        return first_token_readings(load, cost, point.settings["seeds"])
    machine = point.system, point.model
    windows = next(windows for hardware, model, windows in _windows(cfg) if (hardware, model) == machine)
    return predicted_half(windows, _costs(cfg)[machine].cost)


def _hours(paper: Path, cost: StepCost, point: Point) -> list[Reading]:
    """Return the hour of the first seed, with mean and span of its totals over all seeds."""
    about = point.settings["seconds"], point.settings["gpus"], point.system
    factor = slowness(_hour(paper, cost, *about, RELEASED_SEED), paper) if point.panel == SLOWED else 1.0
    if point.panel == SLOWED:
        cost = slowed(cost, factor)

    def run(seed: int) -> list[Reading]:
        served = _hour(paper, cost, *about, seed)
        if point.panel == SLOWED:
            return slowed_readings(served, factor)
        told = readings(served) if seed == RELEASED_SEED else summary(served)
        return [*told, *number_readings(served)]

    return over_seeds(point.settings["seeds"], run)


def seen(asked: Trace, result: SimulationResult, seconds: float) -> ServedHour:
    """Convert a simulation to a served hour. GPUs are numbered from the one that the rule prefers, as in the paper."""
    return ServedHour(
        seconds, asked.arrivals, result.first_token_s, result.finish_s, result.tokens, result.batch[::-1],
        result.seconds_by_batch, "simulated", result.cost_model,
    )  # fmt: skip


def slowness(served: ServedHour, paper: Path) -> float:
    """Divide the tokens per second of an active GPU around the peak of ``served`` by the published ones."""
    ours, published = (
        at_the_peak(windows.speed, windows.active)[0]
        for windows in (windows_of(served), Windows.of(read_figure(paper, "13")))
    )
    return ours / published


def slowed(cost: StepCost, factor: float) -> StepCost:
    """Make every step of ``cost`` ``factor`` times as long, and say so in its name."""
    return cost.slowed(factor, f"{cost.name}; every step {factor:.2f} times as long, fitted to Figure 13's peak")


def slowed_readings(served: ServedHour, factor: float) -> list[Reading]:
    """Return the totals of the slowed hour, and the factor."""
    about: dict[str, Any] = {"kind": served.kind, "cost_model": served.cost_model}
    return [Reading("step_time_factor", factor, "ratio", **about), *summary(served)]


def stream_throughput(point: Point, cost: StepCost, seed: int = RELEASED_SEED) -> float:
    """Simulate the released requests, all waiting from the start, on one GPU of testbed 1: tokens per second."""
    count = point.settings["requests"]
    lengths = released_lengths(count, seed=seed)
    adapters = popularity(point.workload).requests(count, seed=seed) + 1
    asked = Trace(np.zeros(count), lengths, adapters, 0 * adapters + RANK)
    policy = ClusterPolicy()
    pages = model_bytes(point.model).pages(MEMORY_FRACTION * PAPER_GPU_BYTES, policy.page_size, MAX_BATCH, RANK)
    policy.add_gpu("gpu", pages)
    return lengths.total_tokens / float(simulate(asked, policy, cost).finish_s.max())


def cost_readings(fitted: FittedCost) -> list[Reading]:
    """Return the coefficients (microseconds), and the residuals by kind of row, as parts of the time."""
    return _fit_readings("cost", fitted.cost, fitted.residuals)


def load_readings(fitted: FittedLoads) -> list[Reading]:
    """Return the same of a cost model of adapter loads."""
    return _fit_readings("load", fitted.cost, fitted.residuals)


def _fit_readings(what: str, cost: StepCost | LoadCost, residuals: Mapping[str, Residuals]) -> list[Reading]:
    found = [
        _simulated(f"{what}_{name}", 1e6 * value, "us", cost) for name, value in asdict(cost).items() if name != "name"
    ]
    for kind, one in residuals.items():
        for name, value in (("rms", one.rms), ("median", one.median), ("largest", one.largest)):
            found.append(_simulated(f"residual_{name}_{kind}", value, "fraction", cost))
    return found


def _point(panel: str, system: str, workload: str, model: str, cost: StepCost | None = None, **settings: Any) -> Point:
    """Build a point whose settings hold the cost model."""
    about = {**settings, **({} if cost is None else {"cost": asdict(cost)})}
    rank = RANK if workload else None
    return Point(panel, system, workload, model, MAX_BATCH if workload else None, None, rank, about)


def _simulated(metric: str, value: float, unit: str, cost: StepCost | LoadCost) -> Reading:
    return Reading(metric, value, unit, kind="simulated", cost_model=cost.name)


def _chosen(cfg: Config) -> StepCost:
    places, figure = folders(cfg), cfg.figure
    return chosen_cost(figure.cost, MODEL, places.paper, places.recorded_rows.parent)  # type: ignore[attr-defined]


@cache
def _hour(paper: Path, cost: StepCost, seconds: float, gpus: int, rule: str, seed: int) -> ServedHour:
    asked = paper_hour(paper, seconds, seed)
    return seen(asked, simulate(asked, paper_cluster(rule, model_bytes(MODEL), gpus), cost), seconds)


@cache
def _paper_cost(paper: Path, role: str) -> FittedCost:
    return paper_a100(paper, role)


def _costs(cfg: Config) -> dict[tuple[str, str], FittedCost]:
    """Cost models of the paper's A100 and of every machine with recorded rows that give one."""
    places = folders(cfg)
    found = {("a100-80g", MODELS[role][0]): _paper_cost(places.paper, role) for role in ("7B", "13B")}
    return {**found, **recorded_costs(places.recorded_rows.parent)}


def _load_costs(cfg: Config) -> dict[tuple[str, str], FittedLoads]:
    return recorded_load_costs(folders(cfg).recorded_rows.parent)


def _windows(cfg: Config) -> Iterator[tuple[str, str, list[Any]]]:
    """Hardware, model and windows of Figure 11 of every machine that has recorded some beside a cost model."""
    known = _costs(cfg)
    for (hardware, model), windows in recorded_windows(folders(cfg).recorded_rows.parent).items():
        if (hardware, model) in known:
            yield hardware, model, windows


def _loads(cfg: Config) -> Iterator[tuple[str, str, Load, StepCost]]:
    """Hardware, model, load and cost model of every machine that was loaded by the clock; the cost model has the
    constant of half of the machine's windows, if any.
    """
    windows = {(hardware, model): found for hardware, model, found in _windows(cfg)}
    for key, loads in recorded_loads(folders(cfg).recorded_rows.parent).items():
        if key in _costs(cfg):
            cost = _costs(cfg)[key].cost
            cost = fitted_to(halves(windows[key])[0], cost) if key in windows else cost
            yield from ((*key, load, cost) for load in loads)
