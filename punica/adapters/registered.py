"""`RegisteredAdapters`: the adapters in host memory, ready to be written into slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from punica.adapters.active import ActiveAdapters
from punica.adapters.loader import source
from punica.adapters.lru import LRUCache
from punica.adapters.peft import LoRARequest
from punica.adapters.slot_writer import SlotWriter
from punica.adapters.weights import LoRAModel


class RegisteredAdapters:
    """Merged, checked and staged adapters in order of use, and the requests that they were loaded for.

    Whatever leaves is deactivated first, so the active adapters are always a subset, and both sets have the same pins.

    Args:
        capacity: most registered adapters (`max_cpu_loras`).
        active: those of them that lie in slots.
        writer: stages what is entered.
    """

    def __init__(self, capacity: int, active: ActiveAdapters, writer: SlotWriter) -> None:
        self._active = active
        self._writer = writer
        self._adapters: LRUCache[int, LoRAModel] = LRUCache(capacity, self._forget)
        self._requests: dict[int, LoRARequest] = {}

    def __contains__(self, adapter_id: object) -> bool:
        return adapter_id in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def as_dict(self) -> dict[int, LoRAModel]:
        """`{id: adapter}`, the least recently used first; a copy."""
        return dict(self._adapters.items())

    def find(self, adapter_id: int) -> LoRAModel | None:
        """An adapter or `None`; no use."""
        return self._adapters.peek(adapter_id)

    def require(self, adapter_id: int) -> LoRAModel:
        """An adapter; no use. ValueError if it is not registered."""
        lora = self._adapters.peek(adapter_id)
        if lora is None:
            raise ValueError(
                f"adapter {adapter_id!r} is not registered; registered: {sorted(self.as_dict())}; add it first"
            )
        return lora

    def request_of(self, adapter_id: int) -> LoRARequest | None:
        """What an adapter was loaded for; `None` if it is not registered or came without a request."""
        return self._requests.get(adapter_id)

    def check_same_source(self, wanted: Mapping[int, LoRARequest], reload: Collection[int]) -> None:
        """ValueError if a wanted id was loaded under another name or path, unless it is to be loaded again."""
        for adapter_id, request in wanted.items():
            known = self._requests.get(adapter_id)
            if known is not None and adapter_id not in reload and source(known) != source(request):
                raise ValueError(
                    f"adapter id {adapter_id} is registered as {source(known)}, now requested as {source(request)}; "
                    "use another id, or load_inplace=True to replace it"
                )

    def check_room(self, adapter_id: int) -> None:
        """RuntimeError if there is no place for another adapter: all are taken, by pinned ones."""
        pinned = self._adapters.pinned
        if len(pinned) >= self._adapters.capacity:
            raise RuntimeError(
                f"no place for adapter {adapter_id}: all {len(pinned)} registered ones are pinned ({sorted(pinned)}); "
                "unpin_adapter one of them or raise LoRAConfig.max_cpu_loras"
            )

    def enter(
        self, merged: Iterable[LoRAModel], requests: Mapping[int, LoRARequest] | None = None, keep: Iterable[int] = ()
    ) -> None:
        """Stage and enter adapters for which there is room: each replaces one of the same id (and drops its pin), else
        the least recently used one, but none of `keep`. All are staged before the first one is entered.
        """
        staged = [self._writer.stage(lora) for lora in merged]
        for adapter_id in keep:
            if adapter_id in self._adapters:
                self.touch(adapter_id)
        for lora in staged:
            self._adapters.pop(lora.id)
            self._adapters.put(lora.id, lora)
            if requests is not None:
                self._requests[lora.id] = requests[lora.id]

    def touch(self, adapter_id: int) -> None:
        """Mark as just used, in its slot too if it is active. KeyError if it is not registered."""
        self._adapters.touch(adapter_id)
        self._active.touch(adapter_id)

    def pin(self, adapter_id: int) -> None:
        """Keep an active adapter registered and active. ValueError if it is not active."""
        self._active.pin(adapter_id)
        self._adapters.pin(adapter_id)

    def unpin(self, adapter_id: int) -> bool:
        """Undo :meth:`pin`. `False` if it was not pinned."""
        self._active.unpin(adapter_id)
        return self._adapters.unpin(adapter_id)

    def remove(self, adapter_id: int) -> bool:
        """Deactivate and forget, pinned or not. `False` if it is not registered."""
        return self._adapters.pop(adapter_id) is not None

    def remove_oldest(self) -> bool:
        """Remove the least recently used one that is not pinned. `False` if there is none at all; RuntimeError if all
        are pinned.
        """
        if not len(self._adapters):
            return False
        self._adapters.remove_oldest()
        return True

    def _forget(self, adapter_id: int, lora: LoRAModel) -> None:
        self._active.deactivate(adapter_id)
        self._requests.pop(adapter_id, None)
