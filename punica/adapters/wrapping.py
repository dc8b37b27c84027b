"""The model side: which modules can carry LoRA, and replacing them in place.

A model says what it packs: `packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}` means that the
module called `...qkv_proj` computes at once what adapters know as three modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA, BaseLinearLayerWithLoRA, from_layer
from punica.parallel import LinearBase

PackedMapping = Mapping[str, list[str]]


def packed_modules_of(model: nn.Module) -> PackedMapping:
    """The model's `packed_modules_mapping`: runtime name -> adapter-visible parts; `{}` if it packs nothing."""
    return getattr(model, "packed_modules_mapping", {})


def find_supported_layers(model: nn.Module) -> dict[str, nn.Module]:
    """`{name: layer}` of everything LoRA could wrap: all linear layers, and modules named in the model's
    `embedding_modules`.

    An aliased layer appears under each of its names. Raises RuntimeError if the model is already wrapped, ValueError if
    it has no such layer.
    """
    embedding_names = set(getattr(model, "embedding_modules", {}))
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BaseLayerWithLoRA):
            raise RuntimeError(f"module {name!r} is already a LoRA layer; build one LoRAModelManager per model")
        if isinstance(module, LinearBase) or name.rpartition(".")[2] in embedding_names:
            layers[name] = module
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer that LoRA supports (linear layers of punica.parallel)")
    return layers


def expected_lora_modules(layer_names: Collection[str], packed_modules_mapping: PackedMapping) -> set[str]:
    """Last name components an adapter may use: those of the supported layers, and the parts of packed ones."""
    suffixes = {name.rpartition(".")[2] for name in layer_names}
    return suffixes | {part for suffix in suffixes for part in packed_modules_mapping.get(suffix, ())}


def is_in_target_modules(
    name: str, target_modules: Collection[str] | None, packed_modules_mapping: PackedMapping
) -> bool:
    """Does the deployment filter `LoRAConfig.target_modules` let this module carry LoRA?

    True without a filter; if the module's suffix or full name is listed; if it is packed and one of its parts is
    listed; or if it is a part and its packed parent is listed. Full names of parts and parents count too.
    """
    if target_modules is None:
        return True
    parent, _, suffix = name.rpartition(".")
    relatives = list(packed_modules_mapping.get(suffix, ()))
    relatives += [packed for packed, parts in packed_modules_mapping.items() if suffix in parts]
    candidates = [suffix, *relatives]
    full_names = [f"{parent}.{candidate}" if parent else candidate for candidate in candidates]
    return not set(target_modules).isdisjoint({*candidates, *full_names})


def wrap_layers(
    model: nn.Module, layers: Mapping[str, nn.Module], lora_config: LoRAConfig
) -> dict[str, BaseLinearLayerWithLoRA]:
    """Replace each targeted layer in place by its LoRA layer; `{name: LoRA layer}`, an aliased layer under its first
    name.

    All LoRA layers are built before the first one is put into the model.

    Raises:
        ValueError: the filter selects nothing, or a targeted layer has no LoRA class in this configuration.
    """
    packed = packed_modules_of(model)
    targeted = {
        name: layer for name, layer in layers.items() if is_in_target_modules(name, lora_config.target_modules, packed)
    }
    if not targeted:
        raise ValueError(
            f"target_modules {lora_config.target_modules} selects none of the model's layers {sorted(layers)}"
        )
    wrapped: dict[str, BaseLinearLayerWithLoRA] = {}
    by_base: dict[int, BaseLinearLayerWithLoRA] = {}
    for name, layer in targeted.items():
        if id(layer) not in by_base:
            wrapped[name] = by_base[id(layer)] = _wrap(name, layer, packed, lora_config, getattr(model, "config", None))
    # An alias outside the filter still is the same layer, so it must see the same wrapper.
    for name, layer in layers.items():
        if id(layer) in by_base:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, by_base[id(layer)])
    return wrapped


def _wrap(
    name: str, layer: nn.Module, packed: PackedMapping, lora_config: LoRAConfig, model_config: object
) -> BaseLinearLayerWithLoRA:
    parts = packed.get(name.rpartition(".")[2], [])
    replacement = from_layer(layer, lora_config.max_loras, lora_config, parts, model_config)
    if not isinstance(replacement, BaseLinearLayerWithLoRA):
        raise ValueError(
            f"module {name!r} of class {type(layer).__name__} (packed parts {parts}) has no LoRA class with "
            f"{lora_config}; leave it out with LoRAConfig.target_modules"
        )
    return replacement
