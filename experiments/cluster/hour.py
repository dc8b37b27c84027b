"""The hour of Figure 13: its rate, the released lengths, Skewed popularity; and the GPUs it was served on."""

from pathlib import Path

import numpy as np

from experiments.claims.paper import read_figure
from punica.cluster import ClusterPolicy, ModelBytes, Trace
from punica.workload import (
    MAX_BATCH,
    RELEASED_SEED,
    independent_seeds,
    plotted_rate,
    popularity,
    profile_arrivals,
    released_lengths,
)

DURATION_S = 3600.0
NUM_GPUS = 16
RANK = 16
GPU_BYTES = 40e9
"""An A100 of the paper's testbed 2."""
MEMORY_FRACTION = 0.8
"""What the released runner takes of it for weights, adapters and KV pages."""


def paper_hour(folder: str | Path, seed: int = RELEASED_SEED) -> Trace:
    """About 18 000 requests of one hour: Poisson arrivals at the rate plotted in Figure 13.

    ``folder``: path of `paper_results`. Arrivals, lengths and popularity have seeds of their own, all from ``seed``.
    """
    points = read_figure(folder, "13").query("metric == 'request_rate'").sort_values("t_s")
    rates = points["value"].tolist()
    gaps, lengths, adapters = independent_seeds(seed, 3)
    arrivals = profile_arrivals(plotted_rate(points["t_s"].tolist(), rates), max(rates), DURATION_S, gaps)
    count = len(arrivals)
    return Trace(
        arrivals,
        released_lengths(count, seed=lengths),
        popularity("Skewed").requests(count, seed=adapters) + 1,
        np.full(count, RANK),
    )


def paper_cluster(rule: str, size: ModelBytes, num_gpus: int = NUM_GPUS) -> ClusterPolicy:
    """GPUs as the paper's, empty, with the KV pages that a model of ``size`` and a batch of adapters leave."""
    policy = ClusterPolicy(rule)
    pages = size.pages(MEMORY_FRACTION * GPU_BYTES, policy.page_size, MAX_BATCH, RANK)
    for i in range(num_gpus):
        policy.add_gpu(f"gpu-{i:04}", pages)
    return policy
