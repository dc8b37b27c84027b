"""Shrink and expand as one op: what a LoRA layer adds to its base output, in two launches.

    y[t, o_i : o_i + N_i] (+)= scale * (x[t] @ A_i[slot(t)]^T) @ B_i[slot(t)]^T            o_0 = 0, o_{i+1} = o_i + N_i

K may be split: shrink leaves fp32 partials ``[splits, n, T, r]`` and expand sums them as it reads. With ``pdl``
(compute capability 9.0 and newer) expand starts while shrink still runs, its weights and the old y already fetched;
shrink fetches A while its predecessor ends. That is safe because every kernel here lets its dependent start only after
its own wait: what a kernel reads early was complete two kernels ago. After a base product beside the shrink (``aside``,
``base``), which writes y, expand fetches only weights early.

**In one launch** the base product of a few rows, y[t] = W x[t] + bias, and their shrink share a grid: first tiles of
the base product (`skinny_gemm`), then rows of the shrink, whose many short programs fill the tail of the tiles. All
stays one chain of PDL launches, where a second stream (`punica.layers.dual_stream`) has to be forked and joined. On an
H200, in the layers of Llama-2 7B in one graph with 32 rows of 32 adapters, LoRA adds 0.79 ms in slots of rank 16, with
a second stream 0.93. In slots of rank 64 it adds 3.00 and 2.77, since the product's shared memory leaves little of a
multiprocessor to so much work; hence `MOST_RANKS`. One row, and two where K is a multiple of 2048, are multiplied
without tensor cores (`choose_form`), in a launch of their own.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.expect import FLOATS
from punica.ops.interface import Beside
from punica.ops.triton_ops.backbone.checks import check_numbers, check_row_scales, check_rows, check_shape
from punica.ops.triton_ops.backbone.gemm_forms import GemmForm, TilesForm, WeightForm, choose_form, weight_form
from punica.ops.triton_ops.backbone.skinny_gemm import (
    MAX_TOKENS,
    base_operands,
    gemm_tile,
    gemm_tiles,
    skinny_gemm,
    split_workspace,
)
from punica.ops.triton_ops.configs import Options, choose
from punica.ops.triton_ops.device import INDEX_POINTERS
from punica.ops.triton_ops.launch import Launch, block_at_least, on_device
from punica.ops.triton_ops.lora_expand import ExpandMode, LowRank, plan_expand
from punica.ops.triton_ops.lora_shrink import RowTile, ShrinkMode, ShrinkTile, partial_rank, plan_shrink, stored_shape
from punica.ops.triton_ops.plan import Batch, KernelPlan, operands_of, shrink_quant
from punica.ops.triton_ops.schedules import Gpu, Problem, Schedule
from punica.ops.triton_ops.shrink import shrink_row
from punica.ops.weights import Form, LoRAWeights

MOST_RANKS = 16
_MOST_ELEMENTS = 16384
"""Elements of A that a program holds in registers."""


class BaseForm(NamedTuple):
    """A base product whose weight and bias were checked. dtype: of x and y; None: any that kernels have."""

    weight: WeightForm
    dtype: torch.dtype | None
    device: torch.device


@triton.jit(do_not_specialize=["tokens", "num_slots", "gemm_programs"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _gemm_and_shrink_kernel(
    x_ptr, base, sums, operands, partials_ptr, mapping_ptr, ranks_ptr,
    tokens, num_slots, gemm_programs, scaling, strides,
    GEMM: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute tiles of the base product as `gemm_tile`, then the shrink. base: of `base_operands`, for y; sums:
    workspace of a split product; strides: of rows of x, weight and y.
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
        self, source: Sequence[Any], weights: Sequence[Tensor], targets: tuple[Tensor, Tensor], batch: Batch,
        lora_ranks: Tensor | None, aligned: bool, scale: float,
    ) -> None:  # fmt: skip
        """Launch; source: x, and the base product's operands; targets: partials and y."""
        (x, weight, *rest), (partials, y), mapping = source, targets, batch.tensors[0]
        bias, of_rows = (*rest, None, None)[:2]
        ranks = mapping if lora_ranks is None else lora_ranks
        sums = split_workspace(y, weight, self.form)
        tensors = (x, base_operands(weight, bias, y, of_rows), sums, tuple(weights), partials, mapping, ranks)
        self.launch(tensors, (*self.counts, scale), aligned)


def check_base_switches(base: Sequence[Tensor | None], add_inputs: bool) -> None:
    """Raise TypeError, ValueError: not as in `Beside`, or one whose product the LoRA term would overwrite."""
    known = isinstance(base, (tuple, list)) and len(base) <= 3
    if not known or not all(isinstance(one, Tensor) or (one is None and i == 1) for i, one in enumerate(base)):
        raise TypeError(f"base must be (weight, bias, scale), three tensors at most, got {type(base).__name__}")
    if base and not add_inputs:
        raise ValueError("add_inputs must be True with a base product, which the LoRA term is added to")


def describe_base(base: Sequence[Any]) -> BaseForm | None:
    """The form of ``weight [N, K]``, ``bias`` and ``scale`` ``[N]``. ValueError, TypeError: they do not fit."""
    if not base:
        return None
    weight, bias, scale = (*base, None, None)[:3]
    n, _ = check_shape("base weight", weight, (None, None))
    check_rows("base weight", weight)
    stored = check_row_scales("base weight", weight, scale, weight.device)
    dtype = bias.dtype if stored and bias is not None else None if stored else weight.dtype
    if bias is not None:
        check_shape("base bias", bias, (n,))
        check_rows("base bias", bias)
        check_numbers(weight.device, bias.dtype if stored else weight.dtype, **{"base bias": bias})
    return BaseForm(weight_form(weight, bias), dtype, weight.device)


def check_base(base: BaseForm, x: Tensor, y: Tensor) -> None:
    """Raise ValueError, TypeError: operands that do not fit the base product."""
    n, k = base.weight[:2]
    if y.shape[1] != n or x.shape[1] != k:
        raise ValueError(f"x must have {k} columns and y {n}, as the base weight, got {x.shape[1]} and {y.shape[1]}")
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"a base product here takes up to {MAX_TOKENS} rows, got {x.shape[0]}; multiply it before")
    same = x.dtype == y.dtype and (x.dtype in FLOATS if base.dtype is None else x.dtype == base.dtype)
    if not (same and x.device == y.device == base.device and x.stride(1) == 1):
        wanted = base.dtype or "a float"
        raise TypeError(
            f"x and y must be {wanted} on {base.device}, as base weight or bias is, and x have a last stride of 1; "
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
    return choose_form(base.weight, x.shape[0], x.dtype, Gpu.of(x.device).multiprocessors, batch_invariant=False)


_HERE = nullcontext()


class LinearPlan(NamedTuple):
    """Both launches and the shape of the partials between them; the first may make a base product, too."""

    shrink: KernelPlan | GemmAndShrinkPlan
    expand: KernelPlan
    partials: tuple[int, ...]

    def run(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: Batch, aligned: bool, scale: float, beside: Beside
    ) -> None:
        """Launch; arguments as of `punica.ops.interface.Ops.linear`."""
        a, ranks, base = operands_of(weights.a), weights.a.ranks, beside.base
        with on_device(x.get_device()):
            if isinstance(self.shrink, GemmAndShrinkPlan):
                partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
                self.shrink.run((x, *base), a, (partials, y), batch, ranks, aligned, scale)
            else:
                if base:
                    skinny_gemm(y, x, *base)
                with _HERE if beside.aside is None else beside.aside():
                    partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
                    self.shrink.run(x, a, partials, batch, ranks, aligned, scale)
            self.expand.run(partials, operands_of(weights.b), y, batch, weights.b.ranks, aligned)


class LinearMode(NamedTuple):
    """Options of a linear.

    pdl: its kernels start early. apart: shrink and expand do not follow one another directly. fused: the shrink's
    launch makes this base product, too. words: as in `ExpandMode`. early: shrink starts early (None: as with pdl).
    """

    add_inputs: bool = True
    pdl: bool = False
    apart: bool = False
    fused: BaseForm | None = None
    words: bool = True
    early: bool | None = None


def plan_linear(
    y: Tensor, x: Tensor, forms: tuple[Form, Form], batch: Batch, schedules: tuple[Schedule, Schedule], mode: LinearMode
) -> LinearPlan:
    """Plan the two launches with the given schedules (the first of `fused_schedule` where fused), for A and B."""
    (a, b), (shrink, expand), (add_inputs, pdl, apart, fused, words, early) = forms, schedules, mode
    first: KernelPlan | GemmAndShrinkPlan
    if fused is None:
        early = (pdl if early is None else early) and not apart
        first = plan_shrink(x, a, batch, shrink, ShrinkMode(overlap=pdl and not apart, early=early))
    else:
        first = plan_gemm_and_shrink(x, fused, y, a, shrink, pdl)
    partials = LowRank.sums(shrink.split_k, len(a.stored.widths), x.shape[0], partial_rank(a.stored.rank))
    late = apart or fused is not None
    second = plan_expand(partials, y, b, batch, expand, ExpandMode(0, add_inputs, pdl, late, words))
    return LinearPlan(first, second, partials.shape)


def choose_linear(
    y: Tensor, x: Tensor, forms: tuple[Form, Form], batch: Batch, options: Options, mode: LinearMode
) -> LinearPlan:
    """Choose schedules for the step and plan both launches. ``mode.fused``: a base product that the first may make."""
    a, b, base = forms[0].stored, forms[1].stored, mode.fused
    problem = Problem(batch.shape, x.shape[0], a.widths[0], b.widths, a.rank, a.dtype.itemsize, b.row_major)
    shrink = choose("shrink", problem, options, x.device)
    may_fuse = not shrink.block_m and options.tuned_dir is None
    may_fuse = may_fuse and (shrink_quant(forms[0], x.dtype).dense or not forms[0].is_fp8)
    fused = fused_schedule(x, base, a.rank) if base is not None and may_fuse else None
    shrink = fused or shrink
    expand = choose("expand", problem, options, x.device, shrink.split_k, mode.add_inputs)
    mode = mode._replace(fused=base if fused else None, apart=mode.apart or base is not None)
    return plan_linear(y, x, forms, batch, (shrink, expand), mode)
