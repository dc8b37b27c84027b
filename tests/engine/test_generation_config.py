"""Generation defaults of a checkpoint folder, and sizes that fit the machine."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from punica.engine import EngineConfig, sizes
from punica.engine.kv_cache import KVCache, token_bytes
from punica.engine.pretrained import read_generation_defaults
from punica.models import LlamaForCausalLM
from punica.scheduling import SamplingParams

MODEL = SimpleNamespace(vocab_size=100, eos_token_id=7)


def defaults_of(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder, MODEL)


def test_ends_come_from_the_generation_config_else_from_the_model(tmp_path) -> None:
    assert read_generation_defaults(tmp_path, MODEL).eos_token_ids == (7,)
    assert read_generation_defaults(tmp_path, SimpleNamespace(vocab_size=9)).eos_token_ids == ()
    assert defaults_of(tmp_path, eos_token_id=[1, 8, 9]).eos_token_ids == (1, 8, 9)
    assert defaults_of(tmp_path, eos_token_id=0).eos_token_ids == (0,)
    assert defaults_of(tmp_path, temperature=0.5).eos_token_ids == (7,)


def test_sampling_of_the_folder(tmp_path) -> None:
    assert read_generation_defaults(tmp_path, MODEL).params == SamplingParams()
    assert defaults_of(tmp_path, temperature=0.6, top_p=0.9).params == SamplingParams()  # transformers decodes greedily
    sampled = defaults_of(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=0, max_new_tokens=5)
    assert sampled.params == SamplingParams(5, 0.6, top_p=0.9)
    assert defaults_of(tmp_path, do_sample=True, top_k=20).params == SamplingParams(temperature=1.0, top_k=20)
    assert defaults_of(tmp_path, repetition_penalty=1.2).params == SamplingParams(repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"eos_token_id": 100}, ValueError, "eos_token_id is 100 .*vocabulary has 100 ids"),
        ({"eos_token_id": [3, -1]}, ValueError, "eos_token_id .* is -1"),
        ({"eos_token_id": "</s>"}, TypeError, "eos_token_id .* must be an int"),
        ({"do_sample": True, "top_p": 3}, ValueError, "generation_config.json.*top_p is 3"),
        ({"max_new_tokens": "many"}, TypeError, "generation_config.json.*max_new_tokens"),
    ],
    ids=["outside", "negative", "text", "range", "type"],
)
def test_mistakes_in_a_generation_config(tmp_path, values, error, message) -> None:
    with pytest.raises(error, match=message):
        defaults_of(tmp_path, **values)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_generation_defaults(tmp_path, MODEL)


def test_bytes_are_those_that_are_allocated(backbone) -> None:
    model = LlamaForCausalLM(backbone.folder)
    cache = KVCache(model, 6, 8)
    held = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert token_bytes(model) * 6 * 8 == held
    slot = sizes.slot_bytes(model, 8, 4)
    config = EngineConfig(max_batch_size=4, max_model_len=64)
    manager = backbone.engine(max_batch_size=4, max_model_len=64).manager
    weights = [
        one for layer in manager.modules.values()
        for name in ("lora_a_stacked", "lora_b_stacked") for one in getattr(layer, name)
    ]  # fmt: skip
    allocated = sum(tensor.nbytes for tensor in weights) // manager.lora_slots
    assert config.full_slots == manager.lora_slots == 5
    assert allocated == pytest.approx(slot * manager.lora_config.max_lora_rank / 8, rel=0.05)


def test_blocks_that_fit(backbone, monkeypatch) -> None:
    model = LlamaForCausalLM(backbone.folder)
    block = 16 * token_bytes(model)
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 100 * block)
    assert sizes.fit_blocks(model, EngineConfig(num_blocks=30), 0, 0.5) == 30
    many = EngineConfig(num_blocks=300)
    assert sizes.fit_blocks(model, many, 0, 0.5) == 50
    assert sizes.fit_blocks(model, EngineConfig(num_blocks=300, fp8_kv_cache=True), 0, 0.5) == 200
    assert sizes.fit_blocks(model, many, 20 * block, 0.5) == 30
    with pytest.raises(RuntimeError, match=r"no KV block of .* lower max_loras or max_lora_rank"):
        sizes.fit_blocks(model, many, 50 * block, 0.5)


def test_blocks_leave_room_for_graphs(backbone, monkeypatch) -> None:
    """Beyond what `memory_fraction` leaves."""
    model = LlamaForCausalLM(backbone.folder)
    block, many = 16 * token_bytes(model), EngineConfig(num_blocks=300)
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 100 * block)
    for graphs, fraction, blocks in ((60, 0.5, 40), (60, 1.0, 40), (0, 1.0, 100), (30, 0.5, 50)):
        monkeypatch.setattr(sizes, "graph_reserve", lambda *_, graphs=graphs: graphs * block)
        assert sizes.fit_blocks(model, many, 0, fraction) == blocks
    assert sizes.fit_blocks(model, many, 20 * block, 0.5) == 30


def test_what_graphs_may_take_on_a_gpu() -> None:
    def reserve(device: str, **fields) -> float:
        weight = SimpleNamespace(device=torch.device(device), element_size=lambda: 2)
        model = SimpleNamespace(lm_head=SimpleNamespace(weight=weight), config=LlamaConfig())
        return sizes.graph_reserve(model, EngineConfig(max_model_len=2048, **fields)) / 2**20

    assert reserve("cpu") == reserve("cuda", cuda_graphs=False) == 0
    rows, graphs = 2304 + 32, 7 * 7 + 25 * 10
    assert reserve("cuda") == pytest.approx(2 * rows * (4 * 4096 + 3 * 11008) / 2**20 + 2 * graphs + 4, rel=0.01)
    assert 500 < reserve("cuda") < 1000


def test_free_memory_of_this_machine() -> None:
    assert 1 << 20 < sizes.free_bytes(torch.device("cpu")) < 1 << 50
