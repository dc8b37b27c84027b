"""Failure isolation: an error while serving ends its own requests only."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from punica.adapters import LoRARequest, random_adapter
from punica.config import LoRAConfig
from punica.engine import Engine, EngineConfig, Request, RequestStatus
from punica.models import LlamaForCausalLM
from punica.scheduling import SamplingParams
from tests.world import byte_tokenizer, damage, finish, tokens_of

RULES = ("fcfs", "fcfs_many", "resident_first", "single_adapter", "static", "static_mixed")


def copied_adapter(backbone, folder: Path, adapter_id: int) -> LoRARequest:
    """Adapter 2 in a folder of its own."""
    shutil.copytree(backbone.adapters[2].lora_path, folder)
    return LoRARequest(f"copy {adapter_id}", adapter_id, str(folder))


@pytest.mark.parametrize("rule", RULES)
def test_aborting_the_last_unfinished_member_of_a_batch_lets_the_queue_go_on(backbone, rule) -> None:
    engine = backbone.engine(rule)
    engine.add_request(Request("short", [1, 2], 1))
    engine.add_request(Request("long", [1, 2], 20))
    for _ in range(3):
        engine.step()
    engine.abort_request("long")
    queued = engine.add_request(Request("queued", [3], 5))
    finish(engine)
    assert queued.output_token_ids == backbone.generate_merged((3,), 0, 5)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["memory", "interrupt"])
@pytest.mark.parametrize("rule", RULES)
def test_a_failed_model_invocation_changes_no_token(backbone, monkeypatch, rule, error) -> None:
    engine = backbone.engine(rule)
    for cached in (*engine.runner.attention.cache.keys, *engine.runner.attention.cache.values):
        cached.fill_(float("nan"))  # a prompt that is taken for cached must not go unnoticed
    wishes = [((1, 2, 3), 1), ((4, 5, 9, 7), 2), ((6, 8), 1)]
    requests = [Request(str(i), prompt, 6, backbone.adapters[a]) for i, (prompt, a) in enumerate(wishes)]
    requests = [engine.add_request(request) for request in requests]
    real, calls = engine.runner.launch, 0

    def every_third_fails(*step):
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise error
        return real(*step)

    monkeypatch.setattr(engine.runner, "launch", every_third_fails)
    failures = 0
    while engine.has_unfinished():
        try:
            engine.step()
        except (RuntimeError, KeyboardInterrupt):
            failures += 1
    assert failures
    expected = [backbone.generate_merged(prompt, a, 6) for prompt, a in wishes]
    assert [request.output_token_ids for request in requests] == expected
    assert all(request.preemptions == 0 for request in requests)  # no blocks ran out
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("rule", RULES)
def test_an_unloadable_adapter_takes_no_other_request_along(backbone, tmp_path, rule) -> None:
    broken = copied_adapter(backbone, tmp_path / "broken", 9)
    damage(broken.lora_path)
    engine = backbone.engine(rule)
    adapters = [backbone.adapters[1], broken, backbone.adapters[3], broken, backbone.adapters[4]]
    requests = [Request(str(i), [i + 1], 4, adapter) for i, adapter in enumerate(adapters)]
    requests = [engine.add_request(request) for request in requests]
    failed = []
    while engine.has_unfinished():
        failed += engine.step().failed
    assert [result.request_id for result in failed] == [request.request_id for request in requests[1::2]]
    assert all(request.status is RequestStatus.FAILED and "'copy 9'" in request.error for request in requests[1::2])
    assert [request.error for request in requests[::2]] == [None] * 3
    served = [request.output_token_ids for request in requests]
    assert served[::2] == [backbone.generate_merged((i + 1,), adapters[i].adapter_id, 4) for i in (0, 2, 4)]
    assert served[1::2] == [[], []]


@pytest.mark.parametrize("rule", RULES)
def test_an_adapter_removed_under_a_running_request_is_loaded_again(backbone, rule) -> None:
    engine = backbone.engine(rule, max_loras=2)
    requests = [Request(str(i), [i, 3], 7, backbone.adapters[i]) for i in (1, 2)]
    requests = [engine.add_request(request) for request in requests]
    for i in range(12):
        engine.step()
        engine.manager.remove_adapter(1 + i % 2)
    finish(engine)
    assert [r.output_token_ids for r in requests] == [backbone.generate_merged((i, 3), i, 7) for i in (1, 2)]


def test_an_adapter_that_is_loaded_again_takes_the_place_of_no_running_one(backbone) -> None:
    """An adapter that only lives in memory would be lost for good."""
    engine = backbone.engine(max_loras=2)
    engine.manager.add_adapter(random_adapter(77, backbone.config, 8, seed=2))
    reloaded = engine.add_request(Request("reloaded", [1, 3], 6, backbone.adapters[1]))
    in_memory = engine.add_request(Request("in memory", [2, 3], 6, LoRARequest("in-memory", 77, "no folder")))
    for _ in range(3):
        engine.step()
    engine.manager.remove_adapter(1)
    engine.manager.add_adapter(random_adapter(78, backbone.config, 8, seed=3))  # takes the free place, as the newest
    finish(engine)
    assert reloaded.output_token_ids == backbone.generate_merged((1, 3), 1, 6)
    assert in_memory.output_token_ids == backbone.generate_merged((2, 3), 2, 6)


@pytest.mark.parametrize("rule", RULES)
def test_an_adapter_that_is_gone_costs_nothing_to_who_has_begun(backbone, tmp_path, rule) -> None:
    """Removed from the manager and damaged on disk: what runs keeps what it began with, what comes later is refused."""
    gone = copied_adapter(backbone, tmp_path / "gone", 9)
    engine = backbone.engine(rule, max_loras=2)
    wishes = [(gone, 2), (gone, 8), (backbone.adapters[1], 8)]
    requests = [Request(str(i), [i + 1, 3], new, adapter) for i, (adapter, new) in enumerate(wishes)]
    requests = [engine.add_request(request) for request in requests]
    for _ in range(3):
        engine.step()
    engine.manager.remove_adapter(9)
    damage(gone.lora_path)
    finish(engine)
    engine.manager.remove_adapter(9)
    late = engine.add_request(Request("late", [1], 2, gone))
    finish(engine)
    assert (late.status, late.output_token_ids) == (RequestStatus.FAILED, [])
    assert requests[0].output_token_ids == backbone.generate_merged((1, 3), 2, 2)
    assert requests[1].output_token_ids == backbone.generate_merged((2, 3), 2, 8)
    assert requests[2].output_token_ids == backbone.generate_merged((3, 3), 1, 8)


@pytest.mark.parametrize("rule", RULES)
def test_a_copy_into_a_slot_that_fails_costs_only_those_it_was_for(backbone, monkeypatch, rule) -> None:
    """Members that run, have finished, or join: only those of that adapter leave the batch."""
    engine = backbone.engine(rule, max_loras=2)
    wishes = [(2, 2), (2, 8), (1, 8)]
    states = [engine.add_request(Request(str(i), [i, 3], n, backbone.adapters[a])) for i, (a, n) in enumerate(wishes)]
    for _ in range(3):
        engine.step()
    real = engine.manager._writer.write

    def write(slot, lora):
        if lora.id == 2:
            raise RuntimeError("out of memory")
        return real(slot, lora)

    monkeypatch.setattr(engine.manager._writer, "write", write)
    engine.manager.remove_adapter(2)
    finish(engine)
    assert states[0].output_token_ids == backbone.generate_merged((0, 3), 2, 2)
    assert states[1].error == "RuntimeError: out of memory"
    assert states[2].output_token_ids == backbone.generate_merged((2, 3), 1, 8)
    assert engine._residency._users == {}


def test_the_id_of_an_adapter_that_failed_is_free_for_another_folder(backbone, tmp_path) -> None:
    broken = copied_adapter(backbone, tmp_path / "broken", 9)
    damage(broken.lora_path)
    engine = backbone.engine()
    (failed,) = engine.generate([[1, 2]], [broken], 4)
    assert (failed.token_ids, failed.finish_reason) == ([], "failed")
    assert "contains NaN or inf" in failed.error
    repaired = LoRARequest("repaired", 9, backbone.adapters[2].lora_path)
    assert tokens_of(engine.generate([[1, 2]], [repaired], 4)) == [backbone.generate_merged((1, 2), 2, 4)]


def test_the_id_of_a_pinned_adapter_is_not_free(backbone, tmp_path) -> None:
    adapter, other = copied_adapter(backbone, tmp_path / "a", 9), copied_adapter(backbone, tmp_path / "b", 9)
    engine = backbone.engine()
    engine.generate([[1, 2]], [adapter], 1)
    damage(other.lora_path)
    replacement = LoRARequest(other.lora_name, 9, other.lora_path, load_inplace=True)
    assert engine.generate([[1, 2]], [replacement], 1)[0].finish_reason == "failed"
    engine.manager.pin_adapter(9)
    (refused,) = engine.generate([[1, 2]], [other], 1)
    assert re.search(r"adapter id 9 stands for .*use another id", refused.error)
    assert tokens_of(engine.generate([[1, 2]], [adapter], 4)) == [backbone.generate_merged((1, 2), 2, 4)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"r": 64}', "lacks the required keys"),
        ("{", "not valid JSON"),
        ({"r": 64}, "rank 64 exceeds max_lora_rank 16"),
        ({"use_dora": True}, "use_dora"),
    ],
    ids=["keys", "json", "rank", "dora"],
)
def test_an_illegal_adapter_is_refused_on_arrival_by_name_and_path(backbone, tmp_path, config, message) -> None:
    adapter = copied_adapter(backbone, tmp_path / "adapter", 9)
    file = Path(adapter.lora_path) / "adapter_config.json"
    text = config if isinstance(config, str) else json.dumps({**json.loads(file.read_text()), **config})
    file.write_text(text)
    engine = backbone.engine()
    with pytest.raises(ValueError, match=message) as caught:
        engine.add_request(Request("a", [1], 2, adapter))
    assert "'copy 9'" in str(caught.value)
    assert adapter.lora_path in str(caught.value)
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((None,), "prompts"), ((b"text",), "prompts"), (([[1]], 3), "adapters"), (([[1]], "sql"), "adapters"),
     (([[1]], None, 2.5), "params")],
    ids=["no prompts", "bytes", "an id", "a name", "float length"],
)
def test_generate_wants_one_entry_per_prompt(backbone, arguments, name) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a list with one entry per prompt, got "):
        backbone.engine().generate(*arguments)


def test_engine_says_what_it_is_built_from(backbone) -> None:
    with pytest.raises(TypeError, match="model must be of class LlamaForCausalLM, got str 'llama2-7b'"):
        Engine("llama2-7b")
    model = LlamaForCausalLM(backbone.folder)
    with pytest.raises(TypeError, match="lora_config must be of class LoRAConfig or None, got EngineConfig"):
        Engine(model, EngineConfig(max_model_len=64))
    with pytest.raises(TypeError, match="engine_config must be of class EngineConfig or None, got dict"):
        Engine(model, LoRAConfig(), {"max_batch_size": 4})


def test_memory_that_runs_out_while_an_adapter_is_activated_fails_nobody(backbone, monkeypatch) -> None:
    engine = backbone.engine()
    state = engine.add_request(Request("a", [1, 2], 4, backbone.adapters[1]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "add_adapter", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    assert state.status is RequestStatus.WAITING
    finish(engine)
    assert state.output_token_ids == backbone.generate_merged((1, 2), 1, 4)


def _out_of_memory(adapter: object) -> None:
    raise torch.OutOfMemoryError("none left")


@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["at the end", "at every token"])
def test_a_tokenizer_that_raises_fails_the_request_and_not_the_engine(backbone, monkeypatch, stop) -> None:
    engine = backbone.engine(tokenizer=byte_tokenizer())
    bad = engine.add_request(Request("bad", [1, 2], SamplingParams(4, stop=stop)))
    good = engine.add_request(Request("good", [3], 5))
    engine.step()
    mine = backbone.generate_merged((1, 2), 0, 4)
    real = engine.codec.decode

    def decode(ids, **options):
        if list(ids) and list(ids)[-1] in mine and list(ids) != good.output_token_ids:
            raise KeyError("no such token")
        return real(ids, **options)

    monkeypatch.setattr(engine.codec, "decode", decode)
    failed = []
    while engine.has_unfinished():
        failed += engine.step().failed
    assert [(result.request_id, "KeyError" in result.error) for result in failed] == [("bad", True)]
    assert (bad.status, good.status) == (RequestStatus.FAILED, RequestStatus.FINISHED)
    assert good.output_token_ids == backbone.generate_merged((3,), 0, 5)
    assert engine.blocks.num_free == engine.blocks.num_blocks
