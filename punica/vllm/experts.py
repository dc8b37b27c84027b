"""The wrapper's methods on experts with weights and routing given by their tensors, and their configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from punica.checks import check_count
from punica.ops.experts import Assignment, ExpertLoRAWeights, Switches, check_block_size, check_routing
from punica.vllm.weights import Keywords
from punica.wrapper.experts import ExpertMethods, by_slot

Alignment = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Config = dict[str, Any]
Stacks = tuple[Tensor, ...]

DEFAULTS: Config = {
    "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "NUM_WARPS": 4, "NUM_STAGES": 3,
    "SPLIT_K": 1,
}  # fmt: skip
"""Configuration of one product, in the positional order of `fused_moe_lora`."""
OP_TYPES = tuple(f"fused_moe_lora_{site}_{part}" for site in ("w13", "w2") for part in ("shrink", "expand"))


class ExpertContract(ExpertMethods):
    """The methods of experts on the current step.

    Slots that serve no expert weights are switched off by ``adapter_enabled``; ``token_lora_mapping`` None takes the
    slots of the current step. The three that multiply take `Keywords`; for weights in FP8 their x is not FP8, or FP8
    with ``a_scale``. TypeError for any other keyword. NotImplementedError, naming the class, of a wrapper whose backend
    has no experts.
    """

    def moe_lora_align_block_size(
        self, topk_ids: Tensor, num_tokens: int, block_size: int, num_experts: int, max_loras: int,
        adapter_enabled: Tensor, expert_map: Tensor | None = None, pad_sorted_ids: bool = False,
        naive_block_assignment: bool = False, token_lora_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """Group (token, expert) pairs by adapter and expert in blocks of ``block_size``.

        Returns ``(token_lora_mapping, sorted_ids, expert_ids, num_tokens_post_pad)``, the last three flat int32: ids
        ``[L * P]`` with the sentinel ``T * k`` where there is no pair, experts ``[L * B]`` with -1 where there is no
        block, counts ``[L]``. Naive: no ids, every pair's expert, no counts.
        """
        check_block_size(block_size, self._expert_ops("moe_lora_align_block_size").smallest_block)
        mapping = self._slots_of_tokens(token_lora_mapping, num_tokens)
        check_routing(topk_ids, mapping, adapter_enabled, max_loras, expert_map)
        if topk_ids.shape[0] != num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}, topk_ids has {topk_ids.shape[0]} rows; they must be equal")
        if naive_block_assignment:
            if expert_map is not None:
                raise ValueError("naive_block_assignment with an expert_map: experts would be global numbers")
            return mapping, None, topk_ids.contiguous().view(-1), None
        sizes = (num_experts, block_size, max_loras)
        return mapping, *self._aligned(topk_ids, mapping, adapter_enabled, expert_map, sizes, pad_sorted_ids)

    def add_lora_fused_moe(
        self, y: Tensor, x: Tensor, lora_a_stacked: Stacks, lora_b_stacked: Stacks, topk_weights: Tensor,
        sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None, max_lora_rank: int,
        top_k_num: int, shrink_config: Mapping[str, Any], expand_config: Mapping[str, Any], adapter_enabled: Tensor,
        mul_routed_weight: bool = False, fully_sharded: bool = False, offset: int = 0,
        token_lora_mapping: Tensor | None = None, add_inputs: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``y[t, j, offset + s*N : ...] (+)= w * (x @ A_s[l, e]^T) @ B_s[l, e]^T``, see
        `punica.ops.reference.fused_moe_lora`. The configs hold `DEFAULTS`, or some of them.
        """
        ops = self._expert_ops("add_lora_fused_moe")
        switches = Switches(mul_routed_weight, fully_sharded, offset, add_inputs)
        weights = self._weights("add_lora_fused_moe", lora_a_stacked, lora_b_stacked, adapter_enabled, switches, kwargs)
        configs = (positional_config("shrink_config", shrink_config), positional_config("expand_config", expand_config))
        mapping = self._slots_of_tokens(token_lora_mapping, topk_weights.shape[0])
        if self.no_lora and self._is_own(mapping):
            return
        slots = weights.slots if weights.lora_a else 1
        aligned = by_slot(slots, sorted_token_ids, expert_ids, num_tokens_post_padded)
        given = self._operands(y, x, weights, Assignment(topk_weights, *aligned, mapping))
        ops.add(given, max_lora_rank, top_k_num, switches, configs, self._active(mapping, slots), None)

    def add_lora_w13(
        self, y: Tensor, x: Tensor, lora_a_stacked: Stacks, lora_b_stacked: Stacks, topk_ids: Tensor,
        topk_weights: Tensor, expert_map: Tensor | None, w1: Tensor, w2: Tensor, num_tokens: int, top_k_num: int,
        max_loras: int, adapter_enabled: Tensor, local_num_experts: int, top_k: int, num_slices: int,
        fully_sharded: bool, use_tuned_config: bool, token_lora_mapping: Tensor | None = None, add_inputs: bool = True,
        **kwargs: Any,
    ) -> Alignment:  # fmt: skip
        """Add gate and up of x ``[T, H]`` to y ``[T, k, n*N]`` (or flat); return the alignment for `add_lora_w2`."""
        self._expert_ops("add_lora_w13")
        switches, site = Switches(False, fully_sharded, 0, add_inputs), "w13" if use_tuned_config else None
        weights = self._weights("add_lora_w13", lora_a_stacked, lora_b_stacked, adapter_enabled, switches, kwargs, site)
        _check_counts(topk_ids, num_tokens, (top_k_num, top_k), len(lora_a_stacked), num_slices)
        assignment = self.assign_pairs(topk_ids, topk_weights, expert_map, weights, token_lora_mapping, every_slot=True)
        _, ids, experts, counts, mapping = assignment
        if not self._is_idle(mapping):
            self.add_lora_experts(y.view(num_tokens, top_k, -1), x, weights, assignment)
        return None if ids is None else ids.view(-1), experts.view(-1), counts, mapping

    def add_lora_w2(
        self, y: Tensor, x: Tensor, lora_a_stacked: Stacks, lora_b_stacked: Stacks, topk_weights: Tensor,
        sorted_token_ids_lora: Tensor | None, expert_ids_lora: Tensor | None,
        num_tokens_post_padded_lora: Tensor | None, token_lora_mapping: Tensor | None, num_tokens: int, w1: Tensor,
        w2: Tensor, top_k_num: int, max_loras: int, adapter_enabled: Tensor, top_k: int, fully_sharded: bool,
        tp_rank: int, use_tuned_config: bool, add_inputs: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Add the down projection of x ``[T*k, I]`` to y ``[T, k, H]``, weighted, by `add_lora_w13`'s alignment."""
        self._expert_ops("add_lora_w2")
        offset = tp_rank * lora_b_stacked[0].shape[-2] if fully_sharded else 0
        switches, site = Switches(True, fully_sharded, offset, add_inputs), "w2" if use_tuned_config else None
        weights = self._weights("add_lora_w2", lora_a_stacked, lora_b_stacked, adapter_enabled, switches, kwargs, site)
        _check_counts(topk_weights, num_tokens, (top_k_num, top_k), 1, 1)
        if num_tokens == 0:
            return
        mapping = self._slots_of_tokens(token_lora_mapping, num_tokens)
        if self._is_idle(mapping):
            return
        if expert_ids_lora is None:
            raise ValueError("expert_ids_lora is None; pass on what add_lora_w13 returned for these tokens")
        aligned = by_slot(weights.slots, sorted_token_ids_lora, expert_ids_lora, num_tokens_post_padded_lora)
        assignment = Assignment(topk_weights, *aligned, mapping)
        self.add_lora_experts(y.view(num_tokens, top_k, -1), x, weights, assignment)

    def _weights(
        self, method: str, lora_a: Stacks, lora_b: Stacks, enabled: Tensor, switches: Switches,
        kwargs: Mapping[str, Any], site: str | None = None,
    ) -> ExpertLoRAWeights:  # fmt: skip
        given = Keywords.of(method, kwargs)
        fp8 = given.experts()
        self._debug_check(fp8)
        return ExpertLoRAWeights(lora_a, lora_b, enabled, given.lora_ranks, fp8, switches, site)


def _check_counts(routing: Tensor, num_tokens: int, top_k: tuple[int, int], slices: int, num_slices: int) -> None:
    wanted = (num_tokens, top_k[0])
    if routing.ndim != 2 or tuple(routing.shape) != wanted or top_k[0] != top_k[1]:
        raise ValueError(f"num_tokens and both top_k are {num_tokens}, {top_k}; routing is {tuple(routing.shape)}")
    if slices != num_slices:
        raise ValueError(f"num_slices is {num_slices}, lora_a_stacked has {slices} tensors")


def normalize_lora_config_keys(config: Mapping[str, Any]) -> Config:
    """Copy with upper-case keys: ``block_m`` becomes ``BLOCK_SIZE_M``, ``num_warps`` ``NUM_WARPS``."""
    blocks = {f"block_{letter}": f"BLOCK_SIZE_{letter.upper()}" for letter in "mnk"}
    return {blocks.get(key, key.upper()): value for key, value in config.items()}


def positional_config(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the seven numbers of a config for `fused_moe_lora`. ValueError for unknown keys."""
    given = normalize_lora_config_keys(config)
    if unknown := sorted(set(given) - set(DEFAULTS)):
        raise ValueError(f"{name} has unknown keys {unknown}; known: {list(DEFAULTS)}, or these in lower case")
    return tuple((DEFAULTS | given).values())


def try_get_optimal_moe_lora_config(
    op_type: str, w1_shape: Sequence[int], w2_shape: Sequence[int], rank: int, top_k: int, dtype: torch.dtype, M: int
) -> Config:
    """Return a config of the base layer's expert product, adjusted to rank ``rank``, for `add_lora_fused_moe`.

    ``w1_shape``, ``w2_shape``: ``[E, out, in]``; ``M``: tokens; ``top_k`` and ``dtype`` are vLLM's, and unused.
    ValueError for an ``op_type`` not in `OP_TYPES`.
    """
    if op_type not in OP_TYPES:
        raise ValueError(f"op_type must be one of {', '.join(OP_TYPES)}, got {op_type!r}")
    if len(w1_shape) != 3 or len(w2_shape) != 3 or w1_shape[0] != w2_shape[0]:
        raise ValueError(f"w1_shape and w2_shape must be [E, out, in], got {tuple(w1_shape)} and {tuple(w2_shape)}")
    lanes = 1 << (check_count("rank", rank) - 1).bit_length()
    block_m, block_n, block_k, group_m = (16, 32, 64, 1) if w1_shape[0] >= M else (64, 64, 32, 8)
    config = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": block_k, "GROUP_SIZE_M": group_m}
    key = "BLOCK_SIZE_N" if op_type.endswith("shrink") else "BLOCK_SIZE_K"
    return config | {key: max(16, min(config[key], lanes))}
