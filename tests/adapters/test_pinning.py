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

PINNED = "all .* are pinned"


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
