"""Packing the experts of one layer: from either spelling to the entries that its LoRA layer takes.

*Per expert*: a pair (A, B) for each expert and projection. *Stacked* (PEFT's `target_parameters`): one pair for all
experts, `A [E, r, in]` and `B [E, out, r]`, called `...experts.base_layer` and `...experts`, whichever of gate-and-up
and down PEFT wrapped first; their shapes tell which is which. Where the layer keeps gate and up apart, a stacked pair
is split: both take its A, and each its half of B. *By projection* (:mod:`punica.adapters.shared_experts`): one pair per
projection, in which a factor may be one for all experts; it is repeated here, without a copy. With expert parallelism
only this rank's experts are kept.
"""

from collections.abc import Callable, Collection, Mapping
from typing import cast

import torch
from torch import Tensor

from punica.adapters.shared_experts import PROJECTIONS, W1, W2, W3, W13
from punica.adapters.weights import Factor, ModuleWeights, stack_experts
from punica.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from punica.layers.packing import Slices
from punica.ops.quant import Fp8Matrix

BASE_LAYER = -1
"""Part number of `...experts.base_layer`; those of an expert's matrices start at 0, `...experts` itself has None."""
_APART = (
    "its gate and up are apart, and this model's adapters have them as one; set "
    "LoRAConfig(enable_mixed_moe_lora_format=True) to serve both kinds"
)


def group_experts(
    adapter_id: int, name: str, layer: FusedMoEWithLoRA, given: Mapping[int | None, ModuleWeights], parts: int
) -> ModuleWeights:
    """Collect the weights of layer `name`, one pair per name in `layer.names`.

    `given`: part number -> the adapter's weights; `parts`: matrices of all experts.

    Raises:
        ValueError: both spellings at once, a shape that fits no projection, another number of experts, or separate
            matrices for a layer that takes gate and up as one.
    """
    whole = [weights for part, weights in given.items() if part is None or part == BASE_LAYER]
    if whole and whole[0].is_packed:
        return ModuleWeights(name, whole[0].rank, whole[0].scaled())
    projections = {part: weights for part, weights in given.items() if part in PROJECTIONS.values()}
    if max(len(whole), len(projections)) not in (0, len(given)):
        raise ValueError(
            f"adapter {adapter_id} has {name!r} in two of the spellings stacked, per expert, by projection; keep one"
        )
    try:
        if projections:
            slices = _by_projection(projections, layer)
        else:
            slices = _stacked(whole, layer) if whole else _per_expert(given, layer, parts)
    except ValueError as error:
        raise ValueError(f"adapter {adapter_id}, module {name!r}: {error}") from error
    return ModuleWeights(name, max(weights.rank for weights in given.values()), slices)


def _per_expert(given: Mapping[int | None, ModuleWeights], layer: FusedMoEWithLoRA, parts: int) -> Slices:
    if isinstance(layer, FusedMoE3DWithLoRA):
        raise ValueError(_APART)
    pairs: Slices = [(None, None)] * parts
    for part, weights in given.items():
        (pairs[cast(int, part)],) = weights.scaled()
    w1, w2, w3 = (
        stack_experts([pairs[3 * expert + projection] for expert in layer.local_experts]) for projection in range(3)
    )
    return [w1, w2, w3 if layer.moe_config.is_act_and_mul else w1]


def _by_projection(given: Mapping[int | None, ModuleWeights], layer: FusedMoEWithLoRA) -> Slices:
    found: dict[int | None, tuple[Factor, Factor]] = {}
    for part, weights in given.items():
        ((a, b),) = weights.scaled()
        a, b = cast(Tensor, a), cast(Tensor, b)
        found[part] = _of_experts(weights, a, layer), _of_experts(weights, b, layer)
    if W13 in found and (W1 in found or W3 in found):
        raise ValueError("it has gate and up both as one and apart; keep one of the two")
    joined = isinstance(layer, FusedMoE3DWithLoRA)
    if joined and (W1 in found or W3 in found):
        raise ValueError(_APART)
    if W13 in found and not joined:
        found |= _split(found.pop(W13), layer)
    slices: Slices = [found.get(part, (None, None)) for part in (W13 if joined else W1, W2, W3)]
    return slices[: len(layer.names)]


def _of_experts(weights: ModuleWeights, factor: Tensor, layer: FusedMoEWithLoRA) -> Tensor:
    """Return a factor `[E, ...]` of this rank's experts; one of all of them is repeated, as a view."""
    if factor.shape[0] == 1:
        return factor.expand(layer.local_num_experts, -1, -1)
    _check_experts(weights, factor.shape[0], layer)
    return cast(Tensor, _local(factor, layer))


def _split(pair: tuple[Factor, Factor], layer: FusedMoEWithLoRA) -> dict[int | None, tuple[Factor, Factor]]:
    """Split gate-and-up: both take its A, each its half of B. Without a gate all of it is w1."""
    a, b = pair
    if not layer.moe_config.is_act_and_mul:
        return {W1: pair}
    return {W1: (a, _cut(b, lambda rows: rows.chunk(2, 1)[0])), W3: (a, _cut(b, lambda rows: rows.chunk(2, 1)[1]))}


def _stacked(whole: Collection[ModuleWeights], layer: FusedMoEWithLoRA) -> Slices:
    gated, hidden = layer.moe_config.is_act_and_mul, layer.hidden_size
    inner = layer.intermediate_size_per_partition * layer.tp_size
    sizes = {(hidden, 2 * inner if gated else inner): "w13", (inner, hidden): "w2"}
    found: dict[str, tuple[Factor, Factor]] = {}
    for weights in whole:
        ((a, b),) = cast(list[tuple[Factor, Factor]], weights.scaled())
        if a.ndim != 3:
            raise ValueError("weights of all experts must have a leading dimension, [E, r, in] and [E, out, r]")
        which = sizes.get((a.shape[2], b.shape[1]))
        if which is None or which in found:
            raise ValueError(
                f"A with {a.shape[2]} columns and B with {b.shape[1]} rows are none of gate-and-up and down, "
                f"{sorted(sizes)}, or are given twice"
            )
        _check_experts(weights, a.shape[0], layer)
        found[which] = _local(a, layer), _local(b, layer)
    slices: Slices = [found.get("w13", (None, None)), found.get("w2", (None, None)), (None, None)]
    if gated and "w13" in found and not isinstance(layer, FusedMoE3DWithLoRA):
        halves = _split(found["w13"], layer)
        slices[0], slices[2] = halves[W1], halves[W3]
    return slices[: len(layer.names)]


def _check_experts(weights: ModuleWeights, experts: int, layer: FusedMoEWithLoRA) -> None:
    if experts not in (layer.global_num_experts, layer.local_num_experts):
        raise ValueError(
            f"{weights.module_name!r} has {experts} experts of rank {weights.rank}, the rank in the adapter's config; "
            f"the model has {layer.global_num_experts}, this rank {layer.local_num_experts}"
        )


def _local(factor: Factor, layer: FusedMoEWithLoRA) -> Factor:
    """Select this rank's experts of a tensor over all experts; of this rank's alone it is returned as it is."""
    if factor.shape[0] == layer.local_num_experts:
        return factor
    mine = torch.tensor(layer.local_experts, device=factor.device)
    return _cut(factor, lambda experts: experts[mine])


def _cut(factor: Factor, part: Callable[[Tensor], Tensor]) -> Factor:
    return factor.cut(part) if isinstance(factor, Fp8Matrix) else part(factor)
