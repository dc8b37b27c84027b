"""Packing: from the modules of an adapter to the slices of the model's layers, and to one block of memory.

Adapters have `q_proj`, `k_proj`, `v_proj`; the model computes `qkv_proj`. Parts are packed under the runtime name, with
the scaling in B; absent parts stay `None`, zeros in the slot. The caller's adapter does not change.

A GPU can read page-locked ("pinned") host memory directly, and only long reads use the whole link. So for a GPU this
rank's part of every matrix is packed, in the order of the model's layers, into a slot image
(:mod:`punica.ops.slot_image`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from punica.adapters.check import check_scaled
from punica.adapters.lora_model import LoRAModel
from punica.adapters.pack_experts import BASE_LAYER, group_experts
from punica.adapters.shared_experts import PROJECTIONS
from punica.adapters.weights import ModuleWeights
from punica.adapters.wrap import NamedLayer, PackedMapping, is_in_target_modules, sibling
from punica.checks import clip
from punica.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from punica.layers.base import SlotPart
from punica.layers.packing import Blocks, LoRAFactor, Slices
from punica.layers.utils import check_has_data
from punica.ops.quant import Fp8Matrix
from punica.ops.slot_image import image_matrices, pack_image


class AdapterPacker:
    """Packer of adapters for one wrapped model.

    Args:
        wrapped: the model's LoRA layers with all their names.
        packed_modules_mapping: `{runtime suffix: adapter-visible parts}`.
        target_modules: deployment filter; an adapter that touches more is refused.
        fp8: format of FP8 slots, in which adapters are quantised here, once (`None`: other slots).
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
                ends = {"base_layer": BASE_LAYER, **PROJECTIONS}
                self._place |= {f"{alias}.{end}": (name, part) for alias in layer.names for end, part in ends.items()}

    def pack(self, lora: LoRAModel, *, fits: bool = False) -> LoRAModel:
        """Return a new model with the same id: for every layer that it touches, the slices as the layer holds them.

        `fits`: :meth:`check` has accepted tensors of these names, types and shapes, and the numbers are finite, so that
        only what the scaling changed is checked here.

        Raises:
            ValueError: unknown modules, or none; a module given twice (under two of its names, or whole and in parts).
                A wrong shape, rank or size; a B that holds NaN or inf once it is scaled.
            TypeError: unsupported dtype, or a meta tensor. RuntimeError: a module without tensors (shell).
        """
        groups = self._groups(lora)
        if not fits:
            self._check(lora.id, groups, with_data=True)

        is_finite = fits and self._fp8 is None and all(_weights_of(lora, name).scaling == 1 for name in lora.loras)

        def packed(weights: ModuleWeights) -> ModuleWeights:
            name = weights.module_name
            if not is_finite:
                check_scaled(lora.id, name, weights.slices)
            layer = self._wrapped[name].layer
            slices = layer.to_slices(weights.slices if self._fp8 is None else _quantised(weights.slices, self._fp8))
            if len(weights.blocks) == len(slices):  # else blocks of a matrix that the layer splits
                each = zip(slices, weights.blocks, strict=True)
                slices = [layer.own_ranks(i, pair, blocks) for i, (pair, blocks) in enumerate(each)]
            return ModuleWeights(name, weights.rank, slices)

        loras = {weights.module_name: weights for weights in map(packed, groups.values())}
        return LoRAModel(lora.id, max(weights.rank for weights in loras.values()), loras)

    def check(self, lora: LoRAModel) -> None:
        """Check names, types and shapes against every layer; meta tensors will do. Raises as :meth:`pack`."""
        self._check(lora.id, self._groups(lora))

    def _check(self, adapter_id: int, groups: Mapping[str, ModuleWeights], *, with_data: bool = False) -> None:
        """Apply each layer's rules for `set_lora`, so that activation cannot fail half-way."""
        for name, weights in groups.items():
            try:
                if with_data:
                    check_has_data(weights.slices)
                self._wrapped[name].layer.check_slices(weights.slices)
            except (TypeError, ValueError) as error:
                raise type(error)(f"adapter {adapter_id}, module {name!r}: {error}") from error

    @property
    def most_tensors(self) -> int:
        """Upper bound of an adapter's tensors: A, B and scales of every module, and base weights of embeddings."""
        return 4 * len(self._place) + 64

    def _by_layer(self, lora: LoRAModel) -> dict[str, dict[int | None, str]]:
        """Return `{layer: {part: name in the adapter}}`; ValueError for unknown or ambiguous modules."""
        if not lora.loras:
            raise ValueError(f"adapter {lora.id} has no modules; nothing of it matches the model")
        if unknown := sorted(lora.loras.keys() - self._place.keys()):
            raise ValueError(
                f"adapter {lora.id} has weights for {clip(unknown)}, which the model does not have or which "
                f"LoRAConfig.target_modules leaves out{_renames_of(unknown[0], lora.loras, self._place)}"
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

    def _groups(self, lora: LoRAModel) -> dict[str, ModuleWeights]:
        """Collect the parts that an adapter has of every layer, scaled: one pair per part, or the whole as it is."""
        groups = [self._group(lora, name, given) for name, given in self._by_layer(lora).items()]
        return {group.module_name: group for group in groups}

    def _group(self, lora: LoRAModel, name: str, given: Mapping[int | None, str]) -> ModuleWeights:
        """Collect the parts `{part: name in the adapter}` of one layer."""
        layer, parts = self._wrapped[name].layer, self._wrapped[name].parts
        own = {part: _weights_of(lora, adapter_name) for part, adapter_name in given.items()}
        if isinstance(layer, FusedMoEWithLoRA):
            return group_experts(lora.id, name, layer, own, len(parts))
        slices: Slices = [(None, None)] * len(parts)
        blocks: list[Blocks] = [Blocks()] * len(parts)
        for part, weights in own.items():
            if part is None:
                slices, blocks = weights.scaled(), list(weights.blocks)
            elif weights.is_packed or not weights.slices:
                raise ValueError(
                    f"adapter {lora.id}: {given[part]!r} has {len(weights.slices)} slices, expected 1: give "
                    f"several under the name of the whole layer, {name!r}"
                )
            else:
                (slices[part],) = weights.scaled()
                blocks[part] = (*weights.blocks, Blocks())[0]
        return ModuleWeights(name, max(weights.rank for weights in own.values()), slices, blocks=blocks)


def _weights_of(lora: LoRAModel, name: str) -> ModuleWeights:
    weights = lora.loras[name]
    if not isinstance(weights, ModuleWeights):
        raise TypeError(f"adapter {lora.id}: {name!r} must be ModuleWeights, got {type(weights).__name__}")
    return weights


def _quantised(slices: Slices, fp8: torch.dtype) -> Slices:
    """Quantise checked pairs. Scales belong to whole rows of A and B, so later cuts find them ready."""

    def quantise(factor: LoRAFactor) -> LoRAFactor:
        return None if factor is None else Fp8Matrix.of(factor, fp8, check=False)

    return [(quantise(a), quantise(b)) for a, b in slices]


class StagedAdapter(LoRAModel):
    """An adapter whose tensors are views of `image` (uint8, on the CPU), so that memory is taken once.

    With tensor parallelism they are this rank's part of each matrix, otherwise the whole matrix.
    """

    def __init__(self, lora: LoRAModel, loras: Mapping[str, ModuleWeights], image: Tensor) -> None:
        super().__init__(lora.id, lora.rank, loras)
        self.image, self.version = image, lora.version


def stage(
    modules: Mapping[str, BaseLayerWithLoRA], lora: LoRAModel, dtype: torch.dtype, *, pin_memory: bool
) -> StagedAdapter:
    """Copy this rank's part of every matrix of a packed adapter into an image, in the order of the model's layers.

    `dtype` is that of the slots (uint8 for FP8: values and scales go as bytes). Matrices are cast, and turned to the
    memory order of their slots, here, once.
    """
    parts = {name: layer.slot_parts(lora.slices_of(name)) for name, layer in modules.items()}
    all_parts = [part for of_layer in parts.values() for part in of_layer]
    image = pack_image([part.stored() for part in all_parts], dtype, pin_memory=pin_memory)
    matrices = zip(all_parts, image_matrices(image, len(all_parts), dtype), strict=True)
    views = iter([_as_part(part, matrix) for part, matrix in matrices])
    loras: dict[str, ModuleWeights] = {}
    for name, of_layer in parts.items():
        own = [next(views) for _ in of_layer]
        if (weights := lora.get_lora(name)) is not None:
            loras[name] = ModuleWeights(name, weights.rank, _as_slices(own, weights.slices, of_layer[0].fp8))
    return StagedAdapter(lora, loras, image)


def _as_part(part: SlotPart, matrix: Tensor | None) -> Tensor | None:
    """View a matrix of an image as the slot's layer takes it."""
    if matrix is None:
        return None
    typed = matrix.view(part.slots.dtype) if part.fp8 else matrix
    return typed if part.row_major else typed.T


def _as_slices(views: list[Tensor | None], slices: Slices, fp8: bool) -> Slices:
    """Pair the matrices of an image, in the order of :meth:`BaseLayerWithLoRA.slot_parts`, as slices."""
    factors: list[LoRAFactor] = list(views)
    if fp8:
        half = len(views) // 2
        of_experts = any(a is not None and a.ndim == 3 for a, _ in slices)
        pairs = zip(views[:half], views[half:], strict=True)
        factors = [_fp8_view(values, scale, of_experts) for values, scale in pairs]
    half = len(factors) // 2
    return list(zip(factors[:half], factors[half:], strict=True))


def _fp8_view(values: Tensor | None, scale: Tensor | None, of_experts: bool) -> Fp8Matrix | None:
    """View two matrices of an image as one; scales of experts are ``[E, rows]``, of others ``[rows, 1]``."""
    if values is None or scale is None:
        return None
    return Fp8Matrix(values.view(*scale.shape, -1), scale) if of_experts else Fp8Matrix(values, scale[:, 0])


def _renames_of(unknown: str, names: Iterable[str], known: Collection[str]) -> str:
    """Advise a `weights_mapper` that gives the unknown module another beginning, or takes a wrapper's name out of it,
    and all `names` known ones; else `""`.

    Not with a layer's number: any layer would become that one.
    """
    for name in known:
        if old := _wrapper_in(unknown, name):
            fixed, new = "" if unknown == old + name else old, ""
        elif name.endswith(f".{unknown}"):
            old = unknown.partition(".")[0] + "."
            fixed = new = name.removesuffix(unknown) + old
        else:
            continue
        is_numbered = any(part.isdecimal() for part in fixed.split("."))
        if not is_numbered and all(f"{each}.".replace(old, new)[:-1] in known for each in names):
            wrapped = "it was saved inside of another model or wrapper"
            return f"; {wrapped}: pass LoRARequest(weights_mapper={clip({old: new})})"
    return ""


def _wrapper_in(unknown: str, name: str) -> str:
    """Return the parts, one after the other, without which an unknown name is this one; `""` where there are none."""
    longer, shorter = unknown.split("."), name.split(".")
    extra = len(longer) - len(shorter)
    for place in range(len(shorter)) if extra > 0 else ():
        if longer[:place] == shorter[:place] and longer[place + extra :] == shorter[place:]:
            return ".".join(longer[place : place + extra]) + "."
    return ""
