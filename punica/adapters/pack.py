"""Packing: from the modules that an adapter knows to what the wrapped layers take, and on to one block of memory.

Adapters know `q_proj`, `k_proj`, `v_proj`; the model computes `qkv_proj`. The parts that an adapter has are packed
under the runtime name, with the scaling inside B; absent parts stay `None` (their part of the slot stays zero). Nothing
of this changes the caller's adapter.

A GPU can read only page-locked ("pinned") memory of the host by itself, and only a long read uses the whole link. So
what is registered for a GPU is packed once more, this rank's part of every matrix in the order of the model's layers,
into a slot image (:mod:`punica.ops.slot_image`).
"""

import copy
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from punica.adapters.check import check_fits
from punica.adapters.lora_model import LoRAModel, ModuleWeights
from punica.adapters.pack_experts import BASE_LAYER, pack_experts
from punica.adapters.weights import LoRALayerWeights, PackedLoRALayerWeights
from punica.adapters.wrap import NamedLayer, PackedMapping, is_in_target_modules, sibling
from punica.checks import clip
from punica.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from punica.layers.base import SlotPart
from punica.layers.packing import LoRAFactor
from punica.ops.quant import Fp8Matrix
from punica.ops.slot_image import SlotMatrix, image_matrices, pack_image


class AdapterPacker:
    """Prepares adapters for one wrapped model.

    Args:
        wrapped: the model's LoRA layers and all names that adapters may have trained them under.
        packed_modules_mapping: `{runtime suffix: adapter-visible parts}`.
        target_modules: deployment filter; an adapter that touches more is refused rather than served incompletely.
        fp8: the format of FP8 slots: adapters are quantised here, once (`None`: other slots).
    """

    def __init__(
        self,
        wrapped: Sequence[NamedLayer[BaseLayerWithLoRA]],
        packed_modules_mapping: PackedMapping,
        target_modules: Collection[str] | None,
        fp8: torch.dtype | None = None,
    ) -> None:
        self._fp8 = fp8
        self._wrapped = {layer.names[0]: layer for layer in wrapped}
        self._place: dict[str, tuple[str, int | None]] = {}  # adapter's name -> layer, and which part (None: whole)
        for name, layer in self._wrapped.items():
            for i, part in enumerate(layer.parts):
                part_names = [sibling(alias, part) for alias in layer.names]
                let_through = (
                    isinstance(layer.layer, FusedMoEWithLoRA)
                    or is_in_target_modules(own, target_modules, packed_modules_mapping)
                    for own in part_names
                )
                if any(let_through):
                    self._place |= dict.fromkeys(part_names, (name, i))
        for name, layer in self._wrapped.items():  # a layer of that name comes before a part
            self._place |= dict.fromkeys(layer.names, (name, None))
            if isinstance(layer.layer, FusedMoEWithLoRA):
                self._place |= {f"{alias}.base_layer": (name, BASE_LAYER) for alias in layer.names}

    def pack(self, lora: LoRAModel) -> LoRAModel:
        """A new model with the same id, keyed by runtime names, which every target layer will accept.

        Raises:
            ValueError: unknown modules, no module at all, a module given twice (under two of its names, or whole and in
                parts), a wrong shape, rank or size, or a B that holds NaN or inf once it is scaled.
            TypeError: unsupported dtype. RuntimeError: a module without tensors (shell).
        """
        packed = self.check(lora)
        if self._fp8 is not None:
            packed = {name: _quantised(weights, self._fp8) for name, weights in packed.items()}
        return LoRAModel(lora.id, max(weights.rank for weights in packed.values()), packed)

    def check(self, lora: LoRAModel) -> dict[str, ModuleWeights]:
        """What :meth:`pack` makes of the modules before it quantises; meta tensors will do. Raises as that."""
        packed = {name: self._pack_module(lora, name, given) for name, given in self._by_layer(lora).items()}
        for name, weights in packed.items():
            check_fits(lora.id, name, *weights.pair(), self._wrapped[name].layer)
        return packed

    @property
    def most_tensors(self) -> int:
        """More tensors than an adapter of this model can have: A and B of every module, their scales, and what PEFT
        saves along with an embedding.
        """
        return 4 * len(self._place) + 64

    def _by_layer(self, lora: LoRAModel) -> dict[str, dict[int | None, str]]:
        """`{layer: {part: how the adapter calls it}}`."""
        if not lora.loras:
            raise ValueError(f"adapter {lora.id} has no modules; nothing of it matches the model")
        if unknown := sorted(lora.loras.keys() - self._place.keys()):
            raise ValueError(
                f"adapter {lora.id} has weights for {clip(unknown)}, which the model does not have or which "
                "LoRAConfig.target_modules leaves out"
            )
        given: dict[str, dict[int | None, str]] = {}
        for name in lora.loras:
            layer, part = self._place[name]
            first = given.setdefault(layer, {}).setdefault(part, name)
            if first != name:
                raise ValueError(
                    f"adapter {lora.id} has {first!r} and {name!r}, which are one and the same module of the model; "
                    "keep one of the two"
                )
        whole = (None, BASE_LAYER)
        if both := sorted(
            layer for layer, parts in given.items() if None in parts and any(part not in whole for part in parts)
        ):
            raise ValueError(f"adapter {lora.id} has {both} both whole and in parts; keep one of the two")
        return given

    def _pack_module(self, lora: LoRAModel, name: str, given: Mapping[int | None, str]) -> ModuleWeights:
        """The weights of one layer; one whole pair for a packed module is a list of one, which the layer splits."""
        layer, n_parts = self._wrapped[name].layer, len(self._wrapped[name].parts)
        if isinstance(layer, FusedMoEWithLoRA):
            return pack_experts(lora, name, layer, given, n_parts)
        whole = None if None not in given else lora.loras[given[None]]
        if isinstance(whole, PackedLoRALayerWeights):
            return whole
        members: list[LoRALayerWeights | None] = [None] * (n_parts if whole is None else 1)
        for part, own_name in given.items():
            weights = lora.loras[own_name]
            if not isinstance(weights, LoRALayerWeights):
                kind = type(weights).__name__
                raise TypeError(f"adapter {lora.id}: {own_name!r} must be LoRALayerWeights, got {kind}")
            members[part or 0] = copy.copy(weights)  # tensors are shared, `optimize` makes a new B
        if n_parts <= 1 and members[0] is not None:
            return members[0].optimize()
        return PackedLoRALayerWeights.pack(members, name)


def _quantised(weights: ModuleWeights, fp8: torch.dtype) -> ModuleWeights:
    """Copies of checked weights in FP8. Scales belong to whole rows of A and B, so later cuts find them ready."""

    def quantise(factor: LoRAFactor) -> LoRAFactor:
        return None if factor is None else Fp8Matrix.of(factor, fp8, check=False)

    if isinstance(weights, PackedLoRALayerWeights):
        lora_a, lora_b = ([quantise(factor) for factor in each] for each in (weights.lora_a, weights.lora_b))
        return PackedLoRALayerWeights(weights.module_name, weights.rank, lora_a, lora_b)
    own = copy.copy(weights)
    own.lora_a, own.lora_b = (quantise(factor) for factor in weights.pair())
    return own


class StagedAdapter(LoRAModel):
    """An adapter whose tensors are views of `image` (uint8, on the CPU), so that nothing is held twice.

    With tensor parallelism they are this rank's part of each matrix, otherwise the whole matrix; a module that the
    model computes in several slices has one pair per slice.
    """

    def __init__(self, lora: LoRAModel, loras: Mapping[str, ModuleWeights], image: Tensor) -> None:
        super().__init__(lora.id, lora.rank, loras)
        self.image = image


def stage(
    modules: Mapping[str, BaseLayerWithLoRA], lora: LoRAModel, dtype: torch.dtype, *, pin_memory: bool
) -> StagedAdapter:
    """Copy this rank's part of every matrix of a packed adapter into an image, in the order of the model's layers.

    `dtype` is that of the slots (uint8: they are in FP8, values and scales go as bytes). Casting, and turning a matrix
    to the order in which its slot lies in memory, happens here, once.
    """
    parts = {name: layer.slot_parts(*lora.pair_of(name)) for name, layer in modules.items()}
    all_parts = [part for of_layer in parts.values() for part in of_layer]
    image = pack_image([SlotMatrix(part.stored().part, part.rank) for part in all_parts], dtype, pin_memory=pin_memory)
    matrices = zip(all_parts, image_matrices(image, len(all_parts), dtype), strict=True)
    views = iter([_as_part(part, matrix) for part, matrix in matrices])
    loras: dict[str, ModuleWeights] = {}
    for name, of_layer in parts.items():
        own = [next(views) for _ in of_layer]
        if (weights := lora.get_lora(name)) is not None:
            loras[name] = _as_views(weights, own, of_layer[0].fp8)
    return StagedAdapter(lora, loras, image)


def _as_part(part: SlotPart, matrix: Tensor | None) -> Tensor | None:
    """A matrix of an image as the slot's layer takes it."""
    if matrix is None:
        return None
    typed = matrix.view(part.slots.dtype) if part.fp8 else matrix
    return typed if part.row_major else typed.T


def _as_views(weights: ModuleWeights, views: list[Tensor | None], fp8: bool) -> ModuleWeights:
    """`weights` with the tensors replaced by the views: first those of A, slice by slice, then those of B; with `fp8`
    then the scales of both.
    """
    factors: list[LoRAFactor] = list(views)
    if fp8:
        half = len(views) // 2
        pairs = zip(views[:half], views[half:], strict=True)
        given = weights.lora_a if isinstance(weights, PackedLoRALayerWeights) else [weights.lora_a]
        of_experts = any(a is not None and a.ndim == 3 for a in given)
        factors = [_fp8_view(values, scale, of_experts) for values, scale in pairs]
    slices = len(factors) // 2
    lora_a, lora_b = factors[:slices], factors[slices:]
    if slices > 1 or isinstance(weights, PackedLoRALayerWeights):
        return PackedLoRALayerWeights(weights.module_name, weights.rank, lora_a, lora_b)
    own = copy.copy(weights)
    own.lora_a, own.lora_b = lora_a[0], lora_b[0]
    return own


def _fp8_view(values: Tensor | None, scale: Tensor | None, of_experts: bool) -> Fp8Matrix | None:
    """Two matrices of an image as one of the adapter; scales of experts are ``[E, rows]``, of others ``[rows, 1]``."""
    if values is None or scale is None:
        return None
    return Fp8Matrix(values.view(*scale.shape, -1), scale) if of_experts else Fp8Matrix(values, scale[:, 0])
