"""LoRA over a linear layer that every rank holds whole: nothing to split, nothing to communicate."""

from typing import Any

from torch import Tensor

from punica.layers.base_linear import BaseLinearLayerWithLoRA
from punica.layers.utils import is_kind_of
from punica.parallel.linear import LinearOutput, ReplicatedLinear


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """``ReplicatedLinear`` and its subclasses (routers, gates), sharded configuration or not."""

    _uses_base_forward = True

    def forward(self, input_: Tensor) -> LinearOutput:
        """``[..., in] -> [..., out]``; the bias is the base layer's own business."""
        return self.base_layer._result(self.apply(input_))

    @classmethod
    def can_replace_layer(cls, *, source_layer: Any, lora_config: Any, **_: Any) -> bool:
        """Any replicated layer; there is nothing that full sharding could split."""
        return is_kind_of(source_layer, ReplicatedLinear)
