"""Writers of slots: synchronous on a CPU, asynchronous beside the running model on CUDA.

On CUDA a write is hidden behind decoding (section 5.2 of the paper). This rank's part of every matrix is in one image
in page-locked host memory (:mod:`punica.ops.slot_image`), since only long reads use the whole link; one kernel on the
copy stream reads it and fills the slots of all layers. The host never waits; events order the two streams:

* *before a slot is overwritten*, the copy stream waits for the last step that could read it: the running one if the
  slot belongs to it, else the end of the last step that used the slot;
* *before a step reads a slot*, its stream waits for the slot's latest copy.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from punica.adapters.weights import LoRAModel, ModuleWeights
from punica.layers import BaseLayerWithLoRA, SlotPart
from punica.layers.packing import LoRAFactor, Slices
from punica.ops.quant import Fp8Matrix
from punica.ops.slot_image import image_matrices, pack_image


class CopyHandle:
    """A slot write under way: what a CUDA stream was given up to here; without a stream it has ended."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream, self._event = stream, None if stream is None else stream.record_event()

    def is_ready(self) -> bool:
        """Tell if the slot is written; never waits."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Make the current stream wait for the copy; the host does not."""
        if self._stream is not None and self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)


_ENDED = CopyHandle()


class LayerSlotWriter:
    """Writer of slots on all layers of a model; synchronous, layer by layer, from an adapter's own tensors."""

    def __init__(self, modules: Mapping[str, BaseLayerWithLoRA]) -> None:
        self._modules = modules

    def stage(self, lora: LoRAModel) -> LoRAModel:
        """Prepare a packed adapter, once, when it is registered; return the one to keep and to write."""
        return lora

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        """Replace the slot's content on all layers by a staged adapter; if a layer raises, the slot is cleared.

        Asynchronous on CUDA: after every step that may still read the slot, before every later :meth:`begin_step`; the
        adapter may be dropped meanwhile. If it raises, the slot counts as free, whatever its content.
        """
        try:
            for name, layer in self._modules.items():
                weights = lora.loras.get(name)
                layer.fill_slot(slot, None if weights is None else weights.slices)
        except BaseException:
            for layer in self._modules.values():
                layer.reset_lora(slot)
            raise
        return _ENDED

    def begin_step(self, slots: Collection[int]) -> None:
        """Order the next step on the current stream, which reads these slots, after their copies."""


SlotWriter = LayerSlotWriter  # the type of all writers


class StreamSlotWriter(LayerSlotWriter):
    """Asynchronous writer for a CUDA device, used by one thread; the slots stay at their addresses.

    A step runs on the stream that is current in `begin_step`; a caller that changes streams between steps orders them.
    `write` may be called under any stream. Both come before the replay of a CUDA graph, never inside of one.
    """

    def __init__(self, modules: Mapping[str, BaseLayerWithLoRA], device: torch.device) -> None:
        from punica.ops.triton_ops.slot_write import SlotTable, write_slot  # importing punica must not need Triton

        super().__init__(modules)
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
        self._written: dict[int, CopyHandle] = {}  # latest copy into each slot, until a step finds it done
        self._in_flight: list[tuple[CopyHandle, Tensor]] = []  # images that a kernel may still read

    def __del__(self) -> None:
        """Wait for the copies in flight, whose images and slots are about to be freed."""
        with suppress(AttributeError, RuntimeError):  # not built to the end; or CUDA has ended before this object
            self._stream.synchronize()

    def stage(self, lora: LoRAModel) -> LoRAModel:
        with torch.cuda.device(self._device):  # in whose context memory is locked, whatever thread this is
            return stage(self._modules, lora, self._table.dtype, pin_memory=True)

    def write(self, slot: int, lora: LoRAModel) -> CopyHandle:
        if (image := lora.image) is None:
            raise TypeError(f"adapter {lora.id} is not staged; pass what stage() returned")
        if slot in self._reading:
            self._stream.wait_event(self._step_stream.record_event())
        elif slot in self._last_read:
            self._stream.wait_event(self._last_read.pop(slot))
        try:
            with torch.cuda.stream(self._stream):
                self._write_slot(image, self._table, slot)
            copied = CopyHandle(self._stream)
            self._in_flight.append((copied, image))
        except BaseException:
            self._stream.synchronize()  # a launched kernel may still read the image
            raise
        self._written[slot] = copied
        for name, layer in self._marked.items():
            layer.mark_slot(slot, lora.check_lora_name(name))
        return copied

    def begin_step(self, slots: Collection[int]) -> None:
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


def make_slot_writer(modules: Mapping[str, BaseLayerWithLoRA]) -> SlotWriter:
    device = next(iter(modules.values())).device
    return StreamSlotWriter(modules, device) if device.type == "cuda" else LayerSlotWriter(modules)


def stage(
    modules: Mapping[str, BaseLayerWithLoRA], lora: LoRAModel, dtype: torch.dtype, *, pin_memory: bool
) -> LoRAModel:
    """Copy this rank's part of every matrix into an image, of which the result has views. `dtype` is that of the slots
    (uint8 for FP8: values and scales as bytes), to which matrices are cast and turned here, once.
    """
    parts = {name: layer.slot_parts(lora.slices_of(name)) for name, layer in modules.items()}
    all_parts = [part for of_layer in parts.values() for part in of_layer]
    image = pack_image([(one.part, one.rank) for one in map(SlotPart.stored, all_parts)], dtype, pin_memory=pin_memory)
    views: list[Tensor | None] = []  # of the image, as the layers take them
    for part, matrix in zip(all_parts, image_matrices(image, len(all_parts), dtype), strict=True):
        if matrix is not None:
            matrix = matrix.view(part.slots.dtype) if part.fp8 else matrix
            matrix = matrix if part.row_major else matrix.T
        views.append(matrix)
    loras: dict[str, ModuleWeights] = {}
    for name, of_layer in parts.items():
        own, views = views[: len(of_layer)], views[len(of_layer) :]
        if (weights := lora.get_lora(name)) is not None:
            loras[name] = ModuleWeights(name, weights.rank, _as_slices(own, weights.slices, of_layer[0].fp8))
    staged = LoRAModel(lora.id, lora.rank, loras)
    staged.image, staged.version, staged.invocation = image, lora.version, lora.invocation
    return staged


def _as_slices(views: list[Tensor | None], slices: Slices, fp8: bool) -> Slices:
    factors: list[LoRAFactor] = list(views)
    if fp8:  # values of all, then their scales: of experts [E, rows], of others [rows, 1]
        half = len(views) // 2
        of_experts = any(a is not None and a.ndim == 3 for a, _ in slices)
        factors = [
            None if values is None or scale is None
            else Fp8Matrix(values.view(*scale.shape, -1), scale) if of_experts else Fp8Matrix(values, scale[:, 0])
            for values, scale in zip(views[:half], views[half:], strict=True)
        ]  # fmt: skip
    half = len(factors) // 2
    return list(zip(factors[:half], factors[half:], strict=True))
