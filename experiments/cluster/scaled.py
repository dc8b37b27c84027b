"""Time and memory of simulating Figure 13's hour with more requests on more GPUs, in a process of its own."""

import multiprocessing
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.cluster.hour import paper_cluster, paper_hour
from experiments.cluster.step_costs import a100_of_the_cluster, model_bytes
from experiments.facts.paper import read_figure
from experiments.harness.experiment import CheckFailed
from experiments.simulator import simulate


@dataclass(frozen=True)
class Replay:
    """Requests, those that finished, steps of all GPUs; ``seconds`` and ``peak_bytes`` of the simulation."""

    requests: int
    finished: int
    steps: int
    seconds: float
    peak_bytes: int


def replay(paper: str, requests: int, gpus: int, rule: str) -> Replay:
    """Simulate about ``requests`` requests of an hour on ``gpus`` GPUs under ``rule``; ``paper``: path of
    `paper_results`.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(replayed, (paper, requests, gpus, rule))


def replayed(paper: str, requests: int, gpus: int, rule: str) -> Replay:
    """Simulate in this process, whose peak counts all that it did before."""
    whole = float(read_figure(paper, "13").query("metric == 'total_requests'")["value"].iloc[0])
    asked = paper_hour(paper, load=requests / whole)
    policy = paper_cluster(rule, model_bytes("llama2-7b"), gpus)
    started = time.perf_counter()
    result = simulate(asked, policy, a100_of_the_cluster(paper))
    seconds = time.perf_counter() - started
    return Replay(len(asked.arrivals), int(np.isfinite(result.finish_s).sum()), result.steps, seconds, peak_bytes())


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Read this process's peak memory; `CheckFailed` where the system does not tell. (A spawned process inherits its
    parent's `ru_maxrss`.)
    """
    told = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text() if status.exists() else "", re.MULTILINE)
    if told is None:
        raise CheckFailed(f"{status} does not tell a process's peak memory (VmHWM): measure this figure on Linux")
    return 1024 * int(told[1])
