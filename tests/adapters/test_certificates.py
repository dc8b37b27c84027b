"""An adapter's shapes are checked once, when its folder is first seen; the certificate travels to its slot."""

import pytest
import torch
from adapter_world import adapter, adapter_tensors, decode

from punica.layers import BaseLayerWithLoRA


@pytest.fixture
def checks(monkeypatch) -> list[BaseLayerWithLoRA]:
    """Layers, in the order in which they check something."""
    layers: list[BaseLayerWithLoRA] = []
    real = BaseLayerWithLoRA.check_slices
    monkeypatch.setattr(
        BaseLayerWithLoRA, "check_slices", lambda layer, groups: (layers.append(layer), real(layer, groups))[1]
    )
    return layers


@pytest.mark.parametrize("arrives", [True, False], ids=["checked on arrival", "loaded at once"])
def test_from_a_folder_to_its_slot_every_layer_checks_once(make_manager, tenants, checks, arrives):
    tenants.write(1)
    manager = make_manager(max_loras=2)
    if arrives:
        manager.check_adapter(tenants.request(1))
        assert len(checks) == len(manager.modules)
    manager.set_active_adapters([tenants.request(1)], decode(1))
    manager.deactivate_adapter(1)
    manager.activate_adapter(1)
    assert sorted(map(id, checks)) == sorted(map(id, manager.modules.values()))


def test_from_memory_to_its_slot_every_layer_checks_once(make_manager, checks):
    manager = make_manager(max_loras=2)
    manager.add_adapter(adapter(1))
    manager.activate_adapter(1)
    assert sorted(map(id, checks)) == sorted(map(id, manager.modules.values()))


def test_a_certificate_is_good_for_the_tensors_it_was_made_of(make_manager, tenants, monkeypatch):
    """The folder is replaced between the check and the reading of the numbers, and its file looks the same."""
    tenants.write(1, adapter_tensors(1, 4), 4)
    manager = make_manager(max_loras=2)
    request = tenants.request(1)
    manager.check_adapter(request)
    certificate = manager._loader._known(next(iter(dict(manager._loader._certificates.items()))))
    monkeypatch.setattr(manager._loader, "_known", lambda state: certificate)
    tenants.write(1, adapter_tensors(1, 2), 2)
    manager.add_adapter(request)
    assert manager.get_adapter(1).rank == 2
    tensors = adapter_tensors(1, 4)
    name = next(key for key in tensors if "lora_B" in key)
    tenants.write(1, {**tensors, name: torch.zeros(1, 4)}, 4)
    with pytest.raises(ValueError, match="must have 24 rows"):
        manager.add_adapter(tenants.request(1, load_inplace=True))
