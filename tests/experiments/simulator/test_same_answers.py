"""Answers of the simulator to the bit: recorded ones, step by step against strides, an index against a scan."""

import hashlib

import numpy as np
import pytest

from experiments.simulator import LoadCost, ResidencyConfig, SimulationResult, StepCost, Trace, simulate
from experiments.workload import poisson_arrivals, popularity, scaled_lengths
from punica.cluster import SCHEDULING_RULES, ClusterPolicy
from punica.cluster.gpu import Gpu
from punica.cluster.placement import LargestWorkingSet

ODD = StepCost("odd", base=0.0171, row=3e-5, kv=4.1e-7, prefill=1.03e-4, rank=4.3e-6, join=1e-3)
SECOND = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
ROOMY, TIGHT = {"gpus": 5, "pages": 2000}, {"gpus": 4, "pages": 60, "max_batch_size": 8}
LOADS = LoadCost("slow", host_base=0.01, host_rank=1e-3, disk_base=0.1, disk_rank=1e-3)
ORDERED = [name for name in SCHEDULING_RULES.names() if "candidates" in vars(SCHEDULING_RULES.get(name))]


def cluster(rule: str, gpus: int, pages: int, **settings) -> ClusterPolicy:
    policy = ClusterPolicy(rule, **settings)
    for i in range(gpus):
        policy.add_gpu(f"gpu-{i:04}", pages)
    return policy


def mixed_ranks(count: int, rate: float, seed: int, whole_seconds: bool = False) -> Trace:
    arrivals = poisson_arrivals(rate, 10 * count / rate, seed)[:count]
    adapters = popularity("Skewed").requests(count, seed=seed) + 1
    ranks = np.array([8, 16, 32, 64])[adapters % 4]
    return Trace(np.floor(arrivals) if whole_seconds else arrivals, scaled_lengths(count, 256, seed), adapters, ranks)


def digest(result: SimulationResult) -> str:
    """Hash the answers; GPU time to the microsecond, as its sum rounds by its order."""
    found = hashlib.sha256()
    whole = result.first_token_s, result.finish_s, result.tokens, result.batch
    for values in (*whole, np.round(result.seconds_by_batch, 6)):
        found.update(np.ascontiguousarray(values).tobytes())
    found.update(repr((result.longest_queue, result.steps, result.evictions)).encode())
    return found.hexdigest()[:16]


RECORDED = {
    "punica, roomy": "7fcd372b5ac5d994",
    "punica, tight": "301e65428df72a2d",
    "released, tight": "e912156cccf3715b",
    "least_loaded, tight": "7c9914b65476ed9d",
    "punica, roomy, padded": "f489c777868b8cf3",
    "punica, tight, ahead": "818558e14a00f41d",
    "least_loaded, roomy, ties, ahead": "9431e7d431386c4c",
}
"""Case -> digest of what the simulator answered when it took one step after the other."""


@pytest.mark.parametrize(("case", "told"), RECORDED.items())
def test_answers_are_those_of_the_simulator_that_took_step_by_step(case, told):
    rule, size, *marks = case.split(", ")
    asked = mixed_ranks(500, 60.0, seed=4, whole_seconds="ties" in marks)
    policy = cluster(rule=rule, **(TIGHT if size == "tight" else ROOMY))
    cost = SECOND if "ties" in marks else ODD
    assert digest(simulate(asked, policy, cost, "padded" in marks, "ahead" in marks)) == told


@pytest.mark.parametrize(
    ("works_ahead", "host_adapters", "cost"),
    [(False, None, SECOND), (True, 9, ODD), (False, 9, ODD), (True, None, ODD)],
    ids=["whole seconds", "ahead, evicted", "evicted", "ahead"],
)  # fmt: skip
def test_strides_change_no_answer_with_residency_either(works_ahead, host_adapters, cost, monkeypatch):
    asked = mixed_ranks(200, 40.0, seed=5, whole_seconds=cost is SECOND)

    def served() -> tuple[str, int, int, float]:
        adapters = ResidencyConfig(8, LOADS, host_adapters)
        result = simulate(asked, cluster("released", **TIGHT), cost, False, works_ahead, adapters)
        assert np.isfinite(result.finish_s).all()
        return digest(result), result.loads_from_host, result.loads_from_disk, result.load_wait_s

    strides = served()
    monkeypatch.setattr(Gpu, "steps_that_fit", lambda gpu, most, spare: 0)
    assert served() == strides
    assert strides[2 if host_adapters else 1] > 8, "some adapters are loaded more than once"


def test_strides_reach_past_the_last_spare_page(monkeypatch):
    begun = []
    begin_step = ClusterPolicy.begin_step
    monkeypatch.setattr(ClusterPolicy, "begin_step", lambda *given: begun.append(1) or begin_step(*given))
    result = simulate(mixed_ranks(300, 60.0, seed=6), cluster("punica", **TIGHT), ODD)
    assert len(begun) < 0.15 * result.steps


def test_rules_of_one_order_are_ordered_and_a_subclass_with_its_own_choice_is_asked():
    assert set(ORDERED) >= {"punica", "least_loaded"}
    assert "released" not in ORDERED
    asked: list[int] = []

    class Watched(LargestWorkingSet):
        def choose(self, request, gpus):
            asked.append(len(gpus))
            return gpus[0]

    SCHEDULING_RULES.register("watched")(Watched)
    try:
        policy = cluster("watched", **ROOMY)
    finally:
        SCHEDULING_RULES._entries.pop("watched")
    policy.submit("a", 4, 8)
    policy.place()
    assert asked == [5]


@pytest.mark.parametrize("rule", SCHEDULING_RULES.names())
def test_no_rule_evicts_before_its_pages_run_short(rule):
    policy = cluster(rule, gpus=1, pages=12, max_batch_size=3, page_size=4)
    for name in "abc":
        policy.submit(name, 8, 40)
    policy.place()
    gpu = policy.gpus["gpu-0000"]
    spare = policy.rule.spare_pages
    while gpu.free_pages >= (len(gpu.members) if spare else gpu.pages_to_grow()):
        assert not policy.rule.must_evict(gpu)
        policy.begin_step(gpu.uuid)
        policy.end_step(gpu.uuid)
    assert gpu.step >= 5
    assert policy.rule.must_evict(gpu)
