"""`ActiveAdapters`: which adapter lies in which slot, and who leaves when a slot is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from punica.adapters.lru import LRUCache
from punica.adapters.slot_writer import CopyHandle, SlotWriter
from punica.adapters.weights import LoRAModel


class Placement(NamedTuple):
    """Where an active adapter lies, and the copy that brings (or brought) it there."""

    slot: int
    copy: CopyHandle


class ActiveAdapters:
    """The active adapters: at most one per slot, in order of use, some of them pinned.

    Args:
        n_slots: slots on the device (`max_loras`).
        writer: fills them.

    Attributes:
        index_to_id: adapter id of each slot, `None` = free; the list that metadata are built from.
    """

    def __init__(self, n_slots: int, writer: SlotWriter) -> None:
        self.index_to_id: list[int | None] = [None] * n_slots
        self._writer = writer
        self._placements: LRUCache[int, Placement] = LRUCache(n_slots, self._free)

    def ids(self) -> list[int]:
        """The active adapters, the least recently used first."""
        return [adapter_id for adapter_id, _ in self._placements.items()]

    @property
    def pinned(self) -> frozenset[int]:
        """Adapters that keep their slot until they are unpinned, deactivated or removed."""
        return self._placements.pinned

    def check_room(self, wanted: Collection[int]) -> None:
        """RuntimeError unless all of `wanted` can be active together with everything that is pinned."""
        n_slots, pinned = len(self.index_to_id), self.pinned.difference(wanted)
        if len(wanted) + len(pinned) > n_slots:
            raise RuntimeError(
                f"no slot for adapters {sorted(wanted)}: all that could make room are pinned ({sorted(pinned)}, of "
                f"{n_slots} slots); unpin_adapter one of them or raise LoRAConfig.max_loras"
            )

    def activate(self, adapter_id: int, lora: LoRAModel) -> bool:
        """Write an adapter into the lowest free slot, or that of the least recently used unpinned one.

        `False` if it was active (it is marked as just used). RuntimeError: :meth:`check_room`. If the write fails, its
        slot is free.
        """
        if adapter_id in self._placements:
            self._placements.touch(adapter_id)
            return False
        self.check_room([adapter_id])
        if None not in self.index_to_id:
            self._placements.remove_oldest()
        slot = self.index_to_id.index(None)
        self._placements.put(adapter_id, Placement(slot, self._writer.write(slot, lora)))
        self.index_to_id[slot] = adapter_id
        return True

    def deactivate(self, adapter_id: int) -> bool:
        """Free the adapter's slot, pinned or not; the old weights may stay, as no mapping can refer to a free slot.
        `False` if it is not active.
        """
        return self._placements.pop(adapter_id) is not None

    def touch(self, adapter_id: int) -> None:
        """Mark as just used, if active."""
        if adapter_id in self._placements:
            self._placements.touch(adapter_id)

    def pin(self, adapter_id: int) -> None:
        """Keep an active adapter in its slot. ValueError if it is not active."""
        self._placements.pin(adapter_id)

    def unpin(self, adapter_id: int) -> bool:
        """Undo :meth:`pin`. `False` if it was not pinned."""
        return self._placements.unpin(adapter_id)

    def copy_of(self, adapter_id: int) -> CopyHandle:
        """The latest copy into an active adapter's slot. ValueError if it is not active."""
        placement = self._placements.peek(adapter_id)
        if placement is None:
            raise ValueError(f"adapter {adapter_id!r} is not active; active: {sorted(self.ids())}")
        return placement.copy

    def slots_of(self, adapter_ids: Iterable[int]) -> dict[int, int]:
        """The slot of each active adapter among `adapter_ids`; ids without a slot (0 is no adapter) are left out."""
        placements = {adapter_id: self._placements.peek(adapter_id) for adapter_id in adapter_ids}
        return {adapter_id: placement.slot for adapter_id, placement in placements.items() if placement is not None}

    def _free(self, adapter_id: int, placement: Placement) -> None:
        self.index_to_id[placement.slot] = None
