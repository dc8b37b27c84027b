"""The LoRA operators in plain torch, fast on a CPU and correct on any device.

`shrink`, `expand` and `linear` are the form that a model uses: they take the step (`punica.metadata.LoRABatch`) and all
slices of a packed layer (q, k, v) in one call. The six functions named after the paper's operators mean exactly what
`punica.ops.reference` says, make a step from their tensors and run the same code.

How a product is computed depends on the layout of the rows (`punica.metadata.SegmentPlan`) and on dtype and processor
(`punica.ops.segment_gemm`). Weights are never gathered: a run of segments multiplies a view of the stack.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.checks import (
    STEP,
    WITH_DOUBLE,
    check_dtype,
    check_input,
    check_low_rank,
    check_output,
    check_pair,
    check_ranks,
    check_scale,
    describe_weights,
)
from punica.ops.paper_ops import PaperOps
from punica.ops.segment_calls import PreparedCall, multiply_products, prepare


def shrink(
    x: Tensor, lora_a_stacked: Sequence[Tensor], y: Tensor, batch: LoRABatch,
    scale: float = 1.0, *, accumulate: bool = False, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """Hidden size to rank, all slices: ``y[i, t] = scale * x[t] @ A_i[l_t]^T``, in place.

    Args:
        x: ``[T', K]`` float16, bfloat16 or float32 (float64 for checks), any strides.
        lora_a_stacked: n tensors ``[L, r, K]`` or ``[L, 1, r, K]`` of equal shape, dtype of ``x``.
        y: ``[n, T', r]``; float32 keeps the precision of the sums.
        batch: the step; it covers the first ``batch.num_rows`` rows, further rows have no adapter.
        scale: finite factor.
        accumulate: add to the output instead of overwriting it.
        lora_ranks: int32 ``[n, L]`` true rank per slice and slot (``None``: r). Lanes beyond it are not read in A.

    Rows without adapter and lanes beyond the rank become 0, or stay as they are with ``accumulate``.

    Raises:
        TypeError: dtypes that may not be combined. ValueError: shapes, devices, slots, ranks or scale out of range.
        Nothing is written before all checks passed.
    """
    if not x.shape[0]:
        return
    call = _prepared(x, lora_a_stacked, y, batch, lora_ranks, rank_dim=-2)
    check_scale(STEP.scale, scale)
    _shrink(call, x, y, scale, accumulate)


def expand(
    x: Tensor, lora_b_stacked: Sequence[Tensor], y: Tensor, batch: LoRABatch,
    offset_start: int = 0, add_inputs: bool = True, *, lora_ranks: Tensor | None = None,
) -> None:  # fmt: skip
    """Rank to hidden size, all slices: ``y[t, o_i : o_i + N_i] (+)= x[i, t] @ B_i[l_t]^T``, in place.

    Args:
        x: ``[n, T', r]``, float32 or the dtype of the weights.
        lora_b_stacked: n tensors ``[L, N_i, r]`` or ``[L, 1, N_i, r]`` with equal L and r.
        y: ``[T', W]``, any floating dtype; ``o_0 = offset_start``, ``o_{i+1} = o_i + N_i``.
        batch: the step, as in `shrink`.
        offset_start: first column written.
        add_inputs: add to the output or overwrite the columns.
        lora_ranks: int32 ``[n, L]`` true ranks. Lanes beyond them are read neither in B nor in ``x``.

    Rows without adapter and columns outside the slices are not written.

    Raises: as `shrink`; ``ValueError`` also when the slices do not fit the columns of the output.
    """
    if not y.shape[0]:
        return
    call = _prepared(x, lora_b_stacked, y, batch, lora_ranks, rank_dim=-1, offset=offset_start)
    _expand(call, x, y, add_inputs)


def linear(
    y: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor], batch: LoRABatch,
    scale: float = 1.0, *, add_inputs: bool = True, lora_ranks: Tensor | None = None, buffer: Tensor | None = None,
) -> None:  # fmt: skip
    """`shrink` into float32 ``[n, T', r]``, then `expand`: ``y[t, o_i : ...] (+)= scale * (x[t] @ A_i^T) @ B_i^T``.

    ``buffer`` takes the intermediate (``None``: a tensor of its own). Arguments, other rows and errors as in the two.
    """
    given, first = buffer, _kept(batch.plan.shrinks, lora_a_stacked)
    second = None if first is None else first.partner
    if buffer is None and second is not None and isinstance(x, Tensor):
        buffer = torch.empty(second.x_shape, dtype=torch.float32, device=x.device)
    if (
        first is None
        or second is None
        or buffer is None
        or not (isinstance(x, Tensor) and isinstance(y, Tensor))
        or not first.repeats(x, lora_a_stacked, buffer, 0, lora_ranks)
        or not second.repeats(buffer, lora_b_stacked, y, 0, lora_ranks)
    ):
        check_dtype(STEP.input, x, WITH_DOUBLE)
        check_dtype(STEP.output, y, WITH_DOUBLE)
        a = describe_weights(STEP.a, lora_a_stacked, -2, WITH_DOUBLE)
        b = describe_weights(STEP.b, lora_b_stacked, -1, WITH_DOUBLE)
        check_pair(a, b, STEP)
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"x has {x.shape[0]} rows and y has {y.shape[0]}; they must be equal")
        if not x.shape[0]:
            return
        buffer = given
        if buffer is None:
            buffer = torch.empty(len(b.widths), x.shape[0], b.rank, dtype=torch.float32, device=x.device)
        first = _prepared(x, lora_a_stacked, buffer, batch, lora_ranks, rank_dim=-2)
        second = first.partner = _prepared(buffer, lora_b_stacked, y, batch, lora_ranks, rank_dim=-1)
    if scale != 1.0 or type(scale) is not float:
        check_scale(STEP.scale, scale)
    if first.only is not None and second.only is not None:
        first.only.multiply(buffer[0], x, first.only.weight, scale, 0.0)
        second.only.multiply(y, buffer[0], second.only.weight, 1.0, 1.0 if add_inputs else 0.0)
        return
    _shrink(first, x, buffer, scale, False)
    _expand(second, buffer, y, add_inputs)


def _kept(calls: dict[int, PreparedCall], weights: Sequence[Tensor]) -> PreparedCall | None:
    """The last call of this step that began with the same weight."""
    return calls.get(id(weights[0])) if isinstance(weights, (tuple, list)) and weights else None


def _prepared(
    x: Tensor, weights: Sequence[Tensor], y: Tensor, batch: LoRABatch, lora_ranks: Tensor | None,
    *,
    rank_dim: int,
    offset: int = 0,
) -> PreparedCall:  # fmt: skip
    """The products of a shrink (``rank_dim`` -2) or an expand (-1): those of the last such call on this step, or the
    operands checked and cut.
    """
    plan, shrinks = batch.plan, rank_dim == -2
    call = _kept(plan.shrinks if shrinks else plan.expands, weights)
    if call is not None and call.repeats(x, weights, y, offset, lora_ranks):
        return call
    form = describe_weights(STEP.a if shrinks else STEP.b, weights, rank_dim, WITH_DOUBLE)
    if shrinks:
        check_input(STEP.input, x, form, STEP.a)
        check_low_rank(STEP.output, y, form, x.shape[0], WITH_DOUBLE)
    else:
        check_output(STEP.output, y, form, offset, WITH_DOUBLE)
        check_low_rank(STEP.input, x, form, y.shape[0], (torch.float32, form.dtype))
    batch.check_rows(x.shape[-2])
    check_ranks(lora_ranks, form)
    return prepare(plan, x, weights, y, lora_ranks, rank_dim=rank_dim, offset=offset)


def _shrink(call: PreparedCall, x: Tensor, y: Tensor, scale: float, accumulate: bool) -> None:
    beta = 1.0 if accumulate else 0.0
    only = call.only
    if only is not None:
        only.multiply(y[0], x, only.weight, scale, beta)
        return
    if not (accumulate or call.covers):
        y.zero_()
    rows = None if call.rows is None else call.rows.to(x.device)
    gathered = x if rows is None else x.index_select(0, rows)
    for target, part in zip(y.unbind(0), call.slices, strict=True):
        sums = target if rows is None else target.index_select(0, rows)
        multiply_products(sums, gathered, part, scale, beta, rank_of_out=True)
        if rows is not None:
            target.index_copy_(0, rows, sums)


def _expand(call: PreparedCall, x: Tensor, y: Tensor, add_inputs: bool) -> None:
    beta = 1.0 if add_inputs else 0.0
    only = call.only
    if only is not None:
        only.multiply(y, x[0], only.weight, 1.0, beta)
        return
    rows = None if call.rows is None else call.rows.to(y.device)
    column, columns = call.offset, y.shape[1]
    for low, weight, part in zip(x.unbind(0), call.weights, call.slices, strict=True):
        width = weight.shape[-2]
        target = y if width == columns else y.narrow(1, column, width)
        column += width
        if rows is None:
            multiply_products(target, low, part, 1.0, beta, rank_of_out=False)
            continue
        sums = target.index_select(0, rows)
        multiply_products(sums, low.index_select(0, rows), part, 1.0, beta, rank_of_out=False)
        target.index_copy_(0, rows, sums)


def _shrink_lanes(x: Tensor, weights: Tensor, lanes: Tensor, slots: Tensor, scaling: float) -> None:
    plan, y = LoRABatch.of_slots(slots).plan, lanes[None]
    _shrink(prepare(plan, x, (weights,), y, None, rank_dim=-2), x, y, scaling, False)


def _expand_columns(x: Tensor, weights: Tensor, columns: Tensor, slots: Tensor, add_inputs: bool) -> None:
    plan, x = LoRABatch.of_slots(slots).plan, x[None]
    _expand(prepare(plan, x, (weights,), columns, None, rank_dim=-1), x, columns, add_inputs)


_OPS = PaperOps(_shrink_lanes, _expand_columns)
bgmv_shrink, bgmv_expand, bgmv_expand_slice = _OPS.bgmv_shrink, _OPS.bgmv_expand, _OPS.bgmv_expand_slice
sgmv_shrink, sgmv_expand, sgmv_expand_slice = _OPS.sgmv_shrink, _OPS.sgmv_expand, _OPS.sgmv_expand_slice
