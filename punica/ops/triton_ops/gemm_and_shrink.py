"""The base product of a few rows and their shrink, in one launch: both read ``x``, both wait for their weights.

    y[t] = W x[t] + bias            partials[split, i, t] = scaling * A_i[slot(t)] x[t], as `lora_shrink` leaves them

One grid holds programs of two kinds: tiles of the base product (`skinny_gemm`), then rows of the shrink
(`shrink`). The bytes of a few ranks are few beside those of a projection, and the shrink's many short programs
fill the tail of the tiles. All stays one chain of PDL launches on one stream, where a second stream for the shrink
(`punica.layers.dual_stream`) has to be forked and joined.

What counts is the width of the slots, not the rank of an adapter in one. Probed once on an H200 (2026-11-23), with the
projections, norms and activation of Llama-2 7B's 32 layers in one graph, 32 rows: in slots of rank 16 LoRA adds 0.79 ms
where it adds 0.93 with a second stream (32 adapters), 0.31 and 0.33 (one adapter); in slots of rank 64 it adds 3.00
where it adds 2.77, since the product's shared memory leaves little of a multiprocessor to so much work. Between these
nothing was measured, hence `MOST_RANKS`. One row, and two where K is a multiple of 2048, are multiplied without tensor
cores (`choose_form`), and have a launch of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.backbone.checks import check_rows, check_same, check_shape
from punica.ops.triton_ops.backbone.skinny_gemm import (
    MAX_TOKENS,
    GemmForm,
    TilesForm,
    WeightForm,
    choose_form,
    gemm_tile,
    gemm_tiles,
    split_workspace,
    weight_form,
)
from punica.ops.triton_ops.device import INDEX_POINTERS
from punica.ops.triton_ops.launch import Launch, block_at_least
from punica.ops.triton_ops.lora_shrink import RowTile, ShrinkMode, ShrinkTile, stored_shape
from punica.ops.triton_ops.plan import Batch
from punica.ops.triton_ops.schedules import Gpu, Schedule
from punica.ops.triton_ops.shrink import shrink_row
from punica.ops.weights import Form

MOST_RANKS = 16
_MOST_ELEMENTS = 16384
"""Elements of A that a program holds in registers."""


class BaseForm(NamedTuple):
    """A base product whose weight and bias were checked."""

    weight: WeightForm
    dtype: torch.dtype
    device: torch.device


@triton.jit(do_not_specialize=["tokens", "num_slots", "gemm_programs"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _gemm_and_shrink_kernel(
    x_ptr, base, sums, operands, partials_ptr, mapping_ptr, ranks_ptr,
    tokens, num_slots, gemm_programs, scaling, strides,
    GEMM: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute tiles of the base product as `gemm_tile` takes them, then rows, slices, ranks and splits of the shrink.

    base: weight, bias (or any tensor) and y; sums: workspace of a split product; strides: of rows of x, weight and y.
    """
    TILES: tl.constexpr = (GEMM.n + GEMM.block_n - 1) // GEMM.block_n
    x_stride, _, _ = strides
    pid = tl.program_id(0)
    if pid < gemm_programs:
        gemm_tile(x_ptr, base, sums, pid % TILES, pid // TILES, tokens, strides, GEMM)
    else:
        pid -= gemm_programs
        block = (pid % TILE.split_k, pid // TILE.split_k % TILE.row.programs)
        pid //= TILE.split_k * TILE.row.programs
        row = (pid // SHAPE.slices).to(tl.int64)
        place = (row, tl.load(mapping_ptr + row), pid % SHAPE.slices)
        call = (ranks_ptr, tokens, num_slots, scaling, False)
        shrink_row((x_ptr, partials_ptr), operands, place, block, call, (x_stride, 1), SHAPE, TILE)


class GemmAndShrinkPlan(NamedTuple):
    """The launch, the form of its base product, and its counts."""

    launch: Launch
    form: TilesForm
    counts: tuple[int, int, int]

    def run(
        self, source: Sequence[Tensor], weights: Sequence[Tensor], targets: tuple[Tensor, Tensor], batch: Batch,
        lora_ranks: Tensor | None, aligned: bool, scale: float,
    ) -> None:  # fmt: skip
        """Launch; source: x, the base weight, and its bias if it has one; targets: partials and y."""
        (x, *base), (partials, y), mapping = source, targets, batch.tensors[0]
        ranks = mapping if lora_ranks is None else lora_ranks
        sums = split_workspace(y, base[0], self.form)
        tensors = (x, (base[0], base[-1], y), sums, tuple(weights), partials, mapping, ranks)
        self.launch(tensors, (*self.counts, scale), aligned)


def check_base_switches(base: Sequence[Tensor], add_inputs: bool) -> None:
    """Raise TypeError, ValueError: no weight and perhaps bias, or one whose product the LoRA term would overwrite."""
    if not isinstance(base, (tuple, list)) or not all(isinstance(one, Tensor) for one in base) or len(base) > 2:
        raise TypeError(f"base must be (weight,) or (weight, bias), two tensors at most, got {type(base).__name__}")
    if base and not add_inputs:
        raise ValueError("add_inputs must be True with a base product, which the LoRA term is added to")


def describe_base(base: Sequence[Tensor]) -> BaseForm | None:
    """Check ``weight [N, K]`` and ``bias [N]`` (if given) and return their form; None without a base product.

    ValueError, TypeError: shapes, layouts, dtypes or devices.
    """
    if not base:
        return None
    weight, bias = base[0], base[1] if len(base) > 1 else None
    n, _ = check_shape("base weight", weight, (None, None))
    check_rows("base weight", weight)
    if bias is not None:
        check_shape("base bias", bias, (n,))
        check_rows("base bias", bias)
        check_same(weight, **{"base bias": bias})
    return BaseForm(weight_form(weight, bias), weight.dtype, weight.device)


def check_base(base: BaseForm, x: Tensor, y: Tensor) -> None:
    """Raise ValueError, TypeError: operands that do not fit the base product."""
    n, k = base.weight[:2]
    if y.shape[1] != n or x.shape[1] != k:
        raise ValueError(
            f"x must have {k} columns and y {n}, as the base weight [{n}, {k}] wants, got {x.shape[1]} and {y.shape[1]}"
        )
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"a base product here takes up to {MAX_TOKENS} rows, got {x.shape[0]}; multiply it before")
    if not (x.dtype == y.dtype == base.dtype and x.device == y.device == base.device and x.stride(1) == 1):
        raise TypeError(
            f"x and y must be {base.dtype} on {base.device}, as the base weight is, and x have a last stride of 1; "
            f"got {x.dtype} on {x.device} with strides {x.stride()}, and {y.dtype} on {y.device}"
        )


def fused_schedule(x: Tensor, base: BaseForm, rank: int) -> Schedule | None:
    """Return the shrink's schedule in one launch with this base product; None where each has a launch of its own."""
    if rank > MOST_RANKS or not isinstance(_form_of(x, base), TilesForm):
        return None
    block_k = min(4096, block_at_least(base.weight.k))
    block_r = min(_MOST_ELEMENTS // block_k, block_at_least(rank, 1))
    return Schedule(0, block_r, block_k, split_k=triton.cdiv(base.weight.k, block_k))


def plan_gemm_and_shrink(
    x: Tensor, base: BaseForm, y: Tensor, a: Form, schedule: Schedule, pdl: bool
) -> GemmAndShrinkPlan:
    """Plan the launch with a schedule of `fused_schedule`, for the forms and strides of these tensors."""
    form = cast(TilesForm, _form_of(x, base))  # fused_schedule answers for no other
    stored, block_r, splits, tokens = a.stored, schedule.block_n, schedule.split_k, x.shape[0]
    row = RowTile(block_r, triton.cdiv(stored.rank, block_r), schedule.block_k)
    constants = {
        "GEMM": gemm_tiles(form, x, base.weight, pdl),
        "SHAPE": stored_shape(a, x.dtype, ShrinkMode()),
        "TILE": ShrinkTile("rows", splits, pdl, row),
    }
    gemm_programs = triton.cdiv(base.weight.n, form.block_n) * form.split_k
    shrink_programs = tokens * len(stored.widths) * row.programs * splits
    launch = Launch(
        _gemm_and_shrink_kernel, (gemm_programs + shrink_programs, 1, 1), (x.dtype, stored.dtype, form.split_k > 1),
        (x.stride(0), base.weight.stride, y.stride(0)), constants, num_warps=form.num_warps, pdl=pdl, device=x.device,
    )  # fmt: skip
    return GemmAndShrinkPlan(launch, form, (tokens, stored.slots, gemm_programs))


def _form_of(x: Tensor, base: BaseForm) -> GemmForm:
    """Return the form in which `skinny_gemm` multiplies."""
    n, k = base.weight[:2]
    return choose_form(n, k, x.shape[0], x.dtype, Gpu.of(x.device).multiprocessors, batch_invariant=False)
