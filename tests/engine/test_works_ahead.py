"""Overlap scheduling: the next step is staged and launched during this one; a wrong guess costs no token."""

from dataclasses import replace

import numpy as np
import pytest

from punica.cluster import ClusterPolicy, StepCost, Trace, simulate
from punica.engine import Engine, EngineConfig, Request
from punica.engine.overlap import Overlap
from punica.engine.runner import ModelRunner
from punica.engine.sampler import PendingCopy
from punica.scheduling import SamplingParams
from punica.workload import RequestLengths


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", True)


@pytest.fixture
def foreseen(monkeypatch) -> list:
    """Steps staged ahead, and whether each was the next one."""
    steps, ahead, prepare = [], ModelRunner.stage_ahead, Overlap.prepare_next

    def noted(overlap, current, *given):
        if steps and steps[-1][1] is None:
            steps[-1][1] = steps[-1][0].is_same_step(current.layout)
        return prepare(overlap, current, *given)

    monkeypatch.setattr(ModelRunner, "stage_ahead", lambda *of: steps.append([of[1], None]) or ahead(*of))
    monkeypatch.setattr(Overlap, "prepare_next", noted)
    return steps


def test_tokens_of_requests_that_join_leave_and_go_on(backbone, mixed_wishes, serve, foreseen) -> None:
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    assert serve(backbone.engine(max_batch_size=4), mixed_wishes) == expected
    assert sum(bool(came_true) for _, came_true in foreseen) > 5


def test_static_batches_with_idle_members(backbone, mixed_wishes, serve, foreseen) -> None:
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    engine, idle = backbone.engine("static_mixed", max_batch_size=4), []
    step = engine.step

    def counted():
        output = step()
        idle.append(output.statistics.num_idle)
        return output

    engine.step = counted
    assert serve(engine, mixed_wishes) == expected
    assert sum(bool(came_true) for _, came_true in foreseen) > len(idle) // 2
    assert sum(number > 0 for number in idle) > len(idle) // 2


def test_cancelled_preempted_and_new_requests(backbone, foreseen) -> None:
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
    said = simulate(Trace(arrivals, lengths, nobody, nobody), policy, second, works_ahead=works_ahead)
    assert [first[i] for i in range(len(arrivals))] == said.first_token_s.tolist()


@pytest.fixture
def begun(monkeypatch) -> list:
    """Layouts of the steps launched ahead."""
    steps, prepare = [], Overlap.prepare_next

    def noted(overlap, *given):
        upcoming = prepare(overlap, *given)
        if upcoming is not None and upcoming.in_flight is not None:
            steps.append(upcoming.layout)
        return upcoming

    monkeypatch.setattr(Overlap, "prepare_next", noted)
    return steps


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
    assert len(begun) == 9, "all but two with a prompt, the first after them, and the one behind the end of a request"
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


def test_a_step_that_fails_forgets_what_was_begun(backbone, begun, monkeypatch) -> None:
    engine = backbone.engine(max_batch_size=2)
    state = engine.add_request(Request("a", [5, 1], 12, backbone.adapters[1]))
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(PendingCopy, "read", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.is_ahead
    while engine.has_unfinished():
        engine.step()
    assert state.output_token_ids == backbone.generate_merged((5, 1), 1, 12)


@pytest.mark.parametrize("wish", [{"temperature": 0.7}, {"logprobs": 2}, {"repetition_penalty": 1.2}])
def test_choices_that_need_what_the_host_reads_are_not_begun(wish, backbone, begun) -> None:
    engine = backbone.engine(max_batch_size=2)
    engine.add_request(Request("a", [5, 1], SamplingParams(max_new_tokens=6, **wish)))
    while engine.has_unfinished():
        engine.step()
        assert not engine.is_ahead


def test_who_may_join_is_not_kept_waiting(backbone, begun) -> None:
    """With a place free and a request in the queue, the next step is left to the host."""
    engine = backbone.engine(max_batch_size=3)
    for i in range(3):
        engine.add_request(Request(f"r{i}", [3 + i], 9, backbone.adapters.get(i)))
    sizes = [engine.step().statistics.batch_size for _ in range(3)]
    assert sizes == [1, 2, 3]


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
