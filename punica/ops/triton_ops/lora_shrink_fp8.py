"""Shrink with A in FP8: the front of `punica.ops.triton_ops.lora_shrink` for weights with scales.

    out[i, t, c] = scaling * a(t) * b_i[l, c] * sum_k x[t, k] * A_i[l, c, k]       l = slot(t), A_i [L, r, K] float8

and the other modes of `punica.ops.fp8_checks`.
"""

from collections.abc import Sequence

from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.checks import FLOATS, Names, Weights, check_input, check_low_rank, check_ranks, describe_stored
from punica.ops.fp8_checks import (
    Form,
    Scheme,
    check_activation,
    check_plain,
    check_scales,
    form_of,
    forms_of,
    is_plain,
)
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.fp8_device import as_operand, check_group_k, operands, quant_of
from punica.ops.triton_ops.fp8_rules import shrink_in_fp8
from punica.ops.triton_ops.launch import on_device
from punica.ops.triton_ops.lora_shrink import plan_shrink, shrink
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named, names_of
from punica.ops.triton_ops.plan import Batch, KernelPlan
from punica.ops.triton_ops.tensor_batch import TensorBatch


def _describe(names: Names, lora_a: Sequence[Tensor], b_scale: Sequence[Tensor]) -> tuple[Weights, tuple[Form, ...]]:
    return describe_stored(names.a, lora_a, -2, FP8_DTYPES), forms_of("b_scale", b_scale)


def _plan(call: Call, forms: tuple[Weights, tuple[Form, ...]]) -> KernelPlan | None:
    """The remaining checks, then the launch; None when there is nothing to multiply."""
    names, x, y, lora_ranks, batch, (accumulate, scheme, a_scale, options) = call
    weights, scales = forms
    scheme.check()
    lie = check_scales("b_scale", scales, weights, True, scheme)
    a_strides = check_activation(names.input, x, a_scale, weights.widths[0], scheme, weights)
    check_group_k(scheme, weights.widths[0])
    check_input(names.input, x, weights._replace(dtype=x.dtype), names.a)
    (tokens, k), segments = x.shape, batch.max_segments
    check_low_rank(names.output, y, weights, tokens, FLOATS)
    if not y.is_contiguous():
        raise ValueError(f"{names.output} must be contiguous, got shape {tuple(y.shape)} with strides {y.stride()}")
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, weights)
    if 0 in (tokens, k, weights.rank, segments):
        return None
    sizes = tokens, k, weights.rank, len(weights.widths)
    config = choose("shrink", batch.shape, *sizes, options, listed=batch.listed and accumulate)
    if options.tuned_dir is None or options.batch_invariant:  # what a tuned table says stays
        config = shrink_in_fp8(config, batch.shape, tokens, weights.rank)
    ranks = [weights.rank] * len(weights.widths)
    quant = quant_of(weights, x.dtype, lie, scheme, ranks, k, None if a_scale is None else a_strides)
    return plan_shrink(
        x, weights, y.dtype, batch, config,
        has_ranks=lora_ranks is not None, direct=True, accumulate=accumulate, quant=quant,
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)


@named("lora_shrink_fp8")
def shrink_fp8(
    x: Tensor, lora_a_stacked: Sequence[Tensor], y: Tensor, batch: Batch, scale: float = 1.0,
    *, b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None, scheme: Scheme = Scheme(),
    accumulate: bool = False, lora_ranks: Tensor | None = None, options: Options = Options(),
) -> None:  # fmt: skip
    """`lora_shrink_fp8` on a step: arguments as of `punica.ops.fp8_ops.shrink_fp8`."""
    if batch.no_lora:
        if isinstance(batch, LoRABatch) and not accumulate:
            y.zero_()  # with the flag of the flat form set, nothing is written
        return
    if is_plain(lora_a_stacked, b_scale):
        check_plain(names_of(batch).input, x, a_scale, scheme)
        shrink(x, lora_a_stacked, y, batch, scale, accumulate=accumulate, lora_ranks=lora_ranks, options=options)
        return
    if isinstance(batch, LoRABatch) and is_traced():
        chosen = {"batch_invariant": options.batch_invariant, "tuned_dir": options.tuned_dir}
        given = {
            "scaling": scale,
            "b_scale": b_scale or [],
            "a_scale": a_scale,
            **scheme._asdict(),
            "lora_ranks": lora_ranks,
        }
        call_flat(lora_shrink_fp8, (x, lora_a_stacked, y), batch, x.shape[0], **given, accumulate=accumulate, **chosen)
        return
    switches = (accumulate, scheme, None if a_scale is None else form_of("a_scale", a_scale), options)
    scales = () if b_scale is None else b_scale
    plan, aligned = _PLANS.find(x, y, (lora_a_stacked, scales), lora_ranks, batch, switches, scale)
    if plan is not None:
        aligned = aligned and (a_scale is None or not a_scale.data_ptr() & 15)
        with on_device(x.get_device()):
            weights = operands(lora_a_stacked, scales, a_scale)
            plan.run(as_operand(x), weights, y, batch, lora_ranks, aligned, float(scale))
    elif not accumulate:
        y.zero_()


@custom_op(mutates="output_tensor")
def lora_shrink_fp8(
    inputs: Tensor, lora_a_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor, num_active_loras: int | Tensor | None,
    scaling: float, b_scale: Sequence[Tensor], a_scale: Tensor | None = None,
    group_k: int = 0, group_n: int = 0, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    *, accumulate: bool = False, lora_ranks: Tensor | None = None, batch_invariant: bool = False,
    tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[i, t] (+)= scaling * inputs[t] @ A_i[slot(t)]^T`` for every slice i, A in FP8, in place.

    Args:
        inputs: [T, K] float16, bfloat16 or float32, or (``use_fp8_w8a8``) float8 with ``a_scale``; any strides.
        lora_a_weights: n x [L, (1,) r, K], all float8_e4m3fn or all float8_e5m2, contiguous (or with the last two
            dimensions swapped). Without ``b_scale`` weights of `lora_shrink`, and its result.
        output_tensor: [n, T, r] contiguous, float32, float16 or bfloat16.
        token_lora_mapping, ..., num_active_loras: the seven of `LoRAKernelMeta.meta_args`.
        scaling: finite factor.
        b_scale: n float32 tensors [L] (per tensor), [L, r] (``per_channel_quant``) or [L, ceil(r/group_n),
            ceil(K/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: float32, one element, [T], [T, 1], or block-wise [T, ceil(K/group_k)].
        group_k, group_n: block sizes; group_k a power of two >= 16, or at least K.
        accumulate, lora_ranks, batch_invariant, tuned_dir: as in `lora_shrink`.

    Rows at slot -1: 0, or unchanged with ``accumulate``. With the no-adapter flag set nothing is written. TypeError for
    dtypes, ValueError for shapes, sizes and missing scales, before any write.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    shrink_fp8(
        inputs, lora_a_weights, output_tensor, batch, scaling,
        b_scale=b_scale, a_scale=a_scale, scheme=Scheme(group_k, group_n, use_fp8_w8a8, per_channel_quant),
        accumulate=accumulate, lora_ranks=lora_ranks, options=Options(batch_invariant, tuned_dir=tuned_dir),
    )  # fmt: skip
