"""Fused MoE LoRA with weights in FP8: `fused_moe_lora` with scales.

    y[t, j, o + s*N : o + (s+1)*N] (+)= w * (a(x) x @ (sA_s[l, e] A_s[l, e])^T) @ (sB_s[l, e] B_s[l, e])^T

Kernels and schedules are those of `punica.ops.triton_ops.fused_moe_lora`, which read either kind of weights; this file
is the op's own front. Scales are as in `punica.ops.experts`. With ``expand_act_scale`` the intermediate is rounded
to FP8.
"""

from collections.abc import Sequence

from torch import Tensor

from punica.ops.experts import Experts, Fp8Experts, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.fused_moe_lora import fused
from punica.ops.triton_ops.moe_plan import How
from punica.ops.triton_ops.op import custom_op, named

_fused = named("fused_moe_lora_fp8")(fused)


@custom_op(mutates="output")
def fused_moe_lora_fp8(
    output: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor, sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    shrink_block_size_m: int, shrink_block_size_n: int, shrink_block_size_k: int, shrink_group_size_m: int,
    shrink_num_warps: int, shrink_num_stages: int, shrink_split_k: int,
    expand_block_size_m: int, expand_block_size_n: int, expand_block_size_k: int, expand_group_size_m: int,
    expand_num_warps: int, expand_num_stages: int, expand_split_k: int,
    lora_a_scale_stacked: Sequence[Tensor] | None, lora_b_scale_stacked: Sequence[Tensor] | None,
    shrink_act_scale: Tensor | None = None, expand_act_scale: Tensor | None = None,
    mul_routed_weight: bool = False, fully_sharded: bool = False, offset: int = 0, use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False, block_shape: Sequence[int] | None = None, add_inputs: bool = True,
    *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """`fused_moe_lora` with A and B in FP8, in place; without scales and FP8 weights it is that op.

    Args:
        qcurr_hidden_states: float16, bfloat16 or float32 (weight-only), or with ``use_fp8_w8a8`` float8 with
            ``shrink_act_scale``.
        lora_a_stacked, lora_b_stacked: all float8_e4m3fn or all float8_e5m2.
        lora_a_scale_stacked, lora_b_scale_stacked: n float32 tensors each: [L, E] (per tensor), [L, E, R] and [L, E, N]
            (``per_channel_quant``), or per block.
        shrink_act_scale: float32, one element, [rows], [rows, 1], or with blocks [rows, ceil(K/bk)].
        expand_act_scale: [T*k] likewise: what lies between the products is rounded to the format of B by it.
        block_shape: [bn, bk], rows and columns of A and of B that share a scale; any sizes >= 1.

    The other arguments and errors as of `fused_moe_lora`; ValueError also for scales that are missing, too many or of
    another shape, or two schemes at once; TypeError for scales that are not float32.
    """
    scheme = scheme_of(block_shape, use_fp8_w8a8, per_channel_quant)
    weights, scales = (*lora_a_stacked, *lora_b_stacked), (lora_a_scale_stacked, lora_b_scale_stacked)
    fp8 = scales_of(weights, scales, (shrink_act_scale, expand_act_scale), scheme)
    given = Experts(
        output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids, expert_ids,
        num_tokens_post_padded, token_lora_mapping, adapter_enabled, lora_ids, lora_ranks, fp8,
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
    _fused(given, max_lora_rank, top_k_num, switches, How((shrink, expand), active))


def scheme_of(block_shape: Sequence[int] | None, use_fp8_w8a8: bool, per_channel_quant: bool) -> Scheme:
    """Scheme of these arguments of the op. ValueError where they make none."""
    blocks = (0, 0) if block_shape is None else tuple(block_shape)
    legal = len(blocks) == 2 and all([type(size) is int and size > 0 for size in blocks])
    if block_shape is not None and not legal:
        raise ValueError(f"block_shape must be two ints >= 1, rows and columns of a block, got {block_shape!r}")
    scheme = Scheme(blocks[1], blocks[0], use_fp8_w8a8, per_channel_quant)
    scheme.check()
    return scheme


def scales_of(
    weights: Sequence[Tensor], scales: tuple[Sequence[Tensor] | None, Sequence[Tensor] | None],
    act_scales: tuple[Tensor | None, Tensor | None], scheme: Scheme,
) -> Fp8Experts | None:  # fmt: skip
    """Scales of A and B and of both activations; None where nothing is FP8."""
    a_scale, b_scale = (() if one is None else one for one in scales)
    in_fp8 = any([isinstance(one, Tensor) and one.dtype in FP8_DTYPES for one in weights])
    if len(a_scale) + len(b_scale) > 0 or in_fp8 or scheme.use_fp8_w8a8:
        return Fp8Experts(a_scale, b_scale, *act_scales, scheme, scheme)
    if act_scales != (None, None) or scheme != Scheme():
        raise ValueError(f"activation scales and {scheme} need float8 weights with scales; leave them out for others")
    return None
