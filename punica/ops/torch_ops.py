"""The LoRA operators in plain torch, fast on a CPU and correct on any device.

`TorchOps` takes a step and all slices of a packed layer (q, k, v) in one call; the six functions named after the
paper's operators make a step from their tensors and run the same code. How a product is computed depends on the layout
of rows (`punica.metadata.SegmentPlan`), dtype and processor (`punica.ops.segment_gemm`). Weights are never gathered.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from punica.metadata import LoRABatch, MixedBatch
from punica.ops.expect import FLOATS, WITH_DOUBLE, check_scale, expect
from punica.ops.interface import ALONE, Beside, add_low_rank, check_equal_rows, check_expand, check_shrink, low_rank_of
from punica.ops.paper_ops import PaperOps
from punica.ops.quant import quantize_per_token
from punica.ops.scales import real_rows, real_weight
from punica.ops.segment_gemm import Cut, cut, multiply_products
from punica.ops.weights import STEP, LoRAWeights, Stack, weights_3d

_MOST_CUTS = 64  # of a stack on one step; a full table starts anew


class TorchOps:
    """`punica.ops.interface.Ops`; float64 is legal, gradients are none. Lanes beyond a true rank are never read."""

    contiguous_shrinks = False

    def shrink(
        self, y: Tensor, x: Tensor, a: Stack, batch: LoRABatch, scale: float = 1.0,
        accumulate: bool = False, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        _check(y, x, a.tensors)
        check_scale(STEP.scale, scale)
        if not x.shape[0]:
            return
        if a.form.is_fp8:
            check_shrink(STEP, y, x, a.form, x_scale, FLOATS)
            batch.check_rows(x.shape[0], a.form.stored.slots)
            _shrink_fp8(y, x, a, batch, scale, accumulate, x_scale)
        else:
            _shrink(_cut(y, x, a, batch, 0, x_scale), x, y, scale, accumulate)

    def expand(
        self, y: Tensor, x: Tensor, b: Stack, batch: LoRABatch, offset_start: int = 0,
        add_inputs: bool = True, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        _check(y, x, b.tensors)
        if not y.shape[0]:
            return
        if b.form.is_fp8:
            check_expand(STEP, y, x, b.form, offset_start, x_scale, FLOATS)
            batch.check_rows(y.shape[0], b.form.stored.slots)
            _expand_fp8(y, x, b, batch, offset_start, add_inputs, x_scale)
        else:
            _expand(_cut(y, x, b, batch, offset_start, x_scale), b.tensors, x, y, offset_start, add_inputs)

    def linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float = 1.0,
        add_inputs: bool = True, x_scale: Tensor | None = None, beside: Beside = ALONE,
    ) -> None:  # fmt: skip
        if beside is not ALONE:
            raise NotImplementedError("TorchOps computes no base product; multiply it before")
        _check(y, x)
        check_equal_rows(STEP, x, y)
        if x.shape[0]:
            low = low_rank_of(self, x, weights, batch, scale, x_scale)
            add_low_rank(self, y, low, weights, batch, add_inputs)

    def mix(self, y: Tensor, x: Tensor, weights: LoRAWeights, mixed: MixedBatch) -> None:
        _check(y, x)
        check_equal_rows(STEP, x, y)
        mixed.groups.check_rows(x.shape[0])
        sums = y.to(torch.float64 if y.dtype == torch.float64 else torch.float32, copy=True)
        for batch, gates in mixed.places:
            low = low_rank_of(self, x, weights, batch, 1.0, None)
            low[:, : len(gates)] *= gates.to(x.device)
            add_low_rank(self, sums, low, weights, batch, True)
        y.copy_(sums)

    def quantize(self, x: Tensor, group_k: int = 0) -> tuple[Tensor, Tensor]:
        return quantize_per_token(x, group_k, check=False)

    def gradient(self, stack: Stack, low: Tensor, x: Tensor, batch: LoRABatch) -> tuple[Tensor, ...]:
        _, parts, gradients = stack.gradients(low, x)
        batch.check_rows(x.shape[0], stack.form.stored.slots)
        wide = x.to(low.dtype)
        for slot, rows, i, rank, columns in _products(batch, stack) if x.shape[0] else ():
            inputs = wide[rows] if stack.rank_dim == -2 else wide[rows, columns]
            parts[i][slot, :rank] = low[i, rows, :rank].t() @ inputs
        return gradients


def _check(y: Tensor, x: Tensor, weights: Sequence[Tensor] = ()) -> None:
    """TypeError: no tensors. RuntimeError: one requires a gradient, whose graph would stay in memory used for all."""
    expect(STEP.input, x)
    expect(STEP.output, y)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (y, x, *weights)):
        text = "an operand requires a gradient, and operators compute none; use torch.no_grad(); lora_linear trains"
        raise RuntimeError(text)


def _cut(y: Tensor, x: Tensor, stack: Stack, batch: LoRABatch, offset: int, x_scale: Tensor | None) -> Cut:
    """Return the products of the last such call on this step, or the operands checked and cut."""
    plan, ranks = batch.plan, None if stack.ranks is None else stack.ranks.tolist()
    of, cuts = stack.cuts
    if of is not plan or len(cuts) >= _MOST_CUTS:  # both in one assignment: threads may share a stack
        cuts = {}
        stack.cuts = plan, cuts
    key = (x.shape, x.dtype, x.device, y.shape, y.stride(), y.dtype, y.device, offset, x_scale is None)
    known = cuts.get(key)
    if known is None or known.ranks != ranks:
        if stack.rank_dim == -2:
            check_shrink(STEP, y, x, stack.form, x_scale, WITH_DOUBLE)
        else:
            check_expand(STEP, y, x, stack.form, offset, x_scale, WITH_DOUBLE)
        batch.check_rows(y.shape[-2])
        known = cuts[key] = cut(plan, stack.tensors, stack.rank_dim, ranks, x, y)
    return known


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


# weights in FP8 are dequantised slot by slot: only those in use, up to their true rank
def _shrink_fp8(
    y: Tensor, x: Tensor, a: Stack, batch: LoRABatch, scale: float, accumulate: bool, x_scale: Tensor | None
) -> None:
    products = list(_products(batch, a))
    if not accumulate:
        y.zero_()
    real = real_rows(x, x_scale, a.form.scheme)
    for slot, rows, i, rank, _ in products:
        sums = scale * (real[rows] @ _real_weight(a, i, slot)[:rank].t())
        if accumulate:
            sums += y[i, rows, :rank].float()
        y[i, rows, :rank] = sums.to(y.dtype)


def _expand_fp8(
    y: Tensor, x: Tensor, b: Stack, batch: LoRABatch, offset_start: int, add_inputs: bool, x_scale: Tensor | None
) -> None:
    real, slices = real_rows(x, x_scale, b.form.scheme), y[:, offset_start:]
    for slot, rows, i, rank, columns in list(_products(batch, b)):
        sums = real[i, rows, :rank] @ _real_weight(b, i, slot)[:, :rank].t()
        if add_inputs:
            sums += slices[rows, columns].float()
        slices[rows, columns] = sums.to(y.dtype)


def _real_weight(stack: Stack, i: int, slot: int) -> Tensor:
    return real_weight(weights_3d(stack.tensors[i])[slot], stack.scales[i][slot], stack.form.scheme)


def _products(batch: LoRABatch, stack: Stack) -> Iterator[tuple[int, Tensor, int, int, slice]]:
    """Yield slot and rows of each segment with each slice: its number, true rank, and columns among all slices."""
    (slots, counts), stored = batch.rows.present, stack.form.stored
    parts = torch.from_numpy(batch.rows.order).to(stored.device).split(counts.tolist())
    for slot, rows in zip(slots.tolist(), parts, strict=True):
        column = 0
        for i, width in enumerate(stored.widths if slot >= 0 else ()):
            rank = stored.rank if stack.ranks is None else int(stack.ranks[i, slot])
            if not 0 <= rank <= stored.rank:
                raise ValueError(f"lora_ranks holds {rank} for slot {slot}; expected 0 to {stored.rank}")
            yield slot, rows, i, rank, slice(column, column + width)
            column += width


def _shrink_lanes(x: Tensor, weights: Tensor, lanes: Tensor, slots: Tensor, scaling: float) -> None:
    _check(lanes, x, (weights,))
    plan, y = LoRABatch.of_slots(slots).plan, lanes[None]
    _shrink(cut(plan, (weights,), -2, None, x, y), x, y, scaling, False)


def _expand_columns(x: Tensor, weights: Tensor, columns: Tensor, slots: Tensor, add_inputs: bool) -> None:
    _check(columns, x, (weights,))
    plan, x = LoRABatch.of_slots(slots).plan, x[None]
    _expand(cut(plan, (weights,), -1, None, x, columns), (weights,), x, columns, 0, add_inputs)


_OPS = PaperOps(_shrink_lanes, _expand_columns)
bgmv_shrink, bgmv_expand, bgmv_expand_slice = _OPS.bgmv_shrink, _OPS.bgmv_expand, _OPS.bgmv_expand_slice
sgmv_shrink, sgmv_expand, sgmv_expand_slice = _OPS.sgmv_shrink, _OPS.sgmv_expand, _OPS.sgmv_expand_slice
