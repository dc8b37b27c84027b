"""Requests that arrive by the clock on one GPU (rows of `ext_latency_under_load`): the p99 of their first tokens' wait,
simulated with a cost model that never saw them.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from experiments.harness.points import Reading
from punica.cluster import ClusterPolicy, StepCost, Trace, simulate
from punica.measure.records import read_rows
from punica.workload import RequestLengths, poisson_arrivals, popularity, released_lengths, rescaled, stated_lengths

FILE = "ext_latency_under_load"
P99 = "time_to_first_token_p99"
NEEDED = ("offered_rate", "load", P99)
REQUESTS = 4000
"""Simulated ones, so that one in a hundred is many."""
SEED = 0


@dataclass(frozen=True)
class Load:
    """Requests per second of ``workload`` that Punica was offered, the p99 of their time to first token in seconds, and
    what the stream was made of.
    """

    panel: str
    workload: str
    repeat: int
    rate: float
    p99: float
    max_batch_size: int
    rank: int
    lengths: str
    requests: int
    max_len: int


@cache
def recorded_loads(results: Path) -> dict[tuple[str, str], list[Load]]:
    """Machine and model -> loads, of the folders of ``results`` that have some."""
    folders = sorted(path for path in results.glob("*") if (path / f"{FILE}.csv").exists())
    return {(folder.name, model): found for folder in folders for model, found in read_loads(folder).items()}


def read_loads(folder: Path) -> dict[str, list[Load]]:
    """Model -> loads of Punica below its capacity: beyond it a queue is as long as the run."""
    stream = json.loads((folder / f"{FILE}.json").read_text(encoding="utf-8"))["figure"]
    made = {name: stream[name] for name in ("lengths", "requests", "max_len")}
    cells: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    shapes = {}
    for row in read_rows(folder / f"{FILE}.csv"):
        if row.system == "punica" and row.metric in NEEDED and row.panel.startswith("load ") and not row.disturbed:
            key = row.model, row.panel, row.workload, row.repeat or 0
            cells[key][row.metric] = row.value
            shapes[key] = row.batch_size or 0, row.rank or 0
    found: dict[str, list[Load]] = defaultdict(list)
    for (model, panel, workload, repeat), value in cells.items():
        if set(NEEDED) <= set(value) and value["load"] < 1:
            batch, rank = shapes[model, panel, workload, repeat]
            p99 = value[P99] / 1e3
            found[model].append(Load(panel, workload, repeat, value["offered_rate"], p99, batch, rank, **made))
    return dict(found)


def first_token_readings(load: Load, cost: StepCost) -> list[Reading]:
    """The p99 that a simulation gives, and how far it is from the measured one."""
    seconds = p99_first_token(cost, load.rate, lengths_of(load), load.workload, load.rank, SEED, load.max_batch_size)
    about = {"kind": "simulated", "cost_model": cost.name}
    return [
        Reading("p99_first_token", 1e3 * seconds, "ms", **about),
        Reading("p99_error", seconds / load.p99 - 1, "fraction", **about),
    ]


def lengths_of(load: Load) -> RequestLengths:
    """`REQUESTS` requests, those of the load's stream again and again."""
    drawn = (stated_lengths if load.lengths == "stated" else released_lengths)(load.requests)
    drawn = rescaled(drawn, load.max_len)
    return RequestLengths(np.resize(drawn.prompt, REQUESTS), np.resize(drawn.output, REQUESTS))


def p99_first_token(
    cost: StepCost, rate: float, lengths: RequestLengths, workload: str, rank: int, seed: int, max_batch_size: int
) -> float:
    """Seconds until the first token that 99 of 100 requests see on one GPU, when they arrive at ``rate`` per second.

    The KV cache is as large as it has to be.
    """
    count = len(lengths)
    arrivals = poisson_arrivals(rate, 2 * count / rate, seed)[:count]
    if len(arrivals) < count:
        raise ValueError(f"{len(arrivals)} of {count} requests arrived in twice their time; use another seed")
    adapters = popularity(workload).requests(count, seed=seed) + 1
    policy = ClusterPolicy(max_batch_size=max_batch_size)
    longest = int((lengths.prompt + lengths.output).max())
    policy.add_gpu("gpu", max_batch_size * (policy.page_size + longest))
    result = simulate(Trace(arrivals, lengths, adapters, np.full(count, rank)), policy, cost)
    return float(np.quantile(result.first_token_s - arrivals, 0.99))
