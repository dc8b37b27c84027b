"""`fused_moe_lora`, and shrink and expand of it as ops of their own: operands, routing and schedule given one by one.

    fused_moe_lora          y[t, j, o + s*N : o + (s+1)*N] (+)= w * (a(x) x @ (sA_s A_s[l, e])^T) @ (sB_s B_s[l, e])^T
    fused_moe_lora_shrink   h[s, t, j] = x @ A_s[l, e]^T
    fused_moe_lora_expand   y[t, j, o + s*N : o + (s+1)*N] (+)= w * h[s, t, j] @ B_s[l, e]^T

for the pair (t, j) of slot l and expert e. Scales sA, sB and a are those of weights in FP8 (`punica.ops.experts`), else
1. The kernels are `punica.ops.triton_ops.moe_ops`'.

The intermediate h is [n, T, k, R], or [split_k, n, T, k, R] for partial sums, which expand adds up in order; any float
dtype. Shrink writes the rows of pairs with an adapter, up to its rank, and expand reads no others. Either is planned as
a whole call whose other product has one column, and does not start early (PDL): the predecessor may have written any
operand.
"""

from collections.abc import Sequence

from torch import Tensor

from punica.ops.expect import FLOATS, expect
from punica.ops.experts import Experts, Fp8Experts, Numbers, Switches
from punica.ops.quant import FP8_DTYPES
from punica.ops.scales import PLAIN, Scheme
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.launch import all_aligned, on_device
from punica.ops.triton_ops.moe_ops import fused, index_tensors, planned, stored
from punica.ops.triton_ops.moe_plan import How, MoEPlan
from punica.vllm.ops.signature import Given, flat_op

_NUMBERS = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages", "split_k")
_OPERANDS = (
    "output", "qcurr_hidden_states", "lora_a_stacked", "lora_b_stacked", "topk_weights", "sorted_token_ids",
    "expert_ids", "num_tokens_post_padded", "token_lora_mapping", "adapter_enabled", "lora_ids", "lora_ranks",
)  # fmt: skip
"""Names of the fields of `Experts`."""
_ROUTING = (
    "topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, token_lora_mapping, max_lora_rank, top_k_num, "
    "lora_ids, num_active_loras, adapter_enabled"
)
_BOTH = f"output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, {_ROUTING}"
_WHOLE = ", ".join((_BOTH, *[f"{product}_{name}" for product in ("shrink", "expand") for name in _NUMBERS]))
_SHRINK = ", ".join(("intermediate, qcurr_hidden_states, lora_a_stacked", _ROUTING, *_NUMBERS))
_EXPAND = ", ".join(("output, intermediate, lora_b_stacked", _ROUTING, *_NUMBERS))
_SCALES = "lora_a_scale_stacked, lora_b_scale_stacked, shrink_act_scale=None, expand_act_scale=None"


@flat_op(
    f"{_WHOLE}, mul_routed_weight=False, fully_sharded=False, offset=0, add_inputs=True, *, lora_ranks=None",
    writes="output",
)
def fused_moe_lora(given: Given) -> None:
    """``output[t, j, offset + s*N : ...] (+)= w * (x @ A_s[l, e]^T) @ B_s[l, e]^T`` for every pair, in place.

    Args:
        output: [T, k, W], rows without gaps.
        qcurr_hidden_states: [T, K], or [T*k, K] with ``mul_routed_weight``; 16 or 32 bits, any strides.
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
    fused(*_call(given))


@flat_op(
    f"{_WHOLE}, {_SCALES}, mul_routed_weight=False, fully_sharded=False, offset=0, use_fp8_w8a8=False, "
    "per_channel_quant=False, block_shape=None, add_inputs=True, *, lora_ranks=None",
    writes="output",
)
def fused_moe_lora_fp8(given: Given) -> None:
    """Run `fused_moe_lora` with A and B in FP8, in place; without scales and FP8 weights it is that op.

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
    fused(*_call(given, _scales(given)))


@flat_op(f"{_SHRINK}, mul_routed_weight=False, *, lora_ranks=None", writes="intermediate")
def fused_moe_lora_shrink(given: Given) -> None:
    """``intermediate[s, t, j] = x @ A_s[l, e]^T`` for every pair, in place; the rest as in `fused_moe_lora`."""
    intermediate, topk_weights, lora_a = given["intermediate"], given["topk_weights"], given["lora_a_stacked"]
    expect("intermediate", intermediate, dtype=FLOATS)
    expect("topk_weights", topk_weights, dtype=FLOATS)
    lora_b = _stand_ins(lora_a, 1)
    output = intermediate.new_empty(*topk_weights.shape, len(lora_b))
    experts = _experts(given | {"lora_b_stacked": lora_b, "output": output})
    plan = _plan(given, experts, tuple([given[name] for name in _NUMBERS]))
    if plan is not None:
        x, a, _ = stored(experts)
        with on_device(x.get_device()):
            plan.shrink(((x, intermediate), a, *index_tensors(experts)), plan.counts, all_aligned(x, intermediate, *a))


@flat_op(f"{_EXPAND}, mul_routed_weight=False, offset=0, add_inputs=True, *, lora_ranks=None", writes="output")
def fused_moe_lora_expand(given: Given) -> None:
    """``output[t, j, offset + s*N : ...] (+)= w * intermediate[s, t, j] @ B_s[l, e]^T`` for every pair, in place, as
    `fused_moe_lora`; ``intermediate`` has a plane per partial sum, ``split_k`` is not used.
    """
    intermediate, topk_weights, lora_b = given["intermediate"], given["topk_weights"], given["lora_b_stacked"]
    expect("intermediate", intermediate, dtype=FLOATS)
    expect("topk_weights", topk_weights, dtype=FLOATS)
    lora_a, output = _stand_ins(lora_b, None), given["output"]
    rows = topk_weights.numel() if given["mul_routed_weight"] else len(topk_weights)
    x = topk_weights.new_empty(rows, 1, dtype=lora_a[0].dtype if lora_a else output.dtype)
    experts = _experts(given | {"lora_a_stacked": lora_a, "qcurr_hidden_states": x})
    planes = intermediate.shape[0] if intermediate.ndim == 5 else 1
    plan = _plan(given, experts, (*[given[name] for name in _NUMBERS[:-1]], planes))
    if plan is not None:
        tensors, (_, _, b) = (intermediate, output, topk_weights), stored(experts)
        with on_device(output.get_device()):
            plan.expand((tensors, b, *index_tensors(experts)), plan.counts, all_aligned(*tensors, *b))


@flat_op(f"{_BOTH}, mul_routed_weight, block_size_m, add_inputs=True, offset=0", writes="output")
def _run_fused_moe_lora_one_shot(given: Given) -> None:
    """Run `fused_moe_lora` with one K split and small blocks; ``block_size_m`` is the alignment's."""
    numbers = (given["block_size_m"], 64, 64, 1, 4, 3, 1)
    how = How((numbers, numbers), _active(given))
    fused(_experts(given), given["max_lora_rank"], given["top_k_num"], _switches(given), how)


@flat_op(
    "output, qcurr_hidden_states, lora_a_stacked, lora_b_stacked, topk_weights, expert_ids_flat, token_lora_mapping, "
    "top_k_num, adapter_enabled, mul_routed_weight, add_inputs=True, offset=0",
    writes="output",
)
def _run_fused_moe_lora_small_batch(given: Given) -> None:
    """Run `fused_moe_lora` on naive input. ValueError for ranks above 64."""
    rank = given["lora_a_stacked"][0].shape[-2]
    if rank > 64:
        raise ValueError(f"the small-batch path takes ranks up to 64, got rank {rank}")
    fused(_experts(given | {"expert_ids": given["expert_ids_flat"]}), rank, given["top_k_num"], _switches(given))


def _call(given: Given, fp8: Fp8Experts | None = None) -> tuple[Experts, int, int, Switches, How]:
    shrink, expand = (tuple([given[f"{product}_{name}"] for name in _NUMBERS]) for product in ("shrink", "expand"))
    how = How((shrink, expand), _active(given))
    return _experts(given, fp8), given["max_lora_rank"], given["top_k_num"], _switches(given), how


def _experts(given: Given, fp8: Fp8Experts | None = None) -> Experts:
    return Experts._make([*[given.get(name) for name in _OPERANDS], fp8])


def _switches(given: Given) -> Switches:
    return Switches._make([given.get(name, default) for name, default in Switches._field_defaults.items()])


def _active(given: Given) -> int | None:
    count = given["num_active_loras"]
    return None if count is None else int(count)


def _scales(given: Given) -> Fp8Experts | None:
    block_shape = given["block_shape"]
    blocks = (0, 0) if block_shape is None else tuple(block_shape)
    legal = len(blocks) == 2 and all([type(size) is int and size > 0 for size in blocks])
    if block_shape is not None and not legal:
        raise ValueError(f"block_shape must be two ints >= 1, rows and columns of a block, got {block_shape!r}")
    scheme = Scheme(blocks[1], blocks[0], given.get("use_fp8_w8a8", False), given["per_channel_quant"])
    scheme.check()
    a_scale, b_scale = (() if (one := given.get(f"lora_{ab}_scale_stacked")) is None else one for ab in "ab")
    act_scales = given.get("shrink_act_scale"), given.get("expand_act_scale")
    weights = (*given.get("lora_a_stacked", ()), *given.get("lora_b_stacked", ()))
    in_fp8 = any([isinstance(one, Tensor) and one.dtype in FP8_DTYPES for one in weights])
    if len(a_scale) + len(b_scale) > 0 or in_fp8 or scheme.use_fp8_w8a8:
        return Fp8Experts(a_scale, b_scale, *act_scales, scheme, scheme)
    if act_scales != (None, None) or scheme != PLAIN:
        raise ValueError(f"activation scales and {scheme} need float8 weights with scales; leave them out for others")
    return None


def _plan(given: Given, experts: Experts, numbers: Numbers) -> MoEPlan | None:
    """Return the plan of a call, with ``intermediate`` checked. ``numbers`` are those of either product."""
    intermediate = given["intermediate"]
    how = How((numbers, numbers), _active(given), options=Options(pdl=False), low=intermediate.dtype)
    plan = planned(experts, given["max_lora_rank"], given["top_k_num"], _switches(given), how)
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


def _stand_ins(weights: Sequence[Tensor], rows: int | None) -> list[Tensor]:
    """Return weights [L, E, rows or R, R or 1] of the other product; what are no weights as they are."""
    stacks = weights if isinstance(weights, (tuple, list)) else ()
    if not all(isinstance(one, Tensor) and one.ndim == 4 for one in stacks):
        return list(stacks)
    return [one.new_empty(*one.shape[:2], *((rows, one.shape[2]) if rows else (one.shape[3], 1))) for one in stacks]
