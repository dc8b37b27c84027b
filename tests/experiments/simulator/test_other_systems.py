"""Defining property of each rule of another system, and what all have in common."""

from collections import Counter

import numpy as np
import pytest

from experiments.simulator import LoadCost, Residency, ResidencyConfig, StepCost, Trace, simulate
from experiments.simulator.other_systems import Consolidating, LoRAServe
from experiments.workload import poisson_arrivals, popularity, scaled_lengths
from punica.cluster import SCHEDULING_RULES, ClusterPolicy

STEPS = StepCost("like an A100", base=0.018, row=0.0, kv=4e-7, prefill=1e-4, rank=4e-6)
LOADS = LoadCost("slow", host_base=0.004, host_rank=1e-4, disk_base=0.05, disk_rank=1e-3)


class World:
    """A policy on GPUs whose loads end when `load` says so."""

    def __init__(self, rule: str, gpus: str = "abc", batch: int = 32, pages: int = 4000, slots: int = 32) -> None:
        self.now = 0.0
        self.policy = ClusterPolicy(rule, max_batch_size=batch, page_size=4)
        memory = ResidencyConfig(slots, LoadCost("a second", 1.0, 0.0, 1.0, 0.0), host_adapters=slots + 3)
        for name in gpus:
            self.policy.add_gpu(name, pages)
            self.policy.gpus[name].residency = Residency(memory, lambda: self.now)
        self.names = map(str, range(10**6))

    def ask(self, adapter: int, count: int = 1, rank: int = 8, prompt: int = 4, final: int = 40) -> str:
        """Submit ``count`` requests; return the GPUs that they are placed on, in order."""
        for _ in range(count):
            self.policy.submit(next(self.names), prompt, final, adapter, rank)
        return "".join(gpu for _, gpu in self.policy.place())

    def put(self, gpu: str, adapter: int, count: int = 1, rank: int = 8) -> None:
        """Place requests by hand."""
        others = [name for name in self.policy.gpus if name != gpu]
        for name in others:
            self.policy.gpus[name].reserved = True
        assert self.ask(adapter, count, rank) == gpu * count
        for name in others:
            self.policy.gpus[name].reserved = False

    def load(self) -> None:
        """End all loads."""
        self.now += 1000.0

    def finish(self) -> None:
        """Finish all requests."""
        for name in list(self.policy.requests):
            self.policy.finish(name)

    def prefill(self, gpu: str) -> None:
        """Run steps until no request of ``gpu`` waits for its prefill."""
        while self.policy.gpus[gpu].pending:
            self.policy.begin_step(gpu)
            self.policy.end_step(gpu)


def test_llm_d_returns_to_the_home_of_an_adapter_that_has_no_request_there() -> None:
    for rule, moves in (("llm_d", False), ("least_loaded", True)):
        world = World(rule)
        home = world.ask(1)
        world.load()
        world.finish()
        world.put(home, 2, count=5)
        world.prefill(home)
        assert (world.ask(1) != home) == moves


def test_llm_d_opens_a_second_home_when_the_first_is_saturated_but_no_third() -> None:
    world = World("llm_d", "abcd")
    assert set(world.ask(1, count=9)) == {"d"}
    assert world.ask(1) == "c"  # nine wait on d
    assert set(world.ask(1, count=8)) == {"c"}
    assert set(world.ask(1, count=4)) <= {"c", "d"}  # both saturated, as many as there may be
    assert world.ask(2) in "ab"


def test_ray_serve_takes_the_smaller_of_two_with_the_adapter() -> None:
    world = World("ray_serve", "abcdef")
    world.put("a", 1, count=5)
    world.put("b", 1, count=2)
    assert set(world.ask(1, count=3)) == {"b"}  # the only two that have it
    world.put("c", 2, count=3)
    assert set(world.ask(9)) <= set("def"), "of those with the fewest adapters"


def test_loraserve_gives_each_gpu_similar_ranks_and_an_equal_part_of_the_demand() -> None:
    world = World("loraserve", "abcd", batch=2000, pages=20_000, slots=2000)
    ranks = {adapter: (8, 16, 32, 64)[adapter % 4] for adapter in range(1, 41)}
    asked = np.random.default_rng(1).integers(1, 41, size=3 * LoRAServe.WINDOW).tolist()
    found: dict[str, list[int]] = {name: [] for name in "abcd"}
    for place, adapter in enumerate(asked):
        gpu = world.ask(adapter, rank=ranks[adapter])
        if place >= LoRAServe.WINDOW:
            found[gpu].append(ranks[adapter])
    assert [round(np.mean(part)) for part in found.values()] == sorted(round(np.mean(part)) for part in found.values())
    for part, rank in zip(found.values(), (8, 16, 32, 64), strict=True):
        assert len(part) == pytest.approx(len(asked) / 6, rel=0.25)
        assert Counter(part)[rank] > 0.6 * len(part)


def placed_apart(rule: str, small: int, large: int, pages: int = 4000, steps: int = Consolidating.PERIOD) -> World:
    """Requests of two GPUs, prefilled, the first of which has run ``steps`` steps since it was asked."""
    world = World(rule, "ab", batch=8, pages=pages)
    world.put("a", 1, count=small)
    world.put("b", 1, count=large)
    for name in "ab":
        world.prefill(name)
    world.policy.cancel("0")
    world.policy.gpus["a"].step += steps
    return world


def test_consolidation_moves_all_requests_to_the_larger_working_set() -> None:
    world = placed_apart("punica_consolidating", 3, 5)
    step = world.policy.begin_step("a")
    assert step.evicted == ("2", "1")
    assert step.is_empty
    assert [gpu for _, gpu in world.policy.place()] == ["b", "b"]
    assert world.policy.gpus["b"].working_set == 7
    assert world.policy.begin_step("b").evicted == ()
    assert placed_apart("punica", 3, 5).policy.begin_step("a").evicted == ()


@pytest.mark.parametrize(
    ("small", "large", "pages", "steps"), [(5, 5, 4000, 256), (4, 3, 4000, 256), (3, 5, 22, 256), (3, 5, 4000, 1)]
)
def test_nothing_moves_without_room_or_a_larger_working_set_or_within_a_period(small, large, pages, steps) -> None:
    world = placed_apart("punica_consolidating", small, large, pages, steps)
    assert world.policy.begin_step("a").evicted == ()


def zipf_trace(count: int, rate: float, longest: int, workload: str = "Zipf") -> Trace:
    adapters = popularity(workload).requests(count, seed=5) + 1
    arrivals = poisson_arrivals(rate, 200.0, seed=5)[:count]
    return Trace(arrivals, scaled_lengths(count, longest, 5), adapters, np.array([8, 16, 32, 64])[adapters % 4])


def four_gpus(rule: str, pages: int) -> ClusterPolicy:
    policy = ClusterPolicy(rule, max_batch_size=8)
    for i in range(4):
        policy.add_gpu(f"gpu-{i}", pages)
    return policy


@pytest.mark.parametrize("rule", SCHEDULING_RULES.names())
def test_every_request_is_served_once_with_few_pages_and_adapters_that_load_and_the_same_again(rule: str) -> None:
    asked = zipf_trace(300, 40.0, 200)
    for pages, adapters in ((30, None), (60, ResidencyConfig(8, LOADS, host_adapters=12))):
        policies = [four_gpus(rule, pages) for _ in range(2)]
        first, again = (simulate(asked, policy, STEPS, adapters=adapters) for policy in policies)
        assert first.finish_s.tolist() == again.finish_s.tolist()
        assert first.tokens.sum() == asked.lengths.total_tokens
        assert (first.finish_s >= first.first_token_s).all()
        assert (first.first_token_s > asked.arrivals).all()
        assert policies[0].requests == {}
        assert all(gpu.used_pages == 0 for gpu in policies[0].gpus.values())
        assert first.seconds_by_batch.sum() <= 4 * first.finish_s.max()
        if adapters is None:
            assert min(first.evictions, first.longest_queue) > 0
        else:
            assert first.loads_from_disk >= len(set(asked.adapters.tolist()))
