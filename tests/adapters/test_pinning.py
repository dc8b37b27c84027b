"""Pinned adapters keep their place in both sets until somebody says otherwise."""

import pytest
import torch
from adapter_world import (
    adapter,
    adapter_tensors,
    assert_unchanged,
    check_invariants,
    decode,
    full_manager,
    snapshot,
)

from punica.adapters import LoRAModelManager

PINNED = "all .* are pinned"


def loaded(make_manager, *ids: int, **config: object) -> LoRAModelManager:
    manager = make_manager(**config)
    for i in ids:
        manager.add_adapter(adapter(i, modules=("o_proj",)))
    return manager


def test_a_pinned_adapter_survives_a_stream_of_others(make_manager):
    manager = loaded(make_manager, 1, max_loras=2, max_cpu_loras=3)
    assert manager.pin_adapter(1) is True
    for i in range(2, 9):
        manager.add_adapter(adapter(i, modules=("o_proj",)))
        manager.activate_adapter(i)
        assert manager.lora_index_to_id == [1, i]
        assert 1 in manager.list_adapters()
        check_invariants(manager)
    assert manager.pinned_adapters == {1}


def test_pinning_activates_and_is_idempotent(make_manager):
    manager = loaded(make_manager, 1, 2, 3, max_loras=2, max_cpu_loras=3)
    manager.activate_adapter(1)
    manager.activate_adapter(2)
    assert manager.pin_adapter(3) is True
    assert manager.lora_index_to_id == [3, 2]
    assert manager.pin_adapter(3) is True
    assert manager.pinned_adapters == {3}
    check_invariants(manager)
    with pytest.raises(ValueError, match=r"adapter 9 is not registered; registered: \[1, 2, 3\]"):
        manager.pin_adapter(9)
    assert manager.pinned_adapters == {3}


def test_unpinned_again_it_makes_room(make_manager):
    manager = loaded(make_manager, 1, 2, max_loras=1, max_cpu_loras=2)
    manager.pin_adapter(1)
    with pytest.raises(RuntimeError, match=PINNED):
        manager.activate_adapter(2)
    assert manager.unpin_adapter(1) is True
    assert manager.unpin_adapter(1) is False
    assert manager.unpin_adapter(7) is False
    assert manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2]
    check_invariants(manager)


@pytest.mark.parametrize("leave", ["remove_adapter", "deactivate_adapter"])
def test_taking_a_pinned_adapter_out_drops_the_pin(make_manager, leave):
    manager = loaded(make_manager, 1, 2, max_loras=1, max_cpu_loras=2)
    manager.pin_adapter(1)
    assert getattr(manager, leave)(1) is True
    assert manager.pinned_adapters == frozenset()
    assert (1 in manager.list_adapters()) is (leave == "deactivate_adapter")
    assert manager.activate_adapter(2)
    check_invariants(manager)
    if leave == "remove_adapter":
        manager.add_adapter(adapter(1, modules=("o_proj",)))
    manager.activate_adapter(1)  # the id comes back without the pin of its former life
    assert manager.activate_adapter(2)
    manager.pin_adapter(2)
    manager.remove_all_adapters()
    assert (manager.pinned_adapters, manager.lora_index_to_id, len(manager)) == (frozenset(), [None], 0)


def test_removing_the_oldest_skips_pinned_ones(make_manager):
    manager = loaded(make_manager, 1, 2, 3, max_loras=2, max_cpu_loras=3)
    manager.pin_adapter(2)
    manager.pin_adapter(1)
    assert list(manager.list_adapters()) == [3, 2, 1]
    assert manager.remove_oldest_adapter() is True
    assert list(manager.list_adapters()) == [2, 1]
    before = snapshot(manager)
    with pytest.raises(RuntimeError, match=PINNED):
        manager.remove_oldest_adapter()
    assert_unchanged(manager, before)


CALLS = {
    "activate": lambda m, t: m.activate_adapter(3),
    "prefetch": lambda m, t: m.prefetch_adapter(3),
    "pin": lambda m, t: m.pin_adapter(3),
    "add a request": lambda m, t: m.add_adapter(t.request(4)),
    "add a registered request": lambda m, t: m.add_adapter(t.request(3)),
    "reload a request": lambda m, t: m.add_adapter(t.request(3, load_inplace=True)),
    "step": lambda m, t: m.set_active_adapters([t.request(4)], decode(4)),
    "step with a pinned one": lambda m, t: m.set_active_adapters([t.request(1), t.request(4)], decode(1, 4)),
    "dummy": lambda m, t: m.add_dummy_lora(t.request(4), 8),
}


@pytest.mark.parametrize("call", CALLS)
def test_with_every_slot_pinned_nothing_changes(make_manager, tenants, call):
    manager = full_manager(make_manager, tenants, max_cpu_loras=4)
    manager.add_adapter(adapter(3))
    for i in (1, 2):
        manager.pin_adapter(i)
    for i in (3, 4):
        tenants.write(i)
    before = snapshot(manager)
    with pytest.raises(RuntimeError, match=rf"no slot for adapters .*: {PINNED} \(\[.*\], of 2 slots\); unpin_adapter"):
        CALLS[call](manager, tenants)
    assert_unchanged(manager, before)
    check_invariants(manager)
    manager.unpin_adapter(2)
    CALLS[call](manager, tenants)  # one slot is enough for each of these
    assert set(manager.lora_index_to_id) in ({1, 3}, {1, 4})
    check_invariants(manager)


def test_with_every_place_pinned_nothing_can_be_registered(make_manager, tenants):
    manager = full_manager(make_manager, tenants)
    manager.pin_adapter(1)
    manager.pin_adapter(2)
    before = snapshot(manager)
    with pytest.raises(RuntimeError, match=r"no place for adapter 3: all 2 registered ones are pinned \(\[1, 2\]\)"):
        manager.add_adapter(adapter(3))
    assert_unchanged(manager, before)
    manager.unpin_adapter(1)
    assert manager.add_adapter(adapter(3))
    assert list(manager.list_adapters()) == [2, 3]
    check_invariants(manager)


def test_two_requested_beside_one_pinned_do_not_fit_two_slots(make_manager, tenants):
    manager = full_manager(make_manager, tenants, max_cpu_loras=4)
    for i in (3, 4):
        tenants.write(i)
    manager.pin_adapter(2)
    before = snapshot(manager)
    with pytest.raises(RuntimeError, match=rf"no slot for adapters \[3, 4\]: {PINNED} \(\[2\], of 2 slots\)"):
        manager.set_active_adapters([tenants.request(3), tenants.request(4)], decode(3, 4))
    assert_unchanged(manager, before)
    manager.set_active_adapters([tenants.request(3), tenants.request(2)], decode(3, 2))
    assert manager.lora_index_to_id == [3, 2]


def test_a_bad_folder_is_reported_before_the_pins(make_manager, tenants):
    """First an adapter is loaded and checked, then room is made for it: what is broken is named as such."""
    manager = full_manager(make_manager, tenants)
    manager.pin_adapter(1)
    manager.pin_adapter(2)
    tenants.write(3, use_dora=True)
    before = snapshot(manager)
    with pytest.raises(ValueError, match="use_dora"):
        manager.add_adapter(tenants.request(3))
    with pytest.raises(ValueError, match="use_dora"):
        manager.set_active_adapters([tenants.request(1), tenants.request(3)], decode(1, 3))
    with pytest.raises(ValueError, match="no modules"):
        manager.add_adapter(type(adapter(3))(3, 4, {}))
    assert_unchanged(manager, before)


@pytest.mark.parametrize("call", ["add_adapter", "set_active_adapters"])
def test_reloading_in_place_keeps_the_pin(make_manager, tenants, call):
    manager = full_manager(make_manager, tenants)
    manager.pin_adapter(1)
    tenants.write(1, adapter_tensors(seed=100))
    request = tenants.request(1, load_inplace=True)
    arguments = (request,) if call == "add_adapter" else ([tenants.request(2), request], decode(1, 2))
    getattr(manager, call)(*arguments)
    assert manager.pinned_adapters == {1}
    slot = manager.lora_index_to_id.index(1)
    layer = manager.modules["model.layers.0.self_attn.o_proj"]
    new = adapter_tensors(seed=100)["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"]
    assert torch.equal(layer.lora_a_stacked[0][slot, 0, :4], new)
    check_invariants(manager)


def test_looking_at_pins_gives_a_copy(make_manager):
    manager = loaded(make_manager, 1)
    pins = manager.pinned_adapters
    manager.pin_adapter(1)
    assert (pins, manager.pinned_adapters) == (frozenset(), {1})
