"""`Engine.from_pretrained`: a checkpoint folder and PEFT folders in, an engine of fitting sizes out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, Request, SamplingParams
from punica.engine import config as sizes
from punica.parallel import spawn_tensor_parallel
from tests.parallel.thread_ranks import on_threads
from tests.world import BEGIN, END, VOCAB, save_tokenizer, tokens_of

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen3 in several files, with a tokenizer and a generation config, and adapters of ranks 4 and 12 beside it."""
    home = tmp_path_factory.mktemp("checkpoint")
    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=VOCAB, max_position_embeddings=128, initializer_range=0.15,
        eos_token_id=END, bos_token_id=BEGIN, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [END, 99]
    model.save_pretrained(home, max_shard_size="100KB")
    assert len(list(home.glob("*.safetensors"))) > 1
    save_tokenizer(home)
    for rank in (4, 12):
        write_random_adapter(home / f"rank{rank}", config, rank, seed=rank)
    return home


@pytest.fixture
def adapters(folder) -> list[LoRARequest]:
    return [LoRARequest(f"rank-{rank}", lora_path=folder / f"rank{rank}") for rank in (4, 12)]


@pytest.fixture(scope="module")
def reference(folder) -> transformers.Qwen3ForCausalLM:
    return transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()


def by_transformers(reference, prompt: list[int], new: int) -> list[int]:
    found = reference.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


def test_text_chats_and_tokens_are_continued_as_by_transformers(folder, adapters, reference) -> None:
    engine = Engine.from_pretrained(folder, adapters)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, ids in (
        ("hello", tokenizer("hello")["input_ids"]),
        (CHAT, tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)),
        ([[5, 6, 7]], [5, 6, 7]),
    ):
        wanted = by_transformers(reference, ids, 16)
        (result,) = engine.generate(prompt)
        assert result.prompt_token_ids == tuple(ids)
        assert result.token_ids == wanted
        assert result.text == tokenizer.decode(
            wanted[:-1] if result.finish_reason == "stop" else wanted, skip_special_tokens=True
        )


def test_adapters_of_the_folder_are_those_of_peft(folder, adapters, reference) -> None:
    peft = pytest.importorskip("peft")
    engine = Engine.from_pretrained(folder, adapters)
    prompt = [BEGIN, 40, 41, 42]
    found = tokens_of(engine.generate([prompt] * 3, [*adapters, None], SamplingParams(12, ignore_eos=True)))
    assert len({tuple(tokens) for tokens in found}) == 3
    for request, tokens in zip(adapters, found, strict=False):
        base = transformers.Qwen3ForCausalLM.from_pretrained(folder)
        model = peft.PeftModel.from_pretrained(base, request.lora_path).eval()
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


def test_sizes_fit_the_adapters_the_model_and_the_machine(folder, adapters, monkeypatch) -> None:
    engine = Engine.from_pretrained(folder, adapters, max_batch_size=4)
    lora = engine.manager.lora_config
    assert (lora.max_lora_rank, lora.max_loras, lora.max_cpu_loras) == (12, 2, 2)
    assert engine.config.max_model_len == 128  # the model's positions
    assert engine.config.num_blocks == 4 * 8  # a full batch of them
    assert sorted(engine.manager.list_adapters()) == sorted(request.lora_int_id for request in adapters)
    memory, cache = engine.memory, engine.runner.attention.cache
    assert memory.kv_cache == 4 * 128 * memory.token_bytes == sum(one.nbytes for one in (*cache.keys, *cache.values))
    assert memory.adapter_slots == 2 * memory.slot_bytes
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 6 * 16 * memory.token_bytes + memory.adapter_slots)
    small = Engine.from_pretrained(folder, adapters, max_batch_size=4, memory_fraction=1.0)
    assert (small.config.num_blocks, small.config.max_model_len) == (6, 96)
    with pytest.raises(RuntimeError, match="no KV block"):
        Engine.from_pretrained(folder, adapters, max_batch_size=4, memory_fraction=0.1)


def test_more_adapters_than_places_and_room_for_later_ones(folder, adapters) -> None:
    engine = Engine.from_pretrained(folder, adapters, max_batch_size=1)
    assert (engine.manager.lora_config.max_loras, len(engine.manager.list_adapters())) == (2, 2)  # a slot for the next
    later = Engine.from_pretrained(folder, max_lora_rank=12, max_batch_size=2)
    assert later.manager.lora_config.max_loras == 3
    assert later.generate([[5]], adapters[1], 3)[0].finish_reason == "length"
    with pytest.raises(ValueError, match="rank 12 exceeds max_lora_rank 4"):
        Engine.from_pretrained(folder, adapters[0]).add_request(Request("a", [5], 3, adapters[1]))
    assert Engine.from_pretrained(folder).manager is None


def test_defaults_come_from_the_generation_config(folder, tmp_path) -> None:
    home = shutil.copytree(folder, tmp_path / "copy")
    values = {"do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": 9, "eos_token_id": []}
    (home / "generation_config.json").write_text(json.dumps(values))
    engine = Engine.from_pretrained(home)
    default, same = engine.generate([[5, 6]]), engine.generate([[5, 6]], None, engine.defaults.params)
    assert engine.defaults.params == SamplingParams(9, 0.8, top_k=5)
    assert len(default[0].token_ids) == len(same[0].token_ids) == 9
    greedy = tokens_of(engine.generate([[5, 6]], None, SamplingParams(9)))
    assert greedy == tokens_of(engine.generate([[5, 6]], None, 9))


def test_dtype_and_length_as_asked(folder) -> None:
    engine = Engine.from_pretrained(str(folder), dtype="bfloat16", max_model_len=40, num_blocks=5, fp8_kv_cache=True)
    assert engine.config.fp8_kv_cache
    assert engine.runner.model.lm_head.weight.dtype is torch.bfloat16
    assert (engine.config.max_model_len, engine.config.num_blocks) == (40, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_model_len": 500}, ValueError, "500, the model has 128 positions"),
        ({"dtype": "int8"}, ValueError, "dtype is 'int8'"), ({"memory_fraction": 2}, ValueError, "fraction is 2.0"),
        ({"adapters": "sql"}, TypeError, "adapters .* str 'sql'"), ({"adapters": ["sql"]}, TypeError, r"adapters\[0\]"),
        ({"adapters": [LoRARequest("ghost", lora_path="none")]}, FileNotFoundError, "'ghost'"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size is 0"), ({"max_loras": 0}, ValueError, "max_loras is 0"),
        ({"nonsense": 3}, TypeError, "nonsense"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes(folder, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        Engine.from_pretrained(folder, **arguments)


def test_a_window_limits_the_length(tmp_path) -> None:
    config = transformers.MistralConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64, max_position_embeddings=128, sliding_window=24,
    )  # fmt: skip
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    assert Engine.from_pretrained(tmp_path).config.max_model_len == 24
    with pytest.raises(ValueError, match="max_model_len is 25, the model has a sliding window of 24 tokens"):
        Engine.from_pretrained(tmp_path, max_model_len=25)


def on_rank(rank: int, folder: str, adapters: list[LoRARequest]) -> tuple[list[str | None], int]:
    engine = Engine.from_pretrained(folder, adapters, device="cpu")
    sampled = SamplingParams(10, temperature=1.0, seed=5, stop="e")
    results = engine.generate(["hello"] * 3, [*adapters, None], [10, sampled, sampled])
    return [result.text for result in results], engine.config.total_blocks


@pytest.mark.slow
def test_ranks_agree_on_sizes_and_texts(folder, adapters) -> None:
    alone = on_rank(0, str(folder), adapters)
    assert spawn_tensor_parallel(on_rank, 2, str(folder), adapters, backend="gloo") == [alone] * 2


def test_a_rank_without_the_folder_ends_all_ranks_with_its_cause(folder) -> None:
    errors = on_threads(2, lambda rank: Engine.from_pretrained("not/here" if rank else folder, device="cpu"))
    assert [type(error) for error in errors] == [FileNotFoundError] * 2
    assert str(errors[0]) == str(errors[1])
    assert str(errors[0]).startswith("rank 1 of 2: model folder 'not/here' does not exist")


@pytest.mark.parametrize(
    ("folder_of", "error", "message"),
    [
        (lambda home, adapter: home, FileNotFoundError, r"config\.json"),
        (lambda home, adapter: "meta-llama/L", FileNotFoundError, "'meta-llama/L' does not exist .*snapshot_download"),
        (lambda home, adapter: None, TypeError, "got NoneType"),
        (lambda home, adapter: adapter.lora_path, ValueError, "is the folder of an adapter"),
    ],
    ids=["empty", "a hub name", "none", "an adapter"],
)  # fmt: skip
def test_a_folder_that_is_none(adapters, tmp_path, folder_of, error, message) -> None:
    with pytest.raises(error, match=message):
        Engine.from_pretrained(folder_of(tmp_path, adapters[0]))


def test_models_of_other_libraries_by_mistake(reference, adapters, folder) -> None:
    peft = pytest.importorskip("peft")
    base = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    for model in (reference, peft.PeftModel.from_pretrained(base, adapters[0].lora_path)):
        for call in (Engine, Engine.from_pretrained):
            with pytest.raises(TypeError, match=r"LlamaForCausalLM is meant: Engine\.from_pretrained"):
                call(model)
