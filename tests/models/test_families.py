"""Mistral, Qwen2 and Qwen3 by the code of Llama: logits are transformers', and what a folder may hold is checked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from punica.models import LlamaForCausalLM, MixtureOfExpertsForCausalLM, load_model
from tests.models.moe_world import CausalAttention

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 77, "initializer_range": 0.2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral, window, own head size": transformers.MistralConfig(**SIZES, sliding_window=40, head_dim=24),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2, tied, window in one layer": transformers.Qwen2Config(
        **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen3, biases": transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "llama, swish is silu": transformers.LlamaConfig(**SIZES, hidden_act="swish"),
}
IDS = torch.randint(77, (40,), generator=torch.Generator().manual_seed(4))


def checkpoint(config: Any, folder: Path) -> torch.Tensor:
    """Saves a model with random norms and biases; its logits for ``IDS``."""
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for key, parameter in model.named_parameters():
        if "norm" in key or key.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    with torch.inference_mode():
        return model(IDS[None]).logits[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_transformers(tmp_path, config) -> None:
    expected = checkpoint(config, tmp_path)
    model = load_model(tmp_path, torch.float32)
    assert type(model) is LlamaForCausalLM
    with torch.inference_mode():
        found = model.compute_logits(model(IDS, torch.arange(len(IDS)), CausalAttention()))
    assert expected.std() > 0.5  # the comparison below is between numbers of this size
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert model.max_context == (40 if getattr(config, "sliding_window", None) else 64)


def test_a_folder_with_experts_loads_by_the_same_call(tmp_path) -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path), MixtureOfExpertsForCausalLM)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds a list"),
        (" " * (1 << 20) + "{}", "a config has at most"),
        ("{}", "model_type 'None'"),
        (json.dumps({"model_type": "gpt2"}), "'gpt2'"),
        (json.dumps({"model_type": "llama", **SIZES, "num_attention_heads": 0}), "num_attention_heads .* is 0"),
        (json.dumps({"model_type": "llama", **SIZES, "num_key_value_heads": 3}), "multiple"),
        (json.dumps({"model_type": "llama", **SIZES, "dtype": "float99"}), "'float99'"),
        (json.dumps({"model_type": "qwen2", **SIZES, "vocab_size": -1}), "vocab_size .* is -1"),
    ],
    ids=["cut", "nested", "list", "huge", "no type", "other family", "no heads", "kv heads", "unknown dtype",
         "negative"],
)  # fmt: skip
def test_damaged_configs_are_one_clear_error(tmp_path, content, message) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_model(tmp_path)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("key", "given", "served"),
    [
        ("dtype", "auto", torch.bfloat16), ("torch_dtype", None, torch.bfloat16), ("dtype", "half", torch.float16),
        ("torch_dtype", "torch.float16", torch.float16), ("dtype", "float32", torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_the_dtype_of_a_folder(tmp_path, key, given, served) -> None:
    """By name, or by the tensors, as transformers does."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = {name: one for name, one in json.loads(file.read_text()).items() if "dtype" not in name}
    file.write_text(json.dumps(values | {key: given}))
    assert load_model(tmp_path).config.dtype == served
    assert load_model(tmp_path, torch.float32).lm_head.weight.dtype == torch.float32


def test_scaled_positions_count() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)  # the card leaves max_position_embeddings at 64
    assert LlamaForCausalLM.resolve_config(config).max_context == 128


@pytest.mark.parametrize("given", ["fp16", "int8", 16, "device", {"": "float16"}], ids=str)
def test_a_dtype_that_no_model_is_served_in(tmp_path, given) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "torch_dtype": given}))
    with pytest.raises(ValueError, match=r"dtype of the config is .*, must be float32, float16, bfloat16 or auto"):
        load_model(tmp_path)


def test_values_of_other_types(tmp_path) -> None:
    scaling = {"type": "linear", "factor": "2"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "rope_scaling": scaling}))
    with pytest.raises(ValueError, match=r"rope_parameters are .*'factor': '2'"):
        LlamaForCausalLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "hidden_size": "wide"}))
    with pytest.raises(TypeError, match=r"hidden_size .* int, got str"):
        load_model(tmp_path)


def test_a_transformers_model_by_mistake_says_which_class_is_meant() -> None:
    model = transformers.Qwen3ForCausalLM(CONFIGS["qwen3"])
    with pytest.raises(TypeError, match=r"Qwen3ForCausalLM is the class of transformers.*Engine\.from_pretrained"):
        LlamaForCausalLM(model)
