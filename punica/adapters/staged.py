"""A registered adapter in the form in which it travels: one block of page-locked host memory.

A GPU can read only page-locked ("pinned") memory of the host by itself, and only a long read uses the whole link. So an
adapter that is registered for a GPU is packed once into a slot image (:mod:`punica.ops.slot_image`): this
rank's part of every matrix, in the order of the model's layers. The adapter's tensors then are views of that image, so
nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from punica.adapters.merging import slot_arguments
from punica.adapters.weights import LoRALayerWeights, LoRAModel, ModuleWeights, PackedLoRALayerWeights
from punica.layers import SlotPart, SlottedLayer
from punica.ops.slot_image import SlotMatrix, image_matrices, pack_image


class StagedAdapter(LoRAModel):
    """An adapter whose tensors are views of ``image`` (uint8, on the CPU).

    With tensor parallelism they are this rank's part of each matrix, otherwise the whole matrix; a module that the
    model computes in several slices has one pair per slice.
    """

    def __init__(self, lora: LoRAModel, loras: Mapping[str, ModuleWeights], image: Tensor) -> None:
        super().__init__(lora.id, lora.rank, loras)
        self.image = image


def slot_parts(modules: Mapping[str, SlottedLayer], lora: LoRAModel | None) -> dict[str, list[SlotPart]]:
    """This rank's matrices of one slot of every layer, in the order of ``modules``: those of ``lora``, else empty."""
    weights = {name: None if lora is None else lora.get_lora(name) for name in modules}
    return {
        name: layer.slot_parts(None, None) if (own := weights[name]) is None else layer.slot_parts(*slot_arguments(own))
        for name, layer in modules.items()
    }


def stage(
    modules: Mapping[str, SlottedLayer], lora: LoRAModel, dtype: torch.dtype, *, pin_memory: bool
) -> StagedAdapter:
    """Pack a merged, checked adapter. ``dtype`` is that of the slots; casting happens here, once."""
    parts = slot_parts(modules, lora)
    matrices = [SlotMatrix(part.part, part.rank) for of_layer in parts.values() for part in of_layer]
    image = pack_image(matrices, dtype, pin_memory=pin_memory)
    views = iter(image_matrices(image, len(matrices), dtype))
    loras: dict[str, ModuleWeights] = {}
    for name, of_layer in parts.items():
        own = [next(views) for _ in of_layer]
        if (weights := lora.get_lora(name)) is not None:
            loras[name] = _as_views(weights, own, modules[name].a_transposed)
    return StagedAdapter(lora, loras, image)


def _as_views(weights: ModuleWeights, views: list[Tensor | None], a_transposed: bool) -> ModuleWeights:
    """``weights`` with the tensors replaced by the views: first those of A, slice by slice, then those of B."""
    slices = len(views) // 2
    lora_a, lora_b = views[:slices], views[slices:]
    if a_transposed:
        lora_a = [None if a is None else a.t() for a in lora_a]
    if slices == 1 and isinstance(weights, LoRALayerWeights):
        return LoRALayerWeights(weights.module_name, weights.rank, weights.lora_alpha, lora_a[0], lora_b[0], scaling=1)
    return PackedLoRALayerWeights(weights.module_name, weights.rank, lora_a, lora_b)
