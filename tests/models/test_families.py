"""What a folder may hold is checked: configs, dtypes, and models of another library."""

import json

import pytest
import torch
import transformers

from punica.models import LlamaForCausalLM, load_model
from tests.models.test_llama import SIZES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "list"),
        (" " * (1 << 20) + "{}", str(1 << 20)),
        ("{}", "'None'"),
        (json.dumps({"model_type": "gpt2"}), "'gpt2'"),
        (json.dumps({"model_type": "llama", **SIZES, "num_attention_heads": 0}), "num_attention_heads"),
        (json.dumps({"model_type": "llama", **SIZES, "num_key_value_heads": 3}), "multiple"),
        (json.dumps({"model_type": "llama", **SIZES, "dtype": "float99"}), "'float99'"),
        (json.dumps({"model_type": "qwen2", **SIZES, "vocab_size": -1}), "vocab_size"),
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
    with pytest.raises((TypeError, ValueError), match="hidden_size"):
        load_model(tmp_path)


def test_a_transformers_model_by_mistake_says_which_class_is_meant() -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    with pytest.raises(TypeError, match=r"Qwen3ForCausalLM is the class of transformers.*Engine\.from_pretrained"):
        LlamaForCausalLM(model)
