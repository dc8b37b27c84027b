"""Requests added one by one beside calls of `generate` and `stream`: no result is lost, in any caller's steps."""

import pytest
import torch

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, Request, StepOutput
from tests.world import damage, tokens_of

PROMPT = (5, 6, 7)


def ids(results) -> list[str]:
    return [result.request_id for result in results]


def outputs_of(engine: Engine, patience: int = 50) -> list[StepOutput]:
    """Run the loop of a caller that added requests; return its outputs."""
    outputs = []
    while engine.has_unfinished():
        outputs.append(engine.step())
        assert len(outputs) < patience
    return outputs


def call(engine: Engine, way: str, prompts: list, new: int) -> list[list[int]]:
    if way == "generate":
        return tokens_of(engine.generate(prompts, None, new))
    return tokens_of([chunk.result for chunk in engine.stream(prompts, None, new) if chunk.result is not None])


@pytest.fixture
def bad_adapter(backbone, tmp_path) -> LoRARequest:
    """Its numbers are no numbers, which shows when it is loaded."""
    damage(folder := write_random_adapter(tmp_path / "bad", backbone.config, 4, 9))
    return LoRARequest("bad", 9, folder)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_results_of_strangers_wait_for_their_owner_s_next_step(backbone, bad_adapter, way) -> None:
    engine = backbone.engine()
    short = engine.add_request(Request("short", PROMPT, 3, backbone.adapters[1]))
    engine.add_request(Request("bad", PROMPT, 3, bad_adapter))
    long = engine.add_request(Request("long", [1], 30))
    assert call(engine, way, [[9], [8, 2]], 6) == [backbone.generate_merged(one, 0, 6) for one in ((9,), (8, 2))]
    assert (short.has_ended, long.has_ended) == (True, False)
    first, *later = outputs_of(engine)
    assert (ids(first.finished), ids(first.failed)) == (["short"], ["bad"])
    assert first.finished[0].token_ids == backbone.generate_merged(PROMPT, 1, 3)
    assert "NaN" in first.failed[0].error
    assert list(first.tokens) == ["long"]
    assert [ids(output.finished) for output in later if output.finished] == [["long"]]  # and nothing comes twice
    assert later[-1].finished[0].token_ids == backbone.generate_merged((1,), 0, 30)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_loop_ends_only_when_it_has_seen_what_was_kept(backbone, way) -> None:
    engine = backbone.engine()
    for number in range(3):
        engine.add_request(Request(f"stranger {number}", [number], 2))
        call(engine, way, [PROMPT], 5)
    assert engine.has_unfinished()
    (output,) = outputs_of(engine)
    assert ids(output.finished) == ["stranger 0", "stranger 1", "stranger 2"]
    assert (output.tokens, output.statistics.batch_size) == ({}, 0)
    assert outputs_of(engine) == []


def test_kept_results_come_before_those_of_the_step(backbone) -> None:
    engine = backbone.engine()
    engine.add_request(Request("short", PROMPT, 2))
    long = engine.add_request(Request("long", [1], 8))
    call(engine, "generate", [[9]], 6)
    assert long.num_generated == 7
    assert ids(engine.step().finished) == ["short", "long"]


def test_what_belongs_to_a_call_is_not_kept(backbone) -> None:
    engine = backbone.engine()
    first, second = engine.stream([[1], [2]], None, 4), engine.stream([[3]], None, 9)
    next(second)
    assert len([chunk for chunk in first if chunk.result is not None]) == 2
    seen = engine.step()  # somebody's own step brings what ends in it, whichever call asked
    rest = list(second)
    assert list(seen.tokens) == [rest[-1].result.request_id]
    assert rest[-1].result.token_ids == backbone.generate_merged((3,), 0, 9)
    assert not engine.has_unfinished()


def test_a_name_is_taken_until_the_call_is_over(backbone) -> None:
    """Else the result of who takes it would pass for the call's."""
    engine = backbone.engine()
    stream = engine.stream([[1], [2]], None, [1, 9])
    ended = next(stream).result
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(Request(ended.request_id, PROMPT, 2))
    stream.close()
    engine.add_request(Request(ended.request_id, PROMPT, 2))
    call(engine, "generate", [[4]], 6)
    assert [ids(output.finished) for output in outputs_of(engine)] == [[ended.request_id]]


def test_a_stranger_that_somebody_aborts_is_not_kept(backbone) -> None:
    engine = backbone.engine()
    engine.add_request(Request("stranger", PROMPT, 20))
    stream = engine.stream([[1]], None, 6)
    next(stream)
    assert engine.abort_request("stranger").finish_reason == "aborted"
    list(stream)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("where", ["loading the next adapter", "in the model"])
def test_a_step_that_raises_loses_no_failure(backbone, bad_adapter, monkeypatch, where) -> None:
    engine = backbone.engine("static_mixed")  # all of them join in one step
    adapters = {"good": backbone.adapters[1], "bad": bad_adapter, "later": backbone.adapters[2]}
    for name, adapter in adapters.items():
        engine.add_request(Request(name, PROMPT, 4, adapter))
    writer, write = engine.manager._writer, engine.manager._writer.write

    def fail(*given) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        if where == "in the model":
            patched.setattr(engine.runner, "launch", fail)
        else:
            patched.setattr(writer, "write", lambda slot, lora: write(slot, lora) if lora.id == 1 else fail())
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    first, *later = outputs_of(engine)
    assert ids(first.failed) == ["bad"]
    finished = {result.request_id: result.token_ids for output in later for result in output.finished}
    assert finished == {
        name: backbone.generate_merged(PROMPT, number, 4) for name, number in (("good", 1), ("later", 2))
    }
