"""`fused_moe_lora` and `fused_moe_lora_fp8`: operands, routing and schedule of fused MoE LoRA given one by one.

    y[t, j, o + s*N : o + (s+1)*N] (+)= w * (a(x) x @ (sA_s[l, e] A_s[l, e])^T) @ (sB_s[l, e] B_s[l, e])^T

for the pair (t, j) of slot l and expert e; scales sA, sB and a are 1 for weights in 16 and 32 bits, else those of
`punica.ops.experts`. The kernels are `punica.ops.triton_ops.moe_ops`'. A signature is its op's schema, so each function
hands its arguments on by name.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from punica.ops.experts import Experts, Fp8Experts, Numbers, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.moe_ops import fused
from punica.ops.triton_ops.moe_plan import How
from punica.ops.triton_ops.op import custom_op, named

Arguments = dict[str, Any]
_OPERANDS = (
    "output", "qcurr_hidden_states", "lora_a_stacked", "lora_b_stacked", "topk_weights", "sorted_token_ids",
    "expert_ids", "num_tokens_post_padded", "token_lora_mapping", "adapter_enabled", "lora_ids", "lora_ranks",
)  # fmt: skip
"""Names of the fields of `Experts`."""
_NUMBERS = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages", "split_k")
_fused_fp8 = named("fused_moe_lora_fp8")(fused)


def experts_of(given: Arguments, fp8: Fp8Experts | None = None) -> Experts:
    """Operands of a call."""
    return Experts._make([*[given.get(name) for name in _OPERANDS], fp8])


def switches_of(given: Arguments) -> Switches:
    """Scalar options of a call."""
    return Switches._make([given.get(name, default) for name, default in Switches._field_defaults.items()])


def numbers_of(given: Arguments, product: str = "") -> Numbers:
    """Schedule of a product."""
    return tuple([given[product + name] for name in _NUMBERS])


def active_of(given: Arguments) -> int | None:
    """Number of adapters in use; None: all slots."""
    count = given.get("num_active_loras")
    return None if count is None else int(count)


def scales_of(given: Arguments) -> Fp8Experts | None:
    """Scales of weights and activations; None where nothing is FP8. ValueError where they make no scheme."""
    block_shape = given["block_shape"]
    blocks = (0, 0) if block_shape is None else tuple(block_shape)
    legal = len(blocks) == 2 and all([type(size) is int and size > 0 for size in blocks])
    if block_shape is not None and not legal:
        raise ValueError(f"block_shape must be two ints >= 1, rows and columns of a block, got {block_shape!r}")
    scheme = Scheme(blocks[1], blocks[0], given.get("use_fp8_w8a8", False), given["per_channel_quant"])
    scheme.check()
    a_scale, b_scale = (given.get(f"lora_{which}_scale_stacked") for which in "ab")
    a_scale, b_scale = (() if one is None else one for one in (a_scale, b_scale))
    act_scales = given.get("shrink_act_scale"), given.get("expand_act_scale")
    weights = (*given.get("lora_a_stacked", ()), *given.get("lora_b_stacked", ()))
    in_fp8 = any([isinstance(one, Tensor) and one.dtype in FP8_DTYPES for one in weights])
    if len(a_scale) + len(b_scale) > 0 or in_fp8 or scheme.use_fp8_w8a8:
        return Fp8Experts(a_scale, b_scale, *act_scales, scheme, scheme)
    if act_scales != (None, None) or scheme != Scheme():
        raise ValueError(f"activation scales and {scheme} need float8 weights with scales; leave them out for others")
    return None


def _call(given: Arguments, fp8: Fp8Experts | None = None) -> tuple[Experts, int, int, Switches, How]:
    """Arguments of `fused`."""
    how = How((numbers_of(given, "shrink_"), numbers_of(given, "expand_")), active_of(given))
    return experts_of(given, fp8), given["max_lora_rank"], given["top_k_num"], switches_of(given), how


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
            None, [T*k], None (naive assignment).
        token_lora_mapping: [T] int32. max_lora_rank: R. top_k_num: k.
        lora_ids, num_active_loras: listed slots, int32, at most L+1 (-1: none), and the number in use (None: all).
        adapter_enabled: int32 [L+1], 0: the slot has no weights here.
        shrink_*, expand_*: blocks (powers of two >= 16, m equal to the alignment's), a group of m tiles (unused),
            warps, pipeline stages and K splits.
        fully_sharded: A is this rank's part; a collective joins the intermediates of all ranks.
        offset: first column written. add_inputs: add, else overwrite.
        lora_ranks: int32 [n, L], true rank of each slot; weights beyond are not read (None: all are).

    Rows of pairs without adapter or expert here are never written. TypeError for dtypes, ValueError for shapes and
    sizes, before any write.
    """
    fused(*_call(locals()))


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
        expand_act_scale: [T*k] likewise: the intermediate is rounded to the format of B by it.
        block_shape: [bn, bk], rows and columns of A and of B that share a scale; any sizes >= 1.

    The other arguments and errors as of `fused_moe_lora`; ValueError also for scales that are missing, too many or of
    another shape, or two schemes at once; TypeError for scales that are not float32.
    """
    given = locals()
    _fused_fp8(*_call(given, scales_of(given)))


def _run_fused_moe_lora_one_shot(
    output: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor, sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int, top_k_num: int,
    lora_ids: Tensor, num_active_loras: int | Tensor | None, adapter_enabled: Tensor,
    mul_routed_weight: bool, block_size_m: int, add_inputs: bool = True, offset: int = 0,
) -> None:  # fmt: skip
    """Run `fused_moe_lora` with one K split and small blocks; ``block_size_m`` is the alignment's."""
    given, numbers = locals(), (block_size_m, 64, 64, 1, 4, 3, 1)
    del given["block_size_m"]
    for product in ("shrink_", "expand_"):
        given |= {product + name: number for name, number in zip(_NUMBERS, numbers, strict=True)}
    fused_moe_lora(**given)


def _run_fused_moe_lora_small_batch(
    output: Tensor, qcurr_hidden_states: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor, expert_ids_flat: Tensor, token_lora_mapping: Tensor,
    top_k_num: int,
    adapter_enabled: Tensor,
    mul_routed_weight: bool, add_inputs: bool = True, offset: int = 0,
) -> None:  # fmt: skip
    """Run `fused_moe_lora` on naive input. ValueError for ranks above 64."""
    given, rank = locals() | {"expert_ids": expert_ids_flat}, lora_a_stacked[0].shape[-2]
    if rank > 64:
        raise ValueError(f"the small-batch path takes ranks up to 64, got rank {rank}")
    fused(experts_of(given), rank, top_k_num, switches_of(given))
