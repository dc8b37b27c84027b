"""Runners on Ray that stay for all hours of a run: timed once, then the same under every rule."""

import atexit
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from experiments.cluster.hour import RANK
from experiments.cluster.ray_world import REHEARSAL_SEED, Fit, World, timed_steps
from experiments.simulator import TimedStep, fit_step_cost, residuals
from experiments.workload import MAX_BATCH, released_lengths, rescaled

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from experiments.cluster.ray_serving import RayCluster, Served, Tenants
    from punica.engine import Request


@dataclass(frozen=True)
class Session:
    """Runners, their adapters, and the cost model of their steps."""

    cluster: "RayCluster"
    tenants: "Tenants"
    fit: Fit


@cache
def served(world: World, kills: bool = False) -> "Served":
    """Serve the hour, or the stream, of ``world``; ``kills``: a runner in its middle."""
    from experiments.cluster.ray_serving import serve, wait_for_all

    session = _session(world.fleet())
    wait_for_all(session.cluster, world.runners)
    while session.cluster.is_busy:  # runners that only had something to evict
        session.cluster.step(1.0)
    session.cluster.use_rule(world.rule)
    middle = world.duration_s / world.speed_up / 2 if kills else float("inf")
    arrivals = world.trace().arrivals / world.speed_up
    asked = requests(world, session.tenants)
    try:
        return serve(session.cluster, asked, arrivals, middle)
    except Exception:  # the same runners serve the next hour
        for request in asked:
            with suppress(ValueError):  # it has ended, or was never due
                session.cluster.abort_request(request.request_id)
        raise


def fit_of(world: World) -> Fit:
    """Return the cost model of the runners of ``world``."""
    return _session(world.fleet()).fit


@cache
def served_by_one_engine(world: World) -> dict[int, list[int]]:
    """Return the tokens of some requests of ``world``, by number, from an engine on the runners' device."""
    from experiments.cluster.ray_serving import served_alone

    asked = requests(world, _session(world.fleet()).tenants)
    every = -(-len(asked) // world.checked) if world.checked else 1
    chosen = range(0, len(asked), every)
    return dict(zip(chosen, served_alone(_session(world.fleet()).tenants, [asked[i] for i in chosen]), strict=True))


def requests(world: World, tenants: "Tenants") -> list["Request"]:
    """Draw the requests of ``world``."""
    trace = world.trace()
    return tenants.requests(trace.lengths, _among(tenants, trace.adapters) if world.share else trace.adapters)


def time_runners(cluster: "RayCluster", tenants: "Tenants", world: World) -> Fit:
    """Fill all runners once, so that adapters are loaded, rehearse the hour, and fit a cost model to its steps."""
    from experiments.cluster.ray_serving import serve

    full = MAX_BATCH * world.runners
    warm = rescaled(released_lengths(full, seed=REHEARSAL_SEED), world.max_len)
    serve(cluster, tenants.requests(warm, _among(tenants, np.arange(1, full + 1))), np.zeros(full))
    trace = world.rehearsal()
    asked = tenants.requests(trace.lengths, _among(tenants, trace.adapters))
    steps = serve(cluster, asked, trace.arrivals / world.speed_up).steps
    timed = [TimedStep(step.work, seconds) for step, seconds in timed_steps(steps)]
    served_by = f"{world.runners} runners on Ray, {world.model}{', batch-invariant' if world.batch_invariant else ''}"
    cost = fit_step_cost(f"{served_by}, their own steps", timed, joins=True)
    return Fit(cost, residuals(cost, timed).rms, len(timed), cluster.num_pages)


@cache
def _session(fleet: World) -> Session:
    from experiments.cluster.ray_serving import runners

    stack = ExitStack()
    atexit.register(stack.close)
    tenants = stack.enter_context(tenants_of(fleet))
    cluster = stack.enter_context(runners(tenants, fleet.runners, fleet.rule, fleet.address or None))
    return Session(cluster, tenants, time_runners(cluster, tenants, fleet))


def tenants_of(world: World) -> "AbstractContextManager[Tenants]":
    """Write the adapters of ``world``."""
    from experiments.cluster.ray_serving import EngineConfig, tenants

    config = EngineConfig(
        max_batch_size=MAX_BATCH, max_model_len=world.max_len, batch_invariant=world.batch_invariant
    )
    return tenants(world.model, config, RANK, world.adapter_ids(), world.device)


def _among(tenants: "Tenants", wanted: "np.ndarray") -> "np.ndarray":
    """Map adapters, numbered from 1 on, to those that there are."""
    known = np.array(sorted(tenants.adapters))
    return known[(wanted - 1) % len(known)]
