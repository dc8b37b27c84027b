"""Expand with B in FP8: the front of `punica.ops.triton_ops.lora_expand` for weights with scales.

    y[t, o_i + c] (+)= a(t) * b_i[l, c] * sum_k h[i, t, k] * B_i[l, c, k]     l = slot(t), B_i [L, N_i, r] float8

and the other modes of `punica.ops.fp8_checks`. h is [n, T, r], or partials [splits, n, T, r].
"""

from collections.abc import Sequence

from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.checks import Names, Weights, check_low_rank, check_ranks, check_stored_output, describe_stored
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
from punica.ops.triton_ops.launch import on_device
from punica.ops.triton_ops.lora_expand import expand, plan_expand
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named, names_of
from punica.ops.triton_ops.plan import Batch, KernelPlan
from punica.ops.triton_ops.tensor_batch import TensorBatch


def _describe(names: Names, lora_b: Sequence[Tensor], b_scale: Sequence[Tensor]) -> tuple[Weights, tuple[Form, ...]]:
    return describe_stored(names.b, lora_b, -1, FP8_DTYPES), forms_of("b_scale", b_scale)


def _plan(call: Call, forms: tuple[Weights, tuple[Form, ...]]) -> KernelPlan | None:
    """The remaining checks, then the launch; None when there is nothing to add."""
    names, x, y, lora_ranks, batch, (offset_start, add_inputs, scheme, a_scale, options) = call
    weights, scales = forms
    scheme.check()
    lie = check_scales("b_scale", scales, weights, False, scheme)
    a_strides = check_activation(names.input, x, a_scale, weights.rank, scheme, weights)
    check_group_k(scheme, weights.rank)
    check_stored_output(names.output, y, weights, offset_start)
    tokens, rank, width = y.shape[0], weights.rank, max(weights.widths)
    check_low_rank(names.input, x, weights, tokens, (x.dtype,))
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, weights)
    if 0 in (tokens, rank, batch.max_segments, width):
        return None
    config = choose(
        "expand", batch.shape, tokens, width, rank, len(weights.widths), options, add_inputs, 1, weights.row_major
    )
    strides = None if a_scale is None else a_strides
    quant = quant_of(weights, x.dtype, lie, scheme, weights.widths, rank, strides)
    return plan_expand(
        (1, *x.shape), (0, *x.stride()), x.dtype, y, weights, batch, config,
        offset_start=offset_start, add_inputs=add_inputs, has_ranks=lora_ranks is not None, quant=quant,
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)


@named("lora_expand_fp8")
def expand_fp8(
    x: Tensor, lora_b_stacked: Sequence[Tensor], y: Tensor, batch: Batch,
    offset_start: int = 0, add_inputs: bool = True,
    *, b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None, scheme: Scheme = Scheme(),
    lora_ranks: Tensor | None = None, options: Options = Options(),
) -> None:  # fmt: skip
    """`lora_expand_fp8` on a step: arguments as of `punica.ops.fp8_ops.expand_fp8`."""
    if batch.no_lora:
        return
    if is_plain(lora_b_stacked, b_scale):
        check_plain(names_of(batch).input, x, a_scale, scheme)
        expand(x, lora_b_stacked, y, batch, offset_start, add_inputs, lora_ranks=lora_ranks, options=options)
        return
    if isinstance(batch, LoRABatch) and is_traced():
        chosen = {"batch_invariant": options.batch_invariant, "tuned_dir": options.tuned_dir}
        given = {"b_scale": b_scale or [], "a_scale": a_scale, **scheme._asdict(), "offset_start": offset_start}
        given |= {"add_inputs": add_inputs, "lora_ranks": lora_ranks, **chosen}
        call_flat(lora_expand_fp8, (x, lora_b_stacked, y), batch, y.shape[0], **given)
        return
    a_form = None if a_scale is None else form_of("a_scale", a_scale)
    scales = () if b_scale is None else b_scale
    switches = (offset_start, add_inputs, scheme, a_form, options)
    plan, aligned = _PLANS.find(x, y, (lora_b_stacked, scales), lora_ranks, batch, switches)
    if plan is not None:
        aligned = aligned and (a_scale is None or not a_scale.data_ptr() & 15)
        with on_device(x.get_device()):
            plan.run(as_operand(x), operands(lora_b_stacked, scales, a_scale), y, batch, lora_ranks, aligned)


@custom_op(mutates="output_tensor")
def lora_expand_fp8(
    inputs: Tensor, lora_b_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor, num_active_loras: int | Tensor | None,
    b_scale: Sequence[Tensor], a_scale: Tensor | None = None, offset_start: int = 0, add_inputs: bool = False,
    group_k: int = 0, group_n: int = 0, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    *, lora_ranks: Tensor | None = None, batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[t, o_i : o_i + N_i] (+)= inputs[i, t] @ B_i[slot(t)]^T`` for every slice i, B in FP8, in place.

    Args:
        inputs: [n, T, r] float16, bfloat16 or float32, or (``use_fp8_w8a8``) float8 with ``a_scale``; any strides.
        lora_b_weights: n x [L, (1,) N_i, r], all float8_e4m3fn or all float8_e5m2, contiguous (or with the last two
            dimensions swapped). Without ``b_scale`` weights of `lora_expand`, and its result.
        output_tensor: [T, W] with last stride 1; ``o_0 = offset_start``, ``o_{i+1} = o_i + N_i``.
        token_lora_mapping, ..., num_active_loras: the seven of `LoRAKernelMeta.meta_args`.
        b_scale: n float32 tensors [L] (per tensor), [L, N_i] (``per_channel_quant``) or [L, ceil(N_i/group_n),
            ceil(r/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: as in `lora_shrink_fp8`, K the rank; all slices of a row share its scales.
        offset_start, add_inputs, lora_ranks, batch_invariant, tuned_dir: as in `lora_expand`.
        group_k, group_n: as in `lora_shrink_fp8`.

    Rows at slot -1 and all other columns are never written. Errors as in `lora_shrink_fp8`.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    expand_fp8(
        inputs, lora_b_weights, output_tensor, batch, offset_start, add_inputs,
        b_scale=b_scale, a_scale=a_scale, scheme=Scheme(group_k, group_n, use_fp8_w8a8, per_channel_quant),
        lora_ranks=lora_ranks, options=Options(batch_invariant, tuned_dir=tuned_dir),
    )  # fmt: skip
