"""A trace served by runners on Ray, as the front of the cluster sees it. Imported to measure alone."""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from experiments.benches.model_steps import llama_config
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ConfigError, model_conf
from experiments.measure.disturbance import OTHER_CPU_LIMIT, CpuTimes, cpu_times, other_seconds
from experiments.workload import RequestLengths
from punica.adapters import LoRARequest, write_random_adapter
from punica.cluster.cluster_output import RunnerStep
from punica.cluster.ray_cluster import RayCluster
from punica.cluster.ray_runners import RankResources
from punica.cluster.runner import random_engine
from punica.engine import Engine, EngineConfig, Request, RequestState


@dataclass(frozen=True)
class Served:
    """A served trace: seconds [n] from the start to first and last token, tokens by request, steps of runners (times
    from the start), seconds of each decision. Runners lost, requests evicted, numbers of those that were computed again
    on another runner, and whether other work disturbed it.
    """

    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    tokens: list[list[int]]
    steps: list[RunnerStep]
    decisions_s: list[float]
    lost: int
    evicted: int
    recomputed: frozenset[int]
    disturbed: bool | None


@dataclass(frozen=True)
class Tenants:
    """Adapters of ids from 1 on in folders, and ``build`` for an engine that serves them on ``device``."""

    model: str
    device: str
    build: Callable[[], Engine]
    adapters: dict[int, LoRARequest]

    def requests(self, lengths: RequestLengths, wanted: NDArray[np.int64]) -> list[Request]:
        """Draw greedy requests of these lengths with adapters of these ids [n], named by number; deterministic."""
        random = np.random.Generator(np.random.PCG64(0))
        vocabulary = model_conf(self.model).vocab_size
        rows = zip(lengths.prompt.tolist(), lengths.output.tolist(), wanted.tolist(), strict=True)
        return [
            Request(str(i), random.integers(0, vocabulary, prompt).tolist(), output, self.adapters[adapter])
            for i, (prompt, output, adapter) in enumerate(rows)
        ]


@contextmanager
def tenants(
    model: str, engine_config: EngineConfig, rank: int, ids: list[int], device: str
) -> Iterator[Tenants]:  # fmt: skip
    """Write random adapters of ``rank`` for a random backbone on ``device`` into a temporary folder."""
    conf = model_conf(model)
    config, dtype = llama_config(conf), getattr(torch, conf.dtype.name)
    slots = engine_config.lora_config(rank).max_loras
    lora = engine_config.lora_config(rank, max_cpu_loras=max(slots, len(ids)))
    with tempfile.TemporaryDirectory(prefix="punica-adapters-") as home:
        adapters = {}
        for i in ids:
            folder = write_random_adapter(Path(home, str(i)), config, rank, i, dtype=dtype)
            adapters[i] = LoRARequest(f"adapter-{i}", i, str(folder))
        build = partial(random_engine, config, lora, engine_config, dtype=dtype, device=device)
        yield Tenants(model, device, build, adapters)


@contextmanager
def runners(world: Tenants, count: int, rule: str, address: str | None) -> Iterator[RayCluster]:
    """Start a cluster, with a GPU for each runner on GPUs; at an ``address`` adapters come from the object store.

    `ConfigError` where Ray or a runner does not come up.
    """
    resources = RankResources(num_gpus=int(world.device == "cuda"))
    try:
        started = RayCluster(world.build, count, resources=resources, rule=rule, max_queued=1 << 20, address=address)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"runtime=ray: {error}") from error
    with started as cluster:
        for adapter in world.adapters.values() if address else ():
            cluster.put_adapter(adapter)
        yield cluster


def wait_for_all(cluster: RayCluster, count: int) -> None:
    """Wait until ``count`` runners are ready, after one was lost."""
    while len(cluster.working_sets) < count:
        cluster.step(1.0)


def serve(
    cluster: RayCluster, asked: list[Request], arrivals_s: NDArray[np.float64], kill_at_s: float = float("inf")
) -> Served:
    """Serve each request when it is due, until all have ended; at ``kill_at_s`` kill the runner with most requests.

    `CheckFailed` when a request fails.
    """
    states: list[RequestState] = []
    tokens: list[list[int]] = [[] for _ in asked]
    steps: list[RunnerStep] = []
    decisions: list[float] = []
    recomputed: set[int] = set()
    lost, evicted = 0, cluster.num_evicted
    gc.collect()
    gc.freeze()  # a collection of all that a process has imported would halt every runner for some steps
    before = cpu_times()
    start = time.perf_counter()
    while len(states) < len(asked) or cluster.has_unfinished():
        now = time.perf_counter() - start
        while len(states) < len(asked) and arrivals_s[len(states)] <= now:
            states.append(cluster.add_request(asked[len(states)]))
        if now >= kill_at_s and any(cluster.working_sets.values()):
            busiest = max(cluster.working_sets, key=lambda uuid: cluster.working_sets[uuid])
            ray.kill(cluster.runners[busiest].actors[0])
            kill_at_s = float("inf")
        wait = None if len(states) == len(asked) else max(0.0, arrivals_s[len(states)] - now)
        if wait is not None and not cluster.has_unfinished():
            time.sleep(wait)
            continue
        output = cluster.step(wait)
        for name, token in output.tokens.items():
            tokens[int(name)].append(token)
        if output.failed:
            raise CheckFailed(f"request {output.failed[0].request_id} failed: {output.failed[0].error}")
        steps += [replace(one, begin_s=one.begin_s - start, end_s=one.end_s - start) for one in output.steps]
        decisions += output.decisions_s
        recomputed.update(map(int, output.recomputed))
        lost += len(output.lost)
    disturbed = _disturbed(before, cpu_times())
    firsts = np.array([state.first_token_s for state in states]) - start
    lasts = np.array([state.last_token_s for state in states]) - start
    evicted = cluster.num_evicted - evicted
    return Served(firsts, lasts, tokens, steps, decisions, lost, evicted, frozenset(recomputed), disturbed)


def served_alone(world: Tenants, asked: list[Request]) -> list[list[int]]:
    """Serve all requests from one engine in this process, on the runners' device, with one thread of torch."""
    engine, threads = world.build(), torch.get_num_threads()
    states = [engine.add_request(request) for request in asked]
    torch.set_num_threads(1)
    try:
        while engine.has_unfinished():
            engine.step()
    finally:
        torch.set_num_threads(threads)
    return [state.output_token_ids for state in states]


def _disturbed(before: CpuTimes | None, after: CpuTimes | None) -> bool | None:
    """Check whether other work took more than `OTHER_CPU_LIMIT` of our cores; ``None`` where unknown."""
    if before is None or after is None:
        return None
    share = other_seconds(before, after) / ((after.wall - before.wall) * len(os.sched_getaffinity(0)))
    return share > OTHER_CPU_LIMIT
