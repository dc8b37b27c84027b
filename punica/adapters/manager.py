"""`LoRAModelManager`: which adapters are registered (host memory) and which are active (in a slot on the device).

A *registered* adapter is merged, scaled and checked; an *active* one is also copied into a slot. Batches refer to
slots, so a step may use as many distinct adapters as there are slots, while the stream of requests may bring any
number: adapters are activated on demand (section 5.2 of the paper) and the least recently used one makes room.

Validate first: an adapter is fully loaded, merged and checked before anything is evicted, so a failed call leaves
registered adapters, slots and buffers exactly as they were.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from punica.adapters.loader import AdapterLoader, distinct_requests, source
from punica.adapters.merging import AdapterMerger, dummy_weights, slot_arguments
from punica.adapters.peft import LoRARequest
from punica.adapters.weights import LoRAModel
from punica.adapters.wrapping import expected_lora_modules, find_supported_layers, packed_modules_of, wrap_layers
from punica.checks import check_count
from punica.config import LoRAConfig
from punica.segments import LoRAMapping
from punica.wrapper import get_punica_wrapper


class LoRAModelManager:
    """Adapters of one model: wraps its layers in place, then loads, activates, evicts, and tells the kernels who uses
    what.

    Args:
        model: module tree built from `punica.parallel` layers; may define `packed_modules_mapping` and
            `embedding_modules`.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        vocab_size: of the model; embedding adapters must match it.
        lora_config: capacity and switches; `"auto"` takes the dtype of the model's weights.
        device: where the metadata lives (the slots live where the layers' weights are).

    Attributes:
        modules: `{name: LoRA layer}`.
        lora_index_to_id: adapter id of each slot, `None` = free.
        lora_config: the given one with its dtype resolved.
        punica_wrapper: shared by all layers.

    Raises:
        ValueError: the model has no layer to wrap, or a targeted layer has no LoRA class. RuntimeError: it is wrapped
            already.
    """

    def __init__(
        self,
        model: nn.Module,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        lora_config: LoRAConfig,
        device: torch.device | str,
    ) -> None:
        layers = find_supported_layers(model)
        self.model = model
        self.vocab_size = vocab_size
        self.lora_config = replace(lora_config)
        self._dtype = _resolve_dtype(self.lora_config, layers)
        self.punica_wrapper = get_punica_wrapper(
            max_num_batched_tokens,
            max_num_seqs,
            device,
            max_loras=self.lora_config.max_loras,
            lora_config=self.lora_config,
        )
        packed = packed_modules_of(model)
        self.modules = wrap_layers(model, layers, self.lora_config)
        for layer in self.modules.values():
            layer.set_mapping(self.punica_wrapper)
        self.lora_index_to_id: list[int | None] = [None] * self.lora_config.max_loras
        self._merger = AdapterMerger(self.modules, packed, self.lora_config.target_modules)
        self._loader = AdapterLoader(
            self._merger, expected_lora_modules(layers, packed), self.lora_config, self._dtype, vocab_size
        )
        # both ordered from least to most recently used
        self._registered: OrderedDict[int, LoRAModel] = OrderedDict()
        self._active: OrderedDict[int, int] = OrderedDict()  # id -> slot
        self._requests: dict[int, LoRARequest] = {}  # where a registered adapter was loaded from
        self._last_mapping: tuple[LoRAMapping, tuple[int | None, ...]] | None = None

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

    def __len__(self) -> int:
        return len(self._registered)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """The registered adapters, `{id: adapter as merged for the model}`; a copy."""
        return dict(self._registered)

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """A registered adapter or `None`; looking does not count as use."""
        return self._registered.get(adapter_id)

    def request_of(self, adapter_id: int) -> LoRARequest | None:
        """The request a registered adapter was loaded for; `None` if it is not registered or came as a `LoRAModel`."""
        return self._requests.get(adapter_id)

    def add_adapter(self, adapter: LoRAModel | LoRARequest) -> bool:
        """Register an adapter; when `max_cpu_loras` are registered, the least recently used one is removed for it.

        A `LoRAModel` is merged, checked and registered; a registered id is only marked as just used and gives `False`.

        A `LoRARequest` is what serving passes: its folder is loaded unless the id is registered (or `load_inplace` asks
        to load it again), registered, and activated. Always `True`: afterwards it is loaded.

        Raises:
            FileNotFoundError, ValueError, TypeError: the adapter cannot be loaded or does not fit the model; nothing
                has changed.
        """
        if isinstance(adapter, LoRARequest):
            wanted = {adapter.lora_int_id: adapter}
            self._register_requested(wanted, reload=set(wanted) if adapter.load_inplace else set())
            self.activate_adapter(adapter.lora_int_id)
            return True
        if not isinstance(adapter, LoRAModel):
            raise TypeError(f"adapter must be a LoRAModel or a LoRARequest, got {type(adapter).__name__}")
        if adapter.id in self._registered:
            self._touch(adapter.id)
            return False
        self._register(self._merger.merge(adapter))
        return True

    def activate_adapter(self, adapter_id: int) -> bool:
        """Copy a registered adapter into the lowest free slot; with none free, into that of the least recently used
        adapter.

        Whoever runs steps must not activate more adapters than the step's requests leave slots for: see
        :meth:`set_active_adapters`. If a layer fails nevertheless, the slot is cleared on all layers and left free.

        Returns:
            `False` if the adapter already was active (it is marked as just used).

        Raises:
            ValueError: the id is not registered.
        """
        if adapter_id not in self._registered:
            raise ValueError(
                f"adapter {adapter_id!r} is not registered; registered: {sorted(self._registered)}; add it first"
            )
        self._touch(adapter_id)
        if adapter_id in self._active:
            return False
        if None not in self.lora_index_to_id:
            self.deactivate_adapter(next(iter(self._active)))
        slot = self.lora_index_to_id.index(None)
        self._write_slot(slot, self._registered[adapter_id])
        self.lora_index_to_id[slot] = adapter_id
        self._active[adapter_id] = slot
        return True

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Free the adapter's slot; it stays registered. `False` if it is not active."""
        slot = self._active.pop(adapter_id, None)
        if slot is None:
            return False
        self.lora_index_to_id[slot] = None  # the old weights may stay: no mapping can refer to a free slot
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Deactivate and unregister. `False` if the id is unknown."""
        self.deactivate_adapter(adapter_id)
        self._requests.pop(adapter_id, None)
        return self._registered.pop(adapter_id, None) is not None

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used registered adapter. `False` if there is none."""
        return bool(self._registered) and self.remove_adapter(next(iter(self._registered)))

    def remove_all_adapters(self) -> None:
        """No adapter registered, every slot free."""
        for adapter_id in list(self._registered):
            self.remove_adapter(adapter_id)

    def set_active_adapters(self, requests: Iterable[LoRARequest | None], mapping: LoRAMapping) -> None:
        """Prepare a step: load what is missing, make every requested adapter active, tell the kernels who uses what.

        Adapters that are not requested stay where they are as long as their place is not needed; requested ones never
        evict each other. A request object with `load_inplace` is loaded once, however many steps it is passed for.

        Args:
            requests: adapters of the running requests; `None` (no adapter) and repetitions are fine.
            mapping: adapter id of every token and every sampled row; each id must be requested (or 0).

        Raises:
            RuntimeError: more distinct adapters than slots.
            ValueError: two requests share an id but not name and path, a mapped id is not requested, the mapping does
                not fit the wrapper's buffers; or an adapter cannot be loaded (also FileNotFoundError, TypeError). Any
                of these changes nothing.
        """
        wanted = distinct_requests(requests)
        if len(wanted) > self.lora_slots:
            raise RuntimeError(
                f"{len(wanted)} distinct adapters requested in one step, but there are {self.lora_slots} slots "
                "(max_loras); run fewer distinct adapters together or raise LoRAConfig.max_loras"
            )
        self._check_mapping(mapping, wanted)
        reload = {i for i, request in wanted.items() if request.load_inplace and self._requests.get(i) is not request}
        self._register_requested(wanted, reload)
        for adapter_id in wanted:
            self.activate_adapter(adapter_id)
        self.set_adapter_mapping(mapping)

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Refill the step's metadata; skipped if neither the mapping nor the slot table changed since the last call.

        Raises:
            ValueError: the mapping names an id that is not active, or has more rows than the buffers; the previous
                metadata stay.
        """
        state = (mapping, tuple(self.lora_index_to_id))
        if state == self._last_mapping:
            return
        # one more than the slots, so that "no adapter" encodes as one past the last slot
        self.punica_wrapper.update_metadata(mapping, self.lora_index_to_id, self.lora_slots + 1, self.vocab_size)
        self._last_mapping = state

    def create_dummy_lora(self, adapter_id: int, rank: int) -> LoRAModel:
        """A zero adapter over all layers, for warm-up and graph capture: real cost, no effect on outputs.

        Args:
            rank: `1 <= rank <= max_lora_rank`; rounded up to a multiple of the tensor-parallel size when fully sharded.

        Raises:
            ValueError: rank out of range.
        """
        limit = self.lora_config.max_lora_rank
        if not 1 <= check_count("rank", rank) <= limit:
            raise ValueError(f"rank must be in [1, max_lora_rank={limit}], got {rank}")
        if self.lora_config.fully_sharded_loras:
            tp_size = max(layer.tp_size for layer in self.modules.values())
            rank = -(-rank // tp_size) * tp_size
        return LoRAModel(
            adapter_id,
            rank,
            {name: dummy_weights(name, layer, rank, self._dtype) for name, layer in self.modules.items()},
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _touch(self, adapter_id: int) -> None:
        """Mark a registered adapter as most recently used."""
        self._registered.move_to_end(adapter_id)
        if adapter_id in self._active:
            self._active.move_to_end(adapter_id)

    def _register(self, merged: LoRAModel) -> None:
        """Enter a merged, checked adapter; it replaces one of the same id, else the least recently used if all places
        are taken.
        """
        self.remove_adapter(merged.id)
        if len(self._registered) >= self.capacity:
            self.remove_oldest_adapter()
        self._registered[merged.id] = merged

    def _register_requested(self, wanted: Mapping[int, LoRARequest], reload: set[int]) -> None:
        """Register those of `wanted` that are not registered or in `reload`: all are loaded and checked before anything
        changes.
        """
        self._check_same_source(wanted, reload)
        loaded = {i: self._loader.load(wanted[i]) for i in wanted if i in reload or i not in self._registered}
        for adapter_id in wanted:  # none of them may now be the oldest
            if adapter_id in self._registered:
                self._touch(adapter_id)
        for adapter_id, merged in loaded.items():
            self._register(merged)
            self._requests[adapter_id] = wanted[adapter_id]

    def _write_slot(self, slot: int, lora: LoRAModel) -> None:
        try:
            for name, layer in self.modules.items():
                weights = lora.get_lora(name)
                if weights is None:
                    layer.reset_lora(slot)
                else:
                    layer.set_lora(slot, *slot_arguments(weights))
        except BaseException:
            for layer in self.modules.values():
                layer.reset_lora(slot)
            raise

    def _check_same_source(self, wanted: Mapping[int, LoRARequest], reload: set[int]) -> None:
        for adapter_id, request in wanted.items():
            known = self._requests.get(adapter_id)
            if known is not None and adapter_id not in reload and source(known) != source(request):
                raise ValueError(
                    f"adapter id {adapter_id} is registered as {source(known)}, now requested as {source(request)}; "
                    "use another id, or load_inplace=True to replace it"
                )

    def _check_mapping(self, mapping: LoRAMapping, wanted: Mapping[int, LoRARequest]) -> None:
        """What `set_adapter_mapping` would object to after the adapters have been made active."""
        if not isinstance(mapping, LoRAMapping):
            raise TypeError(f"mapping must be a LoRAMapping, got {type(mapping).__name__}")
        unknown = sorted({*mapping.index_mapping, *mapping.prompt_mapping} - {0, *wanted})
        if unknown:
            raise ValueError(
                f"mapping uses adapter ids {unknown}, which are not requested; requested: {sorted(wanted)}"
            )
        # which slots they get does not matter here: other ids, other slots
        self.punica_wrapper.check_metadata(mapping, list(wanted), self.lora_slots + 1, self.vocab_size)


def _resolve_dtype(lora_config: LoRAConfig, layers: Mapping[str, nn.Module]) -> torch.dtype:
    """Resolve `lora_config.lora_dtype` in place; `"auto"` becomes the dtype of the base weights."""
    first_weight = next(iter(layers.values())).weight
    lora_config.verify_with_model_config(first_weight)
    if not isinstance(lora_config.lora_dtype, torch.dtype):
        raise TypeError(f"lora_dtype must be a torch dtype by now, got {lora_config.lora_dtype!r}")
    return lora_config.lora_dtype
