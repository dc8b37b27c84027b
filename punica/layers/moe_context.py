"""`MoELoRAContext`: references to the slots of a layer of experts, for the products that LoRA is added to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from punica.ops.experts import Assignment, ExpertLoRAWeights


@dataclass
class MoELoRAContext:
    """Slots and sizes of one layer, by which `punica.parallel.FusedMoE` calls the wrapper after both products.

    Attributes:
        w13, w2: the two products' weights, as the wrapper takes them; the stacks beside them are theirs.
        lora_dtype: dtype in which activations are multiplied with adapters; ``None``: the one they have.
        local_token_lora_mapping: slot of every token where those of other ranks were gathered; ``None``: the step's.
        original_hidden_states: activations before the experts quantise them; ``None``: they do not.
        aux_stream, events: of a second stream; ``None``: one stream.
    """

    w13: ExpertLoRAWeights
    w2: ExpertLoRAWeights
    w13_lora_a_stacked: Sequence[Tensor]
    w13_lora_b_stacked: Sequence[Tensor]
    w2_lora_a_stacked: Sequence[Tensor]
    w2_lora_b_stacked: Sequence[Tensor]
    adapter_enabled: Tensor
    max_loras: int
    top_k: int
    w13_num_slices: int
    fully_sharded: bool
    tp_rank: int
    tp_size: int
    local_num_experts: int
    punica_wrapper: Any
    use_tuned_config: bool
    lora_dtype: torch.dtype | None = None
    local_token_lora_mapping: Tensor | None = None
    original_hidden_states: Tensor | None = None
    aux_stream: Any = None
    events: tuple[torch.cuda.Event, ...] | None = None

    def assign(self, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None) -> Assignment:
        """Group the pairs of ``topk_ids [T, k]`` for both products."""
        mapping = self.local_token_lora_mapping
        return self.punica_wrapper.assign_pairs(topk_ids, topk_weights, expert_map, self.w13, mapping)

    def rows_of_w13(self, x: Tensor) -> Tensor:
        """The rows ``x [T, H]`` of the first product as the adapters take them."""
        return self.as_adapters(x if self.original_hidden_states is None else self.original_hidden_states)

    def as_adapters(self, x: Tensor) -> Tensor:
        return x if self.lora_dtype in (None, x.dtype) else x.to(self.lora_dtype)
