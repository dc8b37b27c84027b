"""Figure 13's hour, for all worlds: its requests, the GPUs or runners, and how both are scaled. A cluster of another
size gets its part of the paper's request rate.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.facts.paper import read_figure
from experiments.harness.schema import ConfigError
from experiments.simulator import ModelBytes, Trace
from experiments.workload import (
    MAX_BATCH,
    RELEASED_SEED,
    independent_seeds,
    plotted_rate,
    popularity,
    profile_arrivals,
    released_lengths,
    rescaled,
)
from punica.cluster import ClusterPolicy

if TYPE_CHECKING:
    from punica.cluster.ray_cluster import RunnerStep

DURATION_S = 3600.0
NUM_GPUS = 16
RANK = 16
GPU_BYTES = 40e9  # memory of an A100 of the paper's testbed 2
MEMORY_FRACTION = 0.8  # part of it that the released runner takes for weights, adapters and KV pages
REHEARSED, REHEARSAL_SEED = 6, 1  # the rehearsal has a sixth of the hour's requests in a sixth of its time


def paper_hour(
    folder: str | Path, seconds: float = DURATION_S, seed: int = RELEASED_SEED, workload: str = "Skewed",
    ranks: Sequence[int] = (RANK,), load: float = 1.0,
) -> Trace:  # fmt: skip
    """Draw an hour of Poisson arrivals at ``load`` times Figure 13's rate, to ``seconds``; an adapter of ``workload``
    has one of ``ranks``. ``folder``: `paper_results`.
    """
    points = read_figure(folder, "13").query("metric == 'request_rate'").sort_values("t_s")
    rates = [load * rate for rate in points["value"].tolist()]
    gaps, of_lengths, of_adapters, of_ranks = independent_seeds(seed, 4)
    arrivals = profile_arrivals(plotted_rate(points["t_s"].tolist(), rates), max(rates), DURATION_S, gaps)
    arrivals = arrivals[arrivals < seconds]
    if not (count := len(arrivals)):
        raise ConfigError(f"figure.seconds={seconds:g} has no request at {load:g} times the paper's rate: give more")
    asked = popularity(workload).requests(count, seed=of_adapters)
    rank_of = np.random.default_rng(of_ranks).choice(np.asarray(ranks), asked.max(initial=0) + 1)
    return Trace(arrivals, released_lengths(count, seed=of_lengths), asked + 1, rank_of[asked])


def paper_cluster(rule: str, size: ModelBytes, num_gpus: int = NUM_GPUS, rank: int = RANK) -> ClusterPolicy:
    """Build the paper's GPUs, empty, with the KV pages that a model of ``size`` and adapters of ``rank`` leave."""
    pages = size.pages(MEMORY_FRACTION * GPU_BYTES, ClusterPolicy().page_size, MAX_BATCH, rank)
    return policy_of(rule, "gpu", num_gpus, pages)


def policy_of(rule: str, name: str, count: int, num_pages: int) -> ClusterPolicy:
    """Build a policy with ``count`` GPUs, called after ``name``, nothing submitted."""
    policy = ClusterPolicy(rule)
    for i in range(count):
        policy.add_gpu(f"{name}-{i:04}", num_pages)
    return policy


@dataclass(frozen=True)
class World:
    """Hour of ``seconds`` that runners of ``model`` serve on ``device`` (``cuda``: a GPU each), ``speed_up`` times as
    fast, with lengths up to ``max_len``. ``checked``: most requests compared with one engine (0: all).
    """

    paper: str
    rule: str
    seconds: int
    runners: int
    speed_up: int
    max_len: int
    address: str
    device: str
    model: str = "llama-tiny"
    checked: int = 0
    batch_invariant: bool = False

    def trace(self, seed: int = RELEASED_SEED, part: int = 1) -> Trace:
        asked = paper_hour(self.paper, self.seconds, seed, load=self.runners / NUM_GPUS / part)
        return replace(asked, lengths=rescaled(asked.lengths, self.max_len))

    def rehearsal(self) -> Trace:
        """Draw other requests at the same rates of our clock, the whole hour in a sixth of the time."""
        asked = self.trace(REHEARSAL_SEED, REHEARSED)
        return replace(asked, arrivals=asked.arrivals / REHEARSED)

    def fleet(self) -> "World":
        """Return what runners must be started again for: all but the rule and the check."""
        return replace(self, rule="punica", checked=0)


def timed_steps(steps: Iterable["RunnerStep"]) -> Iterator[tuple["RunnerStep", float]]:
    """Yield steps that served requests, with their seconds, those with decodes from the end of the one before on."""
    ended: dict[str, float] = {}
    for step in steps:
        if step.work.decodes or step.work.prefill_tokens:
            began = ended.get(step.runner, step.begin_s) if step.work.decodes else step.begin_s
            yield step, step.end_s - began
        ended[step.runner] = step.end_s
