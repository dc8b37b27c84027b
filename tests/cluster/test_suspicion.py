"""Runners that die with requests in them: who is to blame fails in the end, nobody else does."""

import random
from dataclasses import dataclass, field

import pytest

from punica.adapters import LoRARequest
from punica.cluster import ClusterPolicy
from punica.cluster.dispatch import Dispatcher
from punica.cluster.suspicion import LOSSES_ALONE, LOSSES_IN_COMPANY, PROOF_TOKENS
from punica.engine import Request, RequestState, SamplingParams
from tests.cluster.runner_world import LocalRunners, requests, run, undisturbed, write_adapters

MOST_DEATHS = LOSSES_IN_COMPANY + 1 + LOSSES_ALONE


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LoRARequest]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@dataclass
class Deadly:
    """Local runners that die of a request named poison once it has ``at`` tokens, and of other things when told to."""

    count: int
    at: int = 0
    seed: int = 0
    world: LocalRunners = field(init=False)
    failed: list[RequestState] = field(default_factory=list)
    deaths: int = 0
    most_isolated: int = 0

    def __post_init__(self) -> None:
        self.world, self.random = LocalRunners.of(self.count), random.Random(self.seed)

    @property
    def desk(self) -> Dispatcher:
        return self.world.desk

    def turn(self, dies: bool = False) -> None:
        """A step of a runner, which may be its last; it is replaced some turns later."""
        uuid = self.random.choice(sorted(self.desk.startable))
        command = self.desk.begin(uuid)
        if command is None:
            return
        self.check_isolation()
        inside = [state for name, state in self.world.runners[uuid].engine._requests.items() if "poison" in name]
        joins = command.joins is not None and "poison" in command.joins.request.request_id
        tokens = len(command.joins.generated) if joins else max((state.num_generated for state in inside), default=-1)
        if dies or tokens >= self.at:
            self.deaths += 1
            self.failed += self.desk.died(uuid, f"death {self.deaths}")
            self.world.replace(uuid)
            return
        ended = self.desk.end(uuid, self.world.runners[uuid].step(command))
        self.failed += ended.failed

    def check_isolation(self) -> None:
        """An isolated request has its GPU for itself."""
        for gpu in self.desk.policy.gpus.values():
            isolated = [member for member in gpu.members.values() if member.isolated]
            assert not isolated or gpu.working_set == 1
            self.most_isolated = max(self.most_isolated, len(isolated))

    def run(self, deaths_at: tuple[int, ...] = ()) -> None:
        turns = 0
        while self.desk.startable:
            self.turn(dies=turns in deaths_at)
            turns += 1
            assert turns < 20_000, "it never ends"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at", [0, 12], ids=["at once", "after it was acquitted"])
def test_bystanders_of_a_request_that_kills_runners_all_complete(adapters, count, at) -> None:
    asked = requests(adapters, 14, seed=count, seeded=True)
    expected = undisturbed(asked)
    deadly = Deadly(count, at)
    states = [deadly.desk.add(request) for request in asked[:3]]
    poison = deadly.desk.add(Request("poison", [1, 2, 3], SamplingParams(24, ignore_eos=True)))
    states += [deadly.desk.add(request) for request in asked[3:]]
    deadly.run()
    assert deadly.failed == [poison]
    assert poison.finish_reason == "failed"
    assert poison.error == (
        f"RuntimeError: {LOSSES_ALONE} runners died with this request alone in them, of: death {deadly.deaths}"
    )
    assert poison.num_generated == at
    assert LOSSES_ALONE < deadly.deaths <= MOST_DEATHS
    assert deadly.most_isolated == 1
    assert {state.request_id: state.output_token_ids for state in states} == expected
    assert deadly.desk.num_unfinished == 0
    assert not any(gpu.used_pages for gpu in deadly.desk.policy.gpus.values())


@pytest.mark.parametrize("seed", range(3))
def test_unrelated_deaths_fail_nobody(adapters, seed) -> None:
    asked = requests(adapters, 24, seed, seeded=True)
    deadly = Deadly(3, at=1000, seed=seed)
    states = [deadly.desk.add(request) for request in asked]
    deadly.run(deaths_at=tuple(range(8, 88, 8)))
    assert deadly.deaths == 10
    assert deadly.failed == []
    assert deadly.most_isolated == 1, "so that somebody was there twice"
    assert {state.request_id: state.output_token_ids for state in states} == undisturbed(asked)


def two_gpus(names: str) -> ClusterPolicy:
    """For two requests each, and these in the queue."""
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
    policy.isolate("u")
    policy.isolate("v")
    assert policy.place() == [("u", "b")]
    policy.finish("w")
    assert policy.place() == [("y", "a")], "v waits, before it in the queue, and has its own"
    assert policy.queued == ("v",)
    policy.end_isolation("u")
    assert policy.place() == [("v", "b")]
    assert policy.queued == ("u",)
    policy.finish("v")
    assert policy.place() == [("u", "b")]
    assert not policy.gpus["b"].closed


def test_the_gpu_set_apart_is_the_emptiest_and_whoever_is_there_may_finish() -> None:
    policy = two_gpus("uvw")
    policy.place()
    policy.submit("x", 10, 40)
    policy.isolate("x")
    policy.submit("y", 10, 40)
    assert policy.place() == [], "w is on a, and nobody comes to it"
    policy.finish("u")
    assert policy.place() == [("y", "b")]
    policy.finish("w")
    assert policy.place() == [("x", "a")]


def test_a_gpu_set_apart_may_die_or_be_given_back() -> None:
    policy = ClusterPolicy(max_batch_size=2)
    policy.add_gpu("a", 100)
    policy.submit("u", 10, 40)
    policy.submit("v", 10, 40)
    policy.isolate("v")
    assert policy.place() == [("v", "a")]
    policy.remove_gpu("a")
    assert policy.queued == ("v", "u")
    policy.add_gpu("b", 1)  # too small for either
    assert policy.place() == []
    policy.add_gpu("c", 100)
    assert policy.place() == [("v", "c")]
    policy.cancel("v")
    assert policy.place() == [("u", "c")]


def test_who_has_left_a_runner_is_not_blamed_for_its_death(adapters) -> None:
    world = LocalRunners.of(2)
    state = world.desk.add(Request("r", [1, 2, 3], 12))

    def step() -> str:
        uuid = world.desk.startable.pop()
        world.desk.end(uuid, world.runners[uuid].step(world.desk.begin(uuid)))
        return uuid

    uuid = step()
    assert world.desk.died(uuid, "it was alone there") == ()
    world.replace(uuid)
    left = [step() for _ in range(PROOF_TOKENS)][-1]
    assert world.desk.policy.gpus["runner-1"].members, "acquitted, and at home where the rule wants it"
    assert left == "runner-0"
    step()
    assert world.desk.died(left, "it has left") == ()
    assert run(world) == {}
    assert state.output_token_ids == undisturbed([Request("r", [1, 2, 3], 12)])["r"]
    assert world.desk.policy.gpus["runner-1"].step == 12 - 1 - PROOF_TOKENS
