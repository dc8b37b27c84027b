"""Calls that must be refused, with both caches full or pinned: nothing may change."""

import pytest
import torch
from adapter_world import QKV, adapter, adapter_tensors, decode, full_manager, unchanged

from punica.adapters import LoRALayerWeights, LoRAModel

TENSORS = adapter_tensors(seed=3)
UP_A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
UP_B = UP_A.replace("lora_A", "lora_B")
UNKNOWN_A, UNKNOWN_B = UP_A.replace("layers.0", "layers.9"), UP_B.replace("layers.0", "layers.9")
BAD_FOLDERS = {
    "config": ({}, {"use_dora": True}, ValueError, "use_dora"),
    "rank too large": ({}, {"r": 9}, ValueError, "rank 9 exceeds max_lora_rank 8"),
    "unexpected module": ({"m.router.lora_A.weight": torch.ones(4, 2)}, {}, ValueError, r"\['m.router'\]"),
    "unknown layer": ({UNKNOWN_A: torch.ones(4, 24), UNKNOWN_B: torch.ones(40, 4)}, {}, ValueError, r"layers\.9\.mlp"),
    "A too wide": ({UP_A: torch.ones(4, 25)}, {}, ValueError, "gate_up_proj.*24 columns, got 25"),
    "NaN": ({UP_A: torch.full((4, 24), float("nan"))}, {}, ValueError, "NaN"),
    "integers": ({UP_A: torch.ones(4, 24, dtype=torch.int8)}, {}, TypeError, "I8"),
    "scaled B overflows": ({UP_B: torch.full((40, 4), 3e38)}, {"lora_alpha": 400}, ValueError, "after scaling"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_changes_nothing(make_manager, tenants, case):
    changes, config, error, message = BAD_FOLDERS[case]
    manager = full_manager(make_manager, tenants)
    tenants.write(3, TENSORS | changes, **config)
    with unchanged(manager):
        with pytest.raises(error, match=message) as caught:
            manager.set_active_adapters([tenants.request(2), tenants.request(3)], decode(2, 3))
        assert str(caught.value).count("cannot load adapter 'tenant 3' from") == 1
        assert str(tenants.root) in str(caught.value)
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("loras", "error", "message"),
    [
        ({}, ValueError, "no modules"),
        ({"m.x": LoRALayerWeights("m.x", 1, 1, torch.ones(1, 2), torch.ones(2, 1))}, ValueError, r"\['m.x'\]"),
        ({QKV: LoRALayerWeights(QKV, 4, 4, torch.ones(4, 24), torch.ones(47, 4))}, ValueError, "47 rows"),
        ({QKV: LoRALayerWeights(QKV, 9, 9, torch.ones(9, 24), torch.ones(48, 9))}, ValueError, "rank 9 exceeds"),
        ({QKV: LoRALayerWeights(QKV, 4, 4, None, None)}, RuntimeError, "not set"),
    ],
    ids=["empty", "unknown", "rows", "rank", "shell"],
)
def test_a_bad_model_in_memory_changes_nothing(make_manager, tenants, loras, error, message):
    manager = full_manager(make_manager, tenants)
    with unchanged(manager):
        with pytest.raises(error, match=message):
            manager.add_adapter(LoRAModel(3, 4, loras))
        with pytest.raises(TypeError, match="LoRAModel or a LoRARequest, got dict"):
            manager.add_adapter(loras)


def test_modules_outside_the_target_filter_are_refused(make_manager):
    manager = make_manager(target_modules=["q_proj", "o_proj"])
    assert manager.add_adapter(adapter(1, modules=("q_proj", "o_proj")))
    with pytest.raises(ValueError, match=r"k_proj.*target_modules"):
        manager.add_adapter(adapter(2, modules=("q_proj", "k_proj")))
    with pytest.raises(ValueError, match=r"down_proj.*target_modules"):
        manager.add_adapter(adapter(2, modules=("down_proj",)))


def test_what_is_broken_is_named_before_the_pins(make_manager, tenants):
    """First an adapter is loaded and checked, then room is made for it."""
    manager = full_manager(make_manager, tenants)
    manager.pin_adapter(1)
    manager.pin_adapter(2)
    tenants.write(3, use_dora=True)
    tenants.write(4)
    with unchanged(manager):
        with pytest.raises(ValueError, match="use_dora"):
            manager.set_active_adapters([tenants.request(1), tenants.request(3)], decode(1, 3))
        with pytest.raises(RuntimeError, match=r"no slot for adapters .*: all .* pinned \(\[1, 2\], of 2 slots\)"):
            manager.add_dummy_lora(tenants.request(4), 8)
        with pytest.raises(RuntimeError, match=r"no place for adapter 3: all 2 .* pinned \(\[1, 2\]\)"):
            manager.add_adapter(adapter(3))
