"""Packing the experts of one layer: from either spelling to the lists that its LoRA layer takes.

*Per expert*: a pair (A, B) for each expert and projection. *Stacked* (PEFT's `target_parameters`): one pair for all
experts, called `...experts.base_layer` and `...experts`, whichever of gate-and-up and down PEFT wrapped first; their
shapes tell which is which. Where the layer keeps gate and up apart, a stacked pair is split: both take its A, and each
its half of B. With expert parallelism only this rank's experts are kept.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from punica.adapters.lora_model import LoRAModel, ModuleWeights
from punica.adapters.weights import LoRALayerWeights, PackedLoRALayerWeights, StackedLoRALayerWeights
from punica.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from punica.layers.packing import LoRAFactor
from punica.ops.quant import Fp8Matrix

Factor = Tensor | Fp8Matrix
BASE_LAYER = -1
"""Part number of `...experts.base_layer`; those of an expert's matrices start at 0, `...experts` itself has None."""


def pack_experts(
    lora: LoRAModel, name: str, layer: FusedMoEWithLoRA, given: Mapping[int | None, str], parts: int
) -> ModuleWeights:
    """The weights of layer `name`. `given`: part number -> how the adapter calls it; `parts`: matrices of all experts.

    Raises:
        ValueError: both spellings at once, a shape that fits no projection, another number of experts, or separate
            matrices for a layer that wants gate and up as one.
    """
    whole = [own for part, own in given.items() if part is None or part == BASE_LAYER]
    first = lora.loras[whole[0]] if whole else None
    if isinstance(first, PackedLoRALayerWeights):
        return first
    if whole and len(whole) < len(given):
        raise ValueError(f"adapter {lora.id} has {name!r} both stacked and per expert; keep one of the two")
    try:
        if whole:
            return _pack_stacked([_weights_of(lora, own) for own in whole], name, layer)
        members: list[LoRALayerWeights | None] = [None] * parts
        for part, own in given.items():
            members[part or 0] = _weights_of(lora, own)
        return _pack_separate(members, name, layer)
    except ValueError as error:
        raise ValueError(f"adapter {lora.id}, module {name!r}: {error}") from error


def _weights_of(lora: LoRAModel, own: str) -> LoRALayerWeights:
    weights = lora.loras[own]
    if not isinstance(weights, LoRALayerWeights):
        raise TypeError(f"adapter {lora.id}: {own!r} must be LoRALayerWeights, got {type(weights).__name__}")
    return copy.copy(weights)  # tensors are shared, `optimize` makes a new B


def _pack_separate(
    members: list[LoRALayerWeights | None], name: str, layer: FusedMoEWithLoRA
) -> PackedLoRALayerWeights:
    if isinstance(layer, FusedMoE3DWithLoRA):
        raise ValueError(
            "its gate and up are apart, and this model's adapters have them as one; set "
            "LoRAConfig(enable_mixed_moe_lora_format=True) to serve both kinds"
        )
    local = [members[3 * expert + i] for expert in layer.local_experts for i in range(3)]
    if not any(local):  # only experts of other ranks
        return PackedLoRALayerWeights(name, 1, [None] * 3, [None] * 3)
    return PackedLoRALayerWeights.pack_moe(local, name, not layer.moe_config.is_act_and_mul)


def _pack_stacked(members: list[LoRALayerWeights], name: str, layer: FusedMoEWithLoRA) -> PackedLoRALayerWeights:
    gated, hidden = layer.moe_config.is_act_and_mul, layer.hidden_size
    inner = layer.intermediate_size_per_partition * layer.tp_size
    sizes = {(hidden, 2 * inner if gated else inner): "w13", (inner, hidden): "w2"}
    found: dict[str, tuple[Factor, Factor]] = {}
    for member in members:
        if not isinstance(member, StackedLoRALayerWeights):
            raise ValueError("weights of all experts must be StackedLoRALayerWeights")
        a, b = member.by_expert()
        which = sizes.get((a.shape[2], b.shape[1]))
        if which is None or which in found:
            raise ValueError(
                f"A with {a.shape[2]} columns and B with {b.shape[1]} rows are none of gate-and-up and down, "
                f"{sorted(sizes)}, or are given twice"
            )
        found[which] = _local(a, member, layer), _local(b, member, layer)
    rank = max(member.rank for member in members)
    nothing = (None, None)
    w13, w2 = found.get("w13", nothing), found.get("w2", nothing)
    if isinstance(layer, FusedMoE3DWithLoRA):
        return PackedLoRALayerWeights(name, rank, [w13[0], w2[0]], [w13[1], w2[1]])
    gate: LoRAFactor = w13[1]
    up: LoRAFactor = None
    if gated and w13[1] is not None:
        gate, up = _cut(w13[1], lambda rows: rows.chunk(2, 1)[0]), _cut(w13[1], lambda rows: rows.chunk(2, 1)[1])
    return PackedLoRALayerWeights(name, rank, [w13[0], w2[0], None if up is None else w13[0]], [gate, w2[1], up])


def _cut(factor: Factor, part: Callable[[Tensor], Tensor]) -> Factor:
    return factor.cut(part) if isinstance(factor, Fp8Matrix) else part(factor)


def _local(factor: Factor, member: StackedLoRALayerWeights, layer: FusedMoEWithLoRA) -> Factor:
    """This rank's experts of a tensor over all experts; of this rank's already as it is."""
    experts = member.num_experts
    if experts == layer.global_num_experts and experts != layer.local_num_experts:
        mine = torch.tensor(layer.local_experts, device=factor.device)
        return _cut(factor, lambda experts: experts[mine])
    if experts != layer.local_num_experts:
        raise ValueError(
            f"{member.module_name!r} has {experts} experts of rank {member.rank}, the rank in the adapter's config; "
            f"the model has {layer.global_num_experts}, this rank {layer.local_num_experts}"
        )
    return factor
