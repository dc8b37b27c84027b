"""`AdapterCache`: adapters registered in host memory and active in slots, with LRU eviction and pins.

A *registered* adapter is packed, checked and staged in host memory; an *active* one is also copied into a slot on the
device; a *pinned* one is never evicted. Room in either place is made by its least recently used unpinned adapter.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from punica.adapters.lru import LRUCache
from punica.adapters.read import AdapterVersion
from punica.adapters.request import LoRARequest, changed_error
from punica.adapters.weights import LoRAModel
from punica.adapters.write import CopyHandle, SlotWriter
from punica.checks import as_int, clip
from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA
from punica.parallel import all_ranks_agree


@dataclass(eq=False)
class LoadedAdapter:
    """One version of an adapter in host memory."""

    lora: LoRAModel  # packed and staged
    request: LoRARequest | None = None  # that it was loaded for; None: it came as a `LoRAModel`
    users: int = 0  # unfinished generation requests that are computed with it, see `AdapterCache.hold`
    slot: int | None = None  # where it is active
    superseded: bool = False  # another version was registered under its id since

    @property
    def key(self) -> Hashable:
        """Identity of the weights among all that requests run with: the adapter's id, unless superseded."""
        return self if self.superseded else self.lora.id


class AdapterCache:
    """Adapters in host memory and in slots, by id.

    Active adapters are registered and pinned ones active, but for superseded versions that requests still hold. An id
    has the version that was loaded last, even evicted, until it is removed or another adapter takes it.

    Attributes: `modules`, LoRA layers by name; `lora_config`, with its dtype resolved; `capacity`, most registered
    adapters; `lora_slots`, `adapter_slots`, slots on the device: most distinct adapters in one step.
    """

    def __init__(self, modules: dict[str, BaseLayerWithLoRA], lora_config: LoRAConfig, writer: SlotWriter) -> None:
        self.modules, self.lora_config, self._writer = modules, lora_config, writer
        self.lora_slots = self.adapter_slots = lora_config.max_loras
        self.capacity = lora_config.max_cpu_loras or self.lora_slots
        self._registered: LRUCache[int, LoadedAdapter] = LRUCache(self.capacity, self._on_unregister)
        self._active: LRUCache[LoadedAdapter, CopyHandle] = LRUCache(self.lora_slots, self._on_deactivate)
        self._slots: list[LoadedAdapter | None] = [None] * self.lora_slots
        self._held: set[LoadedAdapter] = set()  # versions that have users
        # by id, of the latest load: the request, and what was in its folder; tensors in memory stay what they are
        self._latest: dict[int, tuple[LoRARequest | None, AdapterVersion | None]] = {}

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """A copy of the slots' adapter ids; `None`: free, or taken by a superseded version."""
        return [None if loaded is None or loaded.superseded else loaded.lora.id for loaded in self._slots]

    @property
    def slot_bytes(self) -> int:
        """Device memory of one slot over all layers, in bytes: allocated at construction, whatever adapter fills it."""
        return sum(layer.slot_bytes for layer in self.modules.values())

    @property
    def pinned_adapters(self) -> frozenset[int]:
        return self._registered.pinned

    @property
    def uses(self) -> int:
        """A number that changes whenever an adapter is registered, used, moved into a slot or out of it, or removed."""
        return self._registered.uses + self._active.uses

    def __len__(self) -> int:
        return len(self._registered)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return the registered adapters as packed for the model, by id; a copy."""
        return {adapter_id: loaded.lora for adapter_id, loaded in self._registered.items()}

    def loaded(self, adapter_id: int) -> LoadedAdapter | None:
        """Return the registered version of an adapter, or `None`; does not count as use."""
        return self._registered.peek(as_int("adapter_id", adapter_id))

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        return None if (loaded := self.loaded(adapter_id)) is None else loaded.lora

    def request_of(self, adapter_id: int) -> LoRARequest | None:
        """Return the request of a registered adapter; `None` if it is unknown or came as a `LoRAModel`."""
        return None if (loaded := self.loaded(adapter_id)) is None else loaded.request

    def is_active(self, adapter_id: int) -> bool:
        """Tell if a registered adapter has a slot; its copy into it may still be under way."""
        return self._registered.peek(adapter_id) in self._active

    def active_versions(self) -> list[LoadedAdapter]:
        return [loaded for loaded in self._slots if loaded is not None]

    def adapter_bytes(self, adapter_id: int) -> int:
        """Return the host memory of a registered adapter, in bytes. ValueError if it is not registered."""
        return self._require(adapter_id).lora.host_bytes()

    def restore_adapter(self, adapter: LoRAModel, request: LoRARequest | None) -> None:
        """Register what :meth:`get_adapter` returned. RuntimeError, and no change: all that make room are pinned."""
        self._check_place(adapter.id)
        self._register(LoadedAdapter(adapter, request))

    def remove_adapter(self, adapter_id: int) -> bool:
        """Deactivate and unregister, pinned or not, and forget its version. `False` if the id is not registered."""
        self._latest.pop(as_int("adapter_id", adapter_id), None)
        return self._registered.pop(adapter_id) is not None

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used unpinned adapter. `False` if none is registered; RuntimeError: all pinned."""
        return bool(len(self) and self._registered.remove_oldest())

    def remove_all_adapters(self) -> None:
        for adapter_id in {**self._latest, **self.list_adapters()}:
            self.remove_adapter(adapter_id)

    def activate_adapter(self, adapter_id: int) -> bool:
        """Copy a registered adapter into the lowest free slot; with none free, into that of the least recently used
        unpinned adapter. `False` if the adapter already was active (it is marked as just used).

        A write that fails on any tensor-parallel rank raises on all of them, and the slot is free. ValueError: the id
        is not registered. RuntimeError: all slots are pinned. Nothing has changed.
        """
        return self.activate(self._require(adapter_id))

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Free the adapter's slot and drop a pin; it stays registered. `False` if it is not active."""
        loaded = self.loaded(adapter_id)
        return loaded is not None and self._active.pop(loaded) is not None

    def prefetch_adapter(self, adapter_id: int) -> CopyHandle:
        """Run :meth:`activate_adapter` ahead of a step; return the copy into the slot, beside steps in flight."""
        loaded = self._require(adapter_id)
        self.activate(loaded)
        return cast(CopyHandle, self._active.peek(loaded))

    def pin_adapter(self, adapter_id: int) -> bool:
        """Keep a registered adapter registered and active, activating it if need be, until it is unpinned, deactivated
        or removed. Idempotent; always `True`. Raises as :meth:`activate_adapter`.
        """
        loaded = self._require(adapter_id)
        self.activate(loaded)
        self._registered.pin(loaded.lora.id)
        self._active.pin(loaded)
        return True

    def unpin_adapter(self, adapter_id: int) -> bool:
        loaded = self.loaded(adapter_id)
        return loaded is not None and self._active.unpin(loaded) and self._registered.unpin(loaded.lora.id)

    def hold(self, adapter_id: int) -> LoadedAdapter:
        """Return the registered version of an adapter, counting one more user: it stays in memory until it is released
        as often, and in its slot when another version supersedes it. ValueError if it is not registered.
        """
        loaded = self._require(adapter_id)
        self._held.add(loaded)
        loaded.users += 1
        return loaded

    def release(self, loaded: LoadedAdapter) -> None:
        """Count one user less; the last one frees the slot of a version that is not registered."""
        loaded.users -= 1
        if loaded.users == 0:
            self._held.discard(loaded)
            if self._registered.peek(loaded.lora.id) is not loaded:
                self._active.pop(loaded)

    def count_users(self, held: Sequence[LoadedAdapter | None]) -> None:
        """Correct the users of each version; ``held``: that of each user."""
        for loaded in [*self._held]:
            loaded.users = held.count(loaded) + 1
            self.release(loaded)

    def activate(self, loaded: LoadedAdapter) -> bool:
        """Run :meth:`activate_adapter` for one version, which is registered again unless another took its place."""
        adapter_id = loaded.lora.id
        registered = self._registered.peek(adapter_id)
        if registered is None and not loaded.superseded:
            self._check_place(adapter_id)
            self._register(loaded)
        elif registered is not loaded:
            loaded.superseded = True
        is_inactive = loaded.slot is None
        if is_inactive:
            self._check_slots([adapter_id], self._registered.pinned)
            if None not in self._slots:
                self._active.remove_oldest()
            slot = self._slots.index(None)
            with all_ranks_agree():
                copy = self._writer.write(slot, loaded.lora)
            loaded.slot, self._slots[slot] = slot, loaded
            self._active.put(loaded, copy)
        self._use(loaded)
        return is_inactive

    def folder_versions(self) -> dict[int, tuple[Hashable, AdapterVersion]]:
        """Return source and version of the latest load of each id that came from a folder."""
        return {i: (request.source, version) for i, (request, version) in self._latest.items() if request and version}

    def expect_version(self, request: LoRARequest, version: AdapterVersion) -> None:
        """Serve a request's folder in this version alone; requests that have begun with another one keep it."""
        adapter_id = request.lora_int_id
        known, latest = self._latest.get(adapter_id, (None, None))
        if known is not None and known.source == request.source and latest and not latest.changed_files(version):
            return
        for held in self._held:
            held.superseded |= held.lora.id == adapter_id
        self._registered.pop(adapter_id)
        self._latest[adapter_id] = request, version

    def _require(self, adapter_id: int) -> LoadedAdapter:
        loaded = self.loaded(adapter_id)
        if loaded is None:
            raise ValueError(f"adapter {adapter_id!r} is not registered ({sorted(self.list_adapters())} are); add it")
        return loaded

    def _use(self, loaded: LoadedAdapter) -> None:
        """Mark a version as the most recently used, where it is registered and where it is active."""
        if not loaded.superseded:
            self._registered.touch(loaded.lora.id)
        if loaded.slot is not None:
            self._active.touch(loaded)

    def _register(self, loaded: LoadedAdapter) -> None:
        """Put a version under its id; all others of the id, also those removed before, are superseded."""
        adapter_id = loaded.lora.id
        old = self._registered.peek(adapter_id)
        for version in (old, *self._held):
            if version is not None and version.lora.id == adapter_id:
                version.superseded = True
        if old is not None:
            self._registered.pop(adapter_id)
        loaded.superseded = False
        self._registered.put(adapter_id, loaded)
        self._note_latest(adapter_id, loaded.request, loaded.lora.version)

    def _note_latest(self, adapter_id: int, request: LoRARequest | None, version: AdapterVersion | None) -> None:
        if request is None or request.tensors is None:
            self._latest[adapter_id] = request, version
        else:
            self._latest.pop(adapter_id, None)

    def _check_unchanged(self, request: LoRARequest, now: AdapterVersion | None) -> None:
        """ValueError if a request's folder holds another version than the one that was loaded last under the id."""
        if request.lora_int_id not in self._latest or now is None:
            return
        known, version = self._latest[request.lora_int_id]
        if known is None:
            raise ValueError(
                f"adapter {clip(request.lora_name)} (id {request.lora_int_id}) was registered as a LoRAModel and has "
                "left host memory; add it again, remove_adapter it to have the folder of the request loaded, or raise "
                "LoRAConfig.max_cpu_loras"
            )
        if known.source == request.source and version is not None and (changed := version.changed_files(now)):
            raise ValueError(changed_error(request, changed))

    def _on_unregister(self, adapter_id: int, loaded: LoadedAdapter) -> None:
        if loaded.superseded and loaded.users:
            self._active.unpin(loaded)
        else:
            self._active.pop(loaded)

    def _on_deactivate(self, loaded: LoadedAdapter, copy: CopyHandle) -> None:
        """Free the slot; its weights stay, since no mapping refers to a free slot."""
        self._slots[cast(int, loaded.slot)] = loaded.slot = None
        if not loaded.superseded:
            self._registered.unpin(loaded.lora.id)

    def _check_place(self, adapter_id: int) -> None:
        if len(pinned := self.pinned_adapters) >= self.capacity:
            raise RuntimeError(
                f"no place for adapter {adapter_id}: all {len(pinned)} registered ones are pinned ({sorted(pinned)}); "
                "unpin_adapter one of them or raise LoRAConfig.max_cpu_loras"
            )

    def _check_slots(self, wanted: Collection[int], pinned: Collection[int]) -> None:
        """RuntimeError unless all of `wanted` can be active together with the `pinned` ones, which are others."""
        if len(wanted) + len(pinned) > self.lora_slots:
            raise RuntimeError(
                f"no slot for adapters {sorted(wanted)}: all that could make room are pinned ({sorted(pinned)}, of "
                f"{self.lora_slots} slots); unpin_adapter one of them or raise LoRAConfig.max_loras"
            )
