"""Bytes of slots and adapters, written out from shapes and ranks; and no growth over many activations."""

import gc

import pytest
import torch
from adapter_world import LAYERS, MODULES, VOCAB, adapter, adapter_tensors, decode, one_layer

from punica.adapters import LoRALayerWeights, LoRAModel, LoRAModelManager
from punica.adapters.wrap import slots_need
from punica.config import LoRAConfig


@pytest.mark.parametrize(("tp_size", "sharded"), [(1, False), (2, False), (4, True)])
def test_bytes_of_a_slot(tp_size, sharded):
    config = LoRAConfig(max_lora_rank=8, max_loras=3, fully_sharded_loras=sharded, lora_dtype=torch.bfloat16)
    for tp_rank in range(tp_size):
        model = one_layer(tp_size, tp_rank)
        need = slots_need(model, config)
        manager = LoRAModelManager(model, 4, 16, VOCAB, config, "cpu")
        buffers = [b for layer in manager.modules.values() for b in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
        assert sum(buffer.untyped_storage().nbytes() for buffer in buffers) == 3 * manager.slot_bytes == need.nbytes


@pytest.mark.parametrize(("rank", "modules"), [(5, None), (1, ("q_proj", "v_proj"))], ids=["all", "q and v"])
def test_bytes_of_an_adapter(make_manager, tenants, rank, modules):
    """What it has, at its own rank: `r * (in + out)` elements per module, from memory or from a folder."""
    sizes = [size for name, size in MODULES.items() if modules is None or name.endswith(modules)]
    expected = sum(rank * (width + height) for width, height in sizes) * 4
    manager = make_manager(max_loras=2)
    manager.add_adapter(adapter(1, rank, modules))
    tenants.write(2, adapter_tensors(2, rank, modules), rank)
    manager.add_adapter(tenants.request(2))
    assert manager.adapter_bytes(1) == manager.adapter_bytes(2) == expected
    with pytest.raises(ValueError, match="adapter 3 is not registered"):
        manager.adapter_bytes(3)


def test_shared_storage_counts_once(make_manager):
    a, b = torch.ones(4, 24), torch.ones(24, 4)
    names = [f"model.layers.{i}.self_attn.o_proj" for i in range(LAYERS)]
    loras = {name: LoRALayerWeights(name, 4, 4, a, b) for name in names}  # scaling 1: B is taken as it is
    manager = make_manager()
    manager.add_adapter(LoRAModel(1, 4, loras))
    assert manager.adapter_bytes(1) == 2 * 4 * 24 * 4


def live_tensors() -> int:
    while gc.collect():  # what other tests left may go in several rounds
        pass
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_folders_that_come_and_go_leave_nothing_behind(make_manager, tenants):
    manager = make_manager(max_loras=2, max_cpu_loras=3)
    for i in range(1, 7):
        tenants.write(i)

    def churn(loads: int) -> None:
        for i in range(loads):
            manager.set_active_adapters([tenants.request(i % 6 + 1)], decode(i % 6 + 1))
            if i % 7 == 0:
                manager.pin_adapter(i % 6 + 1)
                manager.unpin_adapter(i % 6 + 1)

    churn(12)
    tensors = live_tensors()
    churn(120)
    assert live_tensors() == tensors
    assert (len(manager), len(manager._active), manager.pinned_adapters) == (3, 2, set())
