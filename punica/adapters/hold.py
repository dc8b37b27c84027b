"""Which adapters the process holds: registered ones in host memory, active ones in a slot too, pinned ones for good."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from punica.adapters.lora_model import LoRAModel
from punica.adapters.request import LoRARequest
from punica.adapters.write import CopyHandle, SlotWriter
from punica.checks import check_count
from punica.parallel import all_ranks_agree

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """At most `capacity` entries in order of use; a full one drops what was used least recently and is not pinned.

    Args:
        capacity: at least 1.
        on_remove: called as `on_remove(key, value)` after an entry has left, for whatever reason: popped, evicted,
            or its value replaced.

    Pinned entries are never evicted; they can still be popped, which drops the pin. TypeError, ValueError: the
    capacity is not an integer >= 1.

    Attributes:
        uses: how often an entry was entered, used or taken out: while it stays, so does the order of use.
    """

    def __init__(self, capacity: int, on_remove: Callable[[K, V], None] | None = None) -> None:
        self.capacity = check_count("capacity", capacity)
        self._on_remove = on_remove or (lambda key, value: None)
        self._entries: OrderedDict[K, V] = OrderedDict()  # least recently used first
        self._pinned: set[K] = set()
        self.uses = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """All entries, the least recently used first; a copy, and no use."""
        return list(self._entries.items())

    @property
    def pinned(self) -> frozenset[K]:
        """The keys that are never evicted."""
        return frozenset(self._pinned)

    def get(self, key: K, default: V | None = None) -> V | None:
        """The value, which is now the most recently used; `default` if absent."""
        if key in self._entries:
            self.touch(key)
        return self.peek(key, default)

    def peek(self, key: K, default: V | None = None) -> V | None:
        """The value or `default`; looking is no use."""
        return self._entries.get(key, default)

    def put(self, key: K, value: V) -> None:
        """Enter a value as the most recently used; a full cache first evicts its oldest unpinned entry.

        A key that is present gets the new value and keeps its pin. RuntimeError, and no change, when all entries are
        pinned.
        """
        if key in self._entries:
            old, self._entries[key] = self._entries[key], value
            self.touch(key)
            self._on_remove(key, old)
            return
        if len(self._entries) >= self.capacity:
            self.remove_oldest()
        self._entries[key] = value
        self.uses += 1

    def touch(self, key: K) -> None:
        """Mark as the most recently used. KeyError for an absent key."""
        self._entries.move_to_end(key)
        self.uses += 1

    def pop(self, key: K, default: V | None = None) -> V | None:
        """Take an entry out, pinned or not; its value, or `default` if absent."""
        if key not in self._entries:
            return default
        value = self._entries.pop(key)
        self._pinned.discard(key)
        self.uses += 1
        self._on_remove(key, value)
        return value

    def pin(self, key: K) -> None:
        """Keep an entry from being evicted; again is fine. ValueError for an absent key."""
        if key not in self._entries:
            raise ValueError(f"cannot pin {key!r}: the cache has only {list(self._entries)}; put it first")
        self._pinned.add(key)

    def unpin(self, key: K) -> bool:
        """Let an entry be evicted again. `False` if it was not pinned."""
        was_pinned = key in self._pinned
        self._pinned.discard(key)
        return was_pinned

    def remove_oldest(self) -> tuple[K, V]:
        """Evict the least recently used entry that is not pinned; its key and value.

        KeyError if the cache is empty, RuntimeError if all entries are pinned.
        """
        if not self._entries:
            raise KeyError("the cache is empty, there is no oldest entry")
        for key, value in self._entries.items():
            if key not in self._pinned:
                self.pop(key)
                return key, value
        raise RuntimeError(f"all {len(self)} entries are pinned: {list(self._entries)}; unpin one of them")


class Placement(NamedTuple):
    """Where an active adapter lies, and the copy that brings (or brought) it there."""

    slot: int
    copy: CopyHandle


class HeldAdapters(LRUCache[int, LoRAModel]):
    """Packed, checked and staged adapters in order of use, the slots of those that are active, and who stays.

    An entry is a registered adapter. There is one order of use: an adapter that makes room in a slot is the least
    recently used of the active ones, one that leaves altogether the least recently used of all. Active adapters are
    registered, pinned ones are active.

    Args:
        capacity: most registered adapters (`max_cpu_loras`).
        n_slots: slots on the device (`max_loras`).
        writer: fills the slots.

    Attributes:
        index_to_id: adapter id of each slot, `None` = free; the list that metadata are built from.
        requests: what adapters were loaded for; those that came without a request are absent.
        active: the placements of the active adapters.
    """

    def __init__(self, capacity: int, n_slots: int, writer: SlotWriter) -> None:
        super().__init__(capacity, self._forget)
        self.index_to_id: list[int | None] = [None] * n_slots
        self.requests: dict[int, LoRARequest] = {}
        self._writer = writer
        self.active: dict[int, Placement] = {}

    def require(self, adapter_id: int) -> LoRAModel:
        """An adapter; no use. ValueError if it is not registered."""
        lora = self.peek(adapter_id)
        if lora is None:
            raise ValueError(
                f"adapter {adapter_id!r} is not registered; registered: {sorted(dict(self.items()))}; add it first"
            )
        return lora

    def check_place(self, adapter_id: int) -> None:
        """RuntimeError if there is no place in host memory for another adapter: all are taken, by pinned ones."""
        if len(self.pinned) >= self.capacity:
            raise RuntimeError(
                f"no place for adapter {adapter_id}: all {len(self.pinned)} registered ones are pinned "
                f"({sorted(self.pinned)}); unpin_adapter one of them or raise LoRAConfig.max_cpu_loras"
            )

    def enter(self, staged: Iterable[LoRAModel], requests: Mapping[int, LoRARequest]) -> None:
        """Enter adapters for which there is room, with the requests, if any, that they were loaded for.

        Each replaces one of the same id (and drops its pin), else the least recently used one, but none that is
        requested too.
        """
        for adapter_id in requests:
            if adapter_id in self:
                self.touch(adapter_id)
        for lora in staged:
            self.pop(lora.id)
            self.put(lora.id, lora)
            if lora.id in requests:
                self.requests[lora.id] = requests[lora.id]

    def rename(self, adapter_id: int, new_id: int) -> LoRAModel:
        """Hold a registered adapter under another, unused id, with its slot, pin and request; what is held now."""
        lora = self.require(adapter_id).renamed(new_id)
        del self._entries[adapter_id]
        self._entries[new_id] = lora
        self.uses += 1
        if adapter_id in self.requests:
            self.requests[new_id] = self.requests.pop(adapter_id)
        if adapter_id in self.active:
            self.active[new_id] = self.active.pop(adapter_id)
            self.index_to_id[self.active[new_id].slot] = new_id
        if super().unpin(adapter_id):
            super().pin(new_id)
        return lora

    def _forget(self, adapter_id: int, lora: LoRAModel) -> None:
        self.deactivate(adapter_id)
        self.requests.pop(adapter_id, None)

    def check_slots(self, wanted: Collection[int]) -> None:
        """RuntimeError unless all of `wanted` can be active together with everything that is pinned."""
        n_slots, pinned = len(self.index_to_id), self.pinned.difference(wanted)
        if len(wanted) + len(pinned) > n_slots:
            raise RuntimeError(
                f"no slot for adapters {sorted(wanted)}: all that could make room are pinned ({sorted(pinned)}, of "
                f"{n_slots} slots); unpin_adapter one of them or raise LoRAConfig.max_loras"
            )

    def activate(self, adapter_id: int) -> bool:
        """Write an adapter into the lowest free slot, or that of the least recently used unpinned one.

        `False` if it was active. In any case it counts as just used. ValueError: it is not registered. RuntimeError:
        :meth:`check_slots`. If the write fails on any tensor-parallel rank, it does on all, and its slot is free.
        """
        lora = self.require(adapter_id)
        inactive = adapter_id not in self.active
        if inactive:
            self.check_slots([adapter_id])
            if None not in self.index_to_id:
                removable = (other for other in self._entries if other in self.active and other not in self._pinned)
                self.deactivate(next(removable))
            slot = self.index_to_id.index(None)
            with all_ranks_agree():
                copy = self._writer.write(slot, lora)
            self.active[adapter_id] = Placement(slot, copy)
            self.index_to_id[slot] = adapter_id
        self.touch(adapter_id)
        return inactive

    def deactivate(self, adapter_id: int) -> bool:
        """Free the adapter's slot and drop a pin; the old weights may stay, as no mapping can refer to a free slot.

        `False` if it is not active.
        """
        placement = self.active.pop(adapter_id, None)
        if placement is None:
            return False
        self.unpin(adapter_id)
        self.index_to_id[placement.slot] = None
        self.uses += 1
        return True

    def slots_of(self, adapter_ids: Iterable[int]) -> dict[int, int]:
        """The slot of each active adapter among `adapter_ids`; ids without a slot (0 is no adapter) are left out."""
        return {adapter_id: self.active[adapter_id].slot for adapter_id in adapter_ids if adapter_id in self.active}

    def pin(self, adapter_id: int) -> None:
        """Make a registered adapter active and keep it so until it is unpinned, deactivated or removed.

        Raises as :meth:`activate`.
        """
        self.activate(adapter_id)
        super().pin(adapter_id)
