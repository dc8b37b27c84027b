"""Fused MoE LoRA: every (token, expert) pair through its adapter's weights for that expert.

    y[t, j, o + s*N : o + (s+1)*N] (+)= w * (x @ A_s[l, e]^T) @ B_s[l, e]^T         pair (t, j): slot l, expert e

(`punica.ops.reference.fused_moe_lora` says it in full.) Two launches (`moe_shrink`, `moe_expand`): shrink leaves fp32
partial sums, expand adds them up; those of all ranks may be added in between (fully sharded). `moe_rules` chooses
schedules, `moe_plan` makes launches. Nothing is added atomically; a pair's result depends on its row and weights alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from punica.ops import collectives
from punica.ops.experts import Experts, Switches
from punica.ops.moe_torch import rounded
from punica.ops.triton_ops.fp8_device import as_operand, operands
from punica.ops.triton_ops.launch import all_aligned, on_device
from punica.ops.triton_ops.moe_plan import How, MoEPlan, plan_experts
from punica.ops.triton_ops.op import custom_op, named

# --- running ---------------------------------------------------------------------------------------------------------

_PLANS: dict[tuple, MoEPlan | None] = {}


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return tuple(map(_described, value)) if isinstance(value, (tuple, list)) else value


def planned(given: Experts, max_lora_rank: int, top_k: int, switches: Switches, how: How) -> MoEPlan | None:
    """The plan of a call: the same for operands of the same forms, so it is made once for each of these."""
    key = (*map(_described, given), max_lora_rank, top_k, switches, how)
    if switches.fully_sharded:
        key += (collectives.current().world_size(), collectives.current().rank())
    if key not in _PLANS:
        if len(_PLANS) >= 4096:
            _PLANS.clear()
        plan = plan_experts(given, max_lora_rank, top_k, switches, how)
        # a plan must not keep the operands of its first call alive: launches hold numbers only
        _PLANS[key] = plan
    return _PLANS[key]


def where(given: Experts) -> tuple[Tensor, ...]:
    """sorted, experts, counts, mapping, enabled, ids, ranks; any tensor for what a kernel does not read."""
    mapping = given.mapping
    ids = given.sorted_ids if given.sorted_ids is not None else mapping
    counts = given.counts if given.counts is not None else mapping
    listed = mapping if given.lora_ids is None else _padded(given.lora_ids, given.lora_a[0].shape[0] + 1)
    ranks = given.lora_ranks if given.lora_ranks is not None else mapping
    return ids, given.expert_ids, counts, mapping, given.enabled, listed, ranks


def _padded(lora_ids: Tensor, size: int) -> Tensor:
    """The slots to look at, at least as many as kernels read: -1 is none."""
    missing = size - len(lora_ids)
    return torch.nn.functional.pad(lora_ids, (0, missing), value=-1) if missing > 0 else lora_ids


@named("fused_moe_lora")
def fused(given: Experts, max_lora_rank: int, top_k: int, switches: Switches, how: How = How()) -> None:  # noqa: B008
    """`fused_moe_lora` on its operands as one tuple; what the wrapper calls."""
    plan = planned(given, max_lora_rank, top_k, switches, how)
    if plan is None:
        return
    with on_device(given.x.get_device()):
        _run(plan, given, switches)


def stored(given: Experts) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """x, and the operands of shrink and expand."""
    if given.fp8 is None:
        return given.x, tuple(given.lora_a), tuple(given.lora_b)
    fp8 = given.fp8.contiguous()
    a = operands(given.lora_a, fp8.a_scale, fp8.x_scale)
    return as_operand(given.x), a, operands(given.lora_b, fp8.b_scale, None)


def _run(plan: MoEPlan, given: Experts, switches: Switches) -> None:
    (x, a, b), pairs, fp8 = stored(given), where(given), given.fp8
    aligned = all_aligned(x, given.output, given.topk_weights, *a, *b)
    fill = torch.zeros if switches.fully_sharded else torch.empty  # what travels between ranks is defined everywhere
    partials = fill(plan.partials, dtype=torch.float32, device=given.x.device)
    plan.shrink(((x, partials), a, *pairs), plan.counts, aligned)
    if switches.fully_sharded:
        ranks = collectives.current()
        partials = ranks.all_reduce(partials) if plan.form.rank == plan.form.full_rank else ranks.all_gather(partials)
        partials = partials.contiguous()  # gathered from one rank of A each, a view of what arrived
    if fp8 is not None and fp8.h_scale is not None:
        partials = rounded(partials.sum(0, keepdim=True), fp8.h_scale, fp8.expand, given.lora_b[0].dtype)
    tensors = (partials, given.output, given.topk_weights)
    plan.expand((tensors, b, *pairs), plan.counts, aligned and all_aligned(partials))


# --- the ops ---------------------------------------------------------------------------------------------------------


@custom_op(mutates="output")
def fused_moe_lora(
    output: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor, sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    shrink_block_size_m: int, shrink_block_size_n: int, shrink_block_size_k: int, shrink_group_size_m: int,
    shrink_num_warps: int, shrink_num_stages: int, shrink_split_k: int,
    expand_block_size_m: int, expand_block_size_n: int, expand_block_size_k: int, expand_group_size_m: int,
    expand_num_warps: int, expand_num_stages: int, expand_split_k: int,
    mul_routed_weight: bool = False, fully_sharded: bool = False, offset: int = 0, add_inputs: bool = True,
    *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """``output[t, j, offset + s*N : ...] (+)= w * (x @ A_s[l, e]^T) @ B_s[l, e]^T`` for every pair, in place.

    Args:
        output: [T, k, W], rows without gaps.
        qcurr_hidden_states: [T, K], or [T*k, K] with ``mul_routed_weight``; float16, bfloat16 or float32, any strides.
        lora_a_stacked, lora_b_stacked: n x [L, E, R, K] and n x [L, E, N, R'], contiguous, dtype of the input.
        topk_weights: [T, k] floats, factor w with ``mul_routed_weight``.
        sorted_token_ids, expert_ids, num_tokens_post_padded: of `moe_lora_align_block_size`, [L, P], [L, B], [L]; or
            None, [T*k], None: every pair by itself.
        token_lora_mapping: [T] int32. max_lora_rank: R. top_k_num: k.
        lora_ids, num_active_loras: slots to look at, int32, at most L+1 (-1: none), and how many are in use (None:
            all).
        adapter_enabled: int32 [L+1], 0: the slot has no weights here.
        shrink_*, expand_*: blocks (powers of two >= 16, m equal to the alignment's), a group of m tiles (unused),
            warps, pipeline stages and K splits.
        fully_sharded: A holds this rank's part; a collective stands between shrink and expand.
        offset: first column written. add_inputs: add, else overwrite.
        lora_ranks: int32 [n, L], how many ranks each slot really has; what lies beyond is not read (None: all).

    Rows of pairs without adapter or expert here are never written. TypeError for dtypes, ValueError for shapes and
    sizes, before any write.
    """
    given = Experts(
        output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids, expert_ids,
        num_tokens_post_padded, token_lora_mapping, adapter_enabled, lora_ids, lora_ranks,
    )  # fmt: skip
    shrink = (
        shrink_block_size_m, shrink_block_size_n, shrink_block_size_k, shrink_group_size_m, shrink_num_warps,
        shrink_num_stages, shrink_split_k,
    )  # fmt: skip
    expand = (
        expand_block_size_m, expand_block_size_n, expand_block_size_k, expand_group_size_m, expand_num_warps,
        expand_num_stages, expand_split_k,
    )  # fmt: skip
    active = None if num_active_loras is None else int(num_active_loras)
    switches = Switches(mul_routed_weight, fully_sharded, offset, add_inputs)
    fused(given, max_lora_rank, top_k_num, switches, How((shrink, expand), active))


def _run_fused_moe_lora_one_shot(
    output: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor, sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    mul_routed_weight: bool, block_size_m: int, add_inputs: bool = True, offset: int = 0,
) -> None:  # fmt: skip
    """`fused_moe_lora` with one K split and small blocks; ``block_size_m`` is the alignment's."""
    numbers = (block_size_m, 64, 64, 1, 4, 3, 1)
    fused_moe_lora(
        output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids, expert_ids,
        num_tokens_post_padded, token_lora_mapping, max_lora_rank, top_k_num, lora_ids, num_active_loras,
        adapter_enabled, *numbers, *numbers, mul_routed_weight, False, offset, add_inputs,
    )  # fmt: skip


def _run_fused_moe_lora_small_batch(
    output: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor, expert_ids_flat: Tensor, token_lora_mapping: Tensor,
    top_k_num: int,
    adapter_enabled: Tensor,
    mul_routed_weight: bool, add_inputs: bool = True, offset: int = 0,
) -> None:  # fmt: skip
    """`fused_moe_lora` on naive input. ValueError for ranks above 64."""
    given = Experts(
        output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, topk_weights, None, expert_ids_flat, None,
        token_lora_mapping, adapter_enabled, None,
    )  # fmt: skip
    rank = lora_a_stacked[0].shape[-2]
    if rank > 64:
        raise ValueError(f"the small-batch path takes ranks up to 64, got rank {rank}")
    fused(given, rank, top_k_num, Switches(mul_routed_weight, False, offset, add_inputs))
