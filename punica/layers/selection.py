"""Which LoRA class wraps which base layer: ask each class in a fixed order, the first that agrees wins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from punica.layers.base import BaseLayerWithLoRA
from punica.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
)
from punica.layers.replicated_linear import ReplicatedLinearWithLoRA
from punica.layers.row_parallel_linear import RowParallelLinearWithLoRA

if TYPE_CHECKING:
    from punica.config import LoRAConfig

LORA_CLASSES: tuple[type[BaseLayerWithLoRA], ...] = (
    ReplicatedLinearWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
"""Replacement order. A new LoRA class takes part by its line here."""


def from_layer(
    layer: nn.Module,
    max_loras: int,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: Any = None,
) -> nn.Module:
    """``layer`` wrapped by the first class that can replace it, with ``max_loras`` zeroed slots; else ``layer`` itself.

    ``packed_modules_list``: names under which adapters know the matrices packed in ``layer`` (empty if not packed).
    """
    for lora_class in LORA_CLASSES:
        if lora_class.can_replace_layer(
            source_layer=layer,
            lora_config=lora_config,
            packed_modules_list=packed_modules_list,
            model_config=model_config,
        ):
            wrapped = lora_class(layer)
            wrapped.create_lora_weights(max_loras, lora_config, model_config)
            return wrapped
    return layer
