"""How an adapter gets into its slot: one interface, synchronous on the CPU and asynchronous on CUDA.

A slot write touches every LoRA layer of the model. On CUDA it must neither block the host nor be read half-written by
the step in flight (section 5.2 of the paper hides it behind decoding), so the manager does not write itself: it tells a
writer what belongs into which slot and which slots the next step reads, and the writer orders the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from punica.adapters.merging import slot_arguments
from punica.adapters.weights import LoRAModel, PackedLoRALayerWeights
from punica.layers import SlottedLayer


class CopyHandle(Protocol):
    """One slot write under way."""

    def is_ready(self) -> bool:
        """Whether the adapter lies in its slot; never waits."""
        ...

    def wait(self) -> None:
        """What the current stream does next comes after the copy. The host does not wait."""
        ...


class SlotWriter(Protocol):
    """Fills slots on all layers of a model."""

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Prepare a merged adapter, once, when it is registered; returns what the manager keeps and later writes."""
        ...

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Replace the slot's content on all layers by a staged adapter.

        Asynchronous on CUDA: behind every step that may still read the slot, before every step that
        :meth:`begin_step` announces from now on; the adapter may be forgotten meanwhile. If it raises, the slot
        counts as free, whatever it holds.
        """
        ...

    def begin_step(self, slots: Collection[int]) -> None:
        """The step that comes next on the current stream reads these slots."""
        ...

    def host_bytes(self, lora: LoRAModel) -> int:
        """Host memory that a staged adapter occupies, in bytes."""
        ...


class ReadyCopy:
    """The handle of a write that is done when it returns."""

    def is_ready(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class LayerSlotWriter:
    """Writes layer by layer, on the spot: the writer for CPU devices.

    Args:
        modules: ``{name: LoRA layer}`` of the model.
    """

    def __init__(self, modules: Mapping[str, SlottedLayer]) -> None:
        self._modules = modules

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """The adapter as it is: its tensors already are where slots are filled from."""
        return lora

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Fill the slot of every layer; if one of them raises, the slot is cleared on all."""
        try:
            for name, layer in self._modules.items():
                weights = lora.get_lora(name)
                if weights is None:
                    layer.reset_lora(slot)
                else:
                    layer.set_lora(slot, *slot_arguments(weights))
        except BaseException:
            for layer in self._modules.values():
                layer.reset_lora(slot)
            raise
        return ReadyCopy()

    def begin_step(self, slots: Collection[int]) -> None:
        """Nothing to order: every write has ended."""

    def host_bytes(self, lora: LoRAModel) -> int:
        """Bytes of the distinct storages behind the adapter's tensors: what two modules share counts once."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(lora)}
        return sum(storage.nbytes() for storage in storages.values())


def make_slot_writer(modules: Mapping[str, SlottedLayer]) -> SlotWriter:
    """The writer for the device that the slots of these layers are on."""
    device = next(iter(modules.values())).device
    if device.type == "cuda":
        from punica.adapters.stream_writer import StreamSlotWriter  # the CPU path needs neither CUDA nor Triton

        return StreamSlotWriter(modules, device)
    return LayerSlotWriter(modules)


def _tensors(lora: LoRAModel) -> list[torch.Tensor]:
    """Every A and B of a merged adapter."""
    tensors: list[torch.Tensor | None] = []
    for weights in lora.loras.values():
        if isinstance(weights, PackedLoRALayerWeights):
            tensors += [*weights.lora_a, *weights.lora_b]
        else:
            tensors += weights.pair()
    return [tensor for tensor in tensors if tensor is not None]
