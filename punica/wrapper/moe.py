"""The mixture-of-experts methods of a wrapper: signatures here, behaviour in `punica.wrapper.experts`."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from punica.ops.experts import Assignment, ExpertLoRAWeights


class MoEMethods:
    """Fused MoE LoRA. A backend without it inherits these, which raise NotImplementedError naming the class.

    Slots that serve no expert weights are switched off by ``adapter_enabled``; ``token_lora_mapping`` None takes the
    slots of the current step. The three that multiply take the keywords ``lora_ranks``, int32 ``[n, L]``, the true rank
    of every slice and slot (None: the slots' width), and for weights in FP8 those of `punica.wrapper.fp8`; their x then
    is not FP8, or FP8 with ``a_scale``. TypeError for any other keyword.
    """

    def assign_pairs(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor | None,
        weights: ExpertLoRAWeights, mapping: torch.Tensor | None = None,
    ) -> Assignment:  # fmt: skip
        """Group the pairs of ``topk_ids [T, k]`` for both products of a layer, ``weights`` being the first one's."""
        self._no_moe("assign_pairs")

    def add_lora_experts(
        self, y: torch.Tensor, x: torch.Tensor, weights: ExpertLoRAWeights, assignment: Assignment
    ) -> None:
        """Add one product's LoRA to ``y [T, k, W]``; ``x [T, K]``, or ``[T*k, K]`` behind the activation."""
        self._no_moe("add_lora_experts")

    def moe_lora_align_block_size(
        self, topk_ids: torch.Tensor,
        num_tokens: int, block_size: int, num_experts: int, max_loras: int,
        adapter_enabled: torch.Tensor,
        expert_map: torch.Tensor | None = None, pad_sorted_ids: bool = False, naive_block_assignment: bool = False,
        token_lora_mapping: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Group (token, expert) pairs by adapter and expert in blocks of ``block_size``.

        Returns ``(token_lora_mapping, sorted_ids, expert_ids, num_tokens_post_pad)``.
        """
        self._no_moe("moe_lora_align_block_size")

    def add_lora_fused_moe(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...], topk_weights: torch.Tensor, sorted_token_ids: torch.Tensor | None,
        expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor | None,
        max_lora_rank: int, top_k_num: int,
        shrink_config: Mapping[str, Any], expand_config: Mapping[str, Any], adapter_enabled: torch.Tensor,
        mul_routed_weight: bool = False, fully_sharded: bool = False, offset: int = 0,
        token_lora_mapping: torch.Tensor | None = None, add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Shrink and expand of every (token, expert) pair through its adapter's expert weights, into ``y``."""
        self._no_moe("add_lora_fused_moe")

    def add_lora_w13(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...], topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None, w1: torch.Tensor, w2: torch.Tensor,
        num_tokens: int, top_k_num: int, max_loras: int,
        adapter_enabled: torch.Tensor,
        local_num_experts: int, top_k: int, num_slices: int, fully_sharded: bool, use_tuned_config: bool,
        token_lora_mapping: torch.Tensor | None = None, add_inputs: bool = True,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """The up and gate projections; aligns once and returns the alignment for `add_lora_w2`.

        Returns ``(sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora, token_lora_mapping)``.
        """
        self._no_moe("add_lora_w13")

    def add_lora_w2(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...], topk_weights: torch.Tensor,
        sorted_token_ids_lora: torch.Tensor | None, expert_ids_lora: torch.Tensor | None,
        num_tokens_post_padded_lora: torch.Tensor | None, token_lora_mapping: torch.Tensor | None,
        num_tokens: int,
        w1: torch.Tensor, w2: torch.Tensor,
        top_k_num: int, max_loras: int,
        adapter_enabled: torch.Tensor,
        top_k: int, fully_sharded: bool, tp_rank: int, use_tuned_config: bool,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """The down projection, with the alignment that `add_lora_w13` returned."""
        self._no_moe("add_lora_w2")

    def _no_moe(self, method: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} does not implement {method}")
