"""What a LoRA layer hands to the experts that it wraps: its slots, and the calls that add them.

References only: weights that are put into a slot later are seen. The experts call :meth:`MoELoRAContext.add_w13` after
their first product and :meth:`MoELoRAContext.add_w2` after their second, with what the first returned.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class MoELoRAContext:
    """Slots and sizes of one layer.

    Attributes:
        w13_lora_a_stacked, w13_lora_b_stacked, w2_lora_a_stacked, w2_lora_b_stacked: tuples of ``[L, E, out, in]``.
        adapter_enabled: int32 ``[L+1]``, slots that hold weights for this layer.
        use_tuned_config: whether tuned kernel tables are looked up.
        aux_stream, events: of a second stream; ``None``: one stream.
        local_token_lora_mapping: slot of every token where tokens of other ranks were gathered, written per forward;
            ``None``: the step's own.
        lora_dtype: dtype in which activations are multiplied with adapters; ``None``: the one they have.
        w13_keywords, w2_keywords: what the wrapper's methods take besides: ranks, and the scales of FP8 slots.
        original_hidden_states: activations before the experts quantise them; ``None``: they do not.
    """

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
    aux_stream: Any = None
    events: tuple[torch.cuda.Event, ...] | None = None
    local_token_lora_mapping: Tensor | None = None
    original_hidden_states: Tensor | None = None
    lora_dtype: torch.dtype | None = None
    w13_keywords: dict[str, Any] = field(default_factory=dict)
    w2_keywords: dict[str, Any] = field(default_factory=dict)

    def add_w13(
        self, y: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, w1: Tensor,
        w2: Tensor,
    ) -> tuple:  # fmt: skip
        """Add to ``y [T, k, w13 rows]``; what `add_w2` wants to know of the alignment."""
        x = x if self.original_hidden_states is None else self.original_hidden_states
        return self.punica_wrapper.add_lora_w13(
            y, self._as_adapters(x), self.w13_lora_a_stacked, self.w13_lora_b_stacked, topk_ids,
            topk_weights, expert_map, w1, w2, x.shape[0], self.top_k, self.max_loras, self.adapter_enabled,
            self.local_num_experts, self.top_k, self.w13_num_slices, self.fully_sharded, self.use_tuned_config,
            self.local_token_lora_mapping, **self.w13_keywords,
        )  # fmt: skip

    def add_w2(self, y: Tensor, x: Tensor, topk_weights: Tensor, aligned: tuple, w1: Tensor, w2: Tensor) -> None:
        """Add to ``y [T, k, H]``, weighted like it."""
        self.punica_wrapper.add_lora_w2(
            y, self._as_adapters(x), self.w2_lora_a_stacked, self.w2_lora_b_stacked, topk_weights,
            *aligned, y.shape[0], w1, w2, self.top_k, self.max_loras, self.adapter_enabled, self.top_k,
            self.fully_sharded, self.tp_rank, self.use_tuned_config, **self.w2_keywords,
        )  # fmt: skip

    def _as_adapters(self, x: Tensor) -> Tensor:
        return x if self.lora_dtype in (None, x.dtype) else x.to(self.lora_dtype)
