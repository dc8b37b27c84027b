"""LoRA over a linear layer that every rank holds whole: nothing to split, nothing to communicate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from punica.layers.base_linear import BaseLinearLayerWithLoRA
from punica.layers.utils import is_kind_of
from punica.parallel.linear import ReplicatedLinear, check_last_dim


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """``ReplicatedLinear`` and its subclasses (routers, gates), sharded configuration or not."""

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """``[..., in] -> [..., out]``; the bias is the base layer's own business."""
        check_last_dim(input_, self.input_size, type(self).__name__)
        return self._result(self.apply(input_))

    def _base_output(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._forward_base(x)

    @classmethod
    def can_replace_layer(
        cls, *, source_layer: Any, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        """Any replicated layer; there is nothing that full sharding could split."""
        return is_kind_of(source_layer, ReplicatedLinear)
