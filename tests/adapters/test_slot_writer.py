"""Writers of slots: the CPU one, any one as the manager calls it, and images, which fill slots as `set_lora` does."""

from collections.abc import Collection, Mapping

import pytest
import torch
from adapter_world import QKV, adapter, all_buffers, check_invariants, decode, full_manager, one_layer, unchanged

from punica.adapters import CopyHandle, LayerSlotWriter, LoRAModel, LoRAModelManager
from punica.adapters.write import stage
from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA
from punica.metadata import LoRAMapping
from tests.ops.helpers import write_slot

O_PROJ = "model.layers.0.self_attn.o_proj"


def test_a_layer_that_fails_leaves_its_slot_empty_and_free(make_manager, monkeypatch):
    manager = make_manager(max_loras=2)
    for i in (1, 2):
        manager.add_adapter(adapter(i))
    manager.activate_adapter(2)
    empty = [buffer[1].clone() for buffer in all_buffers(manager)]

    def fail(index: int, slices: object) -> None:
        if slices is not None:
            raise KeyboardInterrupt
        reset(index, None)

    last = list(manager.modules.values())[-1]
    reset = last.fill_slot
    monkeypatch.setattr(last, "fill_slot", fail)
    with pytest.raises(KeyboardInterrupt):
        manager.activate_adapter(1)
    assert all(torch.equal(a[1], b) for a, b in zip(all_buffers(manager), empty, strict=True))
    assert manager.modules[QKV].lora_ranks.tolist() == [[4, 0]] * 3  # the other slot is untouched
    assert manager.lora_index_to_id == [2, None]
    check_invariants(manager)
    monkeypatch.undo()
    assert manager.activate_adapter(1)


class DeferredCopy:
    def __init__(self, writer: "DeferredWriter", slot: int) -> None:
        self._writer, self._slot = writer, slot

    def is_ready(self) -> bool:
        return self._writer.pending.get(self._slot, (None, None))[0] is not self

    def wait(self) -> None:
        self._writer.finish(self._slot)


class DeferredWriter(LayerSlotWriter):
    """As asynchronous as can be: a slot is written only when a step that reads it begins, or someone waits."""

    def __init__(self, modules: Mapping[str, BaseLayerWithLoRA]) -> None:
        super().__init__(modules)
        self.pending: dict[int, tuple[DeferredCopy, LoRAModel]] = {}
        self.log: list[tuple[str, object]] = []

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        self.log.append(("write", slot))
        copy = DeferredCopy(self, slot)
        self.pending[slot] = (copy, lora)
        return copy

    def begin_step(self, slots: Collection[int]) -> None:
        self.log.append(("begin_step", set(slots)))
        for slot in slots:
            self.finish(slot)

    def finish(self, slot: int) -> None:
        if slot in self.pending:
            super().write(slot, self.pending.pop(slot)[1])


@pytest.fixture
def deferred(make_manager, monkeypatch):
    """`deferred(...)`: a manager with a :class:`DeferredWriter`, which is `manager._writer`."""

    def build(**config: object):
        monkeypatch.setattr("punica.adapters.manager.make_slot_writer", DeferredWriter)
        return make_manager(**config)

    return build


def test_a_step_waits_for_exactly_the_slots_it_reads(deferred):
    manager = deferred(max_loras=3)
    for i in (1, 2, 3):
        manager.add_adapter(adapter(i))
        manager.activate_adapter(i)
    writer = manager._writer
    manager.set_adapter_mapping(LoRAMapping([3, 0, 3], [1], is_prefill=True))
    assert writer.log[-1] == ("begin_step", {0, 2})  # of the tokens and of the sampled rows
    assert set(writer.pending) == {1}
    manager.set_adapter_mapping(decode(0, 0))
    assert writer.log[-1] == ("begin_step", set())


def test_a_step_begins_even_if_its_metadata_are_the_same(deferred, tenants, monkeypatch):
    """A slot may have been rewritten in place: same mapping, same slot table, new weights."""
    manager = full_manager(deferred, tenants)
    updates: list[object] = []
    original = manager.punica_wrapper.update_metadata
    monkeypatch.setattr(manager.punica_wrapper, "update_metadata", lambda *a: (updates.append(a), original(*a)))
    manager.set_adapter_mapping(decode(1, 0, 2))
    assert manager._writer.log[-1] == ("begin_step", {0, 1})
    manager.add_adapter(tenants.request(1, load_inplace=True))
    assert not manager._active.peek(manager.loaded(1)).is_ready()
    manager.set_adapter_mapping(decode(1, 0, 2))
    assert manager._active.peek(manager.loaded(1)).is_ready()
    assert updates == []


def test_prefetch_gives_the_handle_of_the_latest_copy(deferred):
    manager = deferred(max_loras=2, max_cpu_loras=3)
    for i in (1, 2, 3):
        manager.add_adapter(adapter(i))
    handle = manager.prefetch_adapter(1)
    assert not handle.is_ready()
    assert manager.prefetch_adapter(1) is handle  # active already: no second copy
    assert manager._writer.log == [("write", 0)]
    manager.activate_adapter(2)
    manager.set_adapter_mapping(decode(1, 1))  # implies the wait
    assert handle.is_ready()
    handle.wait()
    manager.activate_adapter(1)
    other = manager.prefetch_adapter(3)  # evicts 2, whose copy is still pending
    assert manager.lora_index_to_id == [1, 3]
    assert not other.is_ready()
    other.wait()
    assert other.is_ready()
    weights = manager.get_adapter(3).get_lora(O_PROJ)
    assert torch.equal(manager.modules[O_PROJ].lora_a_stacked[0][1, 0, :4], weights.lora_a)
    with pytest.raises(ValueError, match="adapter 9 is not registered"):
        manager.prefetch_adapter(9)


def test_staging_failure_changes_nothing(make_manager, tenants, monkeypatch):
    """Page-locked memory can run out: what was staged before is dropped, nothing is evicted."""
    manager = full_manager(make_manager, tenants)
    for i in (3, 4):
        tenants.write(i)
    staged: list[int] = []

    def stage(lora: LoRAModel) -> LoRAModel:
        if staged:
            raise RuntimeError("out of page-locked memory")
        staged.append(lora.id)
        return lora

    monkeypatch.setattr(manager._writer, "stage", stage)
    with unchanged(manager):
        with pytest.raises(RuntimeError, match="page-locked"):
            manager.set_active_adapters([tenants.request(3), tenants.request(4)], decode(3, 4))
        assert staged == [3]


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "modules", "options"),
    [
        (2, 1, None, {"lora_dtype": torch.bfloat16}),
        (4, 3, ("q_proj", "v_proj"), {"lora_dtype": torch.float32, "fully_sharded_loras": True}),
        (4, 3, None, {"fp8": torch.float8_e4m3fn, "fully_sharded_loras": True}),
    ],
    ids=str,
)
def test_an_image_fills_a_slot_as_set_lora_does(tp_size, tp_rank, modules, options):
    config = LoRAConfig(max_lora_rank=8, max_loras=3, **options)
    manager = LoRAModelManager(one_layer(tp_size, tp_rank), 4, 16, 50, config, "cpu")
    loras = adapter(3, rank=5, modules=modules).loras
    lora = manager._packer.pack(LoRAModel(3, 5, {name: own for name, own in loras.items() if "layers.0" in name}))
    LayerSlotWriter(manager.modules).write(1, lora)
    expected = [buffer.clone() for buffer in all_buffers(manager)]
    staged = stage(manager.modules, lora, options.get("lora_dtype", torch.uint8), pin_memory=False)
    for buffer in all_buffers(manager):
        buffer[1].fill_(3)
    empty = [part.stored() for layer in manager.modules.values() for part in layer.slot_parts()]
    write_slot(staged.image, [part.slots for part in empty], [part.ranks for part in empty], 1)
    for found, wanted in zip(all_buffers(manager), expected, strict=True):
        assert torch.equal(found.float(), wanted.float())
