"""The engine's interface: requests in, tokens out, and one clear error for each kind of bad input."""

import dataclasses

import pytest
import torch

from punica.adapters import LoRARequest, write_random_adapter
from punica.adapters.wrap import slots_need
from punica.config import LoRAConfig
from punica.engine import Engine, EngineConfig, Request, SamplingParams
from punica.engine.attention import KVCache, token_bytes
from punica.layers import BaseLayerWithLoRA
from punica.models import LlamaForCausalLM
from punica.parallel import memory
from tests.world import are_served, finish, tokens_of


def state(engine: Engine) -> tuple:
    """Everything that a refused request or a warm-up must not change."""
    manager, blocks, scheduler = engine.manager, engine.blocks, engine.scheduler
    return (
        manager.list_adapters(), list(manager.lora_index_to_id), manager.pinned_adapters, blocks.num_free,
        [*blocks._tables], [*scheduler.waiting], [*scheduler.running], engine.has_unfinished(), engine.is_ahead,
        [sorted(layer.filled_slots) for layer in manager.modules.values() if layer.skips_when_empty],
        [slots.abs().sum().item() for layer in manager.modules.values() for slots in layer.lora_b_stacked],
    )  # fmt: skip


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
    times = [(o.statistics.model_s, o.statistics.schedule_s, o.statistics.metadata_s) for o in outputs]
    assert min(min(one) for one in times) > 0
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
        (lambda b: Request("known", [1], 5), ValueError, "'known' is in use"),
        (lambda b: Request("new", [1], SamplingParams(stop_token_ids=[256])), ValueError, "256, the voc"),
        (lambda b: Request("new", [1], SamplingParams(stop="x")), ValueError, "no tokenizer"),
        (lambda b: Request("new", [1], 5, LoRARequest("ghost", 42, "none")), FileNotFoundError, r"'ghost' \(id 42\)"),
        (lambda b: Request("new", [1], 5, LoRARequest("twin", 1, b.adapters[2].lora_path)), ValueError, "adapter id 1"),
        (lambda b: Request("new", [1], 5, "adapter-1"), TypeError, "must be a LoRARequest or None, got str"),
        (lambda b: "new", TypeError, "must be a Request, got str"),
    ],
    ids=[
        "long", "pool", "token", "duplicate", "stop token", "stop string", "unknown adapter", "same id", "adapter type",
        "request type"
    ],
)  # fmt: skip
def test_bad_requests_are_refused_before_any_change(backbone, request_of, error, message) -> None:
    engine = backbone.engine(block_size=8, num_blocks=5)
    engine.add_request(Request("known", [1], 5, backbone.adapters[1]))
    before = state(engine)
    with pytest.raises(error, match=message):
        engine.add_request(request_of(backbone))
    assert state(engine) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", [1], 5), ValueError, "request_id must not be empty"), ((7, [1], 5), TypeError, "request_id .* int 7"),
        (("a", [], 5), ValueError, "'a' is empty"), (("a", "text", 5), TypeError, "tokenize the text first"),
        (("a", [1, 2.5], 5), TypeError, "request 'a'"), (("a", [1, -2], 5), ValueError, "contains -2"),
        (("a", [1, True], 5), TypeError, "got bool True"), (("a", b"text", 5), TypeError, "got bytes"),
        (("a", {1: 2}, 5), TypeError, "got dict"), (("a", {1, 2}, 5), TypeError, "got set"),
        (("a", [1], 0), ValueError, "max_new_tokens is 0"), (("a", [1], 1.5), TypeError, "got float 1.5"),
    ],
    ids=str,
)  # fmt: skip
def test_malformed_requests(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        Request(*arguments)


def test_one_request_in_two_engines_and_twice_in_one(backbone) -> None:
    """A request is only a wish, that cannot be edited; each engine keeps its own account of it."""
    prompt = [5, 6]
    request = Request("a", prompt, 3, backbone.adapters[1])
    first, second = backbone.engine(), backbone.engine()
    states = [first.add_request(request), second.add_request(request)]
    prompt.append(999)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.prompt_token_ids = [999]
    finish(first)
    finish(second)
    states.append(first.add_request(request))
    finish(first)
    assert are_served(backbone, *states)


def test_adapter_without_lora_layers_is_refused(backbone) -> None:
    engine = Engine(backbone.model(), None, EngineConfig(max_model_len=64))
    with pytest.raises(ValueError, match=r"no LoRA layers.*ignore_adapters"):
        engine.add_request(Request("a", [1], 5, backbone.adapters[1]))
    assert tokens_of(engine.generate([[1]], None, 5)) == [backbone.generate_merged((1,), 0, 5)]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_batch_size", 0, ValueError), ("max_batch_size", 2.0, TypeError), ("block_size", 0, ValueError),
        ("num_blocks", 0, ValueError), ("max_model_len", 1, ValueError), ("adapter_index_rule", "mine", ValueError),
        ("ignore_adapters", 1, TypeError),
    ],
)  # fmt: skip
def test_config_is_checked(name, value, error) -> None:
    with pytest.raises(error, match=name):
        EngineConfig(**{name: value})


def test_engine_and_model_must_fit(backbone) -> None:
    model, config = LlamaForCausalLM(backbone.folder), EngineConfig(max_model_len=64, ignore_adapters=True)
    for arguments, error, message in (
        ((None, EngineConfig(max_model_len=129)), ValueError, "129, the model has 128 positions"),
        ((config.lora_config(), config), ValueError, "ignore_adapters"),
        ((None, config, "no such rule"), ValueError, "'no such rule'"),
        ((None, EngineConfig(max_model_len=64)), ValueError, "weights were never loaded"),
        ((EngineConfig(max_model_len=64),), TypeError, "lora_config .* EngineConfig"),
        ((LoRAConfig(), {"max_batch_size": 4}), TypeError, "engine_config .* dict"),
        ((None, config, "fcfs", None, None, None, "yes"), TypeError, "warm_up .* 'yes'"),
    ):
        with pytest.raises(error, match=message):
            Engine(model, *arguments)
    with pytest.raises(TypeError, match="model must be of class LlamaForCausalLM, got str 'llama2-7b'"):
        Engine("llama2-7b")
    model.load_state_dict(backbone.model().state_dict())
    (result,) = Engine(model, None, EngineConfig(max_model_len=64)).generate([[5, 6]], None, 3)
    assert result.token_ids == backbone.generate_merged((5, 6), 0, 3)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("adapters", [(0, 0, 0), (1, 0, 3)], ids=["no LoRA", "adapters"])
def test_an_engine_under_a_default_device_runs_on_the_devices_that_are_named(
    backbone, tmp_path, adapters, device
) -> None:
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    with torch.device(device):
        if any(adapters):
            engine = backbone.engine(block_size=2, num_blocks=40, max_loras=2)
            engine.manager.add_dummy_lora(LoRARequest("warm-up", 7, "nowhere"), 8)
            path = write_random_adapter(tmp_path, backbone.config, 8, 2)  # the numbers of adapter 2
            (again,) = tokens_of(engine.generate(prompts[:1], LoRARequest("again", 9, str(path)), 5))
        else:
            engine = Engine(backbone.model(), None, EngineConfig(max_model_len=64))
        tokens = tokens_of(engine.generate(prompts, [backbone.adapters.get(one) for one in adapters], 5))
    assert tokens == [backbone.generate_merged(prompt, one, 5) for prompt, one in zip(prompts, adapters, strict=True)]
    assert not any(adapters) or again == backbone.generate_merged(prompts[0], 2, 5)
    model = engine.runner.model
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_engines_that_take_turns_may_share_a_cache(backbone) -> None:
    config = EngineConfig(max_batch_size=2, max_model_len=32)
    cache = KVCache(backbone.model(), config.total_blocks + 3, config.block_size)
    for _ in range(2):
        engine = Engine(backbone.model(), None, config, cache=cache)
        assert engine.runner.attention.cache is cache
        assert tokens_of(engine.generate([[1]], None, 5)) == [backbone.generate_merged((1,), 0, 5)]
    for sizes, message in (
        ({"max_batch_size": 4}, "cache has 7 blocks of 16"), ({"block_size": 8}, "cache has 7 blocks of 16"),
        ({"fp8_kv_cache": True}, "cache holds torch.float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Engine(backbone.model(), None, dataclasses.replace(config, **sizes), cache=cache)
    other = KVCache(backbone.model(dtype=torch.bfloat16), config.total_blocks, config.block_size)
    del cache.keys[1:], cache.values[1:]
    for one in (other, cache):
        with pytest.raises(ValueError, match="cache has layers, kv heads"):
            Engine(backbone.model(), None, config, cache=one)


@pytest.mark.parametrize(
    ("sizes", "lora", "message"),
    [
        ({"num_blocks": 10**12}, {}, "KV cache of 1000000000000 blocks"), ({"num_blocks": 10**30}, {}, "KV cache of"),
        ({}, {"max_loras": 10**30}, "adapter slots of rank 16"),
        ({}, {"max_lora_rank": 10**12, "max_loras": 1}, "1 adapter slots of rank 1000000000000"),
    ],
    ids=["blocks", "blocks no integer holds", "slots no integer holds", "rank"],
)  # fmt: skip
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
