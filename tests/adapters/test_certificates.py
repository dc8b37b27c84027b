"""An adapter's shapes are checked once, when its folder is first seen; the certificate travels to its slot."""

import os
from pathlib import Path

import pytest
import torch
from adapter_world import Tenants, adapter_tensors, decode

from punica.adapters import LRUCache
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


def test_a_known_content_is_not_checked_again_whatever_its_folder(make_manager, tenants, checks):
    """Tenants that were trained alike share one certificate."""
    manager = make_manager(max_loras=2)
    for i in (1, 2, 1):
        tenants.write(i)
        manager.add_adapter(tenants.request(i, load_inplace=True))
    assert sorted(map(id, checks)) == sorted(map(id, manager.modules.values()))
    assert not torch.equal(b_of(manager, 1), b_of(manager, 2))


def b_of(manager, adapter_id: int) -> torch.Tensor:
    return manager.get_adapter(adapter_id).get_lora("model.layers.0.self_attn.o_proj").lora_b


def replace_unseen(path: Path, *arguments: object, **config: object) -> None:
    """Write the adapter 1 of these arguments over a folder so that no file changes its inode, size or times."""
    (path / "new").mkdir()
    new = Tenants(path / "new").write(1, *arguments, **config)
    for file in new.iterdir():
        old = (path / file.name).stat()
        (path / file.name).write_bytes(file.read_bytes())
        os.utime(path / file.name, ns=(old.st_atime_ns, old.st_mtime_ns))
        found = (path / file.name).stat()
        assert (found.st_ino, found.st_size, found.st_mtime_ns) == (old.st_ino, old.st_size, old.st_mtime_ns)


@pytest.mark.parametrize("how", ["load_inplace", "another id", "checked only"])
def test_a_config_replaced_by_one_of_the_same_size_and_time_is_served(make_manager, tenants, how):
    manager = make_manager(max_loras=2)
    path = tenants.write(1, lora_alpha=8)
    manager.check_adapter(tenants.request(1))
    if how != "checked only":
        manager.add_adapter(tenants.request(1))
    replace_unseen(path, lora_alpha=4)
    other = tenants.request(2, lora_path=str(path)) if how == "another id" else tenants.request(1, load_inplace=True)
    manager.check_adapter(other)
    manager.add_adapter(other)
    own = adapter_tensors(1)["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]
    assert torch.equal(b_of(manager, other.lora_int_id), own * (4 / 4))


def test_a_header_replaced_by_one_of_the_same_size_and_time_is_checked(make_manager, tenants):
    """The same bytes in all, but two modules have changed names, and one of them is of another size."""
    manager = make_manager(max_loras=2)
    tensors = adapter_tensors(1, 4, ("0.self_attn.q_proj", "0.self_attn.k_proj"))
    path = tenants.write(1, tensors)
    manager.check_adapter(tenants.request(1))
    swapped = {
        name.replace("q_proj", "x").replace("k_proj", "q_proj").replace("x", "k_proj"): tensor
        for name, tensor in tensors.items()
    }
    replace_unseen(path, swapped)
    for call in (manager.check_adapter, manager.add_adapter):
        with pytest.raises(ValueError, match="lora_b must have 24 rows, got 12"):
            call(tenants.request(1))


def test_doubts_are_told_of_every_adapter(make_manager, tenants):
    """Also of one whose content is known under another name."""
    manager = make_manager(max_loras=2)
    for i in (1, 2):
        tenants.write(i, init_lora_weights="pissa", target_modules=["q_proj", "x_proj"])
        with pytest.warns(UserWarning, match=f"adapter 'tenant {i}': init_lora_weights='pissa'"):
            manager.check_adapter(tenants.request(i))
        with pytest.warns(UserWarning, match=f"adapter 'tenant {i}': target_modules are"):
            manager.check_adapter(tenants.request(i))


def test_certificates_are_bounded_by_the_size_of_their_headers(make_manager, tenants, checks, monkeypatch):
    manager, known = make_manager(max_loras=2), LRUCache(10_000)
    monkeypatch.setattr(manager._loader, "_certificates", known)
    for rank in (1, 2, 3, 3, 1):
        tenants.write(rank, adapter_tensors(rank, rank), rank)
        manager.check_adapter(tenants.request(rank))
    assert 2 * 28 * 50 < known.size <= 10_000
    assert len(known) == 2
    assert len(checks) == 4 * len(manager.modules), "rank 1 was forgotten, and 3 was known"
    monkeypatch.setattr("punica.adapters.load.MOST_BYTES", 100)
    tenants.write(4)
    manager.check_adapter(tenants.request(4))
    assert len(known) == 2
