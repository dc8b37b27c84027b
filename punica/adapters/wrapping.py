"""The model side: which modules can carry LoRA, and replacing them in place.

A model says what it packs: `packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}` means that the
module called `...qkv_proj` computes at once what adapters know as three modules. And it says which of its embeddings
and heads may carry LoRA: `embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA, SlottedLayer, from_layer, from_layer_logits_processor
from punica.parallel import LinearBase, ParallelLMHead, VocabParallelEmbedding

PackedMapping = Mapping[str, list[str]]


def packed_modules_of(model: nn.Module) -> PackedMapping:
    """The model's `packed_modules_mapping`: runtime name -> adapter-visible parts; `{}` if it packs nothing."""
    return getattr(model, "packed_modules_mapping", {})


def embedding_modules_of(model: nn.Module) -> set[str]:
    """Last name components of the model's `embedding_modules`: embeddings and heads that may carry LoRA."""
    return set(getattr(model, "embedding_modules", {}))


def find_supported_layers(model: nn.Module) -> dict[str, nn.Module]:
    """`{name: layer}` of everything LoRA could wrap: all linear layers, and modules named in the model's
    `embedding_modules`.

    An aliased layer appears under each of its names. Raises RuntimeError if the model is already wrapped, ValueError if
    it has no such layer.
    """
    embedding_names = embedding_modules_of(model)
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


def resolve_lora_dtype(lora_config: LoRAConfig, layers: Mapping[str, nn.Module]) -> torch.dtype:
    """Resolve `lora_config.lora_dtype` in place; `"auto"` becomes the dtype of the base weights."""
    lora_config.verify_with_model_config(next(iter(layers.values())).weight)
    if not isinstance(lora_config.lora_dtype, torch.dtype):
        raise TypeError(f"lora_dtype must be a torch dtype by now, got {lora_config.lora_dtype!r}")
    return lora_config.lora_dtype


def wrap_layers(
    model: nn.Module, layers: Mapping[str, nn.Module], lora_config: LoRAConfig, vocab_size: int
) -> dict[str, SlottedLayer]:
    """Replace each targeted layer in place by its LoRA layer; `{name: LoRA layer}`, an aliased layer under its first
    name.

    A language-model head stays; its sibling `logits_processor` is replaced, and listed under the head's name. All LoRA
    layers are built before the first one is put into the model.

    Raises:
        ValueError: the filter selects nothing, a targeted layer has no LoRA class in this configuration, a head has no
            logits processor of its own, or an embedding has not `vocab_size` ids.
    """
    packed = packed_modules_of(model)
    targeted = {
        name: layer for name, layer in layers.items() if is_in_target_modules(name, lora_config.target_modules, packed)
    }
    if not targeted:
        raise ValueError(
            f"target_modules {lora_config.target_modules} selects none of the model's layers {sorted(layers)}"
        )
    wrapped: dict[str, SlottedLayer] = {}
    seen: set[int] = set()
    by_base: dict[int, SlottedLayer] = {}  # the replaced module's id -> its replacement
    for name, layer in targeted.items():
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        _check_vocabulary(name, layer, vocab_size)
        base = _logits_processor_of(model, name) if isinstance(layer, ParallelLMHead) else layer
        if id(base) in by_base:
            raise ValueError(f"head {name!r} shares its logits_processor with another head; give each one of its own")
        wrapped[name] = by_base[id(base)] = _wrap(name, layer, base, lora_config, model)
    # An alias, even one outside the filter, still is the same layer, so it must see the same wrapper.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in by_base:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, by_base[id(module)])
    return wrapped


def _check_vocabulary(name: str, layer: nn.Module, vocab_size: int) -> None:
    """The offsets into a stacked embedding A are multiples of the vocabulary that the metadata are told."""
    is_embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if is_embedding and layer.org_vocab_size != vocab_size:
        raise ValueError(f"embedding {name!r} has {layer.org_vocab_size} ids, but vocab_size is {vocab_size}")


def _logits_processor_of(model: nn.Module, head_name: str) -> nn.Module:
    """The module that computes a head's logits: its sibling of that name."""
    parent = head_name.rpartition(".")[0]
    sibling = getattr(model.get_submodule(parent), "logits_processor", None)
    if not isinstance(sibling, nn.Module):
        raise ValueError(
            f"head {head_name!r} needs a logits_processor beside it to carry LoRA, but {parent or 'the model'!r} has "
            "none; add it, or leave the head out with LoRAConfig.target_modules"
        )
    return sibling


def _wrap(name: str, layer: nn.Module, base: nn.Module, lora_config: LoRAConfig, model: nn.Module) -> SlottedLayer:
    parts = packed_modules_of(model).get(name.rpartition(".")[2], [])
    model_config = getattr(model, "config", None)
    if isinstance(layer, ParallelLMHead):
        return from_layer_logits_processor(base, layer, lora_config.max_loras, lora_config, model_config)
    replacement = from_layer(layer, lora_config.max_loras, lora_config, parts, model_config)
    if not isinstance(replacement, SlottedLayer):
        raise ValueError(
            f"module {name!r} of class {type(layer).__name__} (packed parts {parts}) has no LoRA class with "
            f"{lora_config}; leave it out with LoRAConfig.target_modules"
        )
    return replacement
