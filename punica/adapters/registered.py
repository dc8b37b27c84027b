"""The adapters that a manager has, by id: looked up, moved into slots and out of them, pinned, removed; none is loaded
here.
"""

from punica.adapters.hold import HeldAdapters
from punica.adapters.lora_model import LoRAModel
from punica.adapters.request import LoRARequest
from punica.adapters.write import CopyHandle, SlotWriter
from punica.checks import as_int
from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA


class RegisteredAdapters:
    """Adapters in host memory (*registered*), those of them that are in a slot (*active*), and those that stay there
    (*pinned*).

    Attributes:
        modules: `{name: LoRA layer}`, whose slots are filled.
        lora_config: how many there may be; with its dtype resolved.
    """

    def __init__(self, modules: dict[str, BaseLayerWithLoRA], lora_config: LoRAConfig, writer: SlotWriter) -> None:
        self.modules = modules
        self.lora_config = lora_config
        self._writer = writer
        self._held = HeldAdapters(self.capacity, self.lora_slots, writer)

    # --- capacity and look-ups ---------------------------------------------------------------------------------------

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """Adapter id of each slot, `None` = free; a copy."""
        return list(self._held.index_to_id)

    @property
    def capacity(self) -> int:
        """Most registered adapters (`max_cpu_loras`)."""
        return self.lora_config.max_cpu_loras or self.lora_config.max_loras

    @property
    def lora_slots(self) -> int:
        """Slots on the device (`max_loras`): most distinct adapters in one step."""
        return self.lora_config.max_loras

    @property
    def adapter_slots(self) -> int:
        """Same as `lora_slots`."""
        return self.lora_slots

    @property
    def slot_bytes(self) -> int:
        """Device memory of one slot over all layers, in bytes: allocated at construction, whatever adapter fills it."""
        return sum(layer.slot_bytes for layer in self.modules.values())

    @property
    def pinned_adapters(self) -> frozenset[int]:
        """Ids that :meth:`pin_adapter` keeps registered and active."""
        return self._held.pinned

    @property
    def uses(self) -> int:
        """A number that changes whenever an adapter is registered, used, moved into a slot or out of it, or removed."""
        return self._held.uses

    def __len__(self) -> int:
        return len(self._held)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """The registered adapters, `{id: adapter as packed for the model}`; a copy."""
        return dict(self._held.items())

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """A registered adapter or `None`; looking does not count as use."""
        return self._held.peek(_checked(adapter_id))

    def is_active(self, adapter_id: int) -> bool:
        """Whether an adapter has a slot; its copy into it may still be under way."""
        return adapter_id in self._held.active

    def adapter_bytes(self, adapter_id: int) -> int:
        """Host memory of a registered adapter, in bytes. ValueError if it is not registered."""
        return self._writer.host_bytes(self._held.require(_checked(adapter_id)))

    def request_of(self, adapter_id: int) -> LoRARequest | None:
        """The request a registered adapter was loaded for; `None` if it is not registered or came as a `LoRAModel`."""
        return self._held.requests.get(_checked(adapter_id))

    # --- registered adapters -----------------------------------------------------------------------------------------

    def rename_adapter(self, adapter_id: int, new_id: int) -> LoRAModel:
        """Keep a registered adapter, with its slot and pin, under another id: the old one is free for its successor.

        Steps in flight notice nothing. Returns the adapter as it is registered now.

        Raises:
            ValueError: `adapter_id` is not registered, or `new_id` is.
        """
        if new_id in self._held:
            raise ValueError(f"cannot rename adapter {adapter_id} to {new_id}, which is registered; remove that first")
        return self._held.rename(adapter_id, new_id)

    def restore_adapter(self, adapter: LoRAModel, request: LoRARequest | None) -> None:
        """Register what :meth:`get_adapter` once gave and was evicted or removed since, with its request if it had one.

        Raises:
            RuntimeError: all that could make room are pinned. Nothing has changed.
        """
        self._held.check_place(adapter.id)
        self._held.enter([adapter], {} if request is None else {adapter.id: request})

    def remove_adapter(self, adapter_id: int) -> bool:
        """Deactivate and unregister, pinned or not. `False` if the id is unknown."""
        return self._held.pop(_checked(adapter_id)) is not None

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used unpinned adapter. `False` if none is registered; RuntimeError: all pinned."""
        if not len(self):
            return False
        self._held.remove_oldest()
        return True

    def remove_all_adapters(self) -> None:
        """No adapter registered, every slot free, no pins."""
        for adapter_id in self.list_adapters():
            self.remove_adapter(adapter_id)

    # --- active adapters ---------------------------------------------------------------------------------------------

    def activate_adapter(self, adapter_id: int) -> bool:
        """Copy a registered adapter into the lowest free slot; with none free, into that of the least recently used
        unpinned adapter.

        Whoever runs steps must not activate more adapters than the step's requests leave slots for: see
        `set_active_adapters`. If the write fails nevertheless, on this tensor-parallel rank or on another one, it is an
        error on all of them and the slot is free.

        Returns:
            `False` if the adapter already was active (it is marked as just used).

        Raises:
            ValueError: the id is not registered. RuntimeError: all slots are pinned. Nothing has changed.
        """
        return self._held.activate(_checked(adapter_id))

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Free the adapter's slot and drop a pin; it stays registered. `False` if it is not active."""
        return self._held.deactivate(_checked(adapter_id))

    def prefetch_adapter(self, adapter_id: int) -> CopyHandle:
        """:meth:`activate_adapter` ahead of the step that uses it, with the same evictions and errors, so leave slots
        for the steps that come before; returns the handle of the latest copy into its slot.

        On CUDA the copy runs beside the steps in flight. Nobody has to call the handle's `wait`: a mapping that uses
        the adapter implies it.
        """
        self.activate_adapter(adapter_id)
        return self._held.active[adapter_id].copy

    def pin_adapter(self, adapter_id: int) -> bool:
        """Keep a registered adapter registered and active, activating it if need be, until it is unpinned, deactivated
        or removed; again is fine. Always `True`.

        Raises:
            ValueError: the id is not registered. RuntimeError: all slots are pinned already. Nothing has changed.
        """
        self._held.pin(_checked(adapter_id))
        return True

    def unpin_adapter(self, adapter_id: int) -> bool:
        """Let an adapter make room for others again. `False` if it was not pinned."""
        return self._held.unpin(_checked(adapter_id))


def _checked(adapter_id: object) -> int:
    """TypeError for what is no id: booleans stand for no adapter, and not everything can be looked up."""
    return as_int("adapter_id", adapter_id)
