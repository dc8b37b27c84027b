"""Layers of a model that can carry LoRA, and their replacement in place.

A model declares the modules that it packs, as `packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`,
and the embeddings and heads that may carry LoRA: `embedding_modules = {"embed_tokens": "input_embeddings"}`. A module
with several names is wrapped once, and adapters may use any of them.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import nn

from punica.adapters.names import PROJECTIONS, MoEEPSpec, adapter_component, last_component, sibling
from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA, from_layer, from_layer_logits_processor
from punica.layers.utils import base_weight
from punica.parallel import (
    ColumnParallelLinear,
    FusedMoE,
    LinearBase,
    Need,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)

PackedMapping = Mapping[str, list[str]]
L = TypeVar("L", bound=nn.Module, covariant=True)


class NamedLayer(NamedTuple, Generic[L]):
    """A layer, its names in the model, the first of which identifies it, and its parts, if any, in adapters."""

    layer: L
    names: list[str]
    parts: list[str]


def packed_modules_of(model: nn.Module) -> PackedMapping:
    return getattr(model, "packed_modules_mapping", {})


def embedding_modules_of(model: nn.Module) -> set[str]:
    return set(getattr(model, "embedding_modules", {}))


def find_supported_layers(model: nn.Module) -> list[NamedLayer[nn.Module]]:
    """Find all linear layers, mixtures of experts, and modules named in the model's `embedding_modules`. RuntimeError:
    the model is wrapped. ValueError: it has no such layer, or experts without names.
    """
    embedding_names, packed = embedding_modules_of(model), packed_modules_of(model)
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BaseLayerWithLoRA):
            raise RuntimeError(f"module {name!r} is already a LoRA layer; build one LoRAModelManager per model")
        names_of.setdefault(module, []).append(name)
    layers = []
    for module, names in names_of.items():
        names.sort(key=lambda name: last_component(name) not in embedding_names)  # an embedding's role comes first
        if isinstance(module, LinearBase) or last_component(names[0]) in embedding_names:
            parts = next((packed[last] for last in map(last_component, names) if last in packed), [])
            layers.append(NamedLayer(module, names, parts))
        elif isinstance(module, FusedMoE):
            if (expert_mapping := getattr(model, "get_expert_mapping", None)) is None:
                raise ValueError(
                    f"{type(model).__name__} has mixture-of-experts layers but no get_expert_mapping(); it must name "
                    "the matrices of every expert, (w1, w2, w3) after each other"
                )
            layers.append(NamedLayer(module, names, list(expert_mapping())))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer that LoRA supports (linear layers of punica.parallel)")
    return layers


def expected_lora_modules(layers: Collection[NamedLayer[nn.Module]]) -> set[str]:
    """Return the last name components that an adapter may use: of supported layers, and of the parts of packed ones."""
    expected = {adapter_component(name) for layer in layers for name in [*layer.names, *layer.parts]}
    experts = [name for layer in layers if isinstance(layer.layer, FusedMoE) for name in layer.names]
    return expected | {f"{adapter_component(name)}.{last}" for name in experts for last in ("base_layer", *PROJECTIONS)}


def is_in_target_modules(
    name: str, target_modules: Collection[str] | None, packed_modules_mapping: PackedMapping
) -> bool:
    """Tell if the deployment filter `LoRAConfig.target_modules` lets this module carry LoRA: without a filter, or if it
    lists the suffix or full name of the module, of one of its parts or of its packed parent.
    """
    if target_modules is None:
        return True
    suffix = last_component(name)
    relatives = list(packed_modules_mapping.get(suffix, ()))
    relatives += [packed for packed, parts in packed_modules_mapping.items() if suffix in parts]
    return any(own in target_modules or sibling(name, own) in target_modules for own in [suffix, *relatives])


def build_layers(
    model: nn.Module, layers: Collection[NamedLayer[nn.Module]], lora_config: LoRAConfig, vocab_size: int
) -> list[NamedLayer[BaseLayerWithLoRA]]:
    """Build the LoRA layer of each targeted layer, with its slots, under the first targeted name; of a language-model
    head for the sibling `logits_processor`. The model does not change before :func:`put_layers`.

    ValueError: the filter selects nothing, or a layer without LoRA class in this configuration; a head has no logits
    processor of its own, or an embedding has not `vocab_size` ids.
    """
    packed = packed_modules_of(model)
    wrapped: list[NamedLayer[BaseLayerWithLoRA]] = []
    by_base: dict[int, BaseLayerWithLoRA] = {}  # by the id of what it replaces
    for layer, names, parts in layers:
        targeted = _targeted(NamedLayer(layer, names, parts), lora_config, packed)
        if not targeted:
            continue
        name = targeted[0]
        is_embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        if is_embedding and layer.org_vocab_size != vocab_size:  # the metadata compute offsets into its A by that
            raise ValueError(f"embedding {name!r} has {layer.org_vocab_size} ids, but vocab_size is {vocab_size}")
        base = _logits_processor_of(model, name) if isinstance(layer, ParallelLMHead) else layer
        if id(base) in by_base:
            raise ValueError(f"head {name!r} shares its logits_processor with another head; give each one of its own")
        by_base[id(base)] = _wrap(model, name, layer, base, parts, lora_config)
        wrapped.append(NamedLayer(by_base[id(base)], [name, *(other for other in names if other != name)], parts))
    if not wrapped:
        names = sorted(name for layer in layers for name in layer.names)
        raise ValueError(f"target_modules {lora_config.target_modules} selects none of the model's layers {names}")
    return wrapped


def put_layers(model: nn.Module, wrapped: Collection[NamedLayer[BaseLayerWithLoRA]]) -> None:
    """Replace every wrapped layer in place, under all its names, also those outside the filter."""
    by_base = {id(named.layer.base_layer): named.layer for named in wrapped}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in by_base:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, by_base[id(module)])


def _targeted(layer: NamedLayer[nn.Module], lora_config: LoRAConfig, packed: PackedMapping) -> list[str]:
    return [name for name in layer.names if is_in_target_modules(name, lora_config.target_modules, packed)]


def slots_need(model: nn.Module, lora_config: LoRAConfig) -> Need:
    """Tell the device memory of this rank's slots, before the model is wrapped; scales of FP8 come on top, and experts
    whose gate and up share an A need less.
    """
    layers, packed, elements = find_supported_layers(model), packed_modules_of(model), 0
    resolved = replace(lora_config)
    resolved.verify_with_model_config(base_weight(layers[0].layer))
    dtype = torch.uint8 if resolved.fp8 is not None else cast(torch.dtype, resolved.lora_dtype)
    for layer, _, parts in (one for one in layers if _targeted(one, lora_config, packed)):
        cut = getattr(layer, "tp_size", 1) if lora_config.fully_sharded_loras else 1
        if isinstance(layer, FusedMoE):
            sizes = layer.moe_config
            each = (2 + sizes.is_act_and_mul) * (sizes.intermediate_size_per_partition + sizes.hidden_dim // cut)
            elements += sizes.num_local_experts * each
        elif isinstance(layer, VocabParallelEmbedding):
            elements += layer.org_vocab_size + layer.embedding_dim  # whole on each rank
        else:
            rows, columns = base_weight(layer).shape
            rows //= cut if isinstance(layer, RowParallelLinear) else 1
            columns //= cut if isinstance(layer, ColumnParallelLinear) else 1
            elements += rows + max(1, len(parts)) * columns
    return Need(
        f"{lora_config.max_loras} adapter slots of rank {lora_config.max_lora_rank}",
        elements * lora_config.max_lora_rank * lora_config.max_loras * dtype.itemsize,
        "lower LoRAConfig.max_loras or max_lora_rank, or name fewer target_modules",
    )


def moe_ep_spec_of(layers: Collection[NamedLayer[nn.Module]]) -> MoEEPSpec | None:
    """Return the experts of this rank; `None` where ranks hold no equal blocks: all tensors are read."""
    for named in layers:
        layer = named.layer
        if isinstance(layer, FusedMoE) and layer.moe_config.moe_parallel_config.use_ep:
            place, experts = layer.moe_config.moe_parallel_config, layer.moe_config.num_experts
            size, rest = divmod(experts, place.ep_size)
            first = place.ep_rank * size
            # the same answer on every rank, as one that reads all would have read another version than the others
            if not rest and list(layer.local_experts) == list(range(first, first + size)):
                return MoEEPSpec(place.ep_rank, size, experts)
    return None


def _logits_processor_of(model: nn.Module, head_name: str) -> nn.Module:
    parent = head_name.rpartition(".")[0]
    processor = getattr(model.get_submodule(parent), "logits_processor", None)
    if not isinstance(processor, nn.Module):
        raise ValueError(
            f"head {head_name!r} needs a logits_processor beside it to carry LoRA, but {parent or 'the model'!r} has "
            "none; add it, or leave the head out with LoRAConfig.target_modules"
        )
    return processor


def _wrap(
    model: nn.Module, name: str, layer: nn.Module, base: nn.Module, parts: list[str], lora_config: LoRAConfig
) -> BaseLayerWithLoRA:
    model_config = getattr(model, "config", None)
    if isinstance(layer, ParallelLMHead):
        return from_layer_logits_processor(base, layer, lora_config.max_loras, lora_config, model_config)
    if isinstance(layer, FusedMoE):  # of experts, the matrices of the first product in adapters of this model
        is_fused = getattr(model, "is_3d_moe_weight", False) and not lora_config.enable_mixed_moe_lora_format
        parts = ["w13"] if is_fused else ["w1", "w3"]
    replacement = from_layer(layer, lora_config.max_loras, lora_config, parts, model_config)
    if not isinstance(replacement, BaseLayerWithLoRA):
        raise ValueError(
            f"module {name!r} of class {type(layer).__name__} (packed parts {parts}) has no LoRA class with "
            f"{lora_config}; leave it out with LoRAConfig.target_modules"
        )
    return replacement
