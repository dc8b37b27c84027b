"""Zero adapters for warm-up: the cost of a real one, no effect on outputs."""

import pytest
import torch
from adapter_world import adapter, assert_unchanged, check_invariants, decode, full_manager, one_layer, snapshot

from punica.adapters import LoRAModelManager, LoRARequest
from punica.config import LoRAConfig


def ghost(adapter_id: int) -> LoRARequest:
    """A request whose folder does not exist."""
    return LoRARequest(f"warm-up {adapter_id}", adapter_id, "no such folder")


def test_bad_ranks(make_manager, tenants):
    manager = full_manager(make_manager, tenants)
    before = snapshot(manager)
    for rank, error in ((0, ValueError), (9, ValueError), ("4", TypeError), (True, TypeError)):
        with pytest.raises(error, match="rank"):
            manager.create_dummy_lora(3, rank)
        with pytest.raises(error, match="rank"):
            manager.add_dummy_lora(ghost(3), rank)
        with manager.dummy_lora_cache(), pytest.raises(error, match="rank"):
            manager.add_dummy_lora(ghost(3), rank)
    with pytest.raises(TypeError, match="request must be a LoRARequest, got int"):
        manager.add_dummy_lora(3, 8)
    assert_unchanged(manager, before)


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
    before = snapshot(manager)
    assert manager.add_dummy_lora(ghost(1), 4) is False  # the id is taken: nothing changes, not even the order of use
    assert_unchanged(manager, before)
    assert manager.add_dummy_lora(ghost(3), 4) is True  # evicts the oldest, as any adapter would
    assert list(manager.list_adapters()) == [2, 3]
    tenants.write(2)
    with pytest.raises(ValueError, match=r"adapter id 2 stands for.*warm-up 2"):
        manager.add_adapter(tenants.request(2))  # the zero adapter is not served in place of the real one
    manager.remove_adapter(2)
    assert manager.add_adapter(tenants.request(2))


def test_inside_the_cache_one_is_built_per_rank(make_manager, monkeypatch):
    manager = make_manager(max_loras=6)
    built: list[int] = []
    original = manager.create_dummy_lora
    monkeypatch.setattr(manager, "create_dummy_lora", lambda i, rank: (built.append(rank), original(i, rank))[1])
    with manager.dummy_lora_cache():
        for i, rank in ((1, 8), (2, 8), (3, 4)):
            assert manager.add_dummy_lora(ghost(i), rank)
        with manager.dummy_lora_cache():
            assert manager.add_dummy_lora(ghost(4), 4)
        assert manager.add_dummy_lora(ghost(5), 8)
    assert built == [8, 4]
    assert manager.add_dummy_lora(ghost(6), 8)
    assert built == [8, 4, 8]  # outside, each has its own
    pointers = {i: {tensor.data_ptr() for tensor in manager.get_adapter(i).tensors()} for i in range(1, 7)}
    assert pointers[1] == pointers[2] == pointers[5]
    assert pointers[1].isdisjoint(pointers[6])
    assert [manager.get_adapter(i).id for i in range(1, 7)] == manager.lora_index_to_id == [1, 2, 3, 4, 5, 6]
