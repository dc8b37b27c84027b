"""`fused_moe_lora_shrink` and `fused_moe_lora_expand`: the two products of fused MoE LoRA as ops of their own.

    fused_moe_lora_shrink:  h[s, t, j] = x @ A_s[l, e]^T                      pair (t, j): slot l, expert e
    fused_moe_lora_expand:  y[t, j, o + s*N :] (+)= w * h[s, t, j] @ B_s[l, e]^T

The intermediate is [n, T, k, R], or [split_k, n, T, k, R] for partial sums, which expand adds up in order; any float
dtype. Shrink writes the rows of pairs with an adapter, up to its rank, and expand reads no others.

Each is planned as a whole call whose other product has one column. Neither starts early (PDL): the predecessor may have
written any operand. Ops that end in ``_fp8`` take FP8 weights with scales as `fused_moe_lora_fp8` does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.ops.checks import FLOATS, check_dtype
from punica.ops.experts import Experts, Fp8Experts, Numbers, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.moe_torch import rounded
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.flat.moe import Arguments, active_of, experts_of, numbers_of, scales_of, switches_of
from punica.ops.triton_ops.launch import all_aligned, on_device
from punica.ops.triton_ops.moe_ops import index_tensors, planned, stored
from punica.ops.triton_ops.moe_plan import How, MoEPlan
from punica.ops.triton_ops.op import custom_op, named


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


def _plan(given: Arguments, experts: Experts, switches: Switches, numbers: Numbers) -> MoEPlan | None:
    """The plan of a call, with ``intermediate`` checked. ``numbers`` are those of either product."""
    intermediate = given["intermediate"]
    how = How((numbers, numbers), active_of(given), options=Options(pdl=False), low=intermediate.dtype)
    plan = planned(experts, given["max_lora_rank"], given["top_k_num"], switches, how)
    if plan is not None:
        planes, slices, _, width = plan.partials
        shape = (slices, *experts.topk_weights.shape, width)
        legal = tuple(intermediate.shape) == (planes, *shape) or (planes == 1 and tuple(intermediate.shape) == shape)
        if not legal or not intermediate.is_contiguous() or intermediate.device != experts.x.device:
            raise ValueError(
                f"intermediate is {tuple(intermediate.shape)} on {intermediate.device}; contiguous {(planes, *shape)} "
                f"on {experts.x.device} is needed, split_k planes of [n, T, k, R]"
            )
    return plan


@named("fused_moe_lora_shrink")
def _shrink(given: Arguments, fp8: Fp8Experts | None = None) -> None:
    intermediate, topk_weights, lora_a = given["intermediate"], given["topk_weights"], given["lora_a_stacked"]
    check_dtype("intermediate", intermediate, FLOATS)
    check_dtype("topk_weights", topk_weights, FLOATS)
    lora_b, b_scale = _stand_ins(lora_a, 1, fp8.expand if fp8 else None)
    output = intermediate.new_empty(*topk_weights.shape, len(lora_b))
    fp8 = fp8._replace(b_scale=b_scale) if fp8 else None
    experts = experts_of(given | {"lora_b_stacked": lora_b, "output": output}, fp8)
    plan = _plan(given, experts, switches_of(given), numbers_of(given))
    if plan is not None:
        x, a, _ = stored(experts)
        with on_device(x.get_device()):
            plan.shrink(((x, intermediate), a, *index_tensors(experts)), plan.counts, all_aligned(x, intermediate, *a))


@named("fused_moe_lora_expand")
def _expand(given: Arguments, fp8: Fp8Experts | None = None) -> None:
    intermediate, topk_weights, lora_b = given["intermediate"], given["topk_weights"], given["lora_b_stacked"]
    output, switches = given["output"], switches_of(given)
    check_dtype("intermediate", intermediate, FLOATS)
    check_dtype("topk_weights", topk_weights, FLOATS)
    lora_a, a_scale = _stand_ins(lora_b, None, fp8.shrink if fp8 else None)
    rows = topk_weights.numel() if switches.mul_routed_weight else len(topk_weights)
    dtype = output.dtype if fp8 or not lora_a else lora_a[0].dtype
    fp8 = fp8._replace(a_scale=a_scale) if fp8 else None
    x = topk_weights.new_empty(rows, 1, dtype=dtype)
    experts = experts_of(given | {"lora_a_stacked": lora_a, "qcurr_hidden_states": x}, fp8)
    planes = intermediate.shape[0] if intermediate.ndim == 5 else 1
    plan = _plan(given, experts, switches, (*numbers_of(given)[:6], planes))
    if plan is not None:
        if fp8 is not None and fp8.h_scale is not None:
            total = intermediate.view(plan.partials).float().sum(0, keepdim=True)
            intermediate = rounded(total, fp8.h_scale, fp8.expand, lora_b[0].dtype).to(intermediate.dtype)
        tensors, (_, _, b) = (intermediate, output, topk_weights), stored(experts)
        with on_device(output.get_device()):
            plan.expand((tensors, b, *index_tensors(experts)), plan.counts, all_aligned(*tensors, *b))


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
    _shrink(locals())


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
    given = locals()
    _shrink(given, scales_of(given | {"shrink_act_scale": act_scale}))


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
    _expand(locals())


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
    given = locals()
    _expand(given, scales_of(given | {"expand_act_scale": act_scale}))
