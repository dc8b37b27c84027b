"""Shrink and expand with FP8 weights as one call: what a LoRA layer with FP8 slots adds to its base output.

Weight-only it is what `punica.ops.triton_ops.lora_linear` is: two launches, split-K planes between them, the second
started early. With w8a8, x (unless it comes as FP8 with scales) and the float32 intermediate are quantised per token.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from triton import cdiv

from punica.metadata import LoRABatch
from punica.ops.checks import Names, Weights, check_input, check_pair, check_ranks, check_stored_output, describe_stored
from punica.ops.fp8_checks import Form, Scales, Scheme, check_activation, check_scales, forms_of
from punica.ops.fp8_ops import check_linear_fp8, run_linear
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.configs import Config, choose
from punica.ops.triton_ops.fp8_device import check_group_k, held_as, operands
from punica.ops.triton_ops.launch import block_at_least, on_device, supports_pdl
from punica.ops.triton_ops.lora_expand_fp8 import expand_fp8, plan_expand_fp8
from punica.ops.triton_ops.lora_linear import LinearPlan, plan_linear
from punica.ops.triton_ops.lora_shrink_fp8 import plan_shrink_fp8, shrink_fp8
from punica.ops.triton_ops.op import Call, Options, Plans, is_traced
from punica.ops.triton_ops.plan import Batch

Stored = tuple[Weights, Scales, Scheme]
Described = tuple[tuple[Weights, tuple[Form, ...]], tuple[Weights, tuple[Form, ...]]]


def _describe(
    names: Names, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], a_scale: Sequence[Tensor],
    b_scale: Sequence[Tensor],
) -> Described:  # fmt: skip
    a, b = describe_stored(names.a, lora_a, -2, FP8_DTYPES), describe_stored(names.b, lora_b, -1, FP8_DTYPES)
    check_pair(a, b, names)
    return (a, forms_of("lora_a_scale", a_scale)), (b, forms_of("lora_b_scale", b_scale))


def _plan(call: Call, forms: Described) -> LinearPlan | None:
    """The remaining checks, then both launches; None when there is nothing to add."""
    names, x, y, lora_ranks, batch, (add_inputs, shrink, expand, options) = call
    (a, a_scales), (b, b_scales) = forms
    shrink.check()
    expand.check()
    tokens, k, has_ranks = x.shape[0], a.widths[0], lora_ranks is not None
    a_lie, b_lie = (
        check_scales("lora_a_scale", a_scales, a, True, shrink),
        check_scales("lora_b_scale", b_scales, b, False, expand),
    )
    check_group_k(shrink, k)
    check_group_k(expand, b.rank)
    check_activation(names.input, x, None, k, shrink, a)
    check_input(names.input, x, a._replace(dtype=x.dtype), names.a)
    check_stored_output(names.output, y, b, 0)
    if y.shape[0] != tokens:
        raise ValueError(f"{names.input} has {tokens} rows and {names.output} has {y.shape[0]}; they must be equal")
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, a)
    if 0 in (tokens, k, a.rank, batch.max_segments, max(b.widths)):
        return None
    return plan_linear_fp8(
        y, x, (a, a_lie, shrink), (b, b_lie, expand), batch, options, add_inputs=add_inputs, has_ranks=has_ranks,
        pdl=options.pdl and supports_pdl(x.device),
    )  # fmt: skip


def plan_linear_fp8(
    y: Tensor, x: Tensor, given_a: Stored, given_b: Stored, batch: Batch, options: Options,
    *, add_inputs: bool, has_ranks: bool, pdl: bool,
) -> LinearPlan:  # fmt: skip
    """The two launches for weights, how their scales lie, and the scheme of these."""
    (a, a_lie, shrink), (b, b_lie, expand) = given_a, given_b
    tokens, k, slices, width, shape = x.shape[0], a.widths[0], len(a.widths), max(b.widths), batch.shape
    held_a, held_b = held_as(a, a_lie, shrink, [a.rank] * slices), held_as(b, b_lie, expand, b.widths)
    # The kernels of wide weights read these, too, where B is as layers store it.
    held = None if held_a is None or held_b is None or b.row_major else (held_a, held_b)
    first = choose("shrink", shape, tokens, k, a.rank, slices, options, listed=held is not None and batch.listed)
    second = choose("expand", shape, tokens, width, a.rank, slices, options, add_inputs, first["split_k"], b.row_major)
    if held is not None and options.tuned_dir is None:  # what a tuned table says stays
        first, second = _shrink_in_fp8(first, a.rank, tokens / shape.adapters), _expand_in_fp8(second, b, tokens)
    if held is not None:
        return plan_linear(
            y, x, a, b, batch, first, second, add_inputs=add_inputs, has_ranks=has_ranks, pdl=pdl, held=held
        )
    planes, low = (first["split_k"], slices, tokens, a.rank), torch.float32
    return LinearPlan(
        plan_shrink_fp8(
            x, a, a_lie, shrink, None, low, batch, first, has_ranks=has_ranks, direct=False, overlap=pdl, early=pdl
        ),
        plan_expand_fp8(
            planes, (slices * tokens * a.rank, tokens * a.rank, a.rank, 1), low, y, b, b_lie, expand, None, batch,
            second, offset_start=0, add_inputs=add_inputs, has_ranks=has_ranks, pdl=pdl,
        ),
        planes,
    )  # fmt: skip


def _shrink_in_fp8(config: Config, rank: int, mean: float) -> Config:
    """The rule's choice for 16 bits, changed where half the bytes, and making them wide, want another (by search)."""
    if not config["row_wise"]:
        return config
    if rank > 16:
        return {**config, "block_r": 4, "block_k": min(config["block_k"], 2048), "num_warps": 4}
    return {**config, "block_r": min(config["block_r"], 4)} if mean >= 3 else config


def _expand_in_fp8(config: Config, b: Weights, tokens: int) -> Config:
    """The same: threads read as many bytes at once, that is twice the columns, but hold as many wide values, so that
    they take fewer ranks, and fewer still where that lets all programs run at the same time.
    """
    if not config["row_wise"]:
        return config
    block_n = min(2 * config["block_n"], block_at_least(max(b.widths), 32))
    config = {**config, "block_n": block_n}
    if b.rank <= 16 or config["ahead"]:
        return config
    programs = tokens * sum([cdiv(width, block_n) for width in b.widths])
    return {**config, "block_k": 8 if programs <= 600 else 4}


_PLANS = Plans(_describe, _plan)


def linear_fp8(
    y: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor], batch: LoRABatch,
    scale: float = 1.0,
    *, lora_a_scale: Sequence[Tensor] | None, lora_b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None,
    shrink: Scheme = Scheme(), expand: Scheme = Scheme(), add_inputs: bool = True, lora_ranks: Tensor | None = None,
    options: Options = Options(),
) -> None:  # fmt: skip
    """``y[t, o_i : ...] (+)= scale * (x[t] @ A_i^T) @ B_i^T`` with FP8 weights, arguments and errors as of
    `punica.ops.fp8_ops.linear_fp8`.
    """
    if batch.no_lora:
        return
    if shrink.use_fp8_w8a8 or expand.use_fp8_w8a8 or a_scale is not None or is_traced():
        check_linear_fp8(
            y, x, lora_a_stacked, lora_b_stacked, batch, lora_a_scale, lora_b_scale, a_scale, shrink, expand, lora_ranks
        )
        pair = partial(shrink_fp8, options=options), partial(expand_fp8, options=options)
        run_linear(
            *pair, y, x, lora_a_stacked, lora_b_stacked, batch, scale, lora_a_scale, lora_b_scale, a_scale, shrink,
            expand, add_inputs, lora_ranks,
        )  # fmt: skip
        return
    a_scales = () if lora_a_scale is None else lora_a_scale
    b_scales = () if lora_b_scale is None else lora_b_scale
    weights = (lora_a_stacked, lora_b_stacked, a_scales, b_scales)
    plan, aligned = _PLANS.find(x, y, weights, lora_ranks, batch, (add_inputs, shrink, expand, options), scale)
    if plan is None:
        return
    with on_device(x.get_device()):
        planes = torch.empty(plan.planes, dtype=torch.float32, device=x.device)
        first, second = operands(lora_a_stacked, a_scales, None), operands(lora_b_stacked, b_scales, None)
        plan.shrink.run(x, first, planes, batch, lora_ranks, aligned, float(scale))
        plan.expand.run(planes, second, y, batch, lora_ranks, aligned)
