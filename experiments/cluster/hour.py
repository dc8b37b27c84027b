"""Figure 13's hour: its rate, the released lengths, a popularity; and the GPUs that served it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.facts.paper import read_figure
from experiments.simulator import ModelBytes, Trace
from experiments.workload import (
    MAX_BATCH,
    RELEASED_SEED,
    independent_seeds,
    plotted_rate,
    poisson_arrivals,
    popularity,
    profile_arrivals,
    released_lengths,
)
from punica.cluster import ClusterPolicy

DURATION_S = 3600.0
NUM_GPUS = 16
RANK = 16
GPU_BYTES = 40e9
"""Memory of an A100 of the paper's testbed 2."""
MEMORY_FRACTION = 0.8
"""Part of it that the released runner takes for weights, adapters and KV pages."""


def paper_hour(
    folder: str | Path, seconds: float = DURATION_S, seed: int = RELEASED_SEED, workload: str = "Skewed",
    ranks: Sequence[int] = (RANK,), load: float = 1.0,
) -> Trace:  # fmt: skip
    """Draw about 18 000 requests of an hour, Poisson arrivals at ``load`` times Figure 13's rate, until ``seconds``.

    ``folder``: path of `paper_results`. Every adapter of ``workload`` has one of ``ranks``, each as likely. Arrivals,
    lengths, popularity and ranks have independent seeds, all from ``seed``.
    """
    times, rates = _rates(folder, load)
    gaps, *others = independent_seeds(seed, 4)
    arrivals = profile_arrivals(plotted_rate(times, rates), max(rates), DURATION_S, gaps)
    return _requests(arrivals[arrivals < seconds], others, workload, ranks)


def steady_stream(
    folder: str | Path, seconds: float, share: float, seed: int = RELEASED_SEED, load: float = 1.0
) -> Trace:  # fmt: skip
    """Draw requests as `paper_hour` with Skewed adapters, at a constant rate: ``share`` of the hour's highest."""
    _, rates = _rates(folder, load)
    gaps, *others = independent_seeds(seed, 4)
    return _requests(poisson_arrivals(share * max(rates), seconds, gaps), others, "Skewed", (RANK,))


def _rates(folder: str | Path, load: float) -> tuple[list[float], list[float]]:
    """Return starts of windows, and ``load`` times Figure 13's rate in each."""
    points = read_figure(folder, "13").query("metric == 'request_rate'").sort_values("t_s")
    return points["t_s"].tolist(), [load * rate for rate in points["value"].tolist()]


def _requests(
    arrivals: NDArray[np.float64], seeds: Sequence[int], workload: str, ranks: Sequence[int]
) -> Trace:  # fmt: skip
    """Draw lengths, adapters and their ranks for ``arrivals``, from a seed of each."""
    lengths, adapters, widths = seeds
    count = len(arrivals)
    asked = popularity(workload).requests(count, seed=adapters)
    rank_of = np.random.default_rng(widths).choice(np.asarray(ranks), asked.max(initial=0) + 1)
    return Trace(arrivals, released_lengths(count, seed=lengths), asked + 1, rank_of[asked])


def paper_cluster(rule: str, size: ModelBytes, num_gpus: int = NUM_GPUS, rank: int = RANK) -> ClusterPolicy:
    """Build the paper's GPUs, empty, with the KV pages that a model of ``size`` and adapters of ``rank`` leave."""
    policy = ClusterPolicy(rule)
    pages = size.pages(MEMORY_FRACTION * GPU_BYTES, policy.page_size, MAX_BATCH, rank)
    for i in range(num_gpus):
        policy.add_gpu(f"gpu-{i:04}", pages)
    return policy
