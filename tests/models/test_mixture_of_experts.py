"""Mixtral and Qwen3-MoE compute what transformers computes; adapters on experts what merged weights compute."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from punica.adapters import LoRAModelManager, LoRARequest
from punica.config import LoRAConfig
from punica.layers import FusedMoEWithLoRA
from punica.metadata import LoRAMapping
from punica.models import MixtureOfExpertsForCausalLM
from punica.ops.quant import Fp8Matrix
from tests.models.moe_world import (
    CONFIGS,
    TOKENS,
    factors,
    loaded,
    logits_of,
    managed,
    merged,
    saved,
    wanted,
    write_per_expert,
    write_stacked,
)


@pytest.fixture(scope="module", params=CONFIGS)
def world(request, tmp_path_factory) -> tuple[Any, Path]:
    return saved(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def ours(world) -> MixtureOfExpertsForCausalLM:
    return loaded(world[1])


def test_logits_are_those_of_transformers_and_every_name_of_the_checkpoint_has_its_place(world, ours):
    torch.testing.assert_close(logits_of(ours), wanted(world[0]), rtol=1e-4, atol=1e-4)
    names = [entry.name for entry in ours.checkpoint_entries()]
    assert len(set(names)) == len(names)
    ours.init_random_weights(seed=1)
    assert bool(torch.isfinite(logits_of(ours)).all())


@pytest.mark.parametrize(
    ("stacked", "fp8"),
    [(False, None), (True, None), (False, torch.float8_e4m3fn), (True, torch.float8_e5m2)],
    ids=["per expert", "stacked", "per expert, E4M3", "stacked, E5M2"],
)
def test_adapters_on_experts_equal_merged_weights(world, ours, tmp_path, stacked, fp8):
    """In FP8 they are quantised when they are registered, and served as models with the rounded weights."""
    theirs, _ = world
    layers = factors(theirs.config, rank=4, seed=5)
    if stacked:
        write_stacked(tmp_path, layers, 4, alpha=8)
    else:
        write_per_expert(tmp_path, theirs.config, layers, 4, alpha=8)
    held = managed(ours, tmp_path, fp8=fp8).get_adapter(7).get_lora("model.layers.1.mlp.experts")
    assert {isinstance(factor, Fp8Matrix) for factor in (*held.lora_a, *held.lora_b)} == {fp8 is not None}
    if fp8 is not None:  # the scaling, 2, changes no rounding
        layers = {
            i: {which: [Fp8Matrix.of(factor, fp8).real() for factor in pair] for which, pair in of_layer.items()}
            for i, of_layer in layers.items()
        }
    torch.testing.assert_close(logits_of(ours), wanted(merged(theirs, layers, 2.0)), rtol=1e-3, atol=1e-3)


def test_missing_experts_and_projections_change_nothing(world, ours, tmp_path):
    theirs, _ = world
    layers = factors(theirs.config, rank=3, seed=6)
    absent = {(1, "w1"), (0, "w3"), *((expert, "w2") for expert in range(theirs.config.num_local_experts))}
    write_per_expert(tmp_path, theirs.config, layers, 3, 3, absent)
    managed(ours, tmp_path)
    torch.testing.assert_close(logits_of(ours), wanted(merged(theirs, layers, 1.0, absent)), rtol=1e-3, atol=1e-3)


def test_adapters_trained_by_peft(world, ours, tmp_path):
    """`target_parameters` beside the attention's projections, saved by the PEFT library and run by it."""
    theirs, folder = world
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(tmp_path)
    managed(ours, tmp_path)
    assert not torch.allclose(logits_of(ours), wanted(theirs), atol=1e-2)
    torch.testing.assert_close(logits_of(ours), wanted(model.eval()), rtol=1e-3, atol=1e-3)


def test_a_request_that_expects_the_other_spelling_is_refused(world, ours, tmp_path):
    theirs, _ = world
    layers = factors(theirs.config, rank=2, seed=5)
    write_stacked(tmp_path / "a", layers, 2, 2)
    write_per_expert(tmp_path / "b", theirs.config, layers, 2, 2)
    manager = LoRAModelManager(ours, 4, 64, 61, LoRAConfig(6, 2), "cpu")
    assert manager.add_adapter(LoRARequest("a", 2, str(tmp_path / "a"), is_3d_lora_weight=True))
    with pytest.raises(ValueError, match="is_3d_lora_weight"):
        manager.add_adapter(LoRARequest("b", 3, str(tmp_path / "b"), is_3d_lora_weight=True))
    assert list(manager.list_adapters()) == [2]


@pytest.mark.parametrize(("name", "message"), [("7.w9", "w9"), ("99.w1", "99")])
def test_unknown_experts_are_refused(tmp_path, name, message):
    config = CONFIGS["mixtral"]
    ours = MixtureOfExpertsForCausalLM(config)
    ours.init_random_weights()
    write_per_expert(tmp_path, config, factors(config, 2, 1), 2, 2)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    experts = "base_model.model.model.layers.0.block_sparse_moe.experts"
    tensors[f"{experts}.{name}.lora_A.weight"] = torch.zeros(2, 32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        managed(ours, tmp_path)


def test_target_modules_may_name_the_experts_or_their_parts():
    for targets in (["experts"], ["w1"], ["q_proj", "w2"], ["q_proj"]):
        model = MixtureOfExpertsForCausalLM(CONFIGS["mixtral"])
        modules = LoRAModelManager(model, 4, 64, 61, LoRAConfig(4, 2, target_modules=targets), "cpu").modules
        has_experts = isinstance(modules.get("model.layers.1.mlp.experts"), FusedMoEWithLoRA)
        assert has_experts == (targets != ["q_proj"])
        assert ("model.layers.0.self_attn.qkv_proj" in modules) == ("q_proj" in targets)


def test_zero_adapters_cover_the_experts():
    model = MixtureOfExpertsForCausalLM(CONFIGS["mixtral"])
    model.init_random_weights()
    before = logits_of(model)
    manager = LoRAModelManager(model, 4, 64, 61, LoRAConfig(4, 2), "cpu")
    manager.add_dummy_lora(LoRARequest("zero", 1, "/nowhere"), 4)
    manager.set_adapter_mapping(LoRAMapping([1] * len(TOKENS), [1] * len(TOKENS)))
    assert manager.modules["model.layers.0.mlp.experts"].adapter_enabled.tolist() == [1, 0, 0]
    torch.testing.assert_close(logits_of(model), before)
