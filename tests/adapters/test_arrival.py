"""What `check_adapter` tells when a request arrives, before anything is loaded."""

import os
import re
from pathlib import Path

import pytest
import torch
from adapter_world import adapter_tensors

from punica.adapters import LoRARequest
from punica.adapters.names import advise_renames
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
    ("targets", "modules", "message"),
    [
        (["q_proj"], ("q_proj", "k_proj"), r"target_modules are \['q_proj'\], but they leave out .*k_proj"),
        (["q_proj", "v_proj"], ("q_proj",), r"there are no tensors for \['v_proj'\]"),
        (r".*\.0\..*q_proj", ("q_proj",), r"leave out \['model\.layers\.1\.self_attn\.q_proj'\]"),
    ],
    ids=["more tensors", "fewer tensors", "expression"],
)
def test_targets_that_disagree_with_the_tensors_are_named(make_manager, tenants, targets, modules, message) -> None:
    manager = make_manager()
    tenants.write(1, adapter_tensors(1, 4, modules), target_modules=targets)
    with pytest.warns(UserWarning, match=message):
        manager.check_adapter(tenants.request(1))


@pytest.mark.parametrize(
    ("written", "mapper"),
    [
        ("base_model.model._orig_mod.model.", {"_orig_mod.": ""}),
        ("module.base_model.model.model.", {"module.base_model.model.": ""}),
        ("base_model.model.base_model.model.model.", {"base_model.model.": ""}),
        ("base_model.model.", {"layers.": "model.layers."}),
        ("base_model.model.model.language_model.", {"language_model.": ""}),
    ],
)
def test_names_behind_another_beginning_are_refused_with_the_renames_that_load_them(
    make_manager, tenants, written, mapper
) -> None:
    """As training under torch.compile, data-parallel wrappers or a second PEFT model writes them."""
    manager, tensors = make_manager(), adapter_tensors(1)
    names = {name: name.replace("base_model.model.model.", written) for name in tensors}
    tenants.write(1, {names[name]: tensor for name, tensor in tensors.items()}, target_modules="all-linear")
    with pytest.raises(ValueError, match=re.escape(f"weights_mapper={mapper!r}")):
        manager.check_adapter(tenants.request(1))
    renamed = LoRARequest("renamed", 2, tenants.request(1).lora_path, weights_mapper=mapper)
    manager.check_adapter(renamed)
    tenants.write(3, {name.replace("layers.1.", "layers.99."): tensor for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match="which the model does not have") as caught:
        manager.check_adapter(tenants.request(3))
    assert "weights_mapper" not in str(caught.value)


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
    extra = {f"base_model.model.x{i}.q_proj.lora_A.weight": tensor for i in range(2000)
             for tensor in [adapter_tensors(1).popitem()[1]]}  # fmt: skip
    tenants.write(1, extra)
    with pytest.raises(ValueError, match="has 2000 tensors, an adapter of this model at most"):
        manager.check_adapter(tenants.request(1))


@pytest.mark.parametrize("wrong", [True, "1", [1], None, 1.0])
def test_what_is_no_id_is_refused_by_name(make_manager, wrong) -> None:
    manager = make_manager()
    calls = (manager.get_adapter, manager.remove_adapter, manager.activate_adapter, manager.pin_adapter)
    for call in (*calls, manager.unpin_adapter, manager.deactivate_adapter, manager.request_of):
        with pytest.raises(TypeError, match="adapter_id must be an int"):
            call(wrong)


@pytest.mark.parametrize("when", ["opened", "loaded"])
def test_a_file_that_becomes_shorter_is_an_error_and_never_a_signal(make_manager, tenants, monkeypatch, when) -> None:
    """What is mapped from a file kills the process when the file is cut: nothing may be."""
    manager = make_manager()
    tenants.write(1, adapter_tensors(1))
    request = tenants.request(1)
    file = Path(request.lora_path) / "adapter_model.safetensors"
    if when == "opened":
        manager.check_adapter(request)
        real = WeightsFile.numbers
        monkeypatch.setattr(WeightsFile, "numbers", lambda *a: (os.truncate(file, 100), real(*a))[1])
        with pytest.raises(ValueError, match="became shorter while it was read"):
            manager.add_adapter(request)
        return
    loaded = manager._loader.load(request)
    os.truncate(file, 0)
    total = sum(t.sum() for lora in loaded.loras.values() for t in (lora.lora_a, lora.lora_b) if torch.is_tensor(t))
    assert torch.isfinite(torch.as_tensor(total))
    assert file.stat().st_size == 0


@pytest.mark.parametrize(
    ("unknown", "others", "mapper"),
    [
        ("lm_head", [], {"lm_head.": "language_model.lm_head."}),
        ("lm_head", ["layers.1.q_proj"], None),  # which has another beginning
        ("layers.0.q_proj", ["layers.1.q_proj"], {"layers.": "language_model.layers."}),
        ("layers.0.q_proj", ["layers.2.q_proj"], None),  # a layer that the model lacks
        ("layers.0.q_proj", ["language_model.layers.1.q_proj"], None),  # a name that the rename would spoil
        ("x.language_model.lm_head", ["x.language_model.layers.1.q_proj"], {"x.": ""}),
        ("q_proj", [], None),  # of any layer
        ("0.q_proj", [], None),  # a key that other numbers end in
        ("language_model.layers.0._fsdp_wrapped_module.q_proj", ["lm_head"], None),
        (
            "language_model.layers.0._fsdp_wrapped_module.q_proj",
            ["language_model.lm_head"],
            {"_fsdp_wrapped_module.": ""},
        ),
        ("language_model.layers.1.10.q_proj", [], None),
        ("0.auto_model.language_model.layers.1.q_proj", [], {"0.auto_model.": ""}),
    ],
    ids=str,
)
def test_a_rename_is_advised_if_all_names_are_known_after_it(unknown, others, mapper) -> None:
    known = [f"language_model.{name}" for name in ("layers.0.q_proj", "layers.1.q_proj", "lm_head")]
    found = advise_renames(unknown, [unknown, *others], known)
    assert found.endswith(f"weights_mapper={mapper!r})") if mapper else found == ""
