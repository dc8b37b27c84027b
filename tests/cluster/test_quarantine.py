"""Runner crashes with requests in them: the culprit fails in the end, no other request does."""

import random
from dataclasses import dataclass, field

import pytest

from punica.cluster import ClusterPolicy
from punica.cluster.dispatcher import Dispatcher
from punica.cluster.quarantine import MAX_SHARED_CRASHES, MAX_SOLO_CRASHES, PROBATION_TOKENS, CrashRecord
from punica.engine import Request, RequestState, SamplingParams
from tests.cluster.runner_world import LocalRunners, requests, run, undisturbed

MOST_DEATHS = MAX_SHARED_CRASHES + 1 + MAX_SOLO_CRASHES


@dataclass
class Deadly:
    """Local runners that crash on a request named poison once it has ``at`` tokens, and on demand."""

    count: int
    at: int = 0
    seed: int = 0
    world: LocalRunners = field(init=False)
    failed: list[RequestState] = field(default_factory=list)
    deaths: int = 0
    most_quarantined: int = 0

    def __post_init__(self) -> None:
        self.world, self.random = LocalRunners.of(self.count), random.Random(self.seed)

    @property
    def dispatcher(self) -> Dispatcher:
        return self.world.dispatcher

    def turn(self, dies: bool = False) -> None:
        """Run a step of a runner, or crash and replace it."""
        uuid = self.random.choice(sorted(self.dispatcher.startable))
        command = self.dispatcher.begin(uuid)
        if command is None:
            return
        self.check_quarantine()
        inside = [state for name, state in self.world.runners[uuid].engine._requests.items() if "poison" in name]
        joins = command.joins is not None and "poison" in command.joins.request.request_id
        tokens = len(command.joins.generated) if joins else max((state.num_generated for state in inside), default=-1)
        if dies or tokens >= self.at:
            self.deaths += 1
            self.failed += self.dispatcher.died(uuid, f"death {self.deaths}")
            self.world.replace(uuid)
            return
        ended = self.world.step(uuid, command)
        self.failed += ended.failed

    def check_quarantine(self) -> None:
        for gpu in self.dispatcher.policy.gpus.values():
            quarantined = [member for member in gpu.members.values() if member.quarantined]
            assert not quarantined or gpu.working_set == 1
            self.most_quarantined = max(self.most_quarantined, len(quarantined))

    def run(self, deaths_at: tuple[int, ...] = ()) -> None:
        turns = 0
        while self.dispatcher.startable:
            self.turn(dies=turns in deaths_at)
            turns += 1
            assert turns < 20_000, "it never ends"


@pytest.mark.parametrize(("count", "at"), [(1, 0), (3, 12)], ids=["at once", "after it was acquitted"])
def test_bystanders_of_a_request_that_kills_runners_all_complete(adapters, count, at) -> None:
    asked = requests(adapters, 14, seed=count, seeded=True)
    expected = undisturbed(asked)
    deadly = Deadly(count, at)
    states = [deadly.dispatcher.add(request) for request in asked[:3]]
    poison = deadly.dispatcher.add(Request("poison", [1, 2, 3], SamplingParams(24, ignore_eos=True)))
    states += [deadly.dispatcher.add(request) for request in asked[3:]]
    deadly.run()
    assert deadly.failed == [poison]
    assert poison.finish_reason == "failed"
    assert poison.error == (
        f"RuntimeError: {MAX_SOLO_CRASHES} runners died with this request alone in them, of: death {deadly.deaths}"
    )
    assert poison.num_generated == at
    assert MAX_SOLO_CRASHES < deadly.deaths <= MOST_DEATHS
    assert deadly.most_quarantined == 1
    assert {state.request_id: state.output_token_ids for state in states} == expected
    assert deadly.dispatcher.num_unfinished == 0
    assert not any(gpu.used_pages for gpu in deadly.dispatcher.policy.gpus.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_unrelated_deaths_fail_nobody(adapters, seed) -> None:
    asked = requests(adapters, 24, seed, seeded=True)
    deadly = Deadly(3, at=1000, seed=seed)
    states = [deadly.dispatcher.add(request) for request in asked]
    deadly.run(deaths_at=tuple(range(8, 88, 8)))
    assert deadly.deaths == 10
    assert deadly.failed == []
    assert deadly.most_quarantined == 1, "so that somebody was there twice"
    assert {state.request_id: state.output_token_ids for state in states} == undisturbed(asked)


def test_the_second_quarantine_is_final() -> None:
    record = CrashRecord()
    for _ in range(MAX_SHARED_CRASHES):
        assert not record.quarantined
        record.add_crash(shared=True)
    assert [record.add_token() for _ in range(PROBATION_TOKENS)] == [False] * (PROBATION_TOKENS - 1) + [True]
    assert not record.quarantined
    record.add_crash(shared=True)
    assert not any(record.add_token() for _ in range(2 * PROBATION_TOKENS))
    assert record.quarantined


def two_gpus(names: str) -> ClusterPolicy:
    """Build two GPUs for two requests each, and a queue of ``names``."""
    policy = ClusterPolicy(max_batch_size=2)
    for uuid in ("a", "b"):
        policy.add_gpu(uuid, 100)
    for name in names:
        policy.submit(name, 10, 40)
    return policy


def test_others_go_on_while_somebody_is_served_alone() -> None:
    """Neither kept waiting by it, nor beside it; its GPU is open to all again when nobody is to be served alone."""
    policy = two_gpus("uvwxy")
    assert policy.place() == [("u", "b"), ("v", "b"), ("w", "a"), ("x", "a")]
    policy.quarantine("u")
    policy.quarantine("v")
    assert policy.place() == [("u", "b")]
    policy.finish("w")
    assert policy.place() == [("y", "a")], "v waits, before it in the queue, and has its own"
    assert policy.queued == ("v",)
    policy.quarantine("u", begins=False)
    assert policy.place() == [("v", "b")]
    assert policy.queued == ("u",)
    policy.finish("v")
    assert policy.place() == [("u", "b")]
    assert not policy.gpus["b"].reserved


def test_the_gpu_set_apart_is_the_emptiest_and_whoever_is_there_may_finish() -> None:
    policy = two_gpus("uvw")
    policy.place()
    policy.submit("x", 10, 40)
    policy.quarantine("x")
    policy.submit("y", 10, 40)
    assert policy.place() == [], "w is on a, and nobody comes to it"
    policy.finish("u")
    assert policy.place() == [("y", "b")]
    policy.finish("w")
    assert policy.place() == [("x", "a")]


@pytest.mark.parametrize("taken_out", [False, True])
def test_who_has_left_a_runner_is_not_blamed_for_its_death(adapters, taken_out) -> None:
    world = LocalRunners.of(2)
    state = world.dispatcher.add(Request("r", [1, 2, 3], 12))

    def step() -> str:
        uuid = world.dispatcher.startable.pop()
        world.step(uuid)
        return uuid

    uuid = step()
    assert world.dispatcher.died(uuid, "it was alone there") == ()
    world.replace(uuid)
    left = [step() for _ in range(PROBATION_TOKENS)][-1]
    assert world.dispatcher.policy.gpus["runner-1"].members, "acquitted, and at home where the rule wants it"
    assert left == "runner-0"
    if taken_out:
        while step() != left:
            pass
    assert world.dispatcher.died(left, "it has left") == ()
    assert not any(request.quarantined for request in world.dispatcher.policy.requests.values())
    assert run(world) == {}
    assert state.output_token_ids == undisturbed([Request("r", [1, 2, 3], 12)])["r"]
    assert world.dispatcher.policy.gpus["runner-1"].step == 12 - 1 - PROBATION_TOKENS
