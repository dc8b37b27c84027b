"""Shrink and expand with FP8 weights as one call: what a LoRA layer with FP8 slots adds to its base output.

Weight-only it is what `punica.ops.triton_ops.lora_linear` is: two launches, split-K partials between them, the second
started early. With w8a8, x (unless it comes as FP8 with scales) and the float32 intermediate are quantised per token.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.checks import Names, Weights, check_input, check_pair, check_ranks, check_stored_output, describe_stored
from punica.ops.fp8_checks import Form, Scales, Scheme, check_activation, check_scales, forms_of
from punica.ops.fp8_ops import Parts, check_linear_fp8, run_linear
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.backbone.skinny_gemm import skinny_gemm
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.fp8_device import check_group_k, operands, quant_of
from punica.ops.triton_ops.fp8_rules import expand_in_fp8, shrink_in_fp8
from punica.ops.triton_ops.fp8_words import fill_words, starts_words
from punica.ops.triton_ops.gemm_and_shrink import BaseForm, check_base, check_base_switches, describe_base, fused_config
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.lora_expand_fp8 import expand_fp8
from punica.ops.triton_ops.lora_linear import Aside, LinearPlan, plan_linear
from punica.ops.triton_ops.lora_shrink_fp8 import shrink_fp8
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named, names_of
from punica.ops.triton_ops.plan import Batch
from punica.ops.triton_ops.quantize_rows import quantized_rows
from punica.ops.triton_ops.tensor_batch import TensorBatch

Stored = tuple[Weights, Scales, Scheme]
Described = tuple[tuple[Weights, tuple[Form, ...]], tuple[Weights, tuple[Form, ...]], BaseForm | None, bool]


def _describe(
    names: Names, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], a_scale: Sequence[Tensor],
    b_scale: Sequence[Tensor], base: Sequence[Tensor] = (),
) -> Described:  # fmt: skip
    a, b = describe_stored(names.a, lora_a, -2, FP8_DTYPES), describe_stored(names.b, lora_b, -1, FP8_DTYPES)
    check_pair(a, b, names)
    a_forms, b_forms = forms_of("lora_a_scale", a_scale), forms_of("lora_b_scale", b_scale)
    return (a, a_forms), (b, b_forms), describe_base(base), fill_words(b.widths) and starts_words(lora_b)


def _plan(call: Call, forms: Described) -> LinearPlan | None:
    """The remaining checks, then both launches; None when there is nothing to add."""
    names, x, y, lora_ranks, batch, (add_inputs, shrink, expand, options, apart) = call
    (a, a_scales), (b, b_scales), base, words = forms
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
    if base is not None:
        check_base(base, x, y)
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, a)
    if 0 in (tokens, k, a.rank, batch.max_segments, max(b.widths)):
        return None
    return plan_linear_fp8(
        y, x, (a, a_lie, shrink), (b, b_lie, expand), batch, options, add_inputs=add_inputs, has_ranks=has_ranks,
        pdl=options.pdl and supports_pdl(x.device), apart=apart or base is not None, base=base, words=words,
    )  # fmt: skip


def plan_linear_fp8(
    y: Tensor, x: Tensor, given_a: Stored, given_b: Stored, batch: Batch, options: Options,
    *, add_inputs: bool, has_ranks: bool, pdl: bool, apart: bool = False, base: BaseForm | None = None,
    words: bool = True,
) -> LinearPlan:  # fmt: skip
    """The two launches for weights, where their scales are, and the scheme of these. ``base``: a product that the first
    may make, too. ``words``: four columns of B may be read at once.
    """
    (a, a_lie, shrink), (b, b_lie, expand) = given_a, given_b
    tokens, k, slices, width, shape = x.shape[0], a.widths[0], len(a.widths), max(b.widths), batch.shape
    a_quant = quant_of(a, x.dtype, a_lie, shrink, [a.rank] * slices, k)
    b_quant = quant_of(b, torch.float32, b_lie, expand, b.widths, b.rank)
    b_quant = b_quant._replace(words=words and b_quant.dense and not b.row_major)
    first = choose("shrink", shape, tokens, k, a.rank, slices, options, listed=batch.listed)
    fused = None if base is None or not a_quant.dense else fused_config(first, x, base, a.rank)
    first = fused or first
    second = choose("expand", shape, tokens, width, a.rank, slices, options, add_inputs, first["split_k"], b.row_major)
    if options.tuned_dir is None or options.batch_invariant:  # what a tuned table says stays
        first = fused or shrink_in_fp8(first, shape, tokens, a.rank)
        if b_quant.words:
            second = expand_in_fp8(second, shape, tokens, b.widths, b.rank, y.element_size())
    return plan_linear(
        y, x, a, b, batch, first, second,
        add_inputs=add_inputs, has_ranks=has_ranks, pdl=pdl, apart=apart, fused=base if fused else None,
        quant=(a_quant, b_quant),
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)


@named("lora_linear_fp8")
def linear_fp8(
    y: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor], batch: Batch,
    scale: float = 1.0,
    *, lora_a_scale: Sequence[Tensor] | None, lora_b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None,
    shrink: Scheme = Scheme(), expand: Scheme = Scheme(), add_inputs: bool = True, lora_ranks: Tensor | None = None,
    options: Options = Options(), aside: Aside | None = None, base: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """`lora_linear_fp8` on a step: ``y[t, o_i : ...] (+)= scale * (x[t] @ A_i^T) @ B_i^T`` with FP8 weights, arguments
    and errors as of `punica.ops.fp8_ops.linear_fp8`; ``aside`` and ``base`` as in
    `punica.ops.triton_ops.lora_linear.linear`.
    """
    check_base_switches(base, add_inputs)
    if batch.no_lora:
        if base:
            skinny_gemm(y, x, *base)
        return
    a_scales = () if lora_a_scale is None else lora_a_scale
    b_scales = () if lora_b_scale is None else lora_b_scale
    if isinstance(batch, LoRABatch) and is_traced():
        if base:
            skinny_gemm(y, x, *base)
        call_flat(
            lora_linear_fp8, (y, x, lora_a_stacked, lora_b_stacked), batch, x.shape[0], scaling=scale,
            lora_a_scale=a_scales, lora_b_scale=b_scales, a_scale=a_scale,
            schemes=[int(field) for field in (*shrink, *expand)], add_inputs=add_inputs, lora_ranks=lora_ranks,
            **options._asdict(),
        )  # fmt: skip
        return
    if shrink.use_fp8_w8a8 or expand.use_fp8_w8a8 or a_scale is not None:
        check_linear_fp8(
            y, x, lora_a_stacked, lora_b_stacked, batch, lora_a_scale, lora_b_scale, a_scale, shrink, expand,
            lora_ranks, names_of(batch),
        )  # fmt: skip
        if base:
            skinny_gemm(y, x, *base)
        parts = Parts(partial(shrink_fp8, options=options), partial(expand_fp8, options=options), quantized_rows)
        run_linear(
            parts, y, x, lora_a_stacked, lora_b_stacked, batch, scale, lora_a_scale, lora_b_scale, a_scale, shrink,
            expand, add_inputs, lora_ranks, aside=nullcontext if aside is None else aside,
        )  # fmt: skip
        return
    switches = (add_inputs, shrink, expand, options, aside is not None)
    weights = (lora_a_stacked, lora_b_stacked, a_scales, b_scales)
    plan, aligned = _PLANS.find(x, y, (*weights, base) if base else weights, lora_ranks, batch, switches, scale)
    if plan is not None:
        stored = operands(lora_a_stacked, a_scales, None), operands(lora_b_stacked, b_scales, None)
        plan.run(x, *stored, y, batch, lora_ranks, aligned, float(scale), aside, base)
    elif base:
        skinny_gemm(y, x, *base)


@custom_op(mutates="output_tensor")
def lora_linear_fp8(
    output_tensor: Tensor, inputs: Tensor, lora_a_weights: Sequence[Tensor], lora_b_weights: Sequence[Tensor],
    token_lora_mapping: Tensor, token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor, lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    scaling: float, lora_a_scale: Sequence[Tensor], lora_b_scale: Sequence[Tensor], a_scale: Tensor | None = None,
    *, schemes: Sequence[int], num_active_loras: int | Tensor | None = None, add_inputs: bool = True,
    lora_ranks: Tensor | None = None, batch_invariant: bool = False, pdl: bool = True, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[t] (+)= scaling * (inputs[t] @ A[slot(t)]^T) @ B[slot(t)]^T`` with A and B in FP8, in place.

    Args:
        output_tensor: [T, W] with last stride 1.
        inputs: [T, K] float16, bfloat16 or float32, any strides, or (w8a8) float8 with ``a_scale``.
        lora_a_weights, lora_b_weights: n x [L, (1,) r, K] and n x [L, (1,) N_i, r], all of one float8 dtype.
        lora_a_scale, lora_b_scale: of A as ``b_scale`` of `lora_shrink_fp8`, of B as that of `lora_expand_fp8`.
        schemes: the fields of both `punica.ops.fp8_checks.Scheme`, ``(group_k, group_n, use_fp8_w8a8,
            per_channel_quant)`` of A and then of B.

    The other arguments, the treatment of rows at slot -1 and the errors are those of `lora_linear`, `lora_shrink_fp8`
    and `lora_expand_fp8`.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    if len(schemes) != 2 * len(Scheme._fields):
        raise ValueError(f"schemes has {len(schemes)} entries; expected the fields of two Schemes, {2 * len(Scheme())}")
    shrink, expand = (Scheme(k, n, bool(w8a8), bool(channel)) for k, n, w8a8, channel in (schemes[:4], schemes[4:]))
    linear_fp8(
        output_tensor, inputs, lora_a_weights, lora_b_weights, batch, scaling,
        lora_a_scale=lora_a_scale, lora_b_scale=lora_b_scale, a_scale=a_scale, shrink=shrink, expand=expand,
        add_inputs=add_inputs, lora_ranks=lora_ranks, options=Options(batch_invariant, pdl, tuned_dir),
    )  # fmt: skip
