"""Runners on Ray that stay for all hours of a run: timed once, then the same under every rule. Imported to measure."""

import atexit
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from experiments.benches.model_steps import llama_config
from experiments.cluster.hour import RANK, REHEARSAL_SEED, World, timed_steps
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ConfigError, model_conf
from experiments.measure.disturbance import cpu_times, others
from experiments.simulator import StepCost, TimedStep, Trace, fit_step_cost
from experiments.workload import MAX_BATCH, released_lengths, rescaled
from punica.adapters import LoRARequest, write_random_adapter
from punica.cluster.ray_cluster import RayCluster, RunnerStep
from punica.cluster.ray_runners import RunnerResources
from punica.cluster.runner import random_engine
from punica.engine import Engine, EngineConfig, Request, RequestState


@dataclass(frozen=True)
class Served:
    """A served trace: first and last token in seconds [n]; ``lost`` runners; whether other work ``disturbed`` it."""

    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    tokens: list[list[int]]
    steps: list[RunnerStep]
    lost: int
    evicted: int
    recomputed: frozenset[int]
    disturbed: bool | None


class Tenants(NamedTuple):
    """Adapters of ids from 1 on in folders, and ``build`` for an engine that serves them."""

    build: Callable[[], Engine]
    adapters: dict[int, LoRARequest]
    vocabulary: int

    def requests(self, trace: Trace) -> list[Request]:
        """The greedy requests of ``trace``, named by number; adapters beyond those there are begin again."""
        random, lengths = np.random.Generator(np.random.PCG64(0)), trace.lengths
        wanted = (trace.adapters - 1) % len(self.adapters) + 1
        rows = zip(lengths.prompt.tolist(), lengths.output.tolist(), wanted.tolist(), strict=True)
        return [
            Request(str(i), random.integers(0, self.vocabulary, prompt).tolist(), output, self.adapters[adapter])
            for i, (prompt, output, adapter) in enumerate(rows)
        ]


class Session(NamedTuple):
    """Runners, their adapters, and the cost model of their steps, in our seconds."""

    cluster: RayCluster
    tenants: Tenants
    cost: StepCost


@contextmanager
def tenants_of(world: World) -> Iterator[Tenants]:
    """Write random adapters of the hour of ``world`` into a temporary folder, for a random backbone on its device."""
    conf, count = model_conf(world.model), int(world.trace().adapters.max())
    config, dtype = llama_config(conf), getattr(torch, conf.dtype.name)
    engine = EngineConfig(max_batch_size=MAX_BATCH, max_model_len=world.max_len, batch_invariant=world.batch_invariant)
    lora = engine.lora_config(RANK, max_cpu_loras=max(engine.lora_config(RANK).max_loras, count))
    with tempfile.TemporaryDirectory(prefix="punica-adapters-") as home:
        adapters = {}
        for i in range(1, count + 1):
            folder = write_random_adapter(Path(home, str(i)), config, RANK, i, dtype=dtype)
            adapters[i] = LoRARequest(f"adapter-{i}", i, str(folder))
        build = partial(random_engine, config, lora, engine, dtype=dtype, device=world.device)
        yield Tenants(build, adapters, conf.vocab_size)


@contextmanager
def runners(world: World, tenants: Tenants) -> Iterator[RayCluster]:
    """Start the runners of ``world``, a GPU for each on GPUs; `ConfigError` where Ray or a runner does not come up."""
    address, resources = world.address or None, RunnerResources(num_gpus=int(world.device == "cuda"))
    try:
        started = RayCluster(tenants.build, world.runners, resources=resources, rule=world.rule, address=address)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"runtime=ray: {error}") from error
    with started as cluster:
        for adapter in tenants.adapters.values() if address else ():
            cluster.put_adapter(adapter)
        yield cluster


@cache
def session_of(fleet: World) -> Session:
    """Start the runners of ``fleet`` until this process ends, and time them."""
    stack = ExitStack()
    atexit.register(stack.close)
    tenants = stack.enter_context(tenants_of(fleet))
    cluster = stack.enter_context(runners(fleet, tenants))
    return Session(cluster, tenants, _timed(cluster, tenants, fleet))


def _timed(cluster: RayCluster, tenants: Tenants, world: World) -> StepCost:
    """Fill all runners once, so that adapters are loaded, rehearse the hour, and fit a cost model to its steps."""
    full, rehearsal = MAX_BATCH * world.runners, world.rehearsal()
    lengths = rescaled(released_lengths(full, seed=REHEARSAL_SEED), world.max_len)
    warm = Trace(np.zeros(full), lengths, np.arange(1, full + 1), np.full(full, RANK))
    serve(cluster, tenants.requests(warm), warm.arrivals)
    steps = serve(cluster, tenants.requests(rehearsal), rehearsal.arrivals / world.speed_up).steps
    timed = [TimedStep(step.work, seconds) for step, seconds in timed_steps(steps)]
    served_by = f"{world.runners} runners on Ray, {world.model}{', batch-invariant' if world.batch_invariant else ''}"
    return fit_step_cost(f"{served_by}, their own steps", timed, joins=True)


@cache
def served(world: World, kills: bool = False) -> Served:
    """Serve the hour of ``world``; ``kills``: a runner in its middle."""
    session = session_of(world.fleet())
    cluster = session.cluster
    while cluster.is_busy or len(cluster.working_sets) < world.runners:  # to evict something, or to come up again
        cluster.step(1.0)
    cluster.use_rule(world.rule)
    middle = world.seconds / world.speed_up / 2 if kills else float("inf")
    trace = world.trace()
    asked = session.tenants.requests(trace)
    try:
        return serve(cluster, asked, trace.arrivals / world.speed_up, middle)
    except Exception:  # the same runners serve the next hour
        for request in asked:
            with suppress(ValueError):  # it has ended, or was never due
                cluster.abort_request(request.request_id)
        raise


def serve(
    cluster: RayCluster, asked: list[Request], arrivals_s: NDArray[np.float64], kill_at_s: float = float("inf")
) -> Served:
    """Serve each request when it is due; at ``kill_at_s`` kill the runner with most. `CheckFailed` when one fails."""
    states: list[RequestState] = []
    tokens: list[list[int]] = [[] for _ in asked]
    steps: list[RunnerStep] = []
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
            ray.kill(cluster.runners[busiest].actor)
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
        recomputed.update(map(int, output.recomputed))
        lost += len(output.lost)
    _, disturbed = others(before, cpu_times())
    firsts = np.array([state.first_token_s for state in states]) - start
    lasts = np.array([state.last_token_s for state in states]) - start
    evicted = cluster.num_evicted - evicted
    return Served(firsts, lasts, tokens, steps, lost, evicted, frozenset(recomputed), disturbed)


@cache
def served_by_one_engine(world: World) -> dict[int, list[int]]:
    """Tokens of some requests of ``world``, by number, from one engine in this process, with one thread of torch."""
    tenants = session_of(world.fleet()).tenants
    asked = tenants.requests(world.trace())
    every = -(-len(asked) // world.checked) if world.checked else 1
    engine, threads = tenants.build(), torch.get_num_threads()
    states = {i: engine.add_request(asked[i]) for i in range(0, len(asked), every)}
    torch.set_num_threads(1)
    try:
        while engine.has_unfinished():
            engine.step()
    finally:
        torch.set_num_threads(threads)
    return {i: state.output_token_ids for i, state in states.items()}
