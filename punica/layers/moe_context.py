"""`MoELoRAContext`: references to the slots of a layer of experts, and the calls that add LoRA to their products."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from punica.ops.experts import Assignment, ExpertLoRAWeights


@dataclass
class MoELoRAContext:
    """Slots and sizes of one layer. The experts call ``add_w13`` after their first product and ``add_w2`` after their
    second, with the assignment of the first.

    Attributes:
        w13, w2: the two products' weights, as the wrapper takes them; the stacks beside them are theirs.
        lora_dtype: dtype in which activations are multiplied with adapters; ``None``: the one they have.
        local_token_lora_mapping: slot of every token where those of other ranks were gathered; ``None``: the step's.
        original_hidden_states: activations before the experts quantise them; ``None``: they do not.
        aux_stream, events: of a second stream; ``None``: one stream.
    """

    w13: ExpertLoRAWeights
    w2: ExpertLoRAWeights
    w13_lora_a_stacked: tuple[Tensor, ...]
    w13_lora_b_stacked: tuple[Tensor, ...]
    w2_lora_a_stacked: tuple[Tensor, ...]
    w2_lora_b_stacked: tuple[Tensor, ...]
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

    def add_w13(
        self, y: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None
    ) -> Assignment:
        """Add to ``y [T, k, w13 rows]``; returns the assignment of the pairs."""
        x = x if self.original_hidden_states is None else self.original_hidden_states
        assignment = self.punica_wrapper.assign_pairs(
            topk_ids, topk_weights, expert_map, self.w13, self.local_token_lora_mapping
        )
        self.punica_wrapper.add_lora_experts(y, self._as_adapters(x), self.w13, assignment)
        return assignment

    def add_w2(self, y: Tensor, x: Tensor, topk_weights: Tensor, assignment: Assignment) -> None:
        """Add to ``y [T, k, H]``, weighted like it."""
        assignment = assignment._replace(topk_weights=topk_weights)
        self.punica_wrapper.add_lora_experts(y, self._as_adapters(x), self.w2, assignment)

    def _as_adapters(self, x: Tensor) -> Tensor:
        return x if self.lora_dtype in (None, x.dtype) else x.to(self.lora_dtype)
