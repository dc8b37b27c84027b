"""Overlap scheduling: the next step is launched during this one, with those who join it; a wrong guess costs no token.
"""

from dataclasses import replace
from random import Random
from shutil import copytree, rmtree

import numpy as np
import pytest

from experiments.simulator import StepCost, Trace, simulate
from experiments.workload import RequestLengths
from punica.adapters import LoRARequest
from punica.cluster import ClusterPolicy
from punica.engine import Engine, EngineConfig, Request
from punica.engine.overlap import Overlap
from punica.engine.runner import ModelRunner
from punica.engine.sampler import PendingCopy
from punica.scheduling import RequestState, SamplingParams
from tests.world import finish as finished

ADJUSTMENTS = (
    {"repetition_penalty": 1.3}, {"frequency_penalty": 0.8}, {"presence_penalty": 1.5}, {"logit_bias": {5: 3.0}},
    {"bad_words": [[token, other] for token in range(0, 256, 3) for other in (7, 9, 50)]}, {"min_tokens": 3},
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", True)


@pytest.fixture
def begun(monkeypatch) -> list:
    """Layouts of the steps launched ahead."""
    steps, prepare = [], Overlap.prepare_next

    def noted(overlap, *given):
        upcoming = prepare(overlap, *given)
        if upcoming is not None:
            steps.append(upcoming.in_flight.layout)
        return upcoming

    monkeypatch.setattr(Overlap, "prepare_next", noted)
    return steps


def finish(engine: Engine) -> dict[str, list[int]]:
    """Serve all requests; return the tokens of those that did not fail."""
    return {name: result.token_ids for name, result in finished(engine).items() if result.error is None}


def test_tokens_of_requests_that_join_leave_and_go_on(backbone, mixed_wishes, serve, begun) -> None:
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    assert serve(backbone.engine(max_batch_size=4), mixed_wishes) == expected
    assert sum(layout.num_prefill_rows > 0 for layout in begun) == 15, "all but the first join a step launched ahead"


def test_static_batches_with_idle_members(backbone, mixed_wishes, serve, begun) -> None:
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    engine, idle = backbone.engine("static_mixed", max_batch_size=4), []
    step = engine.step

    def counted():
        output = step()
        idle.append(output.statistics.num_idle)
        return output

    engine.step = counted
    assert serve(engine, mixed_wishes) == expected
    assert len(begun) > len(idle) // 2
    assert sum(number > 0 for number in idle) > len(idle) // 2


def test_cancelled_preempted_and_new_requests(backbone, begun) -> None:
    engine = backbone.engine(block_size=4, num_blocks=12)
    for i in range(6):
        engine.add_request(Request(f"r{i}", [i + 1] * 3, 20, backbone.adapters.get(i % 4)))
    served, step = {}, 0
    while engine.has_unfinished():
        if step == 9:
            engine.abort_request("r2")
        if step == 11:
            engine.add_request(Request("late", [9, 9], 20, backbone.adapters[5]))
        served |= {result.request_id: result.token_ids for result in engine.step().finished}
        step += 1
    assert served.pop("late") == backbone.generate_merged((9, 9), 5, 20)
    for name, tokens in served.items():
        i = int(name[1:])
        assert tokens == backbone.generate_merged((i + 1,) * 3, i % 4, 20)
    assert sorted(served) == ["r0", "r1", "r3", "r4", "r5"]
    assert not engine.blocks.owners()


@pytest.mark.parametrize("works_ahead", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_who_arrives_joins_in_the_step_that_the_cluster_s_simulator_says(
    backbone, monkeypatch, seed, works_ahead
) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", works_ahead)
    chance = np.random.default_rng(seed)
    arrivals = np.sort(np.r_[0.0, chance.uniform(0.05, 35.0, 30)])
    lengths = RequestLengths(chance.integers(1, 5, 31), np.r_[58, chance.integers(1, 12, 30)])  # the first never idles
    engine, first, steps = backbone.engine(max_batch_size=4), {}, 0
    while len(first) < len(arrivals):
        for i in np.flatnonzero((steps - 1 < arrivals) & (arrivals <= steps)):
            engine.add_request(Request(f"{i}", [1] * int(lengths.prompt[i]), int(lengths.output[i])))
        steps += 1
        for name in engine.step().tokens:
            first.setdefault(int(name), steps)
    policy = ClusterPolicy(max_batch_size=4)
    policy.add_gpu("gpu", 1000)
    second = StepCost("a step is a second", base=1.0, row=0.0, kv=0.0, prefill=0.0, rank=0.0)
    nobody = np.zeros(len(arrivals), dtype=np.int64)
    trace = Trace(arrivals, lengths, nobody, nobody)
    said = simulate(trace, policy, second, works_ahead=works_ahead, own_queue=True)
    assert [first[i] for i in range(len(arrivals))] == said.first_token_s.tolist()


def test_a_step_is_begun_before_the_host_has_read_the_one_before(backbone, begun, monkeypatch) -> None:
    """One invocation per step, and no activation of adapters in between."""
    engine, calls = backbone.engine(max_batch_size=2), {"forward": 0, "activate": 0}

    def count(name: str, owner: object, attribute: str) -> None:
        call = getattr(owner, attribute)

        def counted(*given, **named):
            calls[name] += 1
            return call(*given, **named)

        monkeypatch.setattr(owner, attribute, counted)

    count("forward", engine.runner, "_forward")
    count("activate", engine._residency, "activate")
    states = [engine.add_request(Request(f"r{i}", [3 + i, 1], 12, backbone.adapters[i])) for i in (1, 2)]
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    expected = [backbone.generate_merged((3 + i, 1), i, 12) for i in (1, 2)]
    assert [state.output_token_ids for state in states] == expected
    assert steps == calls["forward"] == 13
    assert len(begun) == 12, "all but the first"
    assert [layout.num_prefill_rows for layout in begun[:3]] == [2, 0, 0]
    assert calls["activate"] == 1 + 2 + 1, "when one joins, when the other does, and when one is left"


def test_who_stops_in_the_step_before_has_a_row_that_nobody_reads(backbone, begun) -> None:
    expected = {i: backbone.generate_merged((3 + i, 1), i, 12) for i in range(3)}
    stop = next(place for place in range(3, 9) if expected[1][place] not in expected[1][:place])
    engine = backbone.engine(max_batch_size=2)
    params = {0: None, 1: SamplingParams(max_new_tokens=12, stop_token_ids=[expected[1][stop]], ignore_eos=True)}
    wishes = [Request(f"r{i}", [3 + i, 1], params.get(i) or 12, backbone.adapters.get(i)) for i in range(3)]
    states = [engine.add_request(wish) for wish in wishes]
    idle = []
    while engine.has_unfinished():
        statistics = engine.step().statistics
        idle.append(statistics.num_idle)
    assert states[1].output_token_ids == expected[1][: stop + 1]
    assert states[0].output_token_ids == expected[0]
    assert states[2].output_token_ids == expected[2]
    assert sum(idle) == 1
    assert not engine.blocks.owners()


def test_an_aborted_request_and_a_new_one_of_its_name(backbone, begun) -> None:
    engine = backbone.engine(max_batch_size=2)
    first = engine.add_request(Request("a", [5, 1], 12, backbone.adapters[1]))
    other = engine.add_request(Request("b", [6, 1], 12, backbone.adapters[2]))
    for _ in range(5):
        engine.step()
    assert begun
    engine.abort_request("a")
    again = engine.add_request(Request("a", [7, 1], 6, backbone.adapters[3]))
    while engine.has_unfinished():
        engine.step()
    assert first.output_token_ids == backbone.generate_merged((5, 1), 1, 12)[: len(first.output_token_ids)]
    assert other.output_token_ids == backbone.generate_merged((6, 1), 2, 12)
    assert again.output_token_ids == backbone.generate_merged((7, 1), 3, 6)


@pytest.mark.parametrize("fails_in", ["read", "launch", "append", "second append"])
def test_a_step_that_fails_loses_no_request_that_joins_or_ends_with_it(backbone, begun, monkeypatch, fails_in) -> None:
    """Step 4 is the last of `a`, in whose place `c` joins the next one; its tokens are lost, or the launch of that."""
    engine = backbone.engine(max_batch_size=2)
    for name, new in (("a", 4), ("b", 9), ("c", 3), ("d", 2)):
        engine.add_request(Request(name, [5, ord(name)], new, backbone.adapters.get(ord(name) % 3)))
    for _ in range(3):
        engine.step()

    def launch(runner, layout, before=None):
        assert layout.num_prefill_rows
        raise KeyboardInterrupt

    append, calls = RequestState.append, [None] * (fails_in == "append")

    def append_once(request, token):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        append(request, token)

    with monkeypatch.context() as patched:
        if fails_in == "read":
            patched.setattr(PendingCopy, "tolist", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        elif fails_in == "launch":
            patched.setattr(ModelRunner, "launch", launch)
        else:
            patched.setattr(RequestState, "append", append_once)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.is_ahead
    assert not engine.scheduler.leaving
    waiting = [request.request_id for request in engine.scheduler.waiting]
    assert waiting == ["a", "c", "d"][fails_in == "second append" :]
    lengths = {"a": 4, "b": 9, "c": 3, "d": 2}
    assert finish(engine) == {
        name: backbone.generate_merged((5, ord(name)), ord(name) % 3, new) for name, new in lengths.items()
    }


def test_a_step_that_is_forgotten_queues_its_prompts_again(backbone, begun) -> None:
    engine = backbone.engine(max_batch_size=3)
    for i in range(3):
        engine.add_request(Request(f"r{i}", [3 + i], 5, backbone.adapters.get(i)))
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["r0", "r1"]
    engine.forget_next()
    assert [request.request_id for request in engine.scheduler.waiting] == ["r1", "r2"]
    assert finish(engine) == {f"r{i}": backbone.generate_merged((3 + i,), i, 5) for i in range(3)}


def test_a_request_that_is_aborted_before_the_step_that_it_joins(backbone, begun) -> None:
    engine = backbone.engine(max_batch_size=2)
    for i in range(2):
        engine.add_request(Request(f"r{i}", [3 + i], 5, backbone.adapters.get(i)))
    engine.step()
    assert engine.abort_request("r1").token_ids == []
    again = engine.add_request(Request("r1", [9], 4, backbone.adapters[2]))
    assert engine.step().tokens.keys() == {"r0"}
    finish(engine)
    assert again.output_token_ids == backbone.generate_merged((9,), 2, 4)


def test_an_adapter_that_cannot_be_loaded_ahead_fails_its_request_alone(backbone, begun, tmp_path) -> None:
    folder = copytree(backbone.adapters[3].lora_path, tmp_path / "adapter")
    engine = backbone.engine(max_batch_size=3)
    states = [engine.add_request(Request("first", [5], 6, backbone.adapters[1]))]
    engine.add_request(Request("broken", [6], 6, LoRARequest("broken", 3, str(folder))))
    states.append(engine.add_request(Request("behind", [7], 6, backbone.adapters[2])))
    rmtree(folder)
    output = engine.step()
    assert [(result.request_id, result.finish_reason) for result in output.failed] == [("broken", "failed")]
    assert output.tokens.keys() == {"first"}
    finish(engine)
    assert [state.output_token_ids for state in states] == [
        backbone.generate_merged((5,), 1, 6), backbone.generate_merged((7,), 2, 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "adjusts", [{"repetition_penalty": 1.2}, {"frequency_penalty": 1.0}, {"bad_words": [[3, 4]]}], ids=str
)
def test_adjustments_that_need_tokens_on_the_host_are_not_begun(backbone, begun, adjusts) -> None:
    """A prompt with one joins ahead: its tokens are known."""
    engine = backbone.engine(max_batch_size=2)
    engine.add_request(Request("plain", [5, 1], 9))
    engine.add_request(Request("penalised", [5, 1], SamplingParams(max_new_tokens=4, **adjusts)))
    finish(engine)
    assert [[request.request_id for request in layout.requests] for layout in begun] == [
        ["penalised", "plain"], *[["plain"]] * 4,
    ]  # fmt: skip


def _abort_and_pin(engine: Engine, chance: Random) -> None:
    """Change the pin at times, and abort one of the youngest requests, which loses what is compared of it."""
    if chance.random() < 0.15:
        _unpin(engine)
        if (adapter_id := chance.randint(1, 6)) in engine.manager.list_adapters():
            engine.manager.pin_adapter(adapter_id)
    if chance.random() < 0.15 and engine.scheduler.running:
        engine.abort_request(engine.scheduler.running[-1].request_id)


def _unpin(engine: Engine) -> None:
    for adapter_id in list(engine.manager.pinned_adapters):
        engine.manager.unpin_adapter(adapter_id)


@pytest.mark.slow
def test_random_runs_give_what_steps_in_turn_give(backbone, begun, monkeypatch) -> None:
    """Arrivals, aborts, pins, ends and preemptions at random steps; samples, penalties, log-probabilities."""
    outputs = []
    for ahead in (False, True):
        monkeypatch.setattr(ModelRunner, "works_ahead", ahead)
        engine, states = backbone.engine(max_loras=4, max_batch_size=4, block_size=2, num_blocks=16), []
        for step in range(60):
            chance = Random(f"0 {step}")  # whatever the engine did
            for _ in range(chance.randrange(3) if step < 40 else 0):
                wishes = {"max_new_tokens": chance.randint(1, 16), "stop_token_ids": chance.sample(range(256), 8)}
                wishes |= {} if chance.random() < 0.6 else {"temperature": 0.8, "seed": chance.randrange(99)}
                wishes |= {} if chance.random() < 0.8 else {"logprobs": 2}
                wishes |= {} if chance.random() < 0.8 else chance.choice(ADJUSTMENTS)
                prompt = [chance.randrange(256) for _ in range(chance.randint(1, 9))]
                adapter = backbone.adapters.get(chance.randrange(7))
                states.append(engine.add_request(Request(f"r{len(states)}", prompt, SamplingParams(**wishes), adapter)))
            _abort_and_pin(engine, chance)
            engine.step()
        _unpin(engine)
        finish(engine)
        assert [*engine.scheduler.running, *engine.scheduler.leaving, *engine._residency._users] == []
        outputs.append(states)
    ended = [pair for pair in zip(*outputs, strict=True) if "aborted" not in {one.finish_reason for one in pair}]
    for one, other in ended:
        assert one.output_token_ids == other.output_token_ids
        assert one.finish_reason == other.finish_reason
        assert list(map(list, one.logprobs)) == list(map(list, other.logprobs))
    assert sum(state.preemptions for state in outputs[1]) > 0
    assert len(ended) > 20
    assert sum(layout.num_prefill_rows > 0 for layout in begun) > 15


def test_who_may_join_is_not_kept_waiting(backbone, begun) -> None:
    """Requests of the queue join the steps launched ahead, also in place of those that end with the step before."""
    engine = backbone.engine(max_batch_size=3)
    for i in range(3):
        engine.add_request(Request(f"r{i}", [3 + i], 9, backbone.adapters.get(i)))
    engine.add_request(Request("late", [7], 2))
    sizes = [engine.step().statistics.batch_size for _ in range(11)]
    assert sizes == [1, 2, *[3] * 8, 2], "the fourth joins behind the first one's last step"
    assert len(begun) == 10
    assert not engine.has_unfinished()


@pytest.fixture
def pair(backbone):
    """Two requests with adapters 1 and 2 in two slots, four steps on; what they end with, and a check of it."""
    config = EngineConfig(max_batch_size=2, max_model_len=64)
    engine = Engine(backbone.model(), config.lora_config(16, max_loras=2, max_cpu_loras=8), config)
    states = [engine.add_request(Request(f"r{i}", [3 + i, 1], 12, backbone.adapters[i])) for i in (1, 2)]
    for _ in range(4):
        engine.step()
    assert engine.is_ahead

    def go_on() -> None:
        while engine.has_unfinished():
            assert not engine.step().failed
        expected = [backbone.generate_merged((3 + i, 1), i, 12) for i in (1, 2)]
        assert [state.output_token_ids for state in states] == expected

    return engine, go_on


def test_slots_that_move_under_a_begun_step(pair, backbone) -> None:
    """Running requests are computed with their own adapters when another one has taken a slot of theirs."""
    engine, go_on = pair
    engine.manager.add_adapter(backbone.adapters[3])
    go_on()


def test_a_pin_under_a_begun_step_takes_its_slot(pair, backbone) -> None:
    engine, go_on = pair
    engine.manager.pin_adapter(1)
    engine.manager.add_adapter(backbone.adapters[3])
    engine.manager.unpin_adapter(1)
    engine.manager.pin_adapter(3)
    assert engine.step().statistics.num_preempted == 1
    go_on()


def test_a_version_loaded_under_a_begun_step_is_for_those_who_come(pair, backbone) -> None:
    engine, go_on = pair
    engine.manager.add_adapter(replace(backbone.adapters[3], lora_int_id=1, load_inplace=True))
    go_on()


def test_a_static_batch_goes_on_with_the_begun_step_when_a_member_stops(backbone, monkeypatch) -> None:
    expected = backbone.generate_merged((4, 1), 1, 12)
    stop = next(place for place in range(4, 10) if expected[place] not in expected[:place])
    engine, calls = backbone.engine("static_mixed", max_batch_size=2), []
    forward = engine.runner._forward
    monkeypatch.setattr(engine.runner, "_forward", lambda *given, **named: calls.append(1) or forward(*given, **named))
    ends = SamplingParams(max_new_tokens=12, stop_token_ids=[expected[stop]])
    states = [
        engine.add_request(Request("r1", [4, 1], ends, backbone.adapters[1])),
        engine.add_request(Request("r2", [5, 1], 12, backbone.adapters[2])),
    ]
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    assert len(calls) == steps
    assert [state.output_token_ids for state in states] == [
        expected[: stop + 1], backbone.generate_merged((5, 1), 2, 12),
    ]  # fmt: skip
