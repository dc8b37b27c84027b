"""LoRAConfig: defaults, checks at construction, resolution of the dtype."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from punica.config import LoRAConfig


def test_defaults_follow_other_fields_and_nothing_changes_behind_the_allocations() -> None:
    config = LoRAConfig(max_loras=7)
    assert (config.max_cpu_loras, config.lora_dtype, config.pdl, config.batch_invariant) == (7, "auto", True, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_loras = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_lora_rank": 0}, ValueError, "max_lora_rank is 0"),
        ({"max_lora_rank": 8.0}, TypeError, "max_lora_rank"),
        ({"max_loras": True}, TypeError, "max_loras"),
        ({"max_loras": -3}, ValueError, "max_loras is -3"),
        ({"max_loras": 4, "max_cpu_loras": 3}, ValueError, r"max_cpu_loras is 3, must be >= 4"),
        ({"fully_sharded_loras": 1}, TypeError, "fully_sharded_loras"),
        ({"batch_invariant": None}, TypeError, "batch_invariant"),
        ({"lora_dtype": "float64"}, ValueError, "float64"),
        ({"lora_dtype": torch.float64}, TypeError, "float64"),
        ({"lora_dtype": 16}, TypeError, "lora_dtype"),
        ({"target_modules": "q_proj"}, TypeError, "target_modules"),
        ({"target_modules": ["q_proj", 3]}, TypeError, r"target_modules\[1\]"),
        ({"target_modules": [""]}, ValueError, r"target_modules\[0\] is empty"),
        ({"tuned_dir": 3}, TypeError, "tuned_dir"),
    ],
)
def test_bad_fields_raise(fields: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LoRAConfig(**fields)


@pytest.mark.parametrize(
    ("lora_dtype", "model_config", "expected"),
    [
        ("auto", SimpleNamespace(dtype=torch.bfloat16), torch.bfloat16),
        ("auto", SimpleNamespace(dtype=None, torch_dtype="float16"), torch.float16),
        ("float32", SimpleNamespace(dtype=torch.bfloat16), torch.float32),
        (torch.float16, SimpleNamespace(), torch.float16),
    ],
    ids=["model dtype", "model torch_dtype by name", "own name wins", "own dtype"],
)
def test_verify_with_model_config_resolves_the_dtype(lora_dtype, model_config, expected) -> None:
    config = LoRAConfig(lora_dtype=lora_dtype)
    config.verify_with_model_config(model_config)
    assert config.lora_dtype is expected
    with pytest.raises(ValueError, match="set lora_dtype"):
        LoRAConfig().verify_with_model_config(SimpleNamespace())
