"""The LoRA operators in plain torch, fast on a CPU and correct on any device.

:func:`shrink` and :func:`expand` are the form that a model uses: they take a :class:`SegmentPlan`, made once per
step, and all slices of a packed layer (q, k, v) in one call. The six functions named after the paper's operators mean
exactly what :mod:`punica.ops.reference` says, make a plan from their tensors and run the same code.

How a product is computed depends on the layout of the segments (:mod:`punica.ops.segment_plan`) and on dtype and
processor (:mod:`punica.ops.segment_gemm`). Weights are never gathered: a run of segments multiplies a view of the
stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.ops.checks import (
    check_bgmv,
    check_dtypes,
    check_inner_size,
    check_same_device,
    check_scaling,
    check_slice,
    segment_slots,
    weights_3d,
)  # fmt: skip
from punica.ops.segment_calls import PreparedCall, multiply_products, prepare
from punica.ops.segment_plan import SegmentPlan, plan_segments

__all__ = [
    "SegmentPlan", "bgmv_expand", "bgmv_expand_slice", "bgmv_shrink", "expand", "plan_segments", "sgmv_expand",
    "sgmv_expand_slice", "sgmv_shrink", "shrink",
]  # fmt: skip


def _check_plan(plan: SegmentPlan, rows: int, num_slots: int) -> None:
    if plan.num_tokens > rows:
        raise ValueError(f"plan covers {plan.num_tokens} rows but the tensors have {rows}; plan the rows of this step")
    if plan.max_slot >= num_slots:
        raise ValueError(f"plan uses slot {plan.max_slot}; the weights have slots 0 to {num_slots - 1}")


def _check_operands(inputs: Tensor, weights: Sequence[Tensor], output: Tensor, name: str, float32_inputs: bool) -> None:
    """Slice 0 fits inputs and output in dtype and device, the other slices fit slice 0 (L, inner size, dtype,
    device)."""
    first = weights[0]
    check_dtypes(inputs, first, output, name, float32_inputs)
    check_inner_size(inputs, first, name, "rank" if float32_inputs else "hidden size")
    if not inputs.device == first.device == output.device:
        check_same_device({"inputs": inputs, name: first, "output": output})
    for weight in weights[1:]:
        if weight.dtype != first.dtype:
            raise TypeError(f"{name} mixes {first.dtype} and {weight.dtype}; all slices must have one dtype")
        if weight.device != first.device:
            raise ValueError(f"{name} mixes {first.device} and {weight.device}; all slices must be on one device")
        if weight.shape[0] != first.shape[0] or weight.shape[2] != first.shape[2]:
            shapes = f"{tuple(first.shape)} and {tuple(weight.shape)}"
            raise ValueError(f"{name} mixes shapes {shapes}; all slices must have the same slots and inner size")


def _rank_values(lora_ranks: Tensor | None, slices: int, num_slots: int) -> list[list[int]] | None:
    """``lora_ranks`` as nested lists, its dtype and shape checked."""
    if lora_ranks is None:
        return None
    if lora_ranks.dtype != torch.int32:
        raise TypeError(f"lora_ranks has dtype {lora_ranks.dtype}; expected int32")
    if lora_ranks.shape != (slices, num_slots):
        raise ValueError(f"lora_ranks has shape {tuple(lora_ranks.shape)}; expected {(slices, num_slots)}")
    return lora_ranks.tolist()


def _prepare_shrink(
    inputs: Tensor, lora_a_weights: Sequence[Tensor], output: Tensor, plan: SegmentPlan, lora_ranks: Tensor | None
) -> PreparedCall:
    """Check the operands of :func:`shrink` and cut its products."""
    if not lora_a_weights:
        raise ValueError("lora_a_weights is empty; expected one tensor per slice")
    weights = [weights_3d(w, "lora_a_weights") for w in lora_a_weights]
    first = weights[0]
    num_slots, rank, _ = first.shape
    if inputs.dim() != 2 or output.shape != (len(weights), inputs.shape[0], rank):
        raise ValueError(
            f"inputs and output have shapes {tuple(inputs.shape)} and {tuple(output.shape)}; "
            f"expected [rows, {first.shape[2]}] and [{len(weights)}, rows, {rank}]"
        )
    _check_operands(inputs, weights, output, "lora_a_weights", float32_inputs=False)
    for weight in weights[1:]:
        if weight.shape != first.shape:
            raise ValueError(f"lora_a_weights mixes ranks {rank} and {weight.shape[1]}; all slices must have one rank")
    _check_plan(plan, inputs.shape[0], num_slots)
    ranks = _rank_values(lora_ranks, len(weights), num_slots)
    return prepare(plan, inputs, lora_a_weights, weights, output, ranks, rank_dim=1)


def shrink(
    inputs: Tensor,
    lora_a_weights: Sequence[Tensor],
    output: Tensor,
    plan: SegmentPlan,
    scaling: float = 1.0,
    *,
    accumulate: bool = False,
    lora_ranks: Tensor | None = None,
) -> None:
    """Hidden size to rank, all slices: ``output[i, t] = scaling * inputs[t] @ A_i[l_t]^T``, in place.

    Args:
        inputs: ``[T, K]`` float16, bfloat16 or float32 (float64 for checks), any strides.
        lora_a_weights: n tensors ``[L, r, K]`` or ``[L, 1, r, K]`` of equal shape, dtype of ``inputs``.
        output: ``[n, T, r]``; float32 keeps the precision of the sums.
        plan: the step's plan; it covers the first ``plan.num_tokens`` rows, further rows have no adapter.
        scaling: finite factor.
        accumulate: add to the output instead of overwriting it.
        lora_ranks: int32 ``[n, L]`` true rank per slice and slot (``None``: r). Lanes beyond it are not read in A.

    Rows without adapter and lanes beyond the rank become 0, or stay as they are with ``accumulate``.

    Raises:
        TypeError: dtypes that may not be combined. ValueError: shapes, devices, slots, ranks or scaling out of range.
        Nothing is written before all checks passed.
    """
    call = plan.shrinks.get(id(lora_a_weights[0])) if lora_a_weights else None
    if call is None or not call.repeats(inputs, lora_a_weights, output, lora_ranks):
        call = _prepare_shrink(inputs, lora_a_weights, output, plan, lora_ranks)
    if scaling != 1.0 or type(scaling) is not float:
        check_scaling(scaling)

    beta = 1.0 if accumulate else 0.0
    only = call.only
    if only is not None:
        only.multiply(output[0], inputs, only.weight, scaling, beta)
        return
    if not (accumulate or call.covers):
        output.zero_()
    rows = None if plan.rows is None else plan.rows.to(inputs.device)
    x = inputs if rows is None else inputs.index_select(0, rows)
    for target, part in zip(output.unbind(0), call.slices, strict=True):
        sums = target if rows is None else target.index_select(0, rows)
        multiply_products(sums, x, part, scaling, beta, rank_of_out=True)
        if rows is not None:
            target.index_copy_(0, rows, sums)


def _prepare_expand(
    inputs: Tensor,
    lora_b_weights: Sequence[Tensor],
    output: Tensor,
    plan: SegmentPlan,
    offset_start: int,
    lora_ranks: Tensor | None,
) -> PreparedCall:
    """Check the operands of :func:`expand` and cut its products."""
    if not lora_b_weights:
        raise ValueError("lora_b_weights is empty; expected one tensor per slice")
    weights = [weights_3d(w, "lora_b_weights") for w in lora_b_weights]
    num_slots, _, rank = weights[0].shape
    if inputs.dim() != 3 or output.dim() != 2 or inputs.shape[:2] != (len(weights), output.shape[0]):
        raise ValueError(
            f"inputs and output have shapes {tuple(inputs.shape)} and {tuple(output.shape)}; "
            f"expected [{len(weights)}, rows, {rank}] and [rows, columns]"
        )
    _check_operands(inputs, weights, output, "lora_b_weights", float32_inputs=True)
    total = sum([weight.shape[1] for weight in weights])
    columns = output.shape[1]
    if offset_start < 0 or offset_start + total > columns:
        raise ValueError(f"offset_start {offset_start} + {total} columns of all slices must lie in output's {columns}")
    _check_plan(plan, output.shape[0], num_slots)
    ranks = _rank_values(lora_ranks, len(weights), num_slots)
    return prepare(plan, inputs, lora_b_weights, weights, output, ranks, rank_dim=2, offset=offset_start)


def expand(
    inputs: Tensor,
    lora_b_weights: Sequence[Tensor],
    output: Tensor,
    plan: SegmentPlan,
    offset_start: int = 0,
    add_inputs: bool = True,
    *,
    lora_ranks: Tensor | None = None,
) -> None:
    """Rank to hidden size, all slices: ``output[t, o_i : o_i + N_i] (+)= inputs[i, t] @ B_i[l_t]^T``, in place.

    Args:
        inputs: ``[n, T, r]``, float32 or the dtype of the weights.
        lora_b_weights: n tensors ``[L, N_i, r]`` or ``[L, 1, N_i, r]`` with equal L and r.
        output: ``[T, W]``, any floating dtype; ``o_0 = offset_start``, ``o_{i+1} = o_i + N_i``.
        plan: the step's plan, as in :func:`shrink`.
        offset_start: first column written.
        add_inputs: add to the output or overwrite the columns.
        lora_ranks: int32 ``[n, L]`` true ranks. Lanes beyond them are read neither in B nor in ``inputs``.

    Rows without adapter and columns outside the slices are not written.

    Raises: as :func:`shrink`; ``ValueError`` also when the slices do not fit the columns of the output.
    """
    call = plan.expands.get(id(lora_b_weights[0])) if lora_b_weights else None
    if call is None or call.offset != offset_start or not call.repeats(inputs, lora_b_weights, output, lora_ranks):
        call = _prepare_expand(inputs, lora_b_weights, output, plan, offset_start, lora_ranks)

    beta = 1.0 if add_inputs else 0.0
    only = call.only
    if only is not None:
        only.multiply(output, inputs[0], only.weight, 1.0, beta)
        return
    rows = None if plan.rows is None else plan.rows.to(output.device)
    column, columns = offset_start, output.shape[1]
    for x, weight, part in zip(inputs.unbind(0), lora_b_weights, call.slices, strict=True):
        width = weight.shape[-2]
        target = output if width == columns else output.narrow(1, column, width)
        column += width
        if rows is None:
            multiply_products(target, x, part, 1.0, beta, rank_of_out=False)
            continue
        sums = target.index_select(0, rows)
        multiply_products(sums, x.index_select(0, rows), part, 1.0, beta, rank_of_out=False)
        target.index_copy_(0, rows, sums)


def bgmv_shrink(
    inputs: Tensor, lora_a_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, scaling: float = 1.0
) -> None:
    """Per-token shrink; meaning, arguments and errors as :func:`punica.ops.reference.bgmv_shrink`."""
    weights = check_bgmv(
        inputs, lora_a_weights, output_tensor, lora_indices_tensor, "lora_a_weights", shrink=True, scaling=scaling
    )
    plan = plan_segments(lora_indices_tensor.cpu())
    shrink(inputs, (weights,), output_tensor[None, :, : weights.shape[1]], plan, scaling)


def bgmv_expand(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, add_inputs: bool = True
) -> None:
    """Per-token expand; meaning, arguments and errors as :func:`punica.ops.reference.bgmv_expand`."""
    weights = check_bgmv(inputs, lora_b_weights, output_tensor, lora_indices_tensor, "lora_b_weights", shrink=False)
    plan = plan_segments(lora_indices_tensor.cpu())
    expand(inputs[None], (weights[:, : output_tensor.shape[1]],), output_tensor, plan, 0, add_inputs)


def bgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Per-token expand into some columns; as :func:`punica.ops.reference.bgmv_expand_slice`."""
    weights = check_bgmv(inputs, lora_b_weights, output_tensor, lora_indices_tensor, "lora_b_weights", shrink=False)
    check_slice(weights, output_tensor, slice_offset, slice_size)
    plan = plan_segments(lora_indices_tensor.cpu())
    expand(inputs[None], (weights,), output_tensor, plan, slice_offset, add_inputs)


def sgmv_shrink(
    inputs: Tensor,
    lora_a_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
) -> None:
    """Per-segment shrink; meaning, arguments and errors as :func:`punica.ops.reference.sgmv_shrink`."""
    slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
    bgmv_shrink(inputs, lora_a_weights, output_tensor, slots, scaling)


def sgmv_expand(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
) -> None:
    """Per-segment expand; meaning, arguments and errors as :func:`punica.ops.reference.sgmv_expand`."""
    slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
    bgmv_expand(inputs, lora_b_weights, output_tensor, slots, add_inputs)


def sgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    """Per-segment expand into some columns; as :func:`punica.ops.reference.sgmv_expand_slice`."""
    slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, slots, slice_offset, slice_size, add_inputs)
