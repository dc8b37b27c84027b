"""Overlap scheduling: the next step is launched during this one; a wrong guess costs no token."""

from unittest.mock import Mock

import pytest

from punica.engine.overlap import Overlap
from punica.engine.runner import ModelRunner
from punica.engine.sampler import PendingCopy
from punica.scheduling import RequestState, SamplingParams
from tests.world import are_served, finish, steps


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


def test_tokens_of_requests_that_join_leave_and_go_on(backbone, mixed_wishes, mixed_tokens, serve, begun) -> None:
    assert serve(backbone.engine(max_batch_size=4), mixed_wishes) == mixed_tokens
    assert sum(layout.num_prefill_rows > 0 for layout in begun) == 15, "all but the first join a step launched ahead"


def test_a_step_is_begun_before_the_host_has_read_the_one_before(backbone, begun, monkeypatch) -> None:
    """One invocation per step, and no activation of adapters in between."""
    engine = backbone.engine(max_batch_size=2)
    forward, activate = Mock(wraps=engine.runner._forward), Mock(wraps=engine._residency.activate)
    monkeypatch.setattr(engine.runner, "_forward", forward)
    monkeypatch.setattr(engine._residency, "activate", activate)
    states = [backbone.ask(engine, f"r{i}", [3 + i, 1], i, 12) for i in (1, 2)]
    steps(engine, 13)
    assert not engine.has_unfinished()
    assert are_served(backbone, *states)
    # adapters are made active when one joins, when the other does, and when one is left
    assert (forward.call_count, activate.call_count) == (13, 1 + 2 + 1)
    assert len(begun) == 12, "all but the first"
    assert [layout.num_prefill_rows for layout in begun[:3]] == [2, 0, 0]


def test_a_request_that_stops_in_the_step_before_has_a_row_that_is_not_read(backbone, begun) -> None:
    tokens = backbone.generate_merged((4, 1), 1, 12)
    stop = next(place for place in range(3, 9) if tokens[place] not in tokens[:place])
    engine = backbone.engine(max_batch_size=2)
    ends = SamplingParams(max_new_tokens=12, stop_token_ids=[tokens[stop]], ignore_eos=True)
    states = [backbone.ask(engine, f"r{i}", [3 + i, 1], i, ends if i == 1 else 12) for i in range(3)]
    idle = 0
    while engine.has_unfinished():
        idle += engine.step().statistics.num_idle
    assert states[1].output_token_ids == tokens[: stop + 1]
    assert are_served(backbone, states[0], states[2])
    assert idle == 1


def test_an_aborted_request_and_a_new_one_of_its_name(backbone, begun) -> None:
    """Aborted while it runs, and before the step that it joins."""
    engine = backbone.engine(max_batch_size=2)
    first, other = (backbone.ask(engine, name, [5 + i, 1], 1 + i, 12) for i, name in enumerate("ab"))
    engine.step()
    assert engine.abort_request("b").token_ids == []
    other = backbone.ask(engine, "b", [9], 2, 12)
    assert engine.step().tokens.keys() == {"a"}
    steps(engine, 4)
    assert begun
    engine.abort_request("a")
    again = backbone.ask(engine, "a", [7, 1], 3, 6)
    finish(engine)
    assert first.output_token_ids == backbone.generate_merged((5, 1), 1, 12)[: len(first.output_token_ids)]
    assert are_served(backbone, other, again)


@pytest.mark.parametrize("fails_in", ["read", "launch", "append", "second append"])
def test_a_step_that_fails_loses_no_request_that_joins_or_ends_with_it(backbone, begun, monkeypatch, fails_in) -> None:
    """Step 4 is the last of `a`, in whose place `c` joins the next one; its tokens are lost, or the launch of that."""
    engine = backbone.engine(max_batch_size=2)
    lengths = {"a": 4, "b": 9, "c": 3, "d": 2}
    asked = {name: SamplingParams(new, logprobs=0) for name, new in lengths.items()}
    states = [backbone.ask(engine, name, [5, ord(name)], ord(name) % 3, params) for name, params in asked.items()]
    steps(engine, 3)

    def interrupt(*given):
        raise KeyboardInterrupt

    append, calls = RequestState.append, [None] * (fails_in == "append")

    def append_once(request, *given):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        append(request, *given)

    with monkeypatch.context() as patched:
        if fails_in == "read":
            patched.setattr(PendingCopy, "tolist", interrupt)
        elif fails_in == "launch":
            patched.setattr(ModelRunner, "launch", interrupt)
        else:
            patched.setattr(RequestState, "append", append_once)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.is_ahead
    engine.forget_next()
    assert not engine.scheduler.leaving
    waiting = [request.request_id for request in engine.scheduler.waiting]
    assert waiting == ["a", "c", "d"][fails_in == "second append" :]
    assert finish(engine).keys() == lengths.keys()
    assert are_served(backbone, *states)
    assert [[*map(next, map(iter, state.logprobs))] for state in states] == [state.output_token_ids for state in states]


def test_a_step_that_is_forgotten_queues_its_prompts_again(backbone, begun) -> None:
    engine = backbone.engine(max_batch_size=3)
    states = [backbone.ask(engine, f"r{i}", [3 + i], i, 5) for i in range(3)]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["r0", "r1"]
    engine.forget_next()
    assert [request.request_id for request in engine.scheduler.waiting] == ["r1", "r2"]
    finish(engine)
    assert are_served(backbone, *states)


def test_a_static_batch_goes_on_with_the_begun_step_when_a_member_stops(backbone, monkeypatch) -> None:
    expected = backbone.generate_merged((4, 1), 1, 12)
    stop = next(place for place in range(4, 10) if expected[place] not in expected[:place])
    engine, taken = backbone.engine("static_mixed", max_batch_size=2), 0
    forward = Mock(wraps=engine.runner._forward)
    monkeypatch.setattr(engine.runner, "_forward", forward)
    ends = SamplingParams(max_new_tokens=12, stop_token_ids=[expected[stop]])
    first, second = (backbone.ask(engine, f"r{i}", [3 + i, 1], i, ends if i == 1 else 12) for i in (1, 2))
    while engine.has_unfinished():
        engine.step()
        taken += 1
    assert forward.call_count == taken
    assert first.output_token_ids == expected[: stop + 1]
    assert are_served(backbone, second)
