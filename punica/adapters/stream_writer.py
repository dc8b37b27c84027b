"""Adapters into slots on a GPU, beside the running model: section 5.2 of the paper, on a stream of its own.

    image in page-locked host memory --one kernel on the copy stream, through the link--> slots of all layers

Nothing here makes the host wait. What orders the two streams are events:

* *before a slot is overwritten*, the copy stream waits for the last step that could read its old content: the step
  that is running now if the slot belongs to it, else the end of the last step that used the slot, long ago perhaps;
* *before a step reads a slot*, its stream waits for the slot's latest copy.

So the copy of one adapter overlaps the decode steps of the others, and no kernel sees a half-written slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

import torch

from punica.adapters.slot_writer import CopyHandle
from punica.adapters.staged import StagedAdapter, slot_parts, stage
from punica.adapters.weights import LoRAModel
from punica.layers import SlottedLayer


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
    """The :class:`punica.adapters.slot_writer.SlotWriter` of a CUDA device.

    Args:
        modules: ``{name: LoRA layer}``; their slots exist and stay where they are.
        device: where the slots live.

    A step runs on the stream that is current when ``begin_step`` announces it; writes may be asked for under any
    stream. Steps share their metadata, so who changes streams between steps orders them. Both calls look events up, so
    neither belongs into the capture of a CUDA graph: they come before its replay. One writer is used by one thread.
    """

    def __init__(self, modules: Mapping[str, SlottedLayer], device: torch.device) -> None:
        from punica.ops.triton_ops.slot_write import SlotTable, write_slot  # importing punica must not need Triton

        self._modules = modules
        self._marked = {name: layer for name, layer in modules.items() if layer.skips_when_empty}
        self._device = device
        self._write_slot = write_slot
        empty = [part for parts in slot_parts(modules, None).values() for part in parts]
        self._table = SlotTable([part.slots for part in empty], [part.ranks for part in empty])
        self._step_stream = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(self._step_stream)  # the slots and the table are still being made
        self._reading: frozenset[int] = frozenset()  # slots of the step that runs or ran last
        self._last_read: dict[int, torch.cuda.Event] = {}  # of the other slots: the end of their last step
        self._written: dict[int, CopyEvent] = {}  # the latest copy into each slot
        self._in_flight: list[tuple[CopyEvent, torch.Tensor]] = []  # images that a kernel may still read

    def __del__(self) -> None:
        """Wait for the copies in flight: the images and slots that they use are about to be freed."""
        with suppress(AttributeError, RuntimeError):  # not built to the end; or CUDA has ended before this object
            self._stream.synchronize()

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Pack a merged adapter into page-locked memory; the result replaces it."""
        return stage(self._modules, lora, self._table.dtype, pin_memory=True)

    def host_bytes(self, lora: LoRAModel) -> int:
        """Size of a staged adapter's image in bytes. torch hands page-locked memory out in powers of two, so that the
        process holds up to twice as much for it.
        """
        return _image_of(lora).numel()

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Start filling ``slot`` on all layers with a staged adapter."""
        image = _image_of(lora)
        if slot in self._reading:
            self._stream.wait_event(self._step_stream.record_event())
        elif slot in self._last_read:
            self._stream.wait_event(self._last_read.pop(slot))
        try:
            with torch.cuda.stream(self._stream):
                self._write_slot(image, self._table, slot)
            copy = CopyEvent(self._stream.record_event(), self._device)
            self._in_flight.append((copy, image))
        except BaseException:
            self._stream.synchronize()  # nobody would know of a kernel that still reads the image
            raise
        self._written[slot] = copy
        for name, layer in self._marked.items():
            layer.mark_slot(slot, lora.check_lora_name(name))
        return copy

    def begin_step(self, slots: Collection[int]) -> None:
        """The next step on the current stream reads ``slots``: it waits for their copies, and later writes for it."""
        ended = self._step_stream.record_event()
        self._last_read |= dict.fromkeys(self._reading, ended)
        self._step_stream = torch.cuda.current_stream(self._device)
        self._reading = frozenset(slots)
        for slot in self._reading:
            self._last_read.pop(slot, None)
            copy = self._written.get(slot)
            if copy is not None and not copy.is_ready():
                copy.wait()
        self._in_flight = [(copy, image) for copy, image in self._in_flight if not copy.is_ready()]


def _image_of(lora: LoRAModel) -> torch.Tensor:
    if not isinstance(lora, StagedAdapter):
        raise TypeError(f"adapter {lora.id} is not staged; pass what stage() returned")
    return lora.image
