"""Extension: scheduling rules of a cluster side by side, simulated: Punica's, and those of production's routers.

Claim: Punica's rule, the GPU with the largest working set, needs the fewest GPUs. Newer systems place requests by load,
adapter or rank, and claim up to twice the throughput, half the GPUs, or fewer loads. Expected shape: spreading rules
take more GPUs; where adapters are many, rules that know where they are load fewer; and only kernels that pad every
adapter to the largest rank of a batch reward a placement by rank.

Panels: `paper's load` (rank 16, Skewed), and four of Zipf popularity with ranks 8 to 64: `mixed ranks`, the same under
kernels that pad, `flash crowd` (one cold adapter gets half of the requests for a third of the time) and `drift` (the
popular adapters change six times). Another `workload=` is the paper's load with its popularity, in a panel of its own.
Each with the paper's request rate on 16 GPUs, as Figure 13 has it, and with requests that all wait from the start:

    gpu_seconds, mean_active_gpus: GPU seconds in which a token came out, and GPUs per second
    capacity:     tokens per second while all GPUs are full and requests wait; `figure.waiting` above 32 per GPU
    p99_time_to_first_token, time_per_output_token: of the paper's rate
    loads_from_host, loads_from_disk: adapters loaded; load_wait: for loads, a request's mean
    ..._low, ..._high: the same over all `seeds`; the rows above are of the first

Panel `rules of a step`: rms and largest residual of rules on recorded decode steps with adapters (of `figure.loads`).
`by_rank`: as here, a time for each rank; `blis`: inference-sim's `1 + K6 / K7 * adapters`, each with a coefficient
fitted to these steps; `blis_defaults`: with the coefficient that it comes with.

A GPU has a slot for each of 32 adapters, its host memory `host_adapters`, disk the rest; loads take what `figure.loads`
recorded, beside steps, which take what the cost model of Figure 13 says (the paper's A100, or `figure.cost`). A rule
sees only GPUs with room, since the queue is the cluster's: no request waits for a home.

Cost on one core: half a minute at scale=laptop, for half a minute of the hour; half an hour at scale=paper.
"""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.cluster.blis import DEFAULT_TIERS, recorded_steps, rule
from experiments.cluster.costs import chosen_cost, load_cost, model_bytes, panel_of
from experiments.cluster.hour import DURATION_S, RANK, paper_cluster, paper_hour
from experiments.cluster.served import CAPACITY, FROM_DISK, FROM_HOST, ServedHour, over_seeds, summary
from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import REPOSITORY, Count, Counts
from experiments.harness.settings import folders
from experiments.simulator import LoadCost, ResidencyConfig, SimulationResult, StepCost, Trace, simulate
from experiments.workload import MAX_BATCH, adapter_shares, drifting, flash_crowd, independent_seeds

MODEL = "llama2-7b"
KEPT = ("gpu_seconds", "mean_active_gpus", "max_active_gpus", "p99_time_to_first_token", "mean_throughput")
STEP_RULES = "rules of a step"
LOAD, MIXED, PADDED, CROWD, DRIFT = "paper's load", "mixed ranks", "mixed ranks, padded", "flash crowd", "drift"
"""Panels of loads. All but the first have Zipf popularity and several ranks."""
CROWD_SHARE = 0.5
"""Share of the requests in the middle third that name one adapter, the least popular one before and after."""
DRIFT_MOVES = 6
"""Times that popularity moves on, each time by `MAX_BATCH` adapters: no slot has an adapter that is popular next."""


class PlacementConf(FigureConf):
    ranks: Counts = [8, 16, 32, 64]  # of adapters under Zipf, equally likely
    gpus: Count = 16
    cost: str = "a100"  # cost model of the steps, as in Figure 13
    loads: str = "h200"  # machine whose recorded loads of adapters are taken
    adapters: Count = 1000  # of which one is asked for by a flash crowd, or under drift
    host_adapters: int = Field(128, ge=32)  # in a host's memory; slots have 32, disk the rest
    seeds: Count  # of every simulation
    seconds: int = Field(ge=1, le=3600)  # of Figure 13's hour, around its peak
    waiting: Count  # requests queued at once


class Placement(Experiment):
    """GPUs, throughput and latency of each rule (the systems) per load (the panels)."""

    name, figure, order, conf = "ext_placement", "ext placement", 292, PlacementConf
    reads = ("workload",)
    clock = "host_clock"
    passes, watched = 1, False  # a simulation repeats itself
    version = 3  # with loads of adapters, around the hour's peak, full GPUs by first tokens

    def points(self, cfg: Config) -> list[Point]:
        panels = {"Skewed": (LOAD,), "Zipf": (MIXED, PADDED, CROWD, DRIFT)}
        figure, places = cast(PlacementConf, cfg.figure), folders(cfg)
        names = ("gpus", "seconds", "waiting", "seeds", "adapters", "host_adapters")
        about = {
            **{name: getattr(figure, name) for name in names},
            "ranks": list(figure.ranks),
            "cost": asdict(chosen_cost(figure.cost, MODEL, places.paper, places.recorded_rows.parent)),
            # of committed rows, wherever those of this run go
            "loads": asdict(load_cost(REPOSITORY / "results", figure.loads, MODEL)),
        }
        steps = recorded_steps(REPOSITORY / "results", figure.loads, MODEL)
        known = [rank for rank in steps if rank in DEFAULT_TIERS]
        ranks = [Point(STEP_RULES, model=MODEL, rank=rank, settings={"steps": steps[rank].tolist()}) for rank in known]
        return ranks + [
            Point(panel_of(panel, figure.cost), rule, workload, MODEL, settings=about)
            for workload in cfg.workload.names
            for panel in panels.get(workload, (f"{LOAD}, {workload}",))
            for rule in cfg.system.names
        ]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        if point.panel == STEP_RULES:
            return step_rules(np.array(point.settings["steps"]), cast(int, point.rank))
        paper = folders(cfg).paper
        return over_seeds(point.settings["seeds"], lambda seed: served(paper, point, seed))


def step_rules(steps: NDArray[np.float64], rank: int) -> list[Reading]:
    """Compute the errors of rules for what adapters add to recorded ``steps``: by rank, and BLIS's."""
    found = {
        "by_rank": rule(steps, relative=False), "blis": rule(steps, relative=True),
        "blis_defaults": rule(steps, relative=True, each=DEFAULT_TIERS[rank]),
    }  # fmt: skip
    parts = {f"{part}_{name}": getattr(one, part) for name, (_, one) in found.items() for part in ("rms", "largest")}
    return [
        Reading(f"residual_{name}", value, "fraction", kind="simulated", cost_model=STEP_RULES)
        for name, value in parts.items()
    ]


def served(paper: Path, point: Point, seed: int) -> list[Reading]:
    """Simulate the rule of ``point`` on the load of its panel, and with requests that all wait."""
    about = point.settings
    asked = load(paper, point, seed, seconds=about["seconds"])
    result = _run(point, asked)
    hour = ServedHour.simulated(asked, result, about["seconds"])
    each = (result.finish_s - result.first_token_s) / np.maximum(asked.lengths.output - 1, 1)
    full = load(paper, point, seed + 1, count=about["waiting"])
    waiting = _run(point, Trace(np.zeros(len(full.arrivals)), full.lengths, full.adapters, full.ranks))
    found = {
        "time_per_output_token": (1e3 * each.mean(), "ms"),
        CAPACITY: (while_full(waiting.first_token_s, waiting.tokens, about["gpus"] * MAX_BATCH), "token/s"),
        FROM_HOST: (result.loads_from_host, "loads"),
        FROM_DISK: (result.loads_from_disk, "loads"),
        "load_wait": (1e3 * result.load_wait_s / max(1, len(asked.arrivals)), "ms"),
    }
    kept = [reading for reading in summary(hour) if reading.metric in KEPT]
    return [*kept, *(hour.reading(name, value, unit) for name, (value, unit) in found.items())]


def load(paper: Path, point: Point, seed: int, seconds: float = DURATION_S, count: int | None = None) -> Trace:
    """The requests of a panel: of ``seconds`` around the hour's peak, or its first ``count``."""
    panel = _panel(point)
    ranks = tuple(point.settings["ranks"]) if panel in (MIXED, PADDED, CROWD, DRIFT) else (RANK,)
    hour = _hour(paper, DURATION_S, seed, point.workload, ranks)
    start = (DURATION_S - seconds) / 2
    first, end = np.searchsorted(hour.arrivals, (start, start + seconds))
    if count and count > end:
        raise ConfigError(f"figure.waiting={count}, the hour has {end} requests: choose at most as many")
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
    shares = adapter_shares(point.workload, point.settings["adapters"])
    end = float(asked.arrivals[-1])
    drawn = independent_seeds(seed, 5)[-1]  # the fifth, behind those of the hour
    if _panel(point) == CROWD:
        return flash_crowd(asked.arrivals, shares, (end / 3, 2 * end / 3, CROWD_SHARE), drawn)
    return drifting(asked.arrivals, shares, end / DRIFT_MOVES, drawn, MAX_BATCH)


def _panel(point: Point) -> str:
    return point.panel.partition(", cost ")[0]


def _run(point: Point, asked: Trace) -> SimulationResult:
    about = point.settings
    policy = paper_cluster(point.system, model_bytes(MODEL), about["gpus"], int(asked.ranks.max(initial=RANK)))
    adapters = ResidencyConfig(MAX_BATCH, LoadCost(**about["loads"]), about["host_adapters"])
    return simulate(asked, policy, StepCost(**about["cost"]), _panel(point) == PADDED, adapters=adapters)


def while_full(first_token_s: NDArray[np.float64], tokens: NDArray[np.int64], places: int) -> float:
    """Tokens per second while ``places`` are full and requests wait; of few, from half of the first tokens on."""
    firsts = np.sort(first_token_s)
    start, end = int(firsts[min(places, len(firsts) // 2)]), int(firsts[-1])
    return float(tokens[start : max(start + 1, end)].mean())


EXPERIMENT = main(Placement, __name__)
