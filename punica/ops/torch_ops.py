"""The LoRA operators in plain torch, fast on a CPU and correct on any device.

`TorchOps` takes the step (`punica.metadata.LoRABatch`) and all slices of a packed layer (q, k, v) in one call. The six
functions named after the paper's operators mean exactly what `punica.ops.reference` says, make a step from their
tensors and run the same code.

How a product is computed depends on the layout of the rows (`punica.metadata.SegmentPlan`) and on dtype and processor
(`punica.ops.segment_gemm`). Weights are never gathered: a run of segments multiplies a view of the stack. FP8 weights
are dequantised slot by slot (`punica.ops.fp8_ops`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops import fp8_ops
from punica.ops.checks import (
    FLOATS,
    STEP,
    WITH_DOUBLE,
    check_dtype,
    check_equal_rows,
    check_input,
    check_low_rank,
    check_output,
    check_scale,
)
from punica.ops.fp8_checks import check_activation
from punica.ops.interface import ALONE, Beside, add_low_rank, low_rank_of
from punica.ops.paper_ops import PaperOps
from punica.ops.quant import FP8_DTYPES, quantize_per_token
from punica.ops.segment_calls import Cut, cut, multiply_products
from punica.ops.weights import LoRAWeights, Stack

_MOST_CUTS = 64  # of a stack on one step; a full table starts anew


class TorchOps:
    """The operations of `punica.ops.interface.Ops`, arguments and errors as there; float64 is legal, for checks.

    Lanes beyond a true rank are not read in A, B or the input of an expand.
    """

    contiguous_shrinks = False

    def shrink(
        self, y: Tensor, x: Tensor, a: Stack, batch: LoRABatch, scale: float = 1.0,
        accumulate: bool = False, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Shrink hidden size to rank."""
        check_dtype(STEP.input, x, (*WITH_DOUBLE, *FP8_DTYPES))
        check_scale(STEP.scale, scale)
        if not x.shape[0]:
            return
        if a.form.is_fp8:
            _check_shrink(y, x, a, batch, x_scale)
            fp8_ops.shrink(y, x, a, batch, scale, accumulate, x_scale)
        else:
            _shrink(_cut(y, x, a, batch, 0, x_scale), x, y, scale, accumulate)

    def expand(
        self, y: Tensor, x: Tensor, b: Stack, batch: LoRABatch, offset_start: int = 0,
        add_inputs: bool = True, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Expand rank to hidden size."""
        check_dtype(STEP.output, y, WITH_DOUBLE)
        check_dtype(STEP.input, x, (*WITH_DOUBLE, *FP8_DTYPES))
        if not y.shape[0]:
            return
        if b.form.is_fp8:
            _check_expand(y, x, b, batch, offset_start, x_scale)
            fp8_ops.expand(y, x, b, batch, offset_start, add_inputs, x_scale)
        else:
            _expand(_cut(y, x, b, batch, offset_start, x_scale), b.tensors, x, y, offset_start, add_inputs)

    def linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float = 1.0,
        add_inputs: bool = True, x_scale: Tensor | None = None, beside: Beside = ALONE,
    ) -> None:  # fmt: skip
        """Run both. There is no second stream, and base products are the caller's."""
        if beside is not ALONE:
            raise NotImplementedError("TorchOps computes no base product; multiply it before")
        check_dtype(STEP.input, x, (*WITH_DOUBLE, *FP8_DTYPES))
        check_dtype(STEP.output, y, WITH_DOUBLE)
        check_equal_rows(STEP, x, y)
        if x.shape[0]:
            low = low_rank_of(self, x, weights, batch, scale, x_scale)
            add_low_rank(self, y, low, weights, batch, add_inputs)

    def quantize(self, x: Tensor, group_k: int = 0) -> tuple[Tensor, Tensor]:
        """Quantise as `punica.ops.quant.quantize_per_token`, without its check."""
        return quantize_per_token(x, group_k, check=False)


def _cut(y: Tensor, x: Tensor, stack: Stack, batch: LoRABatch, offset: int, x_scale: Tensor | None) -> Cut:
    """Return the products of a call: those of the last such call on this step, or the operands checked and cut."""
    plan, ranks = batch.plan, None if stack.ranks is None else stack.ranks.tolist()
    if stack.cuts_of is not plan or len(stack.cuts) >= _MOST_CUTS:
        stack.cuts_of, stack.cuts = plan, {}
    key = (x.shape, x.dtype, x.device, y.shape, y.dtype, y.device, offset, x_scale is None)
    known = stack.cuts.get(key)
    if known is None or known.ranks != ranks:
        if stack.rank_dim == -2:
            _check_shrink(y, x, stack, batch, x_scale)
        else:
            _check_expand(y, x, stack, batch, offset, x_scale)
        known = stack.cuts[key] = cut(plan, stack.tensors, stack.rank_dim, ranks, x, y)
    return known


def _check_shrink(y: Tensor, x: Tensor, a: Stack, batch: LoRABatch, x_scale: Tensor | None) -> None:
    form, is_fp8 = a.form.stored, a.form.is_fp8
    check_activation(STEP.input, x, x_scale, form.widths[0], a.form.scheme, form)
    check_input(STEP.input, x, form, STEP.a)
    check_low_rank(STEP.output, y, form, x.shape[0], FLOATS if is_fp8 else WITH_DOUBLE)
    batch.check_rows(x.shape[0])


def _check_expand(y: Tensor, x: Tensor, b: Stack, batch: LoRABatch, offset: int, x_scale: Tensor | None) -> None:
    form, is_fp8 = b.form.stored, b.form.is_fp8
    check_output(STEP.output, y, form, offset, FLOATS if is_fp8 else WITH_DOUBLE)
    check_activation(STEP.input, x, x_scale, form.rank, b.form.scheme, form)
    check_low_rank(STEP.input, x, form, y.shape[0], (x.dtype,) if is_fp8 else (torch.float32, form.dtype))
    batch.check_rows(y.shape[0])


def _shrink(call: Cut, x: Tensor, y: Tensor, scale: float, accumulate: bool) -> None:
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


def _expand(call: Cut, tensors: Sequence[Tensor], x: Tensor, y: Tensor, offset_start: int, add_inputs: bool) -> None:
    beta = 1.0 if add_inputs else 0.0
    only = call.only
    if only is not None:
        only.multiply(y, x[0], only.weight, 1.0, beta)
        return
    rows = None if call.rows is None else call.rows.to(y.device)
    column, columns = offset_start, y.shape[1]
    for low, weight, part in zip(x.unbind(0), tensors, call.slices, strict=True):
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
    _shrink(cut(plan, (weights,), -2, None, x, y), x, y, scaling, False)


def _expand_columns(x: Tensor, weights: Tensor, columns: Tensor, slots: Tensor, add_inputs: bool) -> None:
    plan, x = LoRABatch.of_slots(slots).plan, x[None]
    _expand(cut(plan, (weights,), -1, None, x, columns), (weights,), x, columns, 0, add_inputs)


_OPS = PaperOps(_shrink_lanes, _expand_columns)
bgmv_shrink, bgmv_expand, bgmv_expand_slice = _OPS.bgmv_shrink, _OPS.bgmv_expand, _OPS.bgmv_expand_slice
sgmv_shrink, sgmv_expand, sgmv_expand_slice = _OPS.sgmv_shrink, _OPS.sgmv_expand, _OPS.sgmv_expand_slice
