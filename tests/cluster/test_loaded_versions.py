"""Runners read folders by themselves, and all serve one version of each: the one that any of them loaded last."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from punica.adapters import LoRARequest
from punica.cluster.runner import Runner
from punica.engine import Request, RequestState
from tests.cluster.runner_world import LocalRunners, factory, run, undisturbed, write_adapters


@pytest.fixture
def adapters(tmp_path: Path) -> dict[int, LoRARequest]:
    return write_adapters(tmp_path)


def change(adapter: LoRARequest, what: str) -> None:
    folder = Path(adapter.absolute_path)
    if what == "config":
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 99}))
    else:
        file = folder / "adapter_model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3000:-1500] = content[-1500:]
        file.write_bytes(content)


def ask(world: LocalRunners, name: str, adapter: LoRARequest, uuid: str) -> RequestState:
    """Have one of the runners serve a request, while the others are away."""
    others = [other for other in world.runners if other != uuid]
    for other in others:
        world.dispatcher.leave(other)
    state = world.dispatcher.add(Request(name, [1, 2, 3], 6, adapter))
    run(world)
    for other in others:
        world.dispatcher.join(other, world.runners[other].describe())
    return state


@pytest.mark.parametrize("what", ["config", "weights"])
def test_another_runner_serves_what_the_first_has_loaded_or_says_what_changed(adapters, what) -> None:
    world, adapter = LocalRunners.of(2), adapters[2]
    expected = undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"]
    assert ask(world, "first", adapter, "runner-0").output_token_ids == expected
    change(adapter, what)
    assert ask(world, "in memory", adapter, "runner-0").output_token_ids == expected
    for turn in range(2):
        refused = ask(world, f"refused {turn}", adapter, "runner-1")
        assert f"'{adapter.lora_name}' (id 2) has changed on disk since it was loaded" in refused.error
        assert refused.output_token_ids == []
    new = ask(world, "again", replace(adapter, load_inplace=True), "runner-1").output_token_ids
    assert new == undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"] != expected
    assert ask(world, "old runner", adapter, "runner-0").output_token_ids == new, "the first runner loads it, too"
    assert world.dispatcher.num_unfinished == 0


@pytest.mark.parametrize("what", ["config", "weights"])
def test_a_runner_that_starts_later_does_not_bring_another_version(adapters, what) -> None:
    adapter = adapters[3]

    def start() -> Runner:
        runner = Runner(factory(), fetch={}.__getitem__)
        runner.engine.manager.add_adapter(adapter)  # as from_pretrained does
        return runner

    def restart() -> None:
        world.dispatcher.died("runner-0", "a crash")
        world.runners["runner-0"] = start()
        world.dispatcher.join("runner-0", world.runners["runner-0"].describe())

    world = LocalRunners.of(1)
    restart()
    expected = undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"]
    change(adapter, what)
    restart()
    state = world.dispatcher.add(Request("r", [1, 2, 3], 6, adapter))
    assert list(run(world)) == ["r"]
    assert "has changed on disk since it was loaded" in state.error
    state = world.dispatcher.add(Request("in place", [1, 2, 3], 6, replace(adapter, load_inplace=True)))
    assert run(world) == {}
    assert state.output_token_ids != expected


def test_a_request_goes_on_with_the_version_it_began_with_or_fails(adapters) -> None:
    """Its runner dies, and the folder has been loaded again since by another."""
    world, adapter = LocalRunners.of(2), adapters[2]
    state = world.dispatcher.add(Request("r", [1, 2, 3], 9, replace(adapter, load_inplace=True)))
    (uuid,) = world.dispatcher.startable
    for _ in range(3):
        world.dispatcher.end(uuid, world.runners[uuid].step(world.dispatcher.begin(uuid)))
    assert state.num_generated == 3
    change(adapter, "weights")
    world.dispatcher.died(uuid, "a crash")
    assert list(run(world)) == ["r"]
    assert "has changed on disk since it was loaded" in state.error


@pytest.mark.parametrize("new", [1, 6], ids=["its only token", "first of six"])
def test_of_two_runners_that_load_two_versions_at_once_one_is_refused(adapters, new) -> None:
    world, adapter = LocalRunners.of(2, max_batch_size=1), adapters[2]
    expected = undisturbed([Request("x", [1, 2, 3], 6, adapter)])["x"]
    states = [world.dispatcher.add(Request(f"r{i}", [1, 2, 3], new, adapter)) for i in range(2)]
    commands = {uuid: world.dispatcher.begin(uuid) for uuid in sorted(world.dispatcher.startable)}
    assert len(commands) == 2
    replies = {}
    for uuid, command in commands.items():
        replies[uuid] = world.runners[uuid].step(command)
        change(adapter, "weights")
    ended = [world.dispatcher.end(uuid, reply) for uuid, reply in replies.items()]
    assert [len(each.failed) for each in ended] == [0, 1]
    assert [len(each.tokens) for each in ended] == [1, 0]
    run(world)
    errors = [state.error for state in states]
    assert errors.count(None) == 1
    assert "has changed on disk since it was loaded" in next(filter(None, errors))
    assert [state.output_token_ids for state in states if state.error is None] == [expected[:new]]
    assert all(not runner.engine.has_unfinished() for runner in world.runners.values())
