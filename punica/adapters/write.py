"""How an adapter gets into its slot: one interface, synchronous on the CPU and beside the running model on CUDA.

A slot write touches every LoRA layer of the model. On CUDA it must neither block the host nor be read half-written by
the step in flight (section 5.2 of the paper hides it behind decoding), so the manager does not write itself: it tells a
writer what belongs into which slot and which slots the next step reads, and the writer orders the two.

    image in page-locked host memory --one kernel on the copy stream, through the link--> slots of all layers

On CUDA nothing makes the host wait. What orders the two streams are events:

* *before a slot is overwritten*, the copy stream waits for the last step that could read its old content: the step
  that is running now if the slot belongs to it, else the end of the last step that used the slot, long ago perhaps;
* *before a step reads a slot*, its stream waits for the slot's latest copy.

So the copy of one adapter overlaps the decode steps of the others, and no kernel sees a half-written slot.
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
    """One slot write under way."""

    def is_ready(self) -> bool:
        """Whether the adapter lies in its slot; never waits."""

    def wait(self) -> None:
        """What the current stream does next comes after the copy. The host does not wait."""


class SlotWriter(Protocol):
    """Fills slots on all layers of a model."""

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Prepare a packed adapter, once, when it is registered; returns what the manager keeps and later writes."""

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Replace the slot's content on all layers by a staged adapter.

        Asynchronous on CUDA: behind every step that may still read the slot, before every step that
        :meth:`begin_step` announces from now on; the adapter may be forgotten meanwhile. If it raises, the slot
        counts as free, whatever it holds.
        """

    def begin_step(self, slots: Collection[int]) -> None:
        """The step that comes next on the current stream reads these slots."""

    def host_bytes(self, lora: LoRAModel) -> int:
        """Host memory that a staged adapter occupies, in bytes."""


def make_slot_writer(modules: Mapping[str, BaseLayerWithLoRA]) -> SlotWriter:
    """The writer for the device that the slots of these layers are on."""
    device = next(iter(modules.values())).device
    return StreamSlotWriter(modules, device) if device.type == "cuda" else LayerSlotWriter(modules)


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
        modules: `{name: LoRA layer}` of the model.
    """

    def __init__(self, modules: Mapping[str, BaseLayerWithLoRA]) -> None:
        self._modules = modules

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """The adapter as it is: its tensors already are where slots are filled from."""
        return lora

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Fill the slot of every layer; if one of them raises, the slot is cleared on all."""
        try:
            for name, layer in self._modules.items():
                layer.fill_slot(slot, lora.slices_of(name))
        except BaseException:
            for layer in self._modules.values():
                layer.reset_lora(slot)
            raise
        return ReadyCopy()

    def begin_step(self, slots: Collection[int]) -> None:
        """Nothing to order: every write has ended."""

    def host_bytes(self, lora: LoRAModel) -> int:
        """Bytes of the distinct storages behind the adapter's tensors: what two modules share counts once."""
        storages: dict[int, torch.UntypedStorage] = {}
        for weights in lora.loras.values():
            for factor in itertools.chain(*weights.slices):
                for t in [factor.values, factor.scale] if isinstance(factor, Fp8Matrix) else [factor]:
                    if t is not None:
                        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return sum(storage.nbytes() for storage in storages.values())


class CopyEvent:
    """The end of one copy."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_ready(self) -> bool:
        """Whether the slot is written; does not wait."""
        return self._event.query()

    def wait(self) -> None:
        """Let the current stream wait until the slot is written; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamSlotWriter:
    """The writer of a CUDA device.

    Args:
        modules: `{name: LoRA layer}`; their slots exist and stay where they are.
        device: where the slots live.

    A step runs on the stream that is current when `begin_step` announces it; writes may be asked for under any stream.
    Steps share their metadata, so who changes streams between steps orders them. Both calls look events up, so neither
    belongs into the capture of a CUDA graph: they come before its replay. One writer is used by one thread.
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
        self._reading: frozenset[int] = frozenset()  # slots of the step that runs or ran last
        self._last_read: dict[int, torch.cuda.Event] = {}  # of the other slots: the end of their last step
        self._written: dict[int, CopyEvent] = {}  # the latest copy into a slot, unless a step found it ended
        self._in_flight: list[tuple[CopyEvent, Tensor]] = []  # images that a kernel may still read

    def __del__(self) -> None:
        """Wait for the copies in flight: the images and slots that they use are about to be freed."""
        with suppress(AttributeError, RuntimeError):  # not built to the end; or CUDA has ended before this object
            self._stream.synchronize()

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Copy a packed adapter into page-locked memory; the result replaces it."""
        return stage(self._modules, lora, self._table.dtype, pin_memory=True)

    def host_bytes(self, lora: LoRAModel) -> int:
        """Size of a staged adapter's image in bytes. torch hands page-locked memory out in powers of two, so that the
        process holds up to twice as much for it.
        """
        return _image_of(lora).numel()

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Start filling `slot` on all layers with a staged adapter."""
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
            self._stream.synchronize()  # nobody would know of a kernel that still reads the image
            raise
        self._written[slot] = copied
        for name, layer in self._marked.items():
            layer.mark_slot(slot, lora.check_lora_name(name))
        return copied

    def begin_step(self, slots: Collection[int]) -> None:
        """The next step on the current stream reads `slots`: it waits for their copies, and later writes for it."""
        ended = self._step_stream.record_event()
        self._last_read |= dict.fromkeys(self._reading, ended)
        self._step_stream = torch.cuda.current_stream(self._device)
        self._reading = frozenset(slots)
        for slot in self._reading:
            self._last_read.pop(slot, None)
            copied = self._written.get(slot)
            if copied is not None and copied.is_ready():
                del self._written[slot]  # to ask the driver about each slot takes longer than all else here
            elif copied is not None:
                copied.wait()
        self._in_flight = [(copied, image) for copied, image in self._in_flight if not copied.is_ready()]


def _image_of(lora: LoRAModel) -> Tensor:
    if not isinstance(lora, StagedAdapter):
        raise TypeError(f"adapter {lora.id} is not staged; pass what stage() returned")
    return lora.image
