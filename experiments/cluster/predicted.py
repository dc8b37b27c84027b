"""Recorded rows that a machine's cost model predicts: windows of Figure 11, the half of which gives the constant for
the other half; and first tokens (p99) under loads below capacity, whose requests arrive on a virtual clock; the other
loads give the cost of a step with a prompt.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.cluster.costs import machines, rows_that_count
from experiments.cluster.served import SIMULATED, spanned
from experiments.harness.points import Reading
from experiments.simulator import StepCost, TimedStep, Trace, fit_step_cost, simulate
from experiments.workload import RequestLengths, popularity, released_lengths, rescaled, stated_lengths
from experiments.workload.arrivals import FEWEST_FOR_P99, Span
from punica.cluster import ClusterPolicy, StepWork

CONSTANT = "_of_a_constant"
"""Suffix of an error: what a constant, which is fitted to the same rows, would have had."""
WINDOWS_FILE, LOADS_FILE = "fig11_textgen", "ext_latency_under_load"
LEAST = 4  # least windows of which a half is fitted
OF_A_WINDOW = ("throughput", "step_latency", "tokens_per_step", "mean_batch_size", "mean_context")
P99 = "time_to_first_token_p99"
OF_A_LOAD, OF_STEPS = {"offered_rate", "load", "requests", P99}, {"decode_step", "prefill_step"}
OTHER_SEED = 1000  # between seeds of arrivals; repeats of a load have the seeds between


@dataclass(frozen=True)
class Window:
    """Mean step of a window: tokens (prompts included), requests, context, summed ranks; its seconds."""

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


@cache
def recorded_windows(results: Path) -> dict[tuple[str, str], list[Window]]:
    """Read machine and model -> windows of Figure 11 that Punica ran, disturbed ones left out."""
    found: dict[tuple[str, str], list[Window]] = {}
    for folder in machines(results):
        for model, part in rows_that_count(folder, WINDOWS_FILE).groupby("model"):
            if windows := windows_of(part):
                found[folder.name, str(model)] = windows
    return found


def windows_of(rows: pd.DataFrame) -> list[Window]:
    """Punica's windows in Figure 11 of one model, none disturbed or of a whole stream; none if fewer than `LEAST`."""
    punica = (rows["system"] == "punica") & rows["metric"].isin(OF_A_WINDOW) & rows["statistic"].eq("value")
    chosen = rows[punica & ~rows["disturbed"].eq(True) & rows["panel"].str.endswith(" Model")]
    found = []
    for key, one in chosen.groupby(["workload", "repeat"], sort=False):
        workload, repeat = cast("tuple[str, int]", key)
        value = one.drop_duplicates("metric", keep="last").set_index("metric")["value"]
        if set(OF_A_WINDOW) <= set(value.index):
            batch = value["mean_batch_size"]
            ranks = float(one["rank"].iloc[0]) * popularity(workload).number_of_adapters(max(1, round(batch)))
            mean = value["tokens_per_step"], batch, value["mean_context"], ranks, value["step_latency"] / 1e3
            found.append(Window(workload, int(repeat), *map(float, mean)))
    return found if len(found) >= LEAST else []


def fitted_to(windows: Sequence[Window], cost: StepCost) -> StepCost:
    """Replace the constant of ``cost`` by that of every second one of ``windows``; the others are predicted."""
    known = {"row": cost.row, "kv": cost.kv, "prefill": cost.prefill, "rank": cost.rank}
    return fit_step_cost(f"{cost.name}, constant of windows", [one.step for one in windows[::2]], known)


def predicted_half(windows: Sequence[Window], cost: StepCost) -> list[Reading]:
    """Errors of steps per second, of all and the largest; and those of a constant, the mean of the fitted half."""
    seen, held_out = windows[::2], windows[1::2]
    fitted = fitted_to(windows, cost)
    constant = float(np.mean([one.seconds for one in seen]))
    about: dict[str, Any] = {"kind": SIMULATED, "cost_model": fitted.name}
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


@dataclass(frozen=True)
class Load:
    """A load of Punica: its ``rate``, p99 of the first token in seconds, and its stream by the settings of
    `ext_latency_under_load`. ``joining``: cost of steps with a prompt, at each rate that is not predicted. ``others``:
    p99 at other rates.
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
    span: Span
    seed: int
    works_ahead: bool
    joining: tuple[float, ...] = ()
    others: tuple[float, ...] = ()

    def arrivals(self) -> NDArray[np.float64]:
        return self.span.at(self.rate).arrivals(self.rate, self.seed + self.repeat)

    def counts(self, arrivals: NDArray[np.float64]) -> NDArray[np.bool_]:
        return self.span.at(self.rate).counts(arrivals)

    @property
    def drawn(self) -> RequestLengths:
        """Lengths of the different requests, which arrive in a cycle."""
        return rescaled((stated_lengths if self.lengths == "stated" else released_lengths)(self.requests), self.max_len)


@cache
def recorded_loads(results: Path) -> dict[tuple[str, str], list[Load]]:
    folders = [folder for folder in machines(results) if (folder / f"{LOADS_FILE}.csv").exists()]
    return {(folder.name, model): found for folder in folders for model, found in read_loads(folder).items()}


def read_loads(folder: Path) -> dict[str, list[Load]]:
    """Model -> loads of Punica below capacity, with a p99, and as many requests as the settings beside them say."""
    settings = json.loads((folder / f"{LOADS_FILE}.json").read_text(encoding="utf-8"))
    figure = settings["figure"]
    stream: dict[str, Any] = {name: figure[name] for name in ("lengths", "requests", "max_len")}
    stream["span"] = Span(**{name: figure[name] for name in ("warm", "seconds", "drain", "least", "longest")})
    stream |= {"seed": settings["adapters"]["seed"], "works_ahead": settings["hardware"]["device"] != "cpu"}
    rows = rows_that_count(folder, LOADS_FILE)
    chosen = rows["system"].eq("punica") & rows["metric"].isin(OF_A_LOAD | OF_STEPS) & ~rows["disturbed"]
    cells: dict[tuple[str, str, str, int], dict[str, Any]] = defaultdict(dict)
    row: Any
    for row in rows[chosen].fillna({"repeat": 0, "batch_size": 0, "rank": 0}).itertuples():
        cell = cells[row.model, row.panel, row.workload, int(row.repeat)]
        cell |= {row.metric: row.value, "shape": (int(row.batch_size), int(row.rank))}
    longer: dict[str, list[float]] = defaultdict(list)
    found: dict[str, list[Load]] = defaultdict(list)
    for (model, panel, workload, repeat), value in cells.items():
        if panel.startswith("load ") and value.keys() >= OF_A_LOAD and value["load"] < 1:
            about = value["offered_rate"], value[P99] / 1e3, *value["shape"]
            load = Load(panel, workload, repeat, *about, **stream)
            if FEWEST_FOR_P99 <= value["requests"] == load.counts(load.arrivals()).sum():
                found[model].append(load)
        elif value.keys() >= OF_STEPS:
            longer[model].append((value["prefill_step"] - value["decode_step"]) / 1e3)
    for model, known in found.items():
        joining = tuple(sorted(longer[model]))
        others = [tuple(two.p99 for two in known if two.panel != one.panel) for one in known]
        found[model] = [replace(one, joining=joining, others=p99) for one, p99 in zip(known, others, strict=True)]
    return dict(found)


def first_token_readings(load: Load, cost: StepCost, seeds: int = 1) -> list[Reading]:
    """The simulated p99, its span over arrivals, and its error; `_low`, `_high`: by single rates' cost of prompts;
    `_of_a_constant`: of the other loads' mean.
    """
    costs = {"": cost}
    if told := load.joining:
        cases = {"": median(told), "_low": told[0], "_high": told[-1]}
        costs = {name: with_joins(load, cost, seconds) for name, seconds in cases.items()}
    waits = {name: p99_first_token(load, one) for name, one in costs.items()}
    about: dict[str, Any] = {"kind": SIMULATED, "cost_model": costs[""].name}
    others = [replace(load, seed=load.seed + place * OTHER_SEED) for place in range(1, seeds)]
    runs = [waits[""], *(p99_first_token(one, costs[""]) for one in others)]
    if load.others:
        waits[CONSTANT] = fmean(load.others)
    errors = {f"p99_error{name}": wait / load.p99 - 1 for name, wait in waits.items()}
    return [
        *spanned([[Reading("p99_first_token", 1e3 * wait, "ms", **about)] for wait in runs]),
        *(Reading(name, error, "fraction", **about) for name, error in errors.items()),
    ]


def with_joins(load: Load, cost: StepCost, seconds: float) -> StepCost:
    """Give ``cost`` steps with a prompt that take ``seconds`` more than others, the prompt's rows included."""
    rows = float(load.drawn.prompt.mean())
    name = f"{cost.name}, steps with a prompt of other loads"
    return replace(cost, name=name, join=max(0.0, seconds - cost.prefill * rows))


def p99_first_token(load: Load, cost: StepCost) -> float:
    """Simulate the load on one GPU with enough KV cache: p99 of the seconds until the first token."""
    arrivals, drawn, size = load.arrivals(), load.drawn, load.max_batch_size
    count = len(arrivals)
    lengths = RequestLengths(np.resize(drawn.prompt, count), np.resize(drawn.output, count))
    adapters = np.resize(popularity(load.workload).requests(load.requests) + 1, count)
    policy = ClusterPolicy(max_batch_size=size)
    policy.add_gpu("gpu", size * (policy.page_size + int((drawn.prompt + drawn.output).max())))
    trace = Trace(arrivals, lengths, adapters, np.full(count, load.rank))
    result = simulate(trace, policy, cost, works_ahead=load.works_ahead, own_queue=True)
    return float(np.quantile((result.first_token_s - arrivals)[load.counts(arrivals)], 0.99))
