"""Figure 13's world of real engines: runners on Ray, the paper's hour scaled so that two cores or four GPUs serve it.

``speed_up`` seconds of the hour pass in one of ours; the rate is the paper's times runners / 16; lengths are the
released ones times ``max_len`` / 2048. A rehearsal times the runners, and the simulator fitted to its steps serves the
same traces. On a CPU the tokens of every request are compared with those of one engine, on GPUs of ``CHECKED``, on
batch-invariant engines. A request computed again elsewhere may get other tokens, as a prompt rounds otherwise; these
are counted.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.cluster.hour import RANK, World, policy_of, timed_steps
from experiments.cluster.served import KILLED, RAY, SIMULATED, SIMULATED_RAY, ServedHour, over_simulated, readings
from experiments.harness.experiment import CheckFailed
from experiments.harness.points import Point, Reading
from experiments.harness.schema import CONF, Config, ConfigError
from experiments.harness.settings import folders
from experiments.simulator import Trace, simulate
from experiments.workload import MAX_BATCH
from punica.cluster import ClusterPolicy

if TYPE_CHECKING:
    from experiments.cluster.ray_serving import Served

MOST_TIES = 1e-3
"""Largest share of requests with other tokens than one engine's on a CPU, where rounding decides ties."""
CHECKED = 250  # requests whose tokens are compared with one engine's on GPUs


def points(cfg: Config) -> list[Point]:
    """The hour under each rule, served and simulated; then, under the first, with the loss of a runner."""
    figure: Any = cfg.figure
    for rule in cfg.system.names:
        if ClusterPolicy(rule).rule.prefills_per_step != 1:
            raise ConfigError(f"system={rule} puts several prompts into a step; on Ray engines run one: leave it out")
    if figure.model not in (known := sorted(path.stem for path in (CONF / "model").glob("llama*.yaml"))):
        raise ConfigError(f"figure.model={figure.model} is unknown: choose one of {', '.join(known)}")
    settings = {name: getattr(figure, name) for name in ("seconds", "runners", "speed_up", "max_len")}
    settings |= {"address": cfg.address, "device": cfg.hardware.device}
    if cfg.hardware.device == "cuda":
        settings |= {"checked": CHECKED, "batch_invariant": True}
    found = [(rule, panel) for rule in cfg.system.names for panel in (RAY, SIMULATED_RAY)]
    found += [(rule, KILLED) for rule in cfg.system.names[:1] if figure.kill]
    return [Point(panel, rule, "Skewed", figure.model, rank=RANK, settings=settings) for rule, panel in found]


def measure(cfg: Config, point: Point) -> list[Reading]:
    """Serve the hour on Ray, or simulate it. Simulated engines work ahead on GPUs, as real ones."""
    from experiments.cluster.ray_serving import served, session_of

    world = World(str(folders(cfg).paper), point.system, model=point.model, **point.settings)
    kills = point.panel == KILLED
    found, session, trace = served(world, kills), session_of(world.fleet()), world.trace()
    if kills and found.lost != 1:
        raise CheckFailed(f"one runner was killed, {found.lost} were missed")
    hour = hour_of(found, trace, world)
    if point.panel.startswith(SIMULATED):
        cost = session.cost.slowed(world.speed_up, session.cost.name)
        policy = policy_of(world.rule, "runner", world.runners, session.cluster.description.num_pages)
        result = simulate(trace, policy, cost, works_ahead=world.device == "cuda")
        simulated = ServedHour.simulated(trace, result, world.seconds)
        moved = simulated.reading("migrations", result.evictions, "requests")
        return [*readings(simulated), moved, *over_simulated(hour, simulated)]
    lost = [Reading("lost_runners", found.lost, "count"), Reading("migrations", found.evicted, "requests")]
    return [replace(one, disturbed=found.disturbed) for one in (*readings(hour), *lost, *_checked(found, world))]


def _checked(found: "Served", world: World) -> list[Reading]:
    """Check the number of tokens of every request, and the tokens with one engine's."""
    from experiments.cluster.ray_serving import served_by_one_engine

    check_numbers(found.tokens, world.trace().lengths.output.tolist())
    counts = {"requests_lost_or_doubled": 0, "requests_recomputed": len(found.recomputed)}
    alone = served_by_one_engine(replace(world, rule="punica"))
    most = MOST_TIES if world.device == "cpu" else 1.0
    stayed = [i for i in alone if i not in found.recomputed]
    counts["requests_checked"] = len(alone)
    for name, chosen in (("", list(alone)), ("_not_recomputed", stayed)):
        other = check_tokens([found.tokens[i] for i in chosen], [alone[i] for i in chosen], most)
        counts[f"requests_with_other_tokens{name}"] = other
    return [Reading(name, count, "requests") for name, count in counts.items()]


def hour_of(served: "Served", trace: Trace, world: World) -> ServedHour:
    names = sorted(f"runner-{i:04}" for i in range(world.runners))[::-1]  # the rule prefers the last
    seconds = int(max(step.end_s for step in served.steps) * world.speed_up) + 1
    tokens, batch = np.zeros(seconds, dtype=np.int64), np.zeros((world.runners, seconds), dtype=np.int64)
    by_batch = np.zeros(MAX_BATCH + 1)
    for step, duration in timed_steps(served.steps):
        second, gpu = int(step.end_s * world.speed_up), names.index(step.runner)
        joined = int(step.work.prefill_tokens > 0)
        size = step.work.decodes + joined
        tokens[second] += size
        by_batch[size] += world.speed_up * duration
        batch[gpu, second] += joined if batch[gpu, second] else size  # those of the second's first step, and who joined
    firsts, lasts = served.first_token_s * world.speed_up, served.finish_s * world.speed_up
    np.add.at(tokens, firsts.astype(int), trace.lengths.prompt)
    return ServedHour(world.seconds, trace.arrivals, firsts, lasts, tokens, batch, by_batch, "measured")


def check_numbers(served: list[list[int]], asked: list[int]) -> None:
    wrong = [i for i, (tokens, number) in enumerate(zip(served, asked, strict=True)) if len(tokens) != number]
    if wrong:
        i = wrong[0]
        raise CheckFailed(
            f"{len(wrong)} of {len(served)} requests lost tokens or got them twice: request {i} has {len(served[i])}, "
            f"asked for {asked[i]}"
        )


def check_tokens(served: list[list[int]], alone: list[list[int]], most: float = MOST_TIES) -> int:
    """Count requests with other tokens than from one engine; `CheckFailed` beyond a share of ``most`` of them."""
    differ = sum(one != other for one, other in zip(served, alone, strict=True))
    if differ > max(1, most * len(served)):
        raise CheckFailed(f"{differ} of {len(served)} requests have other tokens than from one engine")
    return differ
