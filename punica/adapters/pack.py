"""Packing: from the modules of an adapter to the slices of the model's layers.

Adapters have `q_proj`, `k_proj`, `v_proj`; the model computes `qkv_proj`. Parts are packed under the runtime name, with
the scaling in B; absent parts stay `None`, zeros in the slot. The caller's adapter does not change.

The experts of a layer come in one of three spellings. *Per expert*: a pair (A, B) for each expert and projection.
*Stacked* (PEFT's `target_parameters`): pairs `A [E, r, in]`, `B [E, out, r]` under `...experts.base_layer` and
`...experts`, in whatever order PEFT wrapped gate-and-up and down; shapes tell which is which. A and B of PEFT before
0.19.1 are `[E, r, out]` and `[E, in, r]`: they are taken where the newer ones do not fit. *By projection*: one such
pair per projection, where all experts may share a factor. Where the layer keeps gate and up apart, both take the A of a
pair of both, and each its half of B. Only this rank's experts are kept.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from punica.adapters.check import all_finite
from punica.adapters.names import PROJECTIONS, W1, W2, W3, W13, sibling
from punica.adapters.weights import LoRAModel, ModuleWeights, stack_experts
from punica.adapters.wrap import NamedLayer, PackedMapping, is_in_target_modules
from punica.checks import clip
from punica.layers import BaseLayerWithLoRA, FusedMoE3DWithLoRA, FusedMoEWithLoRA
from punica.layers.packing import LoRAFactor, Slices
from punica.layers.utils import check_has_data
from punica.ops.quant import Fp8Matrix

BASE_LAYER = -1
"""Part number of `...experts.base_layer`; those of an expert's matrices start at 0, `...experts` itself has None."""
_WHOLE = (None, BASE_LAYER)
_APART = (
    "its gate and up are apart, and this model's adapters have them as one; set "
    "LoRAConfig(enable_mixed_moe_lora_format=True) to serve both kinds"
)


class AdapterPacker:
    """Packer of adapters for the LoRA layers of one model.

    An adapter that touches more than `target_modules` is refused. `fp8`: format of FP8 slots, in which adapters are
    quantised here, once. `most_tensors` bounds an adapter's: A, B and scales of every module, and base weights.
    """

    def __init__(
        self, wrapped: Sequence[NamedLayer[BaseLayerWithLoRA]], packed_modules_mapping: PackedMapping,
        target_modules: Collection[str] | None, fp8: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._fp8 = fp8
        self.takes_activated = False
        self._wrapped = {layer.names[0]: layer for layer in wrapped}
        self._place: dict[str, tuple[str, int | None]] = {}  # adapter's name -> layer, and which part (None: whole)
        for name, layer in self._wrapped.items():
            for i, part in enumerate(layer.parts):
                part_names = [sibling(alias, part) for alias in layer.names]
                if isinstance(layer.layer, FusedMoEWithLoRA) or any(
                    is_in_target_modules(own, target_modules, packed_modules_mapping) for own in part_names
                ):
                    self._place |= dict.fromkeys(part_names, (name, i))
        for name, layer in self._wrapped.items():  # a layer of that name comes before a part
            self._place |= dict.fromkeys(layer.names, (name, None))
            if isinstance(layer.layer, FusedMoEWithLoRA):
                ends = {"base_layer": BASE_LAYER, **PROJECTIONS}
                self._place |= {f"{alias}.{end}": (name, part) for alias in layer.names for end, part in ends.items()}
        self.most_tensors = 4 * len(self._place) + 64

    def pack(self, lora: LoRAModel, *, fits: bool = False) -> LoRAModel:
        """Return a new model with the same id: for every layer that it touches, the slices as the layer holds them.

        `fits`: :meth:`check` has accepted tensors of these names, types and shapes, and the numbers are finite, so that
        only what the scaling changed is checked here. ValueError: unknown modules, or none; a module given twice; a
        wrong shape, rank or size; a B that is not finite once it is scaled. TypeError: unsupported dtype, or a meta
        tensor. RuntimeError: a module without tensors (shell).
        """
        groups = self._groups(lora, fits)
        if not fits:
            self._check(lora.id, groups, is_loaded=False)
        is_finite = fits and self._fp8 is None and all(weights.scaling == 1 for weights in lora.loras.values())
        for name, weights in groups.items():
            slices, layer = weights.slices, self._wrapped[name].layer
            if not is_finite and not all(
                b is None or all_finite(b.scale if isinstance(b, Fp8Matrix) else b) for _, b in slices
            ):
                raise ValueError(f"adapter {lora.id}, module {name!r}: B contains NaN or inf after scaling")
            if self._fp8 is not None:  # scales belong to whole rows of A and B, so later cuts find them ready
                slices = [(self._quantised(a), self._quantised(b)) for a, b in slices]
            groups[name] = ModuleWeights(name, weights.rank, layer.to_slices(slices))
        packed = LoRAModel(lora.id, max((weights.rank for weights in groups.values()), default=lora.rank), groups)
        packed.invocation = lora.invocation
        return packed

    def _quantised(self, factor: LoRAFactor) -> LoRAFactor:
        return None if factor is None else Fp8Matrix.of(factor, cast(torch.dtype, self._fp8), check=False)

    def check(self, lora: LoRAModel) -> list[str]:
        """Check names, types and shapes; meta tensors will do. Return the layers adapted. Raises as :meth:`pack`."""
        groups = self._groups(lora, True)
        self._check(lora.id, groups, is_loaded=True)
        return [*groups]

    def _check(self, adapter_id: int, groups: Mapping[str, ModuleWeights], *, is_loaded: bool) -> None:
        """Apply each layer's rules for `set_lora`, so that activation cannot fail half-way."""
        for name, weights in groups.items():
            try:
                if not is_loaded:
                    check_has_data(weights.slices)
                self._wrapped[name].layer.check_slices(weights.slices)
            except (TypeError, ValueError) as error:
                raise type(error)(f"adapter {adapter_id}, module {name!r}: {error}") from error

    def _groups(self, lora: LoRAModel, is_loaded: bool) -> dict[str, ModuleWeights]:
        """Collect the parts that an adapter has of every layer, scaled: one pair per part, or the whole as it is.

        ValueError: unknown or ambiguous modules, or none; activated LoRA that is not accepted.
        """
        if lora.invocation is not None and not self.takes_activated:
            raise ValueError(
                f"adapter {lora.id} is activated LoRA (alora_invocation_tokens {clip(list(lora.invocation))}), which "
                "is served where LoRAModelManager.accept_activated_lora was called, as an engine does"
            )
        if not (lora.loras or is_loaded):  # one that is loaded may be of other ranks' experts alone
            raise ValueError(f"adapter {lora.id} has no modules; nothing of it matches the model")
        if unknown := sorted(lora.loras.keys() - self._place.keys()):
            raise ValueError(
                f"adapter {lora.id} has weights for {clip(unknown)}, which the model does not have or which "
                "LoRAConfig.target_modules leaves out; if it was saved inside of another model or wrapper, pass "
                "LoRARequest(weights_mapper={old: new})"
            )
        given: dict[str, dict[int | None, str]] = {}  # layer -> part -> name in the adapter
        for name, weights in lora.loras.items():
            if not isinstance(weights, ModuleWeights):
                raise TypeError(f"adapter {lora.id}: {name!r} must be ModuleWeights, got {type(weights).__name__}")
            layer, part = self._place[name]
            first = given.setdefault(layer, {}).setdefault(part, name)
            if first != name:
                raise ValueError(f"adapter {lora.id}: {first!r} and {name!r}, which are one and the same; keep one")
        if both := sorted(layer for layer, parts in given.items() if None in parts and parts.keys() - set(_WHOLE)):
            raise ValueError(f"adapter {lora.id} has {both} both whole and in parts; keep one of the two")
        return {layer: self._group(lora, layer, parts, is_loaded) for layer, parts in given.items()}

    def _group(self, lora: LoRAModel, name: str, given: Mapping[int | None, str], is_loaded: bool) -> ModuleWeights:
        """Collect the parts `{part: name in the adapter}` of one layer."""
        layer, parts = self._wrapped[name].layer, self._wrapped[name].parts
        own = {part: lora.loras[adapter_name] for part, adapter_name in given.items()}
        rank = max(weights.rank for weights in own.values())
        if isinstance(layer, FusedMoEWithLoRA):
            try:
                return ModuleWeights(name, rank, expert_slices(own, layer, len(parts), is_loaded))
            except ValueError as error:
                raise ValueError(f"adapter {lora.id}, module {name!r}: {error}") from error
        if None in own:
            return ModuleWeights(name, rank, own[None].scaled())
        slices: Slices = [(None, None)] * len(parts)
        for part, weights in own.items():
            if len(weights.slices) != 1:
                raise ValueError(
                    f"adapter {lora.id}: {given[part]!r} has {len(weights.slices)} slices, expected 1: give "
                    f"several under the name of the whole layer, {name!r}"
                )
            (slices[cast(int, part)],) = weights.scaled()
        return ModuleWeights(name, rank, slices)


def expert_slices(
    given: Mapping[int | None, ModuleWeights], layer: FusedMoEWithLoRA, parts: int, is_loaded: bool = False
) -> Slices:
    """Collect the weights of a layer's experts, one pair per name in `layer.names`, from those `given` by part;
    `parts`: matrices of all experts. `is_loaded`: of all, else this rank's alone will do. ValueError: no fit.
    """
    (first, *_) = given.values()
    is_whole, is_projection = None in given or BASE_LAYER in given, not given.keys().isdisjoint(PROJECTIONS.values())
    if is_whole and first.is_packed:
        return first.scaled()
    spelled = set(_WHOLE) if is_whole else set(PROJECTIONS.values())
    if (is_whole or is_projection) and given.keys() - spelled:
        raise ValueError("it is in two of the spellings stacked, per expert, by projection; keep one")
    is_joined = isinstance(layer, FusedMoE3DWithLoRA)
    if not is_whole and not is_projection:
        if is_joined:
            raise ValueError(_APART)
        pairs: Slices = [(None, None)] * parts
        for part, weights in given.items():
            (pairs[cast(int, part)],) = weights.scaled()
        w1, w2, w3 = (stack_experts([pairs[3 * expert + i] for expert in layer.local_experts]) for i in range(3))
        return [w1, w2, w3 if layer.moe_config.is_act_and_mul else w1]
    found: dict[int | None, tuple[Tensor, Tensor]] = {}
    stacks = {part: cast(tuple[Tensor, Tensor], weights.scaled()[0]) for part, weights in given.items()}
    if any(a.ndim != 3 for a, _ in stacks.values()):
        raise ValueError("weights of all experts must have a leading dimension, [E, r, in] and [E, out, r]")
    sizes = _sizes_of(layer) if is_whole else {}
    widths = [(a.shape[2], b.shape[1]) for a, b in stacks.values()]
    if any(pair not in sizes and pair[::-1] in sizes for pair in widths):
        # PEFT before 0.19.1 took a parameter's rows for inputs, and trained the transposed product
        for part, weights in given.items():  # before they are scaled, as the scaling belongs into B
            ((a, b),) = cast(list[tuple[Tensor, Tensor]], weights.slices)
            (stacks[part],) = cast(list[tuple[Tensor, Tensor]], replace(weights, slices=[(b.mT, a.mT)]).scaled())
    for part, (a, b) in stacks.items():
        which = _projection_of(a, b, sizes, found) if is_whole else part
        own_a, own_b = (_own(given[part], factor, layer, is_projection, is_loaded) for factor in (a, b))
        found[which] = own_a, own_b
    if W13 in found and (W1 in found or W3 in found):
        raise ValueError("it has gate and up both as one and apart; keep one of the two")
    if is_joined and (W1 in found or W3 in found):
        raise ValueError(_APART)
    if W13 in found and not is_joined:
        (a, b), is_gated = found.pop(W13), layer.moe_config.is_act_and_mul
        found[W1] = a, b.chunk(2, 1)[0] if is_gated else b
        if is_gated:
            found[W3] = a, b.chunk(2, 1)[1]
    slices: Slices = [found.get(part, (None, None)) for part in (W13 if is_joined else W1, W2, W3)]
    return slices[: len(layer.names)]


def _sizes_of(layer: FusedMoEWithLoRA) -> dict[tuple[int, int], int]:
    """Inputs and outputs of gate-and-up and of down."""
    hidden, inner = layer.hidden_size, layer.intermediate_size_per_partition * layer.tp_size
    return {(hidden, 2 * inner if layer.moe_config.is_act_and_mul else inner): W13, (inner, hidden): W2}


def _projection_of(a: Tensor, b: Tensor, sizes: Mapping[tuple[int, int], int], found: Collection[int | None]) -> int:
    """Tell gate-and-up from down by the sizes of a stacked pair."""
    which = sizes.get((a.shape[2], b.shape[1]))
    if which is None or which in found:
        raise ValueError(
            f"A with {a.shape[2]} columns and B with {b.shape[1]} rows are none of gate-and-up and down, "
            f"{sorted(sizes)}, or are given twice"
        )
    return which


def _own(
    weights: ModuleWeights, factor: Tensor, layer: FusedMoEWithLoRA, may_be_shared: bool, is_loaded: bool
) -> Tensor:
    """Return this rank's experts of a factor `[E, ...]`; one of all experts is repeated, as a view."""
    experts, own, every = factor.shape[0], layer.local_num_experts, layer.global_num_experts
    if may_be_shared and experts == 1:
        return factor.expand(own, -1, -1)
    if experts != every and (is_loaded or experts != own):
        raise ValueError(
            f"{weights.module_name!r} has {experts} experts of rank {weights.rank}, the rank in the adapter's config; "
            f"the model has {every}, this rank {own}"
        )
    return factor if experts == own else factor[torch.tensor(layer.local_experts, device=factor.device)]
