"""The engine's interface: requests in, tokens out, and one clear error for each kind of bad input."""

import dataclasses

import pytest

from punica.adapters import LoRARequest
from punica.adapters.wrap import slots_need
from punica.engine import Engine, EngineConfig, Request, RequestStatus, SamplingParams
from punica.engine.attention import KVCache, token_bytes
from punica.layers import BaseLayerWithLoRA
from punica.models import LlamaForCausalLM
from punica.parallel import memory
from tests.world import tokens_of


def state(engine: Engine) -> tuple:
    """Everything that a refused request must not change."""
    return (
        engine.has_unfinished(),
        [request.request_id for request in engine.scheduler.waiting],
        engine.blocks.owners(),
        list(engine.manager.lora_index_to_id),
        sorted(engine.manager.list_adapters()),
    )


def test_steps_report_tokens_finished_requests_and_statistics(backbone) -> None:
    engine = backbone.engine()
    first = engine.add_request(Request("first", [1, 2, 3], 3, backbone.adapters[1]))
    engine.add_request(Request("second", [4, 5], 1))
    outputs = []
    while engine.has_unfinished():
        outputs.append(engine.step())
    assert [list(output.tokens) for output in outputs] == [["first"], ["second", "first"], ["first"]]
    assert [output.tokens["first"] for output in outputs] == first.output_token_ids
    assert [[r.request_id for r in output.finished] for output in outputs] == [[], ["second"], ["first"]]
    batch = [(o.statistics.batch_size, o.statistics.num_prefill_tokens, o.statistics.num_segments) for o in outputs]
    assert batch == [(1, 3, 1), (2, 2, 1), (1, 0, 1)]
    assert all(
        o.statistics.model_s > 0 and o.statistics.schedule_s > 0 and o.statistics.metadata_s > 0 for o in outputs
    )
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_generate_beside_other_requests_and_after_an_error(backbone) -> None:
    engine = backbone.engine()
    engine.add_request(Request("other", [1, 2], 20, backbone.adapters[4]))
    assert tokens_of(engine.generate([[5, 6]], None, 3)) == [backbone.generate_merged((5, 6), 0, 3)]
    with pytest.raises(ValueError, match="max_model_len"):
        engine.generate([[1], [2] * 100], None, 3)
    assert [request.request_id for request in engine.scheduler.running] == ["other"]
    assert not engine.scheduler.waiting  # the first prompt of the failed call is not left behind


def test_abort_waiting_running_and_unknown(backbone) -> None:
    engine = backbone.engine(max_batch_size=1)
    for name in "ab":
        engine.add_request(Request(name, [1, 2], 9))
    engine.step()
    assert engine.abort_request("b").token_ids == []
    aborted = engine.abort_request("a")
    assert (len(aborted.token_ids), aborted.finish_reason) == (1, "aborted")
    assert not engine.has_unfinished()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    with pytest.raises(ValueError, match="no unfinished request 'a'"):
        engine.abort_request("a")


@pytest.mark.parametrize(
    ("request_of", "error", "message"),
    [
        (lambda b: Request("new", [1] * 60, 5), ValueError, "60 prompt tokens and 5 new ones, max_model_len is 64"),
        (lambda b: Request("new", [1] * 40, 9), ValueError, "needs 6 KV blocks, the whole cache has 5"),
        (lambda b: Request("new", [1, 256], 5), ValueError, "token 256, the vocabulary has 256"),
        (lambda b: Request("known", [1], 5), ValueError, "request_id 'known' is in use"),
        (lambda b: Request("new", [1], SamplingParams(stop_token_ids=[256])), ValueError, "'new' contain 256, the voc"),
        (lambda b: Request("new", [1], SamplingParams(stop="x")), ValueError, r"'new' has stop strings.*no tokenizer"),
        (
            lambda b: Request("new", [1], 5, LoRARequest("ghost", 42, "no_such_folder")),
            FileNotFoundError,
            r"'ghost' \(id 42\)",
        ),
        (
            lambda b: Request("new", [1], 5, LoRARequest("twin", 1, b.adapters[2].lora_path)),
            ValueError,
            "adapter id 1 stands",
        ),
        (lambda b: Request("new", [1], 5, "adapter-1"), TypeError, "adapter must be a LoRARequest or None, got str"),
        (lambda b: "new", TypeError, "request must be a Request, got str"),
    ],
    ids=[
        "long", "pool", "token", "duplicate", "stop token", "stop string", "unknown adapter", "same id", "adapter type",
        "request type"
    ],
)
def test_bad_requests_are_refused_before_any_change(backbone, request_of, error, message) -> None:
    engine = backbone.engine(block_size=8, num_blocks=5)
    engine.add_request(Request("known", [1], 5, backbone.adapters[1]))
    before = state(engine)
    with pytest.raises(error, match=message):
        engine.add_request(request_of(backbone))
    assert state(engine) == before
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", [1], 5), ValueError, "request_id must not be empty"),
        ((7, [1], 5), TypeError, "request_id must be a str, got int 7"),
        (("a", [], 5), ValueError, "prompt_token_ids of request 'a' is empty"),
        (("a", "text", 5), TypeError, "tokenize the text first"),
        (("a", [1, 2.5], 5), TypeError, "prompt_token_ids of request 'a'"),
        (("a", [1, -2], 5), ValueError, "contains -2"),
        (("a", [1, True], 5), TypeError, "a token id must be an int, got bool True"),
        (("a", b"text", 5), TypeError, "must be a sequence of ints, got bytes"),
        (("a", {1: 2}, 5), TypeError, "must be a sequence of ints, got dict"),
        (("a", {1, 2}, 5), TypeError, "must be a sequence of ints, got set"),
        (("a", [1], 0), ValueError, "max_new_tokens is 0"),
        (("a", [1], 1.5), TypeError, "params must be a SamplingParams or a number"),
    ],
    ids=[
        "empty id", "id type", "empty prompt", "text", "float token", "negative token", "bool token", "bytes", "dict",
        "set", "no new token", "float length",
    ],
)  # fmt: skip
def test_malformed_requests(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        Request(*arguments)


def test_one_request_in_two_engines_and_twice_in_one(backbone) -> None:
    """A request is only a wish; each engine keeps its own account of it."""
    request = Request("a", [5, 6], 3, backbone.adapters[1])
    first, second = backbone.engine(), backbone.engine()
    states = [first.add_request(request), second.add_request(request)]
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        first.add_request(request)
    for engine in (first, second, first):
        while engine.has_unfinished():
            engine.step()
        if len(states) == 2:
            states.append(first.add_request(request))
    assert [state.output_token_ids for state in states] == [backbone.generate_merged((5, 6), 1, 3)] * 3
    assert all(state.status is RequestStatus.FINISHED for state in states)


def test_a_queued_request_cannot_be_edited(backbone) -> None:
    prompt = [5, 6]
    request = Request("a", prompt, 3, backbone.adapters[1])
    engine = backbone.engine()
    state = engine.add_request(request)
    prompt.append(999)
    for name, value in (("prompt_token_ids", [999]), ("max_new_tokens", 10**9), ("adapter", "x"), ("request_id", "b")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(request, name, value)
    while engine.has_unfinished():
        engine.step()
    assert state.output_token_ids == backbone.generate_merged((5, 6), 1, 3)


def test_adapter_without_lora_layers_is_refused(backbone) -> None:
    engine = Engine(backbone.model(), None, EngineConfig(max_model_len=64))
    with pytest.raises(ValueError, match=r"no LoRA layers.*ignore_adapters"):
        engine.add_request(Request("a", [1], 5, backbone.adapters[1]))
    assert tokens_of(engine.generate([[1]], None, 5)) == [backbone.generate_merged((1,), 0, 5)]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_batch_size": 0}, ValueError),
        ({"max_batch_size": 2.0}, TypeError),
        ({"block_size": 0}, ValueError),
        ({"num_blocks": 0}, ValueError),
        ({"max_model_len": 1}, ValueError),
        ({"adapter_index_rule": "mine"}, ValueError),
        ({"ignore_adapters": 1}, TypeError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_is_checked(fields, error) -> None:
    with pytest.raises(error, match=next(iter(fields))):
        EngineConfig(**fields)


def test_engine_and_model_must_fit(backbone) -> None:
    with pytest.raises(ValueError, match="the model has 128 positions"):
        Engine(LlamaForCausalLM(backbone.folder), None, EngineConfig(max_model_len=129))
    config = EngineConfig(max_model_len=64, ignore_adapters=True)
    with pytest.raises(ValueError, match="ignore_adapters"):
        Engine(LlamaForCausalLM(backbone.folder), config.lora_config(), config)
    with pytest.raises(ValueError, match="unknown admission rule 'no such rule'"):
        Engine(LlamaForCausalLM(backbone.folder), None, EngineConfig(max_model_len=64), "no such rule")


def test_engines_that_take_turns_may_share_a_cache(backbone) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=32)
    cache = KVCache(backbone.model(), config.total_blocks + 3, config.block_size)
    for _ in range(2):
        engine = Engine(backbone.model(), None, config, cache=cache)
        assert engine.runner.attention.cache is cache
        assert tokens_of(engine.generate([[1]], None, 5)) == [backbone.generate_merged((1,), 0, 5)]
    needs = "cache has 7 blocks of 16 tokens, the engine needs"
    few = ({"max_batch_size": 4}, needs), ({"block_size": 8}, needs)
    for sizes, message in (*few, ({"fp8_kv_cache": True}, "cache holds torch.float32")):
        with pytest.raises(ValueError, match=message):
            Engine(backbone.model(), None, dataclasses.replace(config, **sizes), cache=cache)


def test_a_model_whose_weights_were_never_loaded_is_not_served(backbone) -> None:
    model = LlamaForCausalLM(backbone.folder)
    with pytest.raises(ValueError, match=r"weights were never loaded.*load_weights\(folder\)"):
        Engine(model, None, EngineConfig(max_model_len=64))
    model.load_state_dict(backbone.model().state_dict())
    (result,) = Engine(model, None, EngineConfig(max_model_len=64)).generate([[5, 6]], None, 3)
    assert result.token_ids == backbone.generate_merged((5, 6), 0, 3)


@pytest.mark.parametrize(
    ("sizes", "lora", "message"),
    [
        ({"num_blocks": 10**12}, {}, "KV cache of 1000000000000 blocks of 16 tokens .* would take .* lower .*num_bl"),
        ({"num_blocks": 10**30}, {}, "KV cache of .* would take"),
        ({"max_batch_size": 10**9, "max_model_len": 64}, {"max_loras": 1}, "KV cache of .* would take"),
        ({}, {"max_loras": 10**9}, "1000000000 adapter slots of rank 16 .* would take .* lower LoRAConfig.max_loras"),
        ({}, {"max_loras": 10**30}, "adapter slots of rank 16 .* would take"),
        ({}, {"max_lora_rank": 10**12, "max_loras": 1}, "1 adapter slots of rank 1000000000000 .* would take"),
    ],
    ids=["blocks", "blocks no integer holds", "batch", "slots", "slots no integer holds", "rank"],
)
def test_sizes_beyond_memory_are_refused_before_anything_is_allocated(backbone, sizes, lora, message) -> None:
    config = EngineConfig(**{"max_batch_size": 4, "max_model_len": 64, **sizes})
    model = backbone.model()
    with pytest.raises(ValueError, match=message):
        Engine(model, config.lora_config(**lora), config)
    assert not any(isinstance(module, BaseLayerWithLoRA) for module in model.modules())


def test_cache_and_slots_that_fit_alone_but_not_together(backbone, monkeypatch) -> None:
    """On a CPU the cache takes nothing until it is written, so the slots alone would seem to fit beside it."""
    config, model = EngineConfig(max_batch_size=4, max_model_len=64), backbone.model()
    cache, slots = 4 * 64 * token_bytes(model), slots_need(model, config.lora_config(16)).nbytes
    for free, fits in ((cache + slots, True), (cache + slots - 1, False), (max(cache, slots), False)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        if fits:
            held = Engine(backbone.model(), config.lora_config(16), config).memory
            assert (held.kv_cache, held.adapter_slots) == (cache, slots)  # so what was asked for is what is taken
            continue
        with pytest.raises(ValueError, match=f"KV cache .*{cache} bytes.* and 5 adapter slots .*{slots} bytes.*{free}"):
            Engine(model, config.lora_config(16), config)
        assert not any(isinstance(module, BaseLayerWithLoRA) for module in model.modules())
    assert Engine(model, None, config).memory.kv_cache == cache
