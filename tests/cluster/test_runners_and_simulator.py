"""The dispatcher's runners give tokens in the steps that the simulator says, evictions included."""

import heapq

import numpy as np
import pytest

from experiments.simulator import StepCost, Trace, simulate
from experiments.workload import RequestLengths
from punica.cluster.policy import ClusterPolicy
from punica.engine import Request
from punica.engine.runner import ModelRunner
from tests.cluster.runner_world import LocalRunners

BATCH, PAGE = 4, 4


def served(world: LocalRunners, trace: Trace) -> tuple[list[float], list[float]]:
    """Serve a trace with steps of a second each on every runner; return when first and last tokens came."""
    dispatcher, first, last, replies = world.dispatcher, {}, {}, {}
    due = [(float(when), "", i) for i, when in enumerate(trace.arrivals)]
    while due:
        now, uuid, i = heapq.heappop(due)
        if uuid:
            for name in dispatcher.end(uuid, replies.pop(uuid)).tokens:
                first.setdefault(int(name), now)
                last[int(name)] = now
        else:
            prompt, output = int(trace.lengths.prompt[i]), int(trace.lengths.output[i])
            dispatcher.add(Request(str(i), [1] * prompt, output))
        while dispatcher.startable:
            uuid = min(dispatcher.startable)
            command = dispatcher.begin(uuid)
            if command is not None:
                replies[uuid] = world.runners[uuid].step(command)
                heapq.heappush(due, (now + 1.0, uuid, 0))
    count = range(len(trace.arrivals))
    return [first[i] for i in count], [last[i] for i in count]


@pytest.mark.parametrize(
    ("seed", "num_blocks", "count", "rate", "works_ahead"),
    [
        (0, 64, 1, 0.4, False), (1, 14, 1, 2.0, True), (2, 64, 2, 3.0, True), (0, 14, 2, 0.8, False),
        (1, 14, 2, 3.0, True),
    ],
    ids=["idle", "tight, ahead", "two, ahead", "tight, two", "tight, two, ahead"],
)  # fmt: skip
def test_tokens_come_when_the_simulator_says(monkeypatch, seed, num_blocks, count, rate, works_ahead) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", works_ahead)
    chance = np.random.default_rng(seed)
    arrivals = np.cumsum(chance.exponential(1 / rate, 40))
    lengths = RequestLengths(chance.integers(1, 12, 40), chance.integers(1, 18, 40))
    nothing = np.zeros(40, dtype=np.int64)
    trace = Trace(arrivals, lengths, nothing, nothing)
    world = LocalRunners.of(count, num_blocks=num_blocks)
    policy = ClusterPolicy(max_batch_size=BATCH, page_size=PAGE)
    for uuid, runner in world.runners.items():
        policy.add_gpu(uuid, runner.describe().num_pages)
    second = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
    said = simulate(trace, policy, second, works_ahead=works_ahead)
    first, last = served(world, trace)
    assert first == pytest.approx(said.first_token_s.tolist())
    assert last == pytest.approx(said.finish_s.tolist())
    assert world.dispatcher.num_evicted == said.evictions
