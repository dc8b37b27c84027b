"""Registered and active adapters, and what a step needs of them: packing, slots, mapping, reload."""

import pytest
import torch
from adapter_world import (
    QKV,
    VOCAB,
    adapter,
    adapter_tensors,
    check_invariants,
    decode,
    full_manager,
    one_layer,
    unchanged,
)

from punica.adapters import LoRALayerWeights, LoRAModel, LoRAModelManager, LoRARequest, PackedLoRALayerWeights
from punica.config import LoRAConfig
from punica.metadata import LoRAMapping


def test_packed_parts_fill_their_slices_and_absent_ones_stay_zero(make_manager):
    manager = make_manager()
    model = adapter(5, modules=("q_proj", "v_proj"))
    given = {name: (weights.slices, weights.scaling) for name, weights in model.loras.items()}
    assert manager.add_adapter(model) is True
    assert given == {name: (weights.slices, weights.scaling) for name, weights in model.loras.items()}
    manager.activate_adapter(5)
    layer = manager.modules[QKV]
    for i, part in ((0, "q_proj"), (2, "v_proj")):
        weights = model.get_lora(f"model.layers.0.self_attn.{part}")
        assert torch.equal(layer.lora_a_stacked[i][0, 0, :4], weights.lora_a)
        assert torch.equal(layer.lora_b_stacked[i][0, 0, :, :4], weights.lora_b * 2)
    assert not layer.lora_a_stacked[1].any()
    assert not layer.lora_b_stacked[1].any()
    assert layer.lora_ranks.tolist() == [[4], [0], [4]]
    assert not any(a.any() for a in manager.modules["model.layers.0.mlp.down_proj"].lora_a_stacked)


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.self_attn.q_proj"])
@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_slices_is_refused(make_manager, name, count):
    """A layer of one slice, and a part of a packed one."""
    manager = make_manager()
    weights = PackedLoRALayerWeights(name, 4, [torch.zeros(4, 24)] * count, [torch.zeros(24, 4)] * count)
    with pytest.raises(ValueError, match=f"{count}"):
        manager.add_adapter(LoRAModel(1, 4, {name: weights}))
    assert manager.list_adapters() == {}


def test_a_shell_is_filled_by_its_members():
    weights = LoRALayerWeights("m", 4, 8, None, None)
    weights.lora_a, weights.lora_b = torch.ones(4, 6), torch.ones(5, 4)
    ((a, b),) = weights.scaled()
    assert (a.shape, b.shape, b.unique().tolist()) == ((4, 6), (5, 4), [2])
    packed = PackedLoRALayerWeights("m", 4, [None, None], [None, None])
    packed.lora_a = [torch.ones(4, 6), None]
    assert packed.slices[0][0].shape == (4, 6)
    with pytest.raises(ValueError, match="zip"):
        packed.lora_b = [None]


def count_writes(manager: LoRAModelManager, monkeypatch) -> list[int]:
    slots: list[int] = []
    layer = manager.modules[QKV]
    original = layer.fill_slot
    monkeypatch.setattr(layer, "fill_slot", lambda slot, slices: (slots.append(slot), original(slot, slices)))
    return slots


def test_active_adapters_are_not_copied_again(make_manager, tenants, monkeypatch):
    manager = full_manager(make_manager, tenants)
    tenants.write(3)
    writes = count_writes(manager, monkeypatch)
    manager.set_active_adapters([tenants.request(3), None, tenants.request(1), tenants.request(3)], decode(3, 1, 0))
    assert manager.lora_index_to_id == [1, 3]
    assert writes == [1]
    assert manager.punica_wrapper.token_lora_indices.tolist() == [1, 0, -1]
    check_invariants(manager)


def test_in_place_reload_replaces_and_without_it_the_second_load_is_a_touch(make_manager, tenants, monkeypatch):
    manager = make_manager(max_loras=2)
    for i in (1, 2):
        tenants.write(i)
        assert manager.add_adapter(tenants.request(i))
    assert manager.lora_index_to_id == [1, 2]
    layer = manager.modules["model.layers.0.self_attn.o_proj"]
    old = layer.lora_b_stacked[0][0].clone()
    tenants.write(1, adapter_tensors(seed=100))
    writes = count_writes(manager, monkeypatch)
    assert manager.add_adapter(tenants.request(1)) is True
    assert torch.equal(layer.lora_b_stacked[0][0], old)
    assert writes == []
    assert list(manager.list_adapters()) == [2, 1]

    reload = tenants.request(1, load_inplace=True)
    manager.set_active_adapters([tenants.request(1), reload, tenants.request(1)], decode(1))  # wherever it is
    new = adapter_tensors(seed=100)["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]
    assert torch.equal(layer.lora_b_stacked[0][0, 0, :, :4], new * 2)
    assert manager.lora_index_to_id == [1, 2]
    for _ in range(3):  # the same request object in the following steps is not read again
        manager.set_active_adapters([reload], decode(1))
    assert writes == [0]


def test_one_id_is_one_adapter(make_manager, tenants):
    manager = full_manager(make_manager, tenants)
    with unchanged(manager):
        with pytest.raises(ValueError, match=r"adapter id 1 stands for.*tenant 1.*now requested as.*impostor"):
            manager.add_adapter(tenants.request(1, lora_name="impostor"))
        with pytest.raises(ValueError, match=r"adapter id 2 stands for.*now requested as.*elsewhere"):
            manager.set_active_adapters([tenants.request(2), tenants.request(2, lora_path="elsewhere")], decode(2))
        with pytest.raises(TypeError, match="requests must be LoRARequest or None, got int"):
            manager.set_active_adapters([1], decode(1))
    replaced = tenants.request(1, lora_name="successor", load_inplace=True)
    assert manager.add_adapter(replaced)
    check_invariants(manager)


def test_mapping_with_an_inactive_id_keeps_the_previous_metadata(make_manager, tenants):
    manager = full_manager(make_manager, tenants)
    with unchanged(manager):
        with pytest.raises(ValueError, match="99"):
            manager.set_adapter_mapping(decode(1, 99))
        with pytest.raises(ValueError, match=r"\[2\], which are not requested"):
            manager.set_active_adapters([tenants.request(1)], decode(1, 2))
        with pytest.raises(ValueError, match="65 rows, more than max_num_batched_tokens=64"):
            manager.set_active_adapters([tenants.request(1)], decode(*[1] * 65))
        with pytest.raises(ValueError, match="runs of equal slot, more than max_batches="):
            manager.set_active_adapters([tenants.request(3)], LoRAMapping([3, 0] * 32, [3], is_prefill=True))
        with pytest.raises(TypeError, match="LoRAMapping, got list"):
            manager.set_active_adapters([tenants.request(1)], [1])
    manager.model(torch.randn(3, 24))
    assert manager.punica_wrapper.token_lora_indices.tolist() == [0, -1, 1]


def test_equal_mapping_is_skipped_only_with_an_equal_slot_table(make_manager, monkeypatch):
    manager = make_manager(max_loras=2, max_cpu_loras=3)
    for i in (1, 2):
        manager.add_adapter(adapter(i))
        manager.activate_adapter(i)
    calls: list[tuple] = []
    original = manager.punica_wrapper.update_metadata
    monkeypatch.setattr(manager.punica_wrapper, "update_metadata", lambda *a: (calls.append(a), original(*a)))
    manager.set_adapter_mapping(decode(1, 1))
    manager.set_adapter_mapping(LoRAMapping([1, 1], [1, 1]))
    assert len(calls) == 1
    assert calls[0][2:] == (3, VOCAB)
    manager.deactivate_adapter(1)
    manager.deactivate_adapter(2)
    manager.activate_adapter(2)
    manager.activate_adapter(1)  # now in slot 1
    manager.set_adapter_mapping(decode(1, 1))
    assert len(calls) == 2
    assert manager.punica_wrapper.token_lora_indices.tolist() == [1, 1]


def ghost(adapter_id: int) -> LoRARequest:
    return LoRARequest(f"warm-up {adapter_id}", adapter_id, "no such folder")


def test_bad_ranks(make_manager, tenants):
    manager = full_manager(make_manager, tenants)
    with unchanged(manager):
        for rank, error in ((0, ValueError), (9, ValueError), ("4", TypeError), (True, TypeError)):
            with pytest.raises(error, match="rank"):
                manager.create_dummy_lora(3, rank)
            with manager.dummy_lora_cache(), pytest.raises(error, match="rank"):
                manager.add_dummy_lora(ghost(3), rank)
        with pytest.raises(TypeError, match="request must be a LoRARequest, got int"):
            manager.add_dummy_lora(3, 8)


@pytest.mark.parametrize(("rank", "rounded"), [(1, 4), (5, 8), (8, 8)])
def test_rank_is_rounded_up_to_the_ranks_of_a_sharded_group(rank, rounded):
    config = LoRAConfig(max_lora_rank=8, fully_sharded_loras=True)
    manager = LoRAModelManager(one_layer(4, 1), 4, 16, 50, config, "cpu")
    dummy = manager.create_dummy_lora(1, rank)
    assert dummy.rank == rounded
    assert manager.add_adapter(dummy)
    assert manager.activate_adapter(1)


def test_adding_registers_and_activates(make_manager, tenants, dense):
    manager = make_manager(max_loras=2, max_cpu_loras=2)
    manager.add_adapter(adapter(1))
    assert manager.add_dummy_lora(ghost(2), 4) is True
    x = torch.randn(5, 24)
    manager.set_adapter_mapping(decode(*[2] * 5))
    assert all((layer.lora_ranks[:, 0] == 4).all() for layer in manager.modules.values())
    torch.testing.assert_close(manager.model(x), dense(x))
    assert manager.lora_index_to_id == [2, None]
    assert manager.get_adapter(2).rank == 4
    assert manager.request_of(2) == ghost(2)
    check_invariants(manager)
    with unchanged(manager):
        assert manager.add_dummy_lora(ghost(1), 4) is False  # the id is taken: not even the order of use changes
    assert manager.add_dummy_lora(ghost(3), 4) is True  # evicts the oldest, as any adapter would
    assert list(manager.list_adapters()) == [2, 3]
    tenants.write(2)
    with pytest.raises(ValueError, match=r"adapter id 2 stands for.*warm-up 2"):
        manager.add_adapter(tenants.request(2))  # the zero adapter is not served in place of the real one
    manager.remove_adapter(2)
    assert manager.add_adapter(tenants.request(2))


def test_inside_the_cache_one_is_built_per_rank(make_manager, monkeypatch):
    manager = make_manager(max_loras=4)
    built: list[int] = []
    original = manager.create_dummy_lora
    monkeypatch.setattr(manager, "create_dummy_lora", lambda i, rank: (built.append(rank), original(i, rank))[1])
    with manager.dummy_lora_cache():
        with manager.dummy_lora_cache():
            assert manager.add_dummy_lora(ghost(1), 4)
        for i in (2, 3):
            assert manager.add_dummy_lora(ghost(i), 8)
    assert built == [4, 8]
    assert manager.add_dummy_lora(ghost(4), 8)
    assert built == [4, 8, 8]  # outside, each has its own
    pointers = [{tensor.data_ptr() for tensor in manager.get_adapter(i).tensors()} for i in (2, 3, 4)]
    assert pointers[0] == pointers[1]
    assert pointers[0].isdisjoint(pointers[2])
    assert [manager.get_adapter(i).id for i in (1, 2, 3, 4)] == manager.lora_index_to_id == [1, 2, 3, 4]
