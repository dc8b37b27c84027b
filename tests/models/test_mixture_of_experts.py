"""Mixtral and Qwen3-MoE compute what transformers computes; adapters on experts, which may share factors, what merged
weights compute.
"""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from punica.adapters import LoRAModelManager, LoRARequest
from punica.adapters.wrap import slots_need
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
    write,
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


@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)])
def test_peft_before_0_19_1_trained_the_transposed_product(world, ours, tmp_path, parameters):
    """It took the rows of `[E, rows, columns]` for inputs: A `[E*r, rows]`, B `[columns, r*E]`."""
    theirs, tensors, rank = copy.deepcopy(world[0]), {}, 3
    generator = torch.Generator().manual_seed(4)
    names = {name: f"model.layers.1.mlp.experts{'.base_layer' * (name != parameters[-1])}" for name in parameters}
    for name, module in names.items():
        weight = getattr(theirs.model.layers[1].mlp.experts, name)
        experts, rows, columns = weight.shape
        a, b = (torch.randn(*size, generator=generator) for size in ((experts * rank, rows), (columns, rank * experts)))
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        delta = torch.einsum("ore,eri->eio", b.view(columns, rank, experts), a.view(experts, rank, rows))
        weight.data += 0.5 * delta
    fields = {"target_modules": None, "target_parameters": [f"experts.{name}" for name in names]}
    write(tmp_path, tensors, rank, 1.5, **fields)
    managed(ours, tmp_path)
    torch.testing.assert_close(logits_of(ours), wanted(theirs), rtol=1e-3, atol=1e-3)
    write(tmp_path, tensors, rank, 1e40, **fields)
    with pytest.raises(ValueError, match="after scaling"):
        managed(loaded(world[1]), tmp_path)


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
        need = slots_need(model, lora := LoRAConfig(4, 2, target_modules=targets))
        manager = LoRAModelManager(model, 4, 64, 61, lora, "cpu")
        modules = manager.modules
        assert need.nbytes == 2 * manager.slot_bytes
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


OUTER = {("w1", 0), ("w3", 0), ("w2", 1)}
"""Shared factors, (projection, A or B), of the shared-outer layout."""
SHARED = {"outer": OUTER, "all": {(which, side) for which in ("w1", "w2", "w3") for side in (0, 1)}, "none": set()}


of_two = pytest.mark.parametrize("world", ["mixtral", "qwen3"], indirect=True)


def shared_factors(config, shared) -> dict[int, dict[str, list[Tensor]]]:
    """Factors `[E or 1, ...]` of each layer's projections."""
    return {
        layer: {
            which: [factor[:1] if (which, side) in shared else factor for side, factor in enumerate(pair)]
            for which, pair in pairs.items()
        }
        for layer, pairs in factors(config, rank=4, seed=5).items()
    }


def write_projections(folder, layers, names: tuple[str, str, str], joined: bool):
    tensors = {}
    for layer, pairs in layers.items():
        own = dict(zip(names, (pairs[which] for which in ("w1", "w2", "w3")), strict=True))
        if joined:
            (a, gate), (_, up) = own.pop(names[0]), own.pop(names[2])
            own["gate_up_proj"] = [a, torch.cat((gate, up), dim=1)]
        for name, (a, b) in own.items():
            module = f"model.layers.{layer}.mlp.experts.{name}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return write(folder, tensors, 4, 8, target_modules=list(names))


def logits(model, folder, **config) -> Tensor:
    managed(model, folder, **config)
    return logits_of(model)


@of_two
@pytest.mark.parametrize(
    ("names", "joined", "shared"),
    [(("w1", "w2", "w3"), False, "outer"), (("gate_proj", "down_proj", "up_proj"), False, "all"),
     (("gate_proj", "down_proj", "up_proj"), True, "none"), (("gate_proj", "down_proj", "up_proj"), True, "outer")],
    ids=["w, outer", "proj, all", "gate_up, none", "gate_up, outer"],
)  # fmt: skip
def test_shared_factors_equal_merged_weights(world, tmp_path, shared, names, joined):
    theirs, folder = world
    layers = shared_factors(theirs.config, SHARED[shared])
    write_projections(tmp_path, layers, names, joined)
    expected = wanted(merged(theirs, layers, 2.0))
    assert not torch.allclose(expected, wanted(theirs), atol=1e-2)
    torch.testing.assert_close(logits(loaded(folder), tmp_path), expected, rtol=1e-3, atol=1e-3)


@of_two
@pytest.mark.parametrize("mixed", [False, True], ids=["3D", "mixed"])
def test_a_model_that_joins_gate_and_up(world, tmp_path, mixed):
    theirs, folder = world
    model = loaded(folder)
    model.is_3d_moe_weight = True
    layers = shared_factors(theirs.config, OUTER)
    write_projections(tmp_path, layers, ("w1", "w2", "w3"), joined=True)
    expected = wanted(merged(theirs, layers, 2.0))
    found = logits(model, tmp_path, enable_mixed_moe_lora_format=mixed)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@of_two
def test_refusals_of_shared_factors(world, tmp_path):
    theirs, folder = world
    layers = shared_factors(theirs.config, OUTER)

    def refused(match, change, three_d=False):
        model = MixtureOfExpertsForCausalLM(folder)
        model.is_3d_moe_weight = three_d
        own = {layer: {which: list(pair) for which, pair in pairs.items()} for layer, pairs in layers.items()}
        change(own[0])
        write_projections(tmp_path, own, ("w1", "w2", "w3"), joined=False)
        with pytest.raises(ValueError, match=match):
            logits(model, tmp_path)

    three = f"has 3 experts of rank 4, .* the model has {theirs.config.num_local_experts}"
    refused(three, lambda pairs: pairs["w1"].__setitem__(1, pairs["w1"][1][:3].clone()))
    refused("gate and up are apart", lambda pairs: None, three_d=True)
    refused("config says rank 4", lambda pairs: pairs["w1"].__setitem__(0, pairs["w1"][0][:, :3]))
    refused(r"must be \[E, r, in\] and \[E, out, r\]", lambda pairs: pairs["w1"].__setitem__(0, pairs["w1"][0][0]))


@of_two
def test_two_spellings_at_once_are_refused(world, tmp_path):
    theirs, folder = world
    layers = shared_factors(theirs.config, OUTER)
    tensors = {}
    is_mixtral = theirs.config.model_type == "mixtral"
    per_expert = "block_sparse_moe.experts.2.w1" if is_mixtral else "mlp.experts.2.gate_proj"
    for name, (a, b) in (("mlp.experts.w1", layers[0]["w1"]), (per_expert, [one[0] for one in layers[0]["w1"]])):
        tensors |= {f"model.layers.0.{name}.lora_A.weight": a, f"model.layers.0.{name}.lora_B.weight": b}
    write(tmp_path, tensors, 4, 8)
    with pytest.raises(ValueError, match="two of the spellings stacked, per expert, by projection"):
        logits(MixtureOfExpertsForCausalLM(folder), tmp_path)
