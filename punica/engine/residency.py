"""Adapters on demand (section 5.2 of the paper): those of a step are made active just before it runs."""

from collections.abc import Iterable
from contextlib import suppress

from punica.adapters import LoRAModelManager, LoRARequest
from punica.adapters.read import read_config
from punica.adapters.request import check_same_source
from punica.scheduling import Request


class AdapterResidency:
    """Between the engine and the manager: checks adapters when a request arrives, activates them when it is admitted.

    An adapter is loaded at admission, or beside the step before if there is a slot to spare, not at arrival, since
    thousands may be queued while few are registered. An adapter that was registered in memory
    (``manager.add_adapter(LoRAModel)``) is used as it is; its request's path is never read while it stays registered,
    so give ``max_cpu_loras`` room for all of those.
    """

    def __init__(self, manager: LoRAModelManager) -> None:
        self.manager = manager
        self._requested: dict[int, LoRARequest] = {}  # the last request for an id
        self._prefetched: str | None = None  # the waiting request that was last tried

    def check(self, adapter: object) -> None:
        """Refuse an adapter that is neither registered nor in a legal PEFT folder; reads its config, not its tensors.

        TypeError: not a LoRARequest. FileNotFoundError, ValueError: the folder or its config; or its id stands for
        another adapter. RuntimeError: every slot is pinned for another adapter, so it could wait for ever.
        """
        if not isinstance(adapter, LoRARequest):
            raise TypeError(f"adapter must be a LoRARequest or None, got {type(adapter).__name__} {adapter!r}")
        if not adapter.load_inplace:
            known = self._requested.get(adapter.lora_int_id) or self.manager.request_of(adapter.lora_int_id)
            check_same_source(known, adapter)
        if adapter.load_inplace or self.manager.get_adapter(adapter.lora_int_id) is None:
            try:
                read_config(adapter, self.manager.lora_config)
            except FileNotFoundError as error:
                registered = sorted(self.manager.list_adapters())
                raise FileNotFoundError(
                    f"adapter {adapter.lora_name!r} (id {adapter.lora_int_id}) is not registered (registered ids: "
                    f"{registered}) and cannot be loaded: {error.__cause__}; pass the path of its PEFT folder, or "
                    "register it with manager.add_adapter"
                ) from error
        pinned = self.manager.pinned_adapters
        if adapter.lora_int_id not in pinned and len(pinned) >= self.manager.lora_slots:
            raise RuntimeError(
                f"no slot for adapter {adapter.lora_name!r} (id {adapter.lora_int_id}): all {len(pinned)} slots are "
                f"pinned, for adapters {sorted(pinned)}; call manager.unpin_adapter first, or raise max_loras"
            )
        self._requested[adapter.lora_int_id] = adapter

    def running_first(self, requests: Iterable[Request]) -> list[Request]:
        """The order in which the adapters of running requests must be made active: those that still are registered
        first, so that none of them makes room for one that somebody removed meanwhile and that is loaded again.
        """
        return sorted(requests, key=lambda request: self.manager.get_adapter(request.adapter_id) is None)

    def activate(self, request: Request, *, resumed: bool) -> None:
        """Make the adapter of a request active, loading it if need be.

        ``resumed``: the request has generated before, so what is registered under its id is used as it is; its weights
        must not change half-way (``load_inplace``). An adapter that cannot be loaded raises (FileNotFoundError,
        ValueError, TypeError), leaves the others active, and its id may then stand for another adapter.
        """
        if not isinstance(request.adapter, LoRARequest):
            return  # the plain backbone
        if resumed and self.manager.get_adapter(request.adapter_id) is not None:
            self.manager.activate_adapter(request.adapter_id)
            return
        try:
            self.manager.add_adapter(request.adapter)
        except Exception:
            self._requested.pop(request.adapter_id, None)
            raise

    def prefetch(self, request: Request) -> None:
        """Make the adapter of a waiting request active, beside the step that is running.

        For a request whose adapter can have a slot now; tried once for each. One that cannot be loaded stays as it is:
        the error belongs to the step in which the request joins.
        """
        adapter, tried = request.adapter, self._prefetched == request.request_id
        if not isinstance(adapter, LoRARequest) or adapter.load_inplace or tried:
            return  # in place: it would be loaded again when it joins
        self._prefetched = request.request_id
        with suppress(Exception):
            self.manager.add_adapter(adapter)

    def slots(self) -> dict[int, int]:
        """Slot of every active adapter id."""
        return {
            adapter_id: slot for slot, adapter_id in enumerate(self.manager.lora_index_to_id) if adapter_id is not None
        }
