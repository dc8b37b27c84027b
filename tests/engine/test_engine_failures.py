"""Failure isolation: an error while serving ends its own requests only."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from punica.adapters import LoRARequest, random_adapter
from punica.engine import Request, RequestStatus
from punica.scheduling import SamplingParams
from tests.world import are_served, byte_tokenizer, damage, finish, is_of, steps, tokens_of

RULES = pytest.mark.parametrize("rule", ["fcfs", "single_adapter", "static_mixed"])


@pytest.fixture
def copied(backbone, tmp_path: Path) -> LoRARequest:
    """Adapter 2 in a folder of its own."""
    shutil.copytree(backbone.adapters[2].lora_path, tmp_path / "copy")
    return LoRARequest("copy 9", 9, str(tmp_path / "copy"))


@RULES
def test_an_unloadable_adapter_takes_no_other_request_along(backbone, copied, rule, ahead) -> None:
    damage(copied.lora_path)
    engine = backbone.engine(rule)
    adapters = [backbone.adapters[1], copied, backbone.adapters[3], copied, backbone.adapters[4]]
    states = [engine.add_request(Request(str(i), [i + 1], 4, adapter)) for i, adapter in enumerate(adapters)]
    failed = {name: result.error for name, result in finish(engine).items() if result.error is not None}
    assert list(failed) == ["1", "3"]
    assert all("'copy 9'" in error for error in failed.values())
    assert all(state.status is RequestStatus.FAILED and state.output_token_ids == [] for state in states[1::2])
    assert are_served(backbone, *states[::2])


def test_an_adapter_that_is_loaded_again_takes_the_place_of_no_running_one(backbone, monkeypatch) -> None:
    engine = backbone.engine(max_loras=2)
    engine.manager.add_adapter(random_adapter(77, backbone.config, 8, seed=2))
    reloaded = backbone.ask(engine, "reloaded", [1, 3], 1, 6)
    in_memory = engine.add_request(Request("in memory", [2, 3], 6, LoRARequest("in-memory", 77, "no folder")))
    steps(engine, 3)
    engine.manager.remove_adapter(1)
    engine.manager.add_adapter(random_adapter(78, backbone.config, 8, seed=3))  # takes the free place, as the newest
    writes = Mock(wraps=engine.manager._writer.write)
    monkeypatch.setattr(engine.manager._writer, "write", writes)
    finish(engine)
    assert [given.args[1].id for given in writes.call_args_list] == [1]
    assert (is_of(backbone, reloaded), is_of(backbone, in_memory, 2)) == (True, True)


@pytest.mark.parametrize("rule", ["fcfs", "single_adapter", "static", "static_mixed"])
def test_a_copy_into_a_slot_that_fails_costs_only_those_it_was_for(backbone, monkeypatch, rule) -> None:
    """Members that run, have finished, or join: only those of that adapter leave the batch."""
    engine = backbone.engine(rule, max_loras=2)
    states = [backbone.ask(engine, str(i), [i, 3], a, new) for i, (a, new) in enumerate([(2, 2), (2, 8), (1, 8)])]
    steps(engine, 3)
    real = engine.manager._writer.write

    def write(slot, lora):
        if lora.id == 2:
            raise RuntimeError("out of memory")
        return real(slot, lora)

    monkeypatch.setattr(engine.manager._writer, "write", write)
    engine.manager.remove_adapter(2)
    finish(engine)
    assert states[1].error == "RuntimeError: out of memory"
    assert are_served(backbone, states[0], states[2])


def test_the_id_of_an_adapter_that_failed_is_free_and_that_of_a_pinned_one_is_not(backbone, copied) -> None:
    engine, healthy = backbone.engine(), LoRARequest("healthy", 9, backbone.adapters[2].lora_path)
    expected = [backbone.generate_merged((1, 2), 2, 4)]
    damage(copied.lora_path)
    (failed,) = engine.generate([[1, 2]], [copied], 4)
    assert (failed.token_ids, failed.finish_reason) == ([], "failed")
    assert "contains NaN or inf" in failed.error
    assert tokens_of(engine.generate([[1, 2]], [healthy], 4)) == expected
    replacement = LoRARequest("copy 9", 9, copied.lora_path, load_inplace=True)
    assert engine.generate([[1, 2]], [replacement], 1)[0].finish_reason == "failed"
    engine.manager.pin_adapter(9)
    assert "adapter id 9 stands for" in engine.generate([[1, 2]], [copied], 1)[0].error
    assert tokens_of(engine.generate([[1, 2]], [healthy], 4)) == expected


@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["at the end", "at every token"])
def test_a_tokenizer_that_raises_fails_the_request_and_not_the_engine(backbone, monkeypatch, stop) -> None:
    engine = backbone.engine(tokenizer=byte_tokenizer())
    bad = backbone.ask(engine, "bad", [1, 2], 0, SamplingParams(4, stop=stop))
    good = backbone.ask(engine, "good", [3], 0, 5)
    engine.step()
    mine, real = backbone.generate_merged((1, 2), 0, 4), engine.codec.decode

    def decode(ids, **options):
        if list(ids) and list(ids)[-1] in mine and list(ids) != good.output_token_ids:
            raise KeyError("no such token")
        return real(ids, **options)

    monkeypatch.setattr(engine.codec, "decode", decode)
    failed = {name: result.error for name, result in finish(engine).items() if result.error is not None}
    assert failed == {"bad": "KeyError: 'no such token'"}
    assert (bad.status, good.status) == (RequestStatus.FAILED, RequestStatus.FINISHED)
    assert are_served(backbone, good)
