"""Figure 13's world of real engines: runners on Ray, the paper's hour compressed in time.

Scaled, so that two cores can serve it:

* time: ``speed_up`` seconds of the paper's hour pass in one of ours; readings are in the paper's seconds;
* load: the request rate is the paper's times runners / 16, its number of GPUs;
* lengths: the released ones times ``max_len`` / 2048, so that a request lives about as long as on an A100.

Before the hour the runners are timed in a rehearsal: the same rates with other requests in a sixth of the time. A cost
model fitted to these steps lets the simulator serve the same trace (a panel of its own). Two cores serve about two
active runners; more of them share cores, which the cost model knows on average alone.

The tokens of every request are compared with those of one engine.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.cluster.hour import NUM_GPUS, RANK, paper_hour
from experiments.cluster.served import KILLED, RAY, SIMULATED_RAY, ServedHour, over_simulated, readings
from experiments.cluster.simulated_hour import seen
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Point, Reading, sampled
from experiments.harness.schema import Config
from experiments.harness.settings import folders
from punica.cluster import ClusterPolicy, StepCost, TimedStep, Trace, fit_step_cost, residuals, simulate
from punica.workload import MAX_BATCH, released_lengths, rescaled

if TYPE_CHECKING:
    from experiments.cluster.ray_serving import RayCluster, Served, Tenants

MODEL = "llama-tiny"
REHEARSED, REHEARSAL_SEED = 6, 1
"""The rehearsal has a sixth of the hour's requests in a sixth of its time."""
MOST_TIES = 1e-3
"""Largest share of requests whose tokens differ from one engine's: another batch rounds otherwise, which decides ties
of two logits.
"""


@dataclass(frozen=True)
class World:
    """An hour, its scales and its runners on ``device``: ``cpu``, or ``cuda``, a GPU for each runner."""

    paper: str
    rule: str
    seconds: int
    runners: int
    speed_up: int
    max_len: int
    address: str
    device: str

    def trace(self) -> Trace:
        """Draw the requests, in the paper's seconds."""
        return self._scaled(paper_hour(self.paper, self.seconds, load=self.runners / NUM_GPUS))

    def rehearsal(self) -> Trace:
        """Draw other requests at the same rates of our clock, the whole hour in a sixth of the time."""
        load = self.runners / NUM_GPUS / REHEARSED
        asked = self._scaled(paper_hour(self.paper, self.seconds, REHEARSAL_SEED, load=load))
        return replace(asked, arrivals=asked.arrivals / REHEARSED)

    def _scaled(self, asked: Trace) -> Trace:
        return replace(asked, lengths=rescaled(asked.lengths, self.max_len))

    def policy(self, num_pages: int) -> ClusterPolicy:
        """Build the policy of the runners' scheduler, nothing submitted."""
        policy = ClusterPolicy(self.rule)
        for i in range(self.runners):
            policy.add_gpu(f"runner-{i:04}", num_pages)
        return policy


@dataclass(frozen=True)
class Fit:
    """A cost model of the runners, in our seconds; root mean square of its relative residuals over ``steps`` steps; KV
    pages of a runner.
    """

    cost: StepCost
    rms: float
    steps: int
    num_pages: int


def points(cfg: Config) -> list[Point]:
    """List the hour under each scheduling rule, with a runner killed if that was chosen, and simulated."""
    figure: Any = cfg.figure
    chosen = ("seconds", "runners", "speed_up", "max_len")
    settings = {name: getattr(figure, name) for name in chosen}
    settings |= {"address": cfg.address, "device": cfg.hardware.device}
    panels = (RAY, KILLED, SIMULATED_RAY) if figure.kill else (RAY, SIMULATED_RAY)
    return [
        Point(panel, rule, "Skewed", MODEL, rank=RANK, settings=settings)
        for rule in cfg.system.names for panel in panels
    ]  # fmt: skip


def measure(cfg: Config, point: Point) -> list[Reading]:
    """Serve the hour, on Ray or on the virtual clock."""
    world = World(str(folders(cfg).paper), point.system, **point.settings)
    if point.panel == SIMULATED_RAY:
        fit, trace = _hour(world).fit, world.trace()
        cost = fit.cost.slowed(world.speed_up, fit.cost.name)
        simulated = seen(trace, simulate(trace, world.policy(fit.num_pages), cost), world.seconds)
        beside = over_simulated(hour_of(_hour(world).served, trace, world), simulated)
        return [*readings(simulated), *beside]
    kills = point.panel == KILLED
    served = _killed_hour(world) if kills else _hour(world).served
    if kills and served.lost != 1:
        raise CheckFailed(f"one runner was killed, {served.lost} were missed")
    other = check_tokens(served.tokens, _alone(world))
    found = [*readings(hour_of(served, world.trace(), world)), *overheads(served)]
    found += [Reading("requests_with_other_tokens", other, "requests")]
    found += [] if kills else _fit_readings(_hour(world).fit)
    return [replace(one, disturbed=served.disturbed) for one in found]


def hour_of(served: "Served", trace: Trace, world: World) -> ServedHour:
    """Convert the steps of runners to a served hour in the paper's seconds."""
    names = sorted(f"runner-{i:04}" for i in range(world.runners))[::-1]  # the rule prefers the last
    seconds = int(max(step.end_s for step in served.steps) * world.speed_up) + 1
    tokens, batch = np.zeros(seconds, dtype=np.int64), np.zeros((world.runners, seconds), dtype=np.int64)
    by_batch = np.zeros(MAX_BATCH + 1)
    for step in served.steps:
        second, gpu = int(step.end_s * world.speed_up), names.index(step.runner)
        joined = int(step.work.prefill_tokens > 0)
        size = step.work.decodes + joined
        tokens[second] += size
        by_batch[size] += world.speed_up * (step.end_s - step.begin_s)
        batch[gpu, second] += joined if batch[gpu, second] else size  # those of the second's first step, and who joined
    firsts, lasts = served.first_token_s * world.speed_up, served.finish_s * world.speed_up
    np.add.at(tokens, firsts.astype(int), trace.lengths.prompt)
    return ServedHour(world.seconds, trace.arrivals, firsts, lasts, tokens, batch, by_batch, "measured")


def overheads(served: "Served") -> list[Reading]:
    """Return costs of the scheduler on our clock: a decision (placements, or the content of a step); a step as the
    scheduler sees it, in the runner, and the difference, messages and waits.
    """
    whole = [1e3 * (step.end_s - step.begin_s) for step in served.steps]
    inside = [1e3 * step.seconds for step in served.steps]
    between = [all_of_it - part for all_of_it, part in zip(whole, inside, strict=True)]
    return [
        *sampled("decision_time", [1e6 * seconds for seconds in served.decisions_s], "us"),
        *sampled("step_round_trip", whole, "ms"),
        *sampled("runner_step", inside, "ms"),
        *sampled("step_messages", between, "ms"),
        Reading("lost_runners", served.lost, "count"),
    ]


def time_runners(cluster: "RayCluster", tenants: "Tenants", world: World) -> Fit:
    """Fill all runners once, so that adapters are loaded, rehearse the hour, and fit a cost model to its steps."""
    from experiments.cluster.ray_serving import serve

    adapters, full = np.array(sorted(tenants.adapters)), MAX_BATCH * world.runners
    warm = rescaled(released_lengths(full, seed=REHEARSAL_SEED), world.max_len)
    serve(cluster, tenants.requests(warm, np.resize(adapters, full)), np.zeros(full))
    trace = world.rehearsal()
    asked = tenants.requests(trace.lengths, adapters[(trace.adapters - 1) % len(adapters)])
    steps = serve(cluster, asked, trace.arrivals / world.speed_up).steps
    timed = [TimedStep(step.work, step.end_s - step.begin_s) for step in steps]
    cost = fit_step_cost(f"{world.runners} runners on Ray, {MODEL}, their own steps", timed)
    return Fit(cost, residuals(cost, timed).rms, len(timed), cluster.num_pages)


def check_tokens(served: list[list[int]], alone: list[list[int]]) -> int:
    """Count requests with other tokens than from one engine. `CheckFailed` beyond `MOST_TIES`, and where numbers of
    tokens differ.
    """
    lengths = [i for i, (one, other) in enumerate(zip(served, alone, strict=True)) if len(one) != len(other)]
    if lengths:
        i = lengths[0]
        raise CheckFailed(
            f"{len(lengths)} of {len(served)} requests lost tokens or got them twice: request {i} has "
            f"{len(served[i])}, from one engine {len(alone[i])}"
        )
    differ = sum(one != other for one, other in zip(served, alone, strict=True))
    if differ > max(1, MOST_TIES * len(served)):
        raise CheckFailed(f"{differ} of {len(served)} requests have other tokens than from one engine")
    return differ


@dataclass(frozen=True)
class _Hour:
    fit: Fit
    served: "Served"


@cache
def _hour(world: World) -> _Hour:
    """Serve the hour by runners that were timed just before."""
    return _with_runners(
        world, lambda cluster, tenants: _Hour(time_runners(cluster, tenants, world), _serve(cluster, tenants, world))
    )


@cache
def _killed_hour(world: World) -> "Served":
    middle = world.seconds / world.speed_up / 2
    return _with_runners(world, lambda cluster, tenants: _serve(cluster, tenants, world, middle))


def _serve(cluster: "RayCluster", tenants: "Tenants", world: World, kill_at_s: float = float("inf")) -> "Served":
    from experiments.cluster.ray_serving import serve

    trace = world.trace()
    asked = tenants.requests(trace.lengths, trace.adapters)
    return serve(cluster, asked, trace.arrivals / world.speed_up, kill_at_s)


@cache
def _alone(world: World) -> list[list[int]]:
    from experiments.cluster.ray_serving import served_alone

    trace = world.trace()
    with _tenants(world) as tenants:
        return served_alone(tenants, tenants.requests(trace.lengths, trace.adapters))


def _with_runners(world: World, work: Any) -> Any:
    from experiments.cluster.ray_serving import runners

    with _tenants(world) as tenants, runners(tenants, world.runners, world.rule, world.address or None) as cluster:
        return work(cluster, tenants)


def _tenants(world: World) -> Any:
    from experiments.cluster.ray_serving import EngineConfig, tenants

    config = EngineConfig(max_batch_size=MAX_BATCH, max_model_len=world.max_len)
    return tenants(MODEL, config, RANK, sorted(set(world.trace().adapters.tolist())), world.device)


def _fit_readings(fit: Fit) -> list[Reading]:
    parts = {"base": fit.cost.base, "row": fit.cost.row, "kv": fit.cost.kv, "prefill": fit.cost.prefill}
    found = [Reading(f"fitted_{name}", 1e6 * value, "us") for name, value in (*parts.items(), ("rank", fit.cost.rank))]
    return [*found, Reading("fit_rms", fit.rms, "fraction"), Reading("fitted_steps", fit.steps, "count")]
