"""Shrink and expand of fused MoE LoRA as ops of their own, for callers that do something in between.

    fused_moe_lora_shrink:  h[s, t, j] = x @ A_s[l, e]^T                      pair (t, j): slot l, expert e
    fused_moe_lora_expand:  y[t, j, o + s*N :] (+)= w * h[s, t, j] @ B_s[l, e]^T

The intermediate is [n, T, k, R], or [split_k, n, T, k, R] for partial sums, which expand adds up in order; any float
dtype. Shrink writes the rows of pairs with an adapter, up to its rank, and expand reads no others.

Each is planned as a whole call whose other product has one column. Neither starts early (PDL): the kernel in front may
have written anything. Ops that end in ``_fp8`` take FP8 weights with scales as `fused_moe_lora_fp8` does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.ops.checks import FLOATS, check_dtype
from punica.ops.experts import Experts, Fp8Experts, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.moe_torch import rounded
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.fused_moe_lora import planned, stored, where
from punica.ops.triton_ops.fused_moe_lora_fp8 import scales_of, scheme_of
from punica.ops.triton_ops.launch import all_aligned, on_device
from punica.ops.triton_ops.moe_plan import How, MoEPlan, Numbers
from punica.ops.triton_ops.op import custom_op, named

Routing = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]
"""topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, token_lora_mapping."""
Slots = tuple[int, int, Tensor, int | Tensor | None, Tensor, Tensor | None]
"""max_lora_rank, top_k_num, lora_ids, num_active_loras, adapter_enabled, lora_ranks."""


def _stand_ins(weights: Sequence[Tensor], rows: int | None, scheme: Scheme | None) -> tuple[list, list]:
    """The other product's weights [L, E, rows or R, R or 1] and scales."""
    stacks, scales = [], []
    for one in weights if isinstance(weights, (tuple, list)) else ():
        if not isinstance(one, Tensor) or one.ndim != 4:
            return list(weights), []
        slots, experts = one.shape[:2]
        shape = (rows, one.shape[2]) if rows else (one.shape[3], 1)
        stacks.append(one.new_empty(slots, experts, *shape))
        if scheme is not None:
            own: tuple[int, ...] = shape[:1] if scheme.per_channel_quant else ()
            if scheme.block_wise:
                own = (-(-shape[0] // scheme.group_n), -(-shape[1] // scheme.group_k))
            scales.append(one.new_empty(slots, experts, *own, dtype=torch.float32))
    return stacks, scales


def _plan(
    given: Experts, slots: Slots, switches: Switches, intermediate: Tensor, numbers: Numbers
) -> MoEPlan | None:
    """The plan of a call, with ``intermediate`` checked. ``numbers`` are those of either product."""
    rank, top_k, _, active, _, _ = slots
    count = None if active is None else int(active)
    how = How((numbers, numbers), count, options=Options(pdl=False), low=intermediate.dtype)
    plan = planned(given, rank, top_k, switches, how)
    if plan is not None:
        planes, slices, _, width = plan.partials
        shape = (slices, *given.topk_weights.shape, width)
        legal = tuple(intermediate.shape) == (planes, *shape) or (planes == 1 and tuple(intermediate.shape) == shape)
        if not legal or not intermediate.is_contiguous() or intermediate.device != given.x.device:
            raise ValueError(
                f"intermediate is {tuple(intermediate.shape)} on {intermediate.device}; contiguous {(planes, *shape)} "
                f"on {given.x.device} is needed, split_k planes of [n, T, k, R]"
            )
    return plan


@named("fused_moe_lora_shrink")
def _shrink(
    intermediate: Tensor, x: Tensor, lora_a: Sequence[Tensor], routing: Routing, slots: Slots, numbers: Numbers,
    mul_routed_weight: bool, fp8: Fp8Experts | None = None,
) -> None:  # fmt: skip
    check_dtype("intermediate", intermediate, FLOATS)
    check_dtype("topk_weights", routing[0], FLOATS)
    lora_b, b_scale = _stand_ins(lora_a, 1, fp8.expand if fp8 else None)
    output = intermediate.new_empty(*routing[0].shape, len(lora_b))
    fp8 = fp8._replace(b_scale=b_scale) if fp8 else None
    given = Experts(output, x, lora_a, lora_b, *routing, slots[4], slots[2], slots[5], fp8)
    plan = _plan(given, slots, Switches(mul_routed_weight), intermediate, numbers)
    if plan is not None:
        x, a, _ = stored(given)
        with on_device(x.get_device()):
            plan.shrink(((x, intermediate), a, *where(given)), plan.counts, all_aligned(x, intermediate, *a))


@named("fused_moe_lora_expand")
def _expand(
    output: Tensor, intermediate: Tensor, lora_b: Sequence[Tensor], routing: Routing, slots: Slots, numbers: Numbers,
    switches: Switches, fp8: Fp8Experts | None = None,
) -> None:  # fmt: skip
    check_dtype("intermediate", intermediate, FLOATS)
    check_dtype("topk_weights", routing[0], FLOATS)
    lora_a, a_scale = _stand_ins(lora_b, None, fp8.shrink if fp8 else None)
    rows = routing[0].numel() if switches.mul_routed_weight else len(routing[0])
    dtype = output.dtype if fp8 or not lora_a else lora_a[0].dtype
    fp8 = fp8._replace(a_scale=a_scale) if fp8 else None
    x = routing[0].new_empty(rows, 1, dtype=dtype)
    given = Experts(output, x, lora_a, lora_b, *routing, slots[4], slots[2], slots[5], fp8)
    planes = intermediate.shape[0] if intermediate.ndim == 5 else 1
    plan = _plan(given, slots, switches, intermediate, (*numbers[:6], planes))
    if plan is not None:
        if fp8 is not None and fp8.h_scale is not None:
            total = intermediate.view(plan.partials).float().sum(0, keepdim=True)
            intermediate = rounded(total, fp8.h_scale, fp8.expand, lora_b[0].dtype).to(intermediate.dtype)
        tensors, (_, _, b) = (intermediate, output, routing[0]), stored(given)
        with on_device(output.get_device()):
            plan.expand((tensors, b, *where(given)), plan.counts, all_aligned(*tensors, *b))


@custom_op(mutates="intermediate")
def fused_moe_lora_shrink(
    intermediate: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], topk_weights: Tensor,
    sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    block_size_m: int, block_size_n: int, block_size_k: int, group_size_m: int, num_warps: int, num_stages: int,
    split_k: int,
    mul_routed_weight: bool = False,
    *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """``intermediate[s, t, j] = x @ A_s[l, e]^T`` for every pair, in place; the rest as in `fused_moe_lora`."""
    routing = (topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, token_lora_mapping)
    slots = (max_lora_rank, top_k_num, lora_ids, num_active_loras, adapter_enabled, lora_ranks)
    numbers = (block_size_m, block_size_n, block_size_k, group_size_m, num_warps, num_stages, split_k)
    _shrink(intermediate, qcurr_hidden_states, lora_a_stacked, routing, slots, numbers, mul_routed_weight)


@custom_op(mutates="intermediate")
def fused_moe_lora_shrink_fp8(
    intermediate: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], topk_weights: Tensor,
    sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    block_size_m: int, block_size_n: int, block_size_k: int, group_size_m: int, num_warps: int, num_stages: int,
    split_k: int,
    lora_a_scale_stacked: Sequence[Tensor] | None, act_scale: Tensor | None = None,
    mul_routed_weight: bool = False, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    block_shape: Sequence[int] | None = None,
    *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """`fused_moe_lora_shrink` of A in FP8. FP8 activations are multiplied in the dtype of ``intermediate``."""
    scheme = scheme_of(block_shape, use_fp8_w8a8, per_channel_quant)
    fp8 = scales_of(lora_a_stacked, (lora_a_scale_stacked, None), (act_scale, None), scheme)
    routing = (topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, token_lora_mapping)
    slots = (max_lora_rank, top_k_num, lora_ids, num_active_loras, adapter_enabled, lora_ranks)
    numbers = (block_size_m, block_size_n, block_size_k, group_size_m, num_warps, num_stages, split_k)
    _shrink(intermediate, qcurr_hidden_states, lora_a_stacked, routing, slots, numbers, mul_routed_weight, fp8)


@custom_op(mutates="output")
def fused_moe_lora_expand(
    output: Tensor, intermediate: Tensor, lora_b_stacked: Sequence[Tensor], topk_weights: Tensor,
    sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    block_size_m: int, block_size_n: int, block_size_k: int, group_size_m: int, num_warps: int, num_stages: int,
    split_k: int,
    mul_routed_weight: bool = False, offset: int = 0, add_inputs: bool = True,
    *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """``output[t, j, offset + s*N : ...] (+)= w * intermediate[s, t, j] @ B_s[l, e]^T`` for every pair, in place.

    ``intermediate`` has as many planes as there are partial sums; ``split_k`` is not used. The rest is as in
    `fused_moe_lora`.
    """
    routing = (topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, token_lora_mapping)
    slots = (max_lora_rank, top_k_num, lora_ids, num_active_loras, adapter_enabled, lora_ranks)
    numbers = (block_size_m, block_size_n, block_size_k, group_size_m, num_warps, num_stages, split_k)
    switches = Switches(mul_routed_weight, False, offset, add_inputs)
    _expand(output, intermediate, lora_b_stacked, routing, slots, numbers, switches)


@custom_op(mutates="output")
def fused_moe_lora_expand_fp8(
    output: Tensor, intermediate: Tensor, lora_b_stacked: Sequence[Tensor], topk_weights: Tensor,
    sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    block_size_m: int, block_size_n: int, block_size_k: int, group_size_m: int, num_warps: int, num_stages: int,
    split_k: int,
    lora_b_scale_stacked: Sequence[Tensor] | None, act_scale: Tensor | None = None,
    mul_routed_weight: bool = False, offset: int = 0, per_channel_quant: bool = False,
    block_shape: Sequence[int] | None = None, add_inputs: bool = True,
    *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """`fused_moe_lora_expand` of B in FP8; with ``act_scale`` [T*k] ``intermediate`` is rounded to its format first."""
    scheme = scheme_of(block_shape, False, per_channel_quant)
    fp8 = scales_of(lora_b_stacked, (None, lora_b_scale_stacked), (None, act_scale), scheme)
    routing = (topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, token_lora_mapping)
    slots = (max_lora_rank, top_k_num, lora_ids, num_active_loras, adapter_enabled, lora_ranks)
    numbers = (block_size_m, block_size_n, block_size_k, group_size_m, num_warps, num_stages, split_k)
    switches = Switches(mul_routed_weight, False, offset, add_inputs)
    _expand(output, intermediate, lora_b_stacked, routing, slots, numbers, switches, fp8)
