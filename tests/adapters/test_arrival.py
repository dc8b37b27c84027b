"""What `check_adapter` tells when a request arrives, before anything is loaded."""

import os
import re
from pathlib import Path

import pytest
import torch
from adapter_world import adapter_tensors

from punica.adapters import LoRARequest
from punica.adapters.read import WeightsFile

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_a_rank_that_no_module_has_is_no_reason_to_refuse(make_manager, tenants) -> None:
    """`r` above the limit under a pattern that gives every module 4, and a pattern above it that nobody matches."""
    manager = make_manager()
    tenants.write(1, rank=4, r=64, lora_alpha=8, rank_pattern={".*": 4}, target_modules=ALL)
    tenants.write(2, rank=4, rank_pattern={"no_such_module": 64}, target_modules=ALL)
    for i in (1, 2):
        manager.check_adapter(tenants.request(i))
        manager.add_adapter(tenants.request(i))


@pytest.mark.parametrize(
    ("targets", "config", "missing"),
    [
        (["q_proj", "v_proj", "0.self_attn.k_proj"], {}, r"\['0\.self_attn\.k_proj', 'v_proj'\]"),
        (["v_proj"], {"exclude_modules": ["v_proj"]}, None),
        (["lm_head", "embed_tokens", "v_proj", "0.self_attn.k_proj"], {"layers_to_transform": 1},
         r"\['lm_head', 'v_proj'\]"),
        (["v_proj", "0.self_attn.k_proj"], {"layers_to_transform": []}, r"\['0\.self_attn\.k_proj', 'v_proj'\]"),
        (["v_proj"], {"target_parameters": ["experts.gate_up_proj"]}, None),
        (r".*\.v_proj", {}, None),
        (["0.self_attn.q_proj", "q_proj"], {}, None),
    ],
    ids=["missing", "excluded", "layers", "no layers", "parameters", "expression", "there"],
)  # fmt: skip
def test_targets_without_tensors_are_named(make_manager, tenants, recwarn, targets, config, missing) -> None:
    manager = make_manager()
    tenants.write(1, adapter_tensors(1, 4, ("q_proj",)), target_modules=targets, **config)
    manager.check_adapter(tenants.request(1))
    found = [str(warning.message) for warning in recwarn if "no tensors for" in str(warning.message)]
    assert len(found) == (missing is not None)
    assert not found or re.search(missing, found[0])


def test_tensors_beside_the_targets_are_named(make_manager, tenants) -> None:
    manager = make_manager()
    tenants.write(1, adapter_tensors(1, 4, ("q_proj", "k_proj")), target_modules=["k_proj"])
    with pytest.warns(UserWarning, match=r"q_proj.*PEFT ignores"):
        manager.check_adapter(tenants.request(1))


@pytest.mark.parametrize(
    ("written", "mapper"),
    [
        ("base_model.model._orig_mod.model.", {"_orig_mod.": ""}),
        ("base_model.model.", {"layers.": "model.layers."}),
        ("base_model.model.model.language_model.", {"language_model.": ""}),
    ],
)
def test_names_behind_another_beginning_are_loaded_by_renames(make_manager, tenants, written, mapper) -> None:
    """As training under torch.compile, of a part, or of a multimodal model writes them."""
    manager, tensors = make_manager(), adapter_tensors(1)
    names = {name: name.replace("base_model.model.model.", written) for name in tensors}
    tenants.write(1, {names[name]: tensor for name, tensor in tensors.items()}, target_modules="all-linear")
    with pytest.raises(ValueError, match="weights_mapper="):
        manager.check_adapter(tenants.request(1))
    manager.check_adapter(LoRARequest("renamed", 2, tenants.request(1).lora_path, weights_mapper=mapper))


def test_empty_tensors_of_a_sharded_trainer_and_other_files_say_what_they_are(make_manager, tenants) -> None:
    manager = make_manager()
    tenants.write(1, dict.fromkeys(adapter_tensors(1), torch.empty(0)))
    with pytest.raises(ValueError, match=r"got shapes \(0,\) and \(0,\); .* gather its shards"):
        manager.check_adapter(tenants.request(1))
    folder = Path(tenants.request(1).lora_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapters.safetensors")  # as mlx-lm calls it
    with pytest.raises(FileNotFoundError, match=r"no adapter_model\.safetensors; it has \[.*'adapters\.safetensors'\]"):
        manager.check_adapter(tenants.request(1))


def test_more_tensors_than_the_model_has_places_for(make_manager, tenants) -> None:
    manager = make_manager()
    tenants.write(1, {f"base_model.model.x{i}.q_proj.lora_A.weight": torch.ones(1, 1) for i in range(2000)})
    with pytest.raises(ValueError, match="has 2000 tensors, an adapter of this model at most"):
        manager.check_adapter(tenants.request(1))


def test_a_file_that_becomes_shorter_is_an_error_and_never_a_signal(make_manager, tenants, monkeypatch) -> None:
    """What is mapped from a file kills the process when the file is cut: nothing may be."""
    manager = make_manager()
    tenants.write(1, adapter_tensors(1))
    request = tenants.request(1)
    file = Path(request.lora_path) / "adapter_model.safetensors"
    loaded = manager.read_adapter(request)
    real = WeightsFile.numbers
    monkeypatch.setattr(WeightsFile, "numbers", lambda *a: (os.truncate(file, 100), real(*a))[1])
    with pytest.raises(ValueError, match="became shorter while it was read"):
        manager.add_adapter(request)
    assert all(torch.isfinite(tensor).all() for tensor in loaded.tensors())
