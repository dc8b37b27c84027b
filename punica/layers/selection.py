"""Selection of the LoRA class for a base layer: the first in a fixed order that can replace it.

The order matters where two can: a merged layer on one rank is wrapped by the plain class, since full sharding has
nothing to shard there.
"""

import warnings
from typing import Any

from torch import nn

from punica.config import LoRAConfig
from punica.layers import column_parallel_linear as column
from punica.layers import fully_sharded as sharded
from punica.layers.base import BaseLayerWithLoRA
from punica.layers.base_linear import ReplicatedLinearWithLoRA, RowParallelLinearWithLoRA
from punica.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from punica.layers.logits_processor import LogitsProcessorWithLoRA
from punica.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA

LORA_CLASSES: tuple[type[BaseLayerWithLoRA], ...] = (
    ReplicatedLinearWithLoRA,
    column.ColumnParallelLinearWithLoRA,
    column.MergedColumnParallelLinearWithLoRA,
    column.MergedColumnParallelLinearVariableSliceWithLoRA,
    column.QKVParallelLinearWithLoRA,
    column.MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    sharded.ColumnParallelLinearWithShardedLoRA,
    sharded.MergedColumnParallelLinearWithShardedLoRA,
    sharded.QKVParallelLinearWithShardedLoRA,
    sharded.MergedQKVParallelLinearWithShardedLoRA,
    sharded.RowParallelLinearWithShardedLoRA,
    FusedMoEWithLoRA,
    FusedMoE3DWithLoRA,
)
"""Replacement order. A new LoRA class takes part by its line here."""
_INSTEAD = {nn.Linear: "ReplicatedLinear", nn.Embedding: "VocabParallelEmbedding"}


def from_layer(
    layer: nn.Module, max_loras: int, lora_config: LoRAConfig, packed_modules_list: list[str], model_config: Any = None
) -> nn.Module:
    """``layer`` wrapped by the first class that can replace it, with ``max_loras`` zeroed slots; else ``layer`` itself,
    with a warning if it is a linear layer or embedding of torch. ``packed_modules_list``: names under which adapters
    know the matrices packed in ``layer``.
    """
    situation = {"lora_config": lora_config, "packed_modules_list": packed_modules_list, "model_config": model_config}
    for lora_class in LORA_CLASSES:
        if lora_class.can_replace_layer(source_layer=layer, **situation):
            wrapped = lora_class(layer)
            wrapped.create_lora_weights(max_loras, lora_config, model_config)
            return wrapped
    for plain, ours in _INSTEAD.items():
        if isinstance(layer, plain):
            warnings.warn(
                f"from_layer returns a {type(layer).__name__} without LoRA, as no LoRA class replaces it; build a "
                f"punica.parallel.{ours} with its weight and wrap that",
                stacklevel=2,
            )
    return layer


def from_layer_logits_processor(
    layer: nn.Module, lm_head: Any, max_loras: int, lora_config: LoRAConfig, model_config: Any = None
) -> LogitsProcessorWithLoRA:
    """The logits processor ``layer`` wrapped for ``lm_head``, with ``max_loras`` zeroed slots."""
    weight, order = lm_head.weight, lm_head.get_sharded_to_full_mapping()
    wrapped = LogitsProcessorWithLoRA(layer, lm_head.embedding_dim, weight.dtype, weight.device, order)
    wrapped.create_lora_weights(max_loras, lora_config, model_config)
    return wrapped
