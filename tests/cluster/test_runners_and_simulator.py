"""First tokens of the dispatcher's runners come in the steps that the simulator says, whose clock a test cannot see."""

import heapq

import numpy as np
import pytest

from punica.cluster import StepCost, Trace, simulate
from punica.cluster.policy import ClusterPolicy
from punica.engine import Request
from punica.engine.runner import ModelRunner
from punica.workload import RequestLengths
from tests.cluster.runner_world import LocalRunners

BATCH, PAGE = 4, 4


def first_tokens(world: LocalRunners, trace: Trace) -> list[float]:
    """Serve a trace with steps of a second each on every runner; return when first tokens came."""
    dispatcher, first, replies = world.dispatcher, {}, {}
    due = [(float(when), "", i) for i, when in enumerate(trace.arrivals)]
    while due:
        now, uuid, i = heapq.heappop(due)
        if uuid:
            for name in dispatcher.end(uuid, replies.pop(uuid)).tokens:
                first.setdefault(int(name), now)
        else:
            prompt, output = int(trace.lengths.prompt[i]), int(trace.lengths.output[i])
            dispatcher.add(Request(str(i), [1] * prompt, output))
        while dispatcher.startable:
            uuid = min(dispatcher.startable)
            replies[uuid] = world.runners[uuid].step(dispatcher.begin(uuid))
            heapq.heappush(due, (now + 1.0, uuid, 0))
    return [first[i] for i in range(len(trace.arrivals))]


@pytest.mark.parametrize("works_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize(("count", "rate"), [(1, 0.4), (1, 2.0), (2, 0.8), (2, 3.0)])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_join_when_the_simulator_says(monkeypatch, seed, count, rate, works_ahead) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", works_ahead)
    chance = np.random.default_rng(seed)
    arrivals = np.cumsum(chance.exponential(1 / rate, 40))
    lengths = RequestLengths(chance.integers(1, 6, 40), chance.integers(1, 14, 40))
    nothing = np.zeros(40, dtype=np.int64)
    trace = Trace(arrivals, lengths, nothing, nothing)
    world = LocalRunners.of(count)
    policy = ClusterPolicy(max_batch_size=BATCH, page_size=PAGE)
    for uuid, runner in world.runners.items():
        policy.add_gpu(uuid, runner.describe().num_pages)
    second = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
    said = simulate(trace, policy, second, works_ahead=works_ahead).first_token_s
    assert first_tokens(world, trace) == pytest.approx(said.tolist())
