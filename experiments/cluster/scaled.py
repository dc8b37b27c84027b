"""The hour of Figure 13 with more requests on more GPUs, in a process of its own: how long, and how much memory."""

import multiprocessing
import resource
import time
from dataclasses import dataclass

import numpy as np

from experiments.claims.paper import read_figure
from experiments.cluster.hour import paper_cluster, paper_hour
from experiments.cluster.step_costs import a100_of_the_cluster, model_bytes
from punica.cluster import simulate


@dataclass(frozen=True)
class Replay:
    """``finished`` of ``requests``, in ``steps`` of all GPUs; ``seconds`` and ``peak_bytes`` that it took."""

    requests: int
    finished: int
    steps: int
    seconds: float
    peak_bytes: int


def replay(paper: str, requests: int, gpus: int) -> Replay:
    """About ``requests`` requests of an hour on ``gpus`` GPUs; ``paper``: path of `paper_results`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(replayed, (paper, requests, gpus))


def replayed(paper: str, requests: int, gpus: int) -> Replay:
    """The same in this process, whose peak counts all that it did before."""
    whole = float(read_figure(paper, "13").query("metric == 'total_requests'")["value"].iloc[0])
    asked = paper_hour(paper, load=requests / whole)
    policy = paper_cluster("punica", model_bytes("llama2-7b"), gpus)
    started = time.perf_counter()
    result = simulate(asked, policy, a100_of_the_cluster(paper))
    seconds = time.perf_counter() - started
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    return Replay(len(asked.arrivals), int(np.isfinite(result.finish_s).sum()), result.steps, seconds, peak)
