"""Requests through dispatcher and runners in one process: tokens as of an undisturbed engine, under any disturbance."""

import time
from collections import Counter
from dataclasses import replace

import pytest

import experiments.simulator  # noqa: F401  # rules of other systems
from punica.adapters import LoRAModelManager, LoRARequest
from punica.cluster.dispatcher import Dispatcher
from punica.cluster.runner import Runner
from punica.engine import Engine, Request, SamplingParams
from punica.engine.runner import ModelRunner
from tests.cluster.runner_world import Disturbed, LocalRunners, factory, new_runner, requests, run, undisturbed


@pytest.mark.parametrize(
    ("works_ahead", "beside", "seed", "crashes"),
    [
        (False, False, 0, 2), (True, True, 0, 2), (False, False, 2, 10),
        *(pytest.param(a, not a, 1, 2, marks=pytest.mark.slow) for a in (False, True)),
        pytest.param(True, False, 2, 10, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_tokens_come_once_and_as_undisturbed_whatever_crashes_is_evicted_or_aborted(
    adapters, monkeypatch, seed, beside, works_ahead, crashes
) -> None:
    """An aborted request is asked for again under its name, where it has a seed. Unrelated deaths fail no request."""
    monkeypatch.setattr(ModelRunner, "works_ahead", works_ahead)
    read = LoRAModelManager.read_adapter
    monkeypatch.setattr(LoRAModelManager, "read_adapter", lambda *given: time.sleep(0.02) or read(*given))
    asked = requests(adapters, 24, seed, seeded=beside)
    expected = undisturbed(asked)
    disturbed = Disturbed(seed, most_crashes=crashes, num_blocks=19, beside=beside)
    disturbed.run(asked, aborts=0.1 * beside)
    assert disturbed.tokens == expected
    assert disturbed.ended == Counter(expected.keys())
    assert disturbed.evictions > 0 or beside  # who joins when, and so whether blocks run out, is up to a thread there
    assert (disturbed.crashes, disturbed.failed) == (crashes, [])
    assert disturbed.most_quarantined == 1 or crashes < 10
    assert not any(gpu.used_pages for gpu in disturbed.dispatcher.policy.gpus.values())


@pytest.mark.parametrize("works_ahead", [False, True], ids=["in turn", "ahead"])
def test_an_adapter_that_cannot_be_loaded_fails_its_own_request(adapters, tmp_path, monkeypatch, works_ahead) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", works_ahead)
    asked = requests(adapters, 6, seeded=True)
    expected = undisturbed(asked)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text("{")
    lost = LoRARequest("lost", 8, str(tmp_path / "nowhere"))
    world = LocalRunners.of(1)
    states = [world.dispatcher.add(request) for request in asked[:3]]
    for name, adapter in (("damaged", LoRARequest("damaged", 9, str(damaged))), ("lost", lost)):
        world.dispatcher.add(Request(name, [1, 2], 4, adapter))
    states += [world.dispatcher.add(request) for request in asked[3:]]
    failed = run(world)
    assert failed.keys() == {"damaged", "lost"}
    assert failed["lost"].startswith("FileNotFoundError: adapter 'lost' (id 8) is not registered")
    assert "damaged" in failed["damaged"]
    assert [state.output_token_ids for state in states] == list(expected.values())


def test_log_probabilities_are_those_of_an_engine(adapters) -> None:
    params = SamplingParams(9, temperature=1.0, seed=5, logprobs=2)
    request = Request("r", [3, 1, 4], params, adapters[2])
    engine = factory()()
    alone = engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    world = LocalRunners.of(2)
    state = world.dispatcher.add(request)
    for _ in range(4):
        world.step("runner-1")
    world.dispatcher.leave("runner-1")  # goes on elsewhere
    run(world)
    assert world.dispatcher.recomputed == ["r"]
    assert state.output_token_ids == alone.output_token_ids
    assert [list(one) for one in state.logprobs] == [list(one) for one in alone.logprobs]
    for one, other in zip(state.logprobs, alone.logprobs, strict=True):
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-4)


def test_scheduler_and_runner_that_disagree_are_refused(adapters) -> None:
    world = LocalRunners.of(1)
    world.dispatcher.add(Request("r", [1, 2, 3], 8))
    command = world.dispatcher.begin("runner-0")
    reply = world.runners["runner-0"].step(command)
    with pytest.raises(RuntimeError, match=r"on 1, .* 2"):
        world.dispatcher.end("runner-0", replace(reply, used_blocks=2))
    world = LocalRunners.of(1)
    world.dispatcher.add(Request("r", [1, 2, 3], 8))
    reply = world.runners["runner-0"].step(world.dispatcher.begin("runner-0"))
    with pytest.raises(RuntimeError, match="requests in the step"):
        world.dispatcher.end("runner-0", replace(reply, tokens={}))


@pytest.mark.parametrize(
    ("build", "error"),
    [
        pytest.param(factory(num_blocks=5), "5 KV blocks", id="blocks"),
        pytest.param(lambda: with_slots(2), "2 adapter slots .* 4", id="slots"),
        pytest.param(lambda: with_slots(4, "static"), "StaticBatching", id="admission"),
    ],
)
def test_engines_that_decide_for_themselves_are_refused(build, error) -> None:
    with pytest.raises(ValueError, match=error):
        Runner(build, fetch=lambda files: files)


def with_slots(slots: int, admission: str = "fcfs") -> Engine:
    model, _, config = factory().args
    backbone = factory()().runner.model.__class__(model)
    backbone.init_random_weights()
    return Engine(backbone, config.lora_config(16, max_loras=slots), config, admission)


@pytest.mark.parametrize(
    ("request_of", "error"),
    [
        pytest.param(lambda: Request("r", [256], 2), "contains token 256", id="vocabulary"),
        pytest.param(lambda: Request("r", [1] * 60, 5), "and 5 new ones, max_model_len is 64", id="length"),
        pytest.param(lambda: Request("r", [1], SamplingParams(2, stop=("a",))), "no tokenizer", id="stop"),
        pytest.param(lambda: Request("used", [1], 2), "is in use", id="name"),
    ],
)
def test_what_no_runner_could_serve_is_refused_at_once(request_of, error) -> None:
    world = LocalRunners.of(1)
    world.dispatcher.add(Request("used", [1], 4))
    with pytest.raises(ValueError, match=error):
        world.dispatcher.add(request_of())
    assert world.dispatcher.num_unfinished == 1


def test_another_rule_takes_over_runners_without_work(adapters) -> None:
    world = LocalRunners.of(2)
    asked = requests(adapters, 6)
    for request in asked[:4]:
        world.dispatcher.add(request)
    with pytest.raises(ValueError, match="rule 'least_loaded' was not taken: 4 requests are unfinished"):
        world.dispatcher.use_rule("least_loaded")
    run(world)
    with pytest.raises(ValueError, match="nonesuch"):
        world.dispatcher.use_rule("nonesuch")
    world.dispatcher.use_rule("least_loaded")
    for request in asked[:2]:  # one on each, where Punica's rule fills one
        world.dispatcher.add(request)
    assert [gpu.working_set for gpu in world.dispatcher.policy.gpus.values()] == [1, 1]
    assert not run(world)


def test_rules_and_runners_that_do_not_fit_are_refused(adapters) -> None:
    description = new_runner().describe()
    with pytest.raises(ValueError, match="'released' puts several prompts into a step"):
        Dispatcher(description, "released")
    dispatcher = Dispatcher(description)
    with pytest.raises(ValueError, match="must have the same sizes, seed and end tokens"):
        dispatcher.join("other", new_runner(max_batch_size=3).describe())
    assert dispatcher.policy.gpus == {}
    dispatcher.join("smaller", replace(description, num_pages=7))
    assert dispatcher.policy.gpus["smaller"].num_pages == 7


@pytest.mark.parametrize(
    ("generated", "error"), [([1] * 4, "has 4 generated tokens and asks for 4"), ([1, 256], "vocabulary has 256 ids")]
)
def test_an_engine_refuses_what_cannot_go_on(generated, error) -> None:
    engine = factory()()
    with pytest.raises(ValueError, match=error):
        engine.add_request(Request("r", [1], 4), generated)
    assert not engine.has_unfinished()


def test_ranks_reach_the_rule(adapters) -> None:
    world = LocalRunners.of(1)
    world.dispatcher.add(Request("r", [1], 4, adapters[2]))
    world.dispatcher.add(Request("s", [1], 4, LoRARequest("nobody", 9, "nowhere")))
    assert sorted(member.rank for member in world.dispatcher.policy.gpus["runner-0"].members.values()) == [0, 16]


@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "in a step"])
def test_the_last_request_of_a_runner_leaves_with_the_next_step(adapters, in_flight: bool) -> None:
    world = LocalRunners.of(1)
    uuid, engine = "runner-0", world.runners["runner-0"].engine
    free = engine.blocks.num_free
    for name in ("a", "b"):
        world.dispatcher.add(Request(name, [1] * 10, 30, adapters[1]))
    world.step(uuid)
    world.step(uuid)
    command = world.dispatcher.begin(uuid) if in_flight else None
    for name in ("a", "b"):
        world.dispatcher.abort(name)
    if command is not None:
        assert not world.dispatcher.startable  # a step at a time
        world.step(uuid, command)
    assert engine.blocks.num_free < free
    assert world.dispatcher.startable == {uuid}
    world.step(uuid)
    assert engine.blocks.num_free == free
    assert not engine.has_unfinished()
    assert not world.dispatcher.startable
    assert world.dispatcher.begin(uuid) is None
    with pytest.raises(ValueError, match="no unfinished request 'a'"):
        world.dispatcher.abort("a")


def test_requests_that_come_during_an_empty_step_are_served_by_the_next(adapters) -> None:
    asked = requests(adapters, 6, seeded=True)
    world = LocalRunners.of(1)
    world.dispatcher.probe()
    command = world.dispatcher.begin("runner-0")
    assert command is not None
    states = [world.dispatcher.add(request) for request in asked]
    assert not world.dispatcher.startable
    world.step("runner-0", command)
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
        world.step(uuid)
    assert not world.dispatcher.startable
    world.step(busy, command)
    assert world.dispatcher.startable == {busy}
