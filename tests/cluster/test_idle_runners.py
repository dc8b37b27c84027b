"""Steps of a runner without requests: aborted requests leave it, and a probe shows whether it lives."""


import pytest

from punica.adapters import LoRARequest
from punica.engine import Request
from tests.cluster.runner_world import LocalRunners, requests, run, undisturbed, write_adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LoRARequest]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


def step(world: LocalRunners, uuid: str) -> None:
    command = world.dispatcher.begin(uuid)
    assert command is not None
    world.dispatcher.end(uuid, world.runners[uuid].step(command))


@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "in a step"])
def test_the_last_request_of_a_runner_leaves_with_the_next_step(adapters, in_flight: bool) -> None:
    world = LocalRunners.of(1)
    uuid, engine = "runner-0", world.runners["runner-0"].engine
    free = engine.blocks.num_free
    for name in ("a", "b"):
        world.dispatcher.add(Request(name, [1] * 10, 30, adapters[1]))
    step(world, uuid)
    step(world, uuid)
    command = world.dispatcher.begin(uuid) if in_flight else None
    for name in ("a", "b"):
        world.dispatcher.abort(name)
    if command is not None:
        assert not world.dispatcher.startable  # a step at a time
        world.dispatcher.end(uuid, world.runners[uuid].step(command))
    assert engine.blocks.num_free < free
    assert world.dispatcher.startable == {uuid}
    step(world, uuid)
    assert engine.blocks.num_free == free
    assert not engine.has_unfinished()
    assert not world.dispatcher.startable
    assert world.dispatcher.begin(uuid) is None


def test_requests_that_come_during_an_empty_step_are_served_by_the_next(adapters) -> None:
    asked = requests(adapters, 6, seeded=True)
    world = LocalRunners.of(1)
    world.dispatcher.probe()
    command = world.dispatcher.begin("runner-0")
    assert command is not None
    states = [world.dispatcher.add(request) for request in asked]
    assert not world.dispatcher.startable
    world.dispatcher.end("runner-0", world.runners["runner-0"].step(command))
    assert run(world) == {}
    assert {state.request_id: state.output_token_ids for state in states} == undisturbed(asked)


def test_a_probe_steps_idle_runners_once() -> None:
    world = LocalRunners.of(3)
    world.dispatcher.add(Request("r", [1], 3))
    busy = next(iter(world.dispatcher.startable))
    command = world.dispatcher.begin(busy)
    world.dispatcher.probe()
    idle = world.runners.keys() - {busy}
    assert world.dispatcher.startable == idle
    for uuid in idle:
        step(world, uuid)
    assert not world.dispatcher.startable
    world.dispatcher.end(busy, world.runners[busy].step(command))
    assert world.dispatcher.startable == {busy}
