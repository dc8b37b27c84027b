"""Predicted p99 of the time to first token, of requests that arrive by the clock (rows of `ext_latency_under_load`).

The same requests arrive at the same times on a virtual clock. Loads below capacity are predicted; the others give the
cost of a step with a prompt beside its rows. An engine on a GPU works ahead.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.cluster.seeds import spanned
from experiments.cluster.windows import CONSTANT
from experiments.harness.counted import counted, frame_of
from experiments.harness.points import Reading
from experiments.harness.span import FEWEST_FOR_P99, Span
from experiments.measure.records import read_rows
from experiments.simulator import StepCost, Trace, simulate
from experiments.workload import RequestLengths, popularity, released_lengths, rescaled, stated_lengths
from punica.cluster import ClusterPolicy

FILE = "ext_latency_under_load"
P99 = "time_to_first_token_p99"
PREDICTED = ("offered_rate", "load", "requests", P99)
TOLD = ("decode_step", "prefill_step")
OTHER_SEED = 1000
"""Between seeds of arrivals; repeats of a load have the seeds between."""


@dataclass(frozen=True)
class Stream:
    """Stream that a machine was loaded with, from the settings of `ext_latency_under_load`."""

    lengths: str
    requests: int
    max_len: int
    span: Span
    seed: int
    works_ahead: bool

    def arrivals(self, rate: float, repeat: int) -> NDArray[np.float64]:
        """Draw seconds at which requests arrive, ``rate`` of them per second."""
        return self.span.at(rate).arrivals(rate, self.seed + repeat)

    def counts(self, rate: float, arrivals: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which of the arrivals are measured."""
        return self.span.at(rate).counts(arrivals)

    @property
    def drawn(self) -> RequestLengths:
        """Lengths of the different requests, which arrive in a cycle."""
        return rescaled((stated_lengths if self.lengths == "stated" else released_lengths)(self.requests), self.max_len)


@dataclass(frozen=True)
class Load:
    """A load of Punica: requests per second (``rate``), p99 of their time to first token in seconds, and the stream.

    ``joining``: seconds by which steps with a prompt exceeded others, at each rate that is not predicted. ``others``:
    p99 of the machine's other predicted loads of the model.
    """

    panel: str
    workload: str
    repeat: int
    rate: float
    p99: float
    max_batch_size: int
    rank: int
    stream: Stream
    joining: tuple[float, ...]
    others: tuple[float, ...] = ()


@cache
def recorded_loads(results: Path) -> dict[tuple[str, str], list[Load]]:
    """Read machine and model -> loads, of the folders of ``results`` that have some."""
    folders = sorted(path for path in results.glob("*") if (path / f"{FILE}.csv").exists())
    return {(folder.name, model): found for folder in folders for model, found in read_loads(folder).items()}


def read_loads(folder: Path) -> dict[str, list[Load]]:
    """Read model -> loads of Punica below its capacity, with a p99, whose number of requests agrees with the settings
    beside the rows (those of the last command).
    """
    stream = stream_of(json.loads((folder / f"{FILE}.json").read_text(encoding="utf-8")))
    cells: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    shapes = {}
    rows = counted(frame_of(read_rows(folder / f"{FILE}.csv")))
    chosen = rows["system"].eq("punica") & rows["metric"].isin((*PREDICTED, *TOLD)) & ~rows["disturbed"]
    numbers = ["repeat", "batch_size", "rank"]
    rows[numbers] = rows[numbers].fillna(0).astype(int)
    row: Any
    for row in rows[chosen].itertuples():
        key = row.model, row.panel, row.workload, row.repeat
        cells[key][row.metric] = row.value
        shapes[key] = row.batch_size, row.rank
    longer: dict[str, list[float]] = defaultdict(list)
    for (model, panel, *_), value in cells.items():
        if set(TOLD) <= set(value) and not _is_predicted(panel, value):
            longer[model].append((value["prefill_step"] - value["decode_step"]) / 1e3)
    found: dict[str, list[Load]] = defaultdict(list)
    for (model, panel, workload, repeat), value in cells.items():
        if _is_predicted(panel, value):
            about = value["offered_rate"], value[P99] / 1e3, *shapes[model, panel, workload, repeat]
            load = Load(panel, workload, repeat, *about, stream, tuple(sorted(longer[model])))
            sent = stream.counts(load.rate, stream.arrivals(load.rate, repeat)).sum()
            if FEWEST_FOR_P99 <= value["requests"] == sent:
                found[model].append(load)
    return {model: [replace(one, others=_others(one, known)) for one in known] for model, known in found.items()}


def _others(load: Load, known: Sequence[Load]) -> tuple[float, ...]:
    """P99 of the loads in ``known`` of other rates, which a constant could know."""
    return tuple(one.p99 for one in known if one.panel != load.panel)


def _is_predicted(panel: str, value: Mapping[str, float]) -> bool:
    return panel.startswith("load ") and set(PREDICTED) <= set(value) and value["load"] < 1


def stream_of(settings: Mapping) -> Stream:
    """Build the stream from the settings beside the rows."""
    figure = settings["figure"]
    return Stream(
        **{name: figure[name] for name in ("lengths", "requests", "max_len")},
        span=Span(**{name: figure[name] for name in ("warm", "seconds", "drain", "least", "longest")}),
        seed=settings["adapters"]["seed"],
        works_ahead=settings["hardware"]["device"] != "cpu",
    )


def first_token_readings(load: Load, cost: StepCost, seeds: int = 1) -> list[Reading]:
    """Return the simulated p99, its span over other arrivals of the same rate, and its error; `_low` and `_high` of
    the error: by single rates' cost of steps with a prompt; `_of_a_constant`: of the mean of the other loads' p99.

    Near capacity a few percent of a step decide the length of the queue.
    """
    costs = {"": cost}
    if told := load.joining:
        cases = {"": median(told), "_low": told[0], "_high": told[-1]}
        costs = {name: with_joins(load, cost, seconds) for name, seconds in cases.items()}
    waits = {name: p99_first_token(load, one) for name, one in costs.items()}
    if load.others:
        waits[CONSTANT] = fmean(load.others)
    about: dict[str, Any] = {"kind": "simulated", "cost_model": costs[""].name}

    def run(place: int) -> list[Reading]:
        stream = replace(load.stream, seed=load.stream.seed + place * OTHER_SEED)
        wait = p99_first_token(replace(load, stream=stream), costs[""]) if place else waits[""]
        return [Reading("p99_first_token", 1e3 * wait, "ms", **about)]

    return [
        *spanned([run(place) for place in range(seeds)]),
        *(Reading(f"p99_error{name}", wait / load.p99 - 1, "fraction", **about) for name, wait in waits.items()),
    ]


def with_joins(load: Load, cost: StepCost, seconds: float) -> StepCost:
    """Give ``cost`` steps with a prompt that take ``seconds`` more than others, the prompt's rows included."""
    rows = float(load.stream.drawn.prompt.mean())
    name = f"{cost.name}, steps with a prompt of other loads"
    return replace(cost, name=name, join=max(0.0, seconds - cost.prefill * rows))


def p99_first_token(load: Load, cost: StepCost) -> float:
    """Simulate the load on one GPU with enough KV cache: p99 of the seconds until the first token."""
    stream, size = load.stream, load.max_batch_size
    arrivals, drawn = stream.arrivals(load.rate, load.repeat), stream.drawn
    count = len(arrivals)
    lengths = RequestLengths(np.resize(drawn.prompt, count), np.resize(drawn.output, count))
    adapters = np.resize(popularity(load.workload).requests(stream.requests) + 1, count)
    policy = ClusterPolicy(max_batch_size=size)
    policy.add_gpu("gpu", size * (policy.page_size + int((drawn.prompt + drawn.output).max())))
    trace = Trace(arrivals, lengths, adapters, np.full(count, load.rank))
    result = simulate(trace, policy, cost, works_ahead=stream.works_ahead, own_queue=True)
    waits = result.first_token_s - arrivals
    return float(np.quantile(waits[stream.counts(load.rate, arrivals)], 0.99))
