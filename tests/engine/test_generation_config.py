"""Generation defaults of a checkpoint folder, and sizes that fit the machine."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from punica.adapters.wrap import slots_need
from punica.engine import Engine, EngineConfig
from punica.engine import config as sizes
from punica.engine.attention import KVCache, token_bytes
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
    for values, ends in (({"eos_token_id": [1, 8, 9]}, (1, 8, 9)), ({"eos_token_id": 0}, (0,)), ({"top_k": 5}, (7,))):
        assert defaults_of(tmp_path, **values).eos_token_ids == ends


@pytest.mark.parametrize(
    ("values", "params"),
    [
        ({}, {}), ({"temperature": 0.6, "top_p": 0.9}, {}),  # transformers decodes greedily
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "max_new_tokens": 5},
         {"max_new_tokens": 5, "temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": True, "top_k": None}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}), ({"repetition_penalty": 1.2},) * 2,
        ({"min_new_tokens": 4, "max_new_tokens": 9, "suppress_tokens": [3, 5], "bad_words_ids": [[6, 7], [8]],
          "stop_strings": ["end"]},
         {"max_new_tokens": 9, "min_tokens": 4, "bad_words": [[3], [5], [6, 7], [8]], "stop": ["end"]}),
        ({"min_new_tokens": 40}, {"max_new_tokens": 40, "min_tokens": 40}),
        ({"min_new_tokens": 40, "max_new_tokens": 7}, {"max_new_tokens": 7, "min_tokens": 7}),
        ({"stop_strings": "end", "suppress_tokens": []}, {"stop": "end"}),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "max_length": 20, "max_new_tokens": 9, "typical_p": 0.5,
          "temperature": 0.3, "length_penalty": 1.0, "use_cache": True, "pad_token_id": 0, "bos_token_id": 1,
          "_from_model_config": True, "begin_suppress_tokens": None, "sequence_bias": {}}, {"max_new_tokens": 9}),
    ],
)  # fmt: skip
def test_fields_that_are_served_or_change_nothing(tmp_path, recwarn, values, params) -> None:
    assert defaults_of(tmp_path, **values).params == SamplingParams(**params)
    assert not [one for one in recwarn if "does not serve" in str(one.message)]


def test_the_usual_top_k_is_that_of_transformers() -> None:
    assert GenerationConfig()._get_default_generation_params()["top_k"] == 50


UNSERVED = {
    "num_beams": 4, "no_repeat_ngram_size": 3, "max_length": 50, "min_length": 5, "num_return_sequences": 2,
    "begin_suppress_tokens": [3], "sequence_bias": [[[3], 2.0]], "forced_eos_token_id": 2, "penalty_alpha": 0.6,
    "exponential_decay_length_penalty": [5, 1.1], "guidance_scale": 1.5, "max_time": 3.0,
}  # fmt: skip


def test_fields_that_are_not_served_are_named_in_one_warning(tmp_path) -> None:
    for names in (*([name] for name in UNSERVED), list(UNSERVED)):
        with pytest.warns(UserWarning, match="generation_config.json.* does not serve") as caught:
            defaults_of(tmp_path, **{name: UNSERVED[name] for name in names})
        assert len(caught) == 1
        assert all(f"{name}={UNSERVED[name]!r}" in str(caught[0].message) for name in names)
    with pytest.warns(UserWarning, match=r"typical_p=0\.9"):
        defaults_of(tmp_path, do_sample=True, typical_p=0.9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": ["end"]}))
    with pytest.warns(UserWarning, match="stop_strings=.*does not serve"):
        found = read_generation_defaults(tmp_path, MODEL, has_tokenizer=False)
    assert found.params.stop == ()


def test_longer_defaults_than_the_engine_end_with_it(backbone, tmp_path) -> None:
    folder = shutil.copytree(backbone.folder, tmp_path / "model", ignore=shutil.ignore_patterns("adapter*"))
    values = {"max_new_tokens": 500, "min_new_tokens": 400, "eos_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(values))
    engine = Engine.from_pretrained(folder, device="cpu", max_model_len=32)
    for length in (1, 20, 31):
        (result,) = engine.generate([[5] * length])
        assert len(result.token_ids) == 32 - length
    for prompt, asked in ((32, None), (20, 13)):  # what a request asks for itself is not changed
        with pytest.raises(ValueError, match="max_model_len is 32"):
            engine.generate([[5] * prompt], None, asked)


@pytest.mark.parametrize(
    ("given", "kept"), [(100, ()), (-1, ()), ([3, 100, -1, 7], (3, 7)), (7, (7,))],
    ids=["above", "below", "some", "none"],
)  # fmt: skip
def test_tokens_outside_of_the_vocabulary_never_come(tmp_path, recwarn, given, kept) -> None:
    """As in transformers: in either config, and among suppressed tokens."""
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    model = SimpleNamespace(vocab_size=100, eos_token_id=given)
    assert read_generation_defaults(tmp_path, model).eos_token_ids == kept
    assert defaults_of(tmp_path, eos_token_id=given).eos_token_ids == kept
    tokens = given if isinstance(given, list) else [given]
    found = defaults_of(tmp_path, suppress_tokens=tokens).params
    assert found == SamplingParams(bad_words=[[token] for token in kept])
    told = [str(one.message) for one in recwarn]
    assert len(told) == (0 if kept == (7,) else 3)
    assert all("the vocabulary has 100 ids" in one for one in told)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"eos_token_id": "</s>"}, TypeError, ""), ({"do_sample": True, "top_p": 3}, ValueError, "top_p is 3"),
        ({"max_new_tokens": "many"}, TypeError, "max_new_tokens"), ({"min_new_tokens": -2}, ValueError, "is -2"),
        ({"bad_words_ids": [[100]]}, ValueError, "have 100, the vocabulary has 100"),
        ({"bad_words_ids": [3]}, TypeError, r"bad_words\[0\]"), ({"suppress_tokens": 5}, TypeError, ""),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_in_a_generation_config(tmp_path, values, error, message) -> None:
    with pytest.raises(error, match=f"generation_config.json.*{message}|eos_token_id"):
        defaults_of(tmp_path, **values)


def test_a_damaged_generation_config(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_generation_defaults(tmp_path, MODEL)


def test_bytes_are_those_that_are_allocated(backbone) -> None:
    model = LlamaForCausalLM(backbone.folder)
    cache = KVCache(model, 6, 8)
    assert token_bytes(model) * 6 * 8 == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    manager = backbone.engine(max_batch_size=4).manager
    weights = [one for layer in manager.modules.values() for one in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
    assert EngineConfig(max_batch_size=4).full_slots == manager.lora_slots == 5
    assert sum(one.nbytes for one in weights) == slots_need(model, manager.lora_config).nbytes


def test_blocks_that_fit_beside_slots_and_graphs(backbone, monkeypatch) -> None:
    """Graphs come out of what `memory_fraction` leaves, and only then out of the blocks."""
    model = LlamaForCausalLM(backbone.folder)
    block, many = 16 * token_bytes(model), EngineConfig(num_blocks=300)
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 100 * block)
    for config, reserved, blocks in (
        (EngineConfig(num_blocks=30), 0, 30), (many, 0, 50), (EngineConfig(num_blocks=300, fp8_kv_cache=True), 0, 200),
        (many, 20, 30),
    ):  # fmt: skip
        assert sizes.fit_blocks(model, config, reserved * block, 0.5) == blocks
    with pytest.raises(RuntimeError, match=r"no KV block of .* lower max_loras or max_lora_rank"):
        sizes.fit_blocks(model, many, 50 * block, 0.5)
    for graphs, fraction, blocks in ((60, 0.5, 40), (60, 1.0, 40), (0, 1.0, 100), (30, 0.5, 50)):
        monkeypatch.setattr(sizes, "graph_reserve", lambda *_, graphs=graphs: graphs * block)
        assert sizes.fit_blocks(model, many, 0, fraction) == blocks
    assert sizes.fit_blocks(model, many, 20 * block, 0.5) == 30


def test_what_graphs_may_take_on_a_gpu() -> None:
    def reserve(device: str, **fields) -> float:
        weight = SimpleNamespace(device=torch.device(device), element_size=lambda: 2)
        model = SimpleNamespace(lm_head=SimpleNamespace(weight=weight), config=LlamaConfig(), parameters=lambda: fp8)
        return sizes.graph_reserve(model, EngineConfig(max_model_len=2048, **fields)) / 2**20

    fp8: list[torch.Tensor] = []

    assert reserve("cpu") == reserve("cuda", cuda_graphs=False) == 0
    rows, graphs = 2304 + 32, 7 * 7 + 26 * 10
    assert reserve("cuda") == pytest.approx(2 * rows * (4 * 4096 + 3 * 11008) / 2**20 + 2 * graphs + 4, rel=0.01)
    assert 500 < (plain := reserve("cuda")) < 1000
    fp8 += [torch.empty(n, dtype=torch.float8_e4m3fn, device="meta") for n in (1 << 20, 1 << 22)]
    assert reserve("cuda") == plain + 8, "the largest weight in 16 bits"
