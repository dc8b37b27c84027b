"""Writers of slots: synchronous on a CPU, asynchronous beside the running model on CUDA.

A slot write touches every LoRA layer of the model. On CUDA it is hidden behind decoding (section 5.2 of the paper):

    image in page-locked host memory --one kernel on the copy stream, through the link--> slots of all layers

The host never waits; events order the two streams:

* *before a slot is overwritten*, the copy stream waits for the last step that could read it: the running one if the
  slot belongs to it, else the end of the last step that used the slot;
* *before a step reads a slot*, its stream waits for the slot's latest copy.

So the copy of one adapter overlaps the decode steps of others, and no kernel reads a half-written slot.
"""

import itertools
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from punica.adapters.lora_model import LoRAModel
from punica.adapters.pack import StagedAdapter, stage
from punica.layers import BaseLayerWithLoRA
from punica.ops.quant import Fp8Matrix


class CopyHandle(Protocol):
    """A slot write under way."""

    def is_ready(self) -> bool:
        """Tell if the slot is written; never waits."""

    def wait(self) -> None:
        """Make the current stream wait for the copy; the host does not."""


class SlotWriter(Protocol):
    """Interface of what fills slots on all layers of a model."""

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Prepare a packed adapter, once, when it is registered; return the one to keep and to write."""

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Replace the slot's content on all layers by a staged adapter.

        Asynchronous on CUDA: after every step that may still read the slot, before every later :meth:`begin_step`; the
        adapter may be dropped meanwhile. If it raises, the slot counts as free, whatever its content.
        """

    def begin_step(self, slots: Collection[int]) -> None:
        """Order the next step on the current stream, which reads these slots, after their copies."""

    def host_bytes(self, lora: LoRAModel) -> int:
        """Return the host memory of a staged adapter, in bytes."""


def make_slot_writer(modules: Mapping[str, BaseLayerWithLoRA]) -> SlotWriter:
    """Build the writer for the device of these layers' slots."""
    device = next(iter(modules.values())).device
    return StreamSlotWriter(modules, device) if device.type == "cuda" else LayerSlotWriter(modules)


class ReadyCopy:
    """Handle of a synchronous write."""

    def is_ready(self) -> bool:
        """Return true."""
        return True

    def wait(self) -> None:
        """Return at once."""


class LayerSlotWriter:
    """Synchronous writer for CPU devices, layer by layer.

    Args:
        modules: `{name: LoRA layer}` of the model.
    """

    def __init__(self, modules: Mapping[str, BaseLayerWithLoRA]) -> None:
        self._modules = modules

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Return the adapter as it is: slots are filled from its own tensors."""
        return lora

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Fill the slot of every layer; if one raises, the slot is cleared on all."""
        try:
            for name, layer in self._modules.items():
                layer.fill_slot(slot, lora.slices_of(name))
        except BaseException:
            for layer in self._modules.values():
                layer.reset_lora(slot)
            raise
        return ReadyCopy()

    def begin_step(self, slots: Collection[int]) -> None:
        """Do nothing: every write has ended."""

    def host_bytes(self, lora: LoRAModel) -> int:
        """Return the bytes of the distinct storages behind the adapter's tensors."""
        storages: dict[int, torch.UntypedStorage] = {}
        for weights in lora.loras.values():
            for factor in itertools.chain(*weights.slices):
                for t in [factor.values, factor.scale] if isinstance(factor, Fp8Matrix) else [factor]:
                    if t is not None:
                        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return sum(storage.nbytes() for storage in storages.values())


class CopyEvent:
    """Handle of a copy on the copy stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_ready(self) -> bool:
        """Tell if the slot is written; does not wait."""
        return self._event.query()

    def wait(self) -> None:
        """Make the current stream wait for the copy; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamSlotWriter:
    """Asynchronous writer for a CUDA device, used by one thread.

    Args:
        modules: `{name: LoRA layer}`; their slots exist and stay at their addresses.
        device: of the slots.

    A step runs on the stream that is current in `begin_step`; `write` may be called under any stream. Steps share their
    metadata, so a caller that changes streams between steps orders them. Neither call may be captured in a CUDA graph;
    they come before its replay.
    """

    def __init__(self, modules: Mapping[str, BaseLayerWithLoRA], device: torch.device) -> None:
        from punica.ops.triton_ops.slot_write import SlotTable, write_slot  # importing punica must not need Triton

        self._modules = modules
        self._marked = {name: layer for name, layer in modules.items() if layer.skips_when_empty}
        self._device = device
        self._write_slot = write_slot
        empty = [part.stored() for layer in modules.values() for part in layer.slot_parts()]
        self._table = SlotTable([part.slots for part in empty], [part.ranks for part in empty])
        self._step_stream = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(self._step_stream)  # the slots and the table are still being made
        self._reading: frozenset[int] = frozenset()  # slots of the latest step
        self._last_read: dict[int, torch.cuda.Event] = {}  # end of the last step of each other slot
        self._written: dict[int, CopyEvent] = {}  # latest copy into each slot, until a step finds it done
        self._in_flight: list[tuple[CopyEvent, Tensor]] = []  # images that a kernel may still read

    def __del__(self) -> None:
        """Wait for the copies in flight, whose images and slots are about to be freed."""
        with suppress(AttributeError, RuntimeError):  # not built to the end; or CUDA has ended before this object
            self._stream.synchronize()

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Copy a packed adapter into page-locked memory."""
        with torch.cuda.device(self._device):  # in whose context memory is locked, whatever thread this is
            return stage(self._modules, lora, self._table.dtype, pin_memory=True)

    def host_bytes(self, lora: LoRAModel) -> int:
        """Return the size of a staged adapter's image in bytes."""
        return _image_of(lora).numel()

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Launch the copy of a staged adapter into `slot` on all layers."""
        image = _image_of(lora)
        if slot in self._reading:
            self._stream.wait_event(self._step_stream.record_event())
        elif slot in self._last_read:
            self._stream.wait_event(self._last_read.pop(slot))
        try:
            with torch.cuda.stream(self._stream):
                self._write_slot(image, self._table, slot)
            copied = CopyEvent(self._stream.record_event(), self._device)
            self._in_flight.append((copied, image))
        except BaseException:
            self._stream.synchronize()  # a launched kernel may still read the image
            raise
        self._written[slot] = copied
        for name, layer in self._marked.items():
            layer.mark_slot(slot, lora.check_lora_name(name))
        return copied

    def begin_step(self, slots: Collection[int]) -> None:
        """Make the next step on the current stream wait for the copies of `slots`, and later writes for the step."""
        ended = self._step_stream.record_event()
        self._last_read |= dict.fromkeys(self._reading, ended)
        self._step_stream = torch.cuda.current_stream(self._device)
        self._reading = frozenset(slots)
        for slot in self._reading:
            self._last_read.pop(slot, None)
            copied = self._written.get(slot)
            if copied is not None and copied.is_ready():
                del self._written[slot]  # event queries dominate the cost of this call
            elif copied is not None:
                copied.wait()
        self._in_flight = [(copied, image) for copied, image in self._in_flight if not copied.is_ready()]


def _image_of(lora: LoRAModel) -> Tensor:
    if not isinstance(lora, StagedAdapter):
        raise TypeError(f"adapter {lora.id} is not staged; pass what stage() returned")
    return lora.image
