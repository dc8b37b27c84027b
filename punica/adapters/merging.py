"""From one adapter's modules to what the wrapped layers take: packed parts together, scaling inside B, every condition
checked.

Adapters know `q_proj`, `k_proj`, `v_proj`; the model computes `qkv_proj`. The parts an adapter has are packed under the
runtime name, absent parts stay `None` (their part of the slot stays zero). Nothing here changes the caller's adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

import torch

from punica.adapters.checkpoint import all_finite, check_pair_shapes
from punica.adapters.weights import LoRALayerWeights, LoRAModel, ModuleWeights, PackedLoRALayerWeights
from punica.adapters.wrapping import PackedMapping, is_in_target_modules
from punica.layers import SlottedLayer
from punica.layers.slots import LoRAInput


class AdapterMerger:
    """Prepares adapters for one wrapped model.

    Args:
        modules: `{runtime name: LoRA layer}`.
        packed_modules_mapping: `{runtime suffix: adapter-visible parts}`.
        target_modules: deployment filter; an adapter that touches more is refused rather than served incompletely.
    """

    def __init__(
        self,
        modules: Mapping[str, SlottedLayer],
        packed_modules_mapping: PackedMapping,
        target_modules: Collection[str] | None,
    ) -> None:
        self._modules = modules
        self._n_parts: dict[str, int] = {}
        self._part_of: dict[str, tuple[str, int]] = {}
        for name in modules:
            parent, _, suffix = name.rpartition(".")
            parts = packed_modules_mapping.get(suffix, [])
            self._n_parts[name] = len(parts)
            for i, part in enumerate(parts):
                part_name = f"{parent}.{part}" if parent else part
                if is_in_target_modules(part_name, target_modules, packed_modules_mapping):
                    self._part_of[part_name] = (name, i)

    def merge(self, lora: LoRAModel) -> LoRAModel:
        """A new model with the same id, keyed by runtime names, which every target layer will accept.

        Raises:
            ValueError: unknown modules, no module at all, a module given both whole and in parts, a wrong shape, rank
                or size, or a B that holds NaN or inf once it is scaled.
            TypeError: unsupported dtype. RuntimeError: a module without tensors (shell).
        """
        if not lora.loras:
            raise ValueError(f"adapter {lora.id} has no modules; nothing of it matches the model")
        self._check_known(lora)
        whole = {name: weights for name, weights in lora.loras.items() if name in self._modules}
        parts: dict[str, list[LoRALayerWeights | None]] = {}
        for part_name, weights in lora.loras.items():
            if part_name not in whole:
                name, i = self._part_of[part_name]
                members = parts.setdefault(name, [None] * self._n_parts[name])
                members[i] = _checked_copy(lora.id, part_name, weights)
        if both := sorted(whole.keys() & parts.keys()):
            raise ValueError(f"adapter {lora.id} has {both} both whole and in parts; keep one of the two")
        merged = {name: self._merge_whole(lora.id, name, weights) for name, weights in whole.items()}
        merged |= {name: self._merge_parts(name, members) for name, members in parts.items()}
        for name, weights in merged.items():
            _check_fits(lora.id, name, weights, self._modules[name])
        return LoRAModel(lora.id, max(weights.rank for weights in merged.values()), merged)

    def _check_known(self, lora: LoRAModel) -> None:
        unknown = sorted(name for name in lora.loras if name not in self._modules and name not in self._part_of)
        if unknown:
            raise ValueError(
                f"adapter {lora.id} has weights for {unknown}, which the model does not have or which "
                "LoRAConfig.target_modules leaves out"
            )

    def _merge_whole(self, adapter_id: int, name: str, weights: ModuleWeights) -> ModuleWeights:
        """Weights given under the runtime name itself; a packed module's layer takes one pair as a list of one and
        splits it.
        """
        if isinstance(weights, PackedLoRALayerWeights):
            return weights
        return self._merge_parts(name, [_checked_copy(adapter_id, name, weights)])

    def _merge_parts(self, name: str, members: list[LoRALayerWeights | None]) -> ModuleWeights:
        if self._n_parts[name] <= 1 and members[0] is not None:
            return members[0].optimize()
        return PackedLoRALayerWeights.pack(members, name)


def _checked_copy(adapter_id: int, name: str, weights: ModuleWeights) -> LoRALayerWeights:
    """A copy to optimise without touching the caller's object: tensors are shared, `optimize` makes a new B."""
    if not isinstance(weights, LoRALayerWeights):
        raise TypeError(f"adapter {adapter_id}: {name!r} must be LoRALayerWeights, got {type(weights).__name__}")
    check_pair_shapes(name, *weights.pair(), weights.rank)
    return copy.copy(weights)


def _check_fits(adapter_id: int, name: str, weights: ModuleWeights, layer: SlottedLayer) -> None:
    """All that the layer's `set_lora` would object to, so that activation cannot fail half-way; and overflow of B."""
    lora_a, lora_b = slot_arguments(weights)
    try:
        _, slices_b = layer.check_lora(lora_a, lora_b)
    except (TypeError, ValueError) as error:
        raise type(error)(f"adapter {adapter_id}, module {name!r}: {error}") from error
    if not all(b is None or all_finite(b) for b in slices_b):
        raise ValueError(f"adapter {adapter_id}, module {name!r}: B contains NaN or inf after scaling")


def slot_arguments(weights: ModuleWeights) -> tuple[LoRAInput, LoRAInput]:
    """`(lora_a, lora_b)` for a layer's `set_lora`: lists for a packed module, tensors otherwise."""
    if isinstance(weights, PackedLoRALayerWeights):
        return weights.lora_a, weights.lora_b
    return weights.pair()


def dummy_weights(name: str, layer: SlottedLayer, rank: int, dtype: torch.dtype) -> ModuleWeights:
    """Zero weights of the given rank for one LoRA layer, all its slices; scaled, so that merging makes no copy."""
    slices: list[LoRALayerWeights | None] = [
        LoRALayerWeights.create_dummy_lora_weights(name, layer.full_input_size, size, rank, dtype, "cpu").optimize()
        for size in layer.full_output_sizes
    ]
    return slices[0] if len(slices) == 1 and slices[0] is not None else PackedLoRALayerWeights.pack(slices)
