"""Shrink and expand as one op: what a LoRA layer adds to its base output, in two launches.

    y[t, o_i : o_i + N_i] (+)= scale * (x[t] @ A_i[slot(t)]^T) @ B_i[slot(t)]^T            o_0 = 0, o_{i+1} = o_i + N_i

Beyond `lora_shrink` followed by `lora_expand` it does two things that need both kernels in one hand. K may be split:
shrink leaves fp32 partials ``[splits, n, T, r]`` in a workspace and expand sums them as it reads. And with ``pdl``
(compute capability 9.0 and newer) expand starts while shrink still runs, its weights and the old y already fetched when
the partials are ready; shrink fetches A while its predecessor ends. That is safe because every kernel
here lets its successor start only after it has itself waited for its predecessor: what a kernel reads early was
complete two kernels ago. The exception is an expand whose shrink ran beside the base product, on another stream
(``aside``) or in its launch (``base``): the previous kernel wrote y, so that only weights are fetched early.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from punica.ops.interface import Beside
from punica.ops.triton_ops.backbone.skinny_gemm import skinny_gemm
from punica.ops.triton_ops.configs import Options, choose
from punica.ops.triton_ops.gemm_and_shrink import BaseForm, GemmAndShrinkPlan, fused_schedule, plan_gemm_and_shrink
from punica.ops.triton_ops.launch import on_device
from punica.ops.triton_ops.lora_expand import ExpandMode, LowRank, plan_expand
from punica.ops.triton_ops.lora_shrink import ShrinkMode, partial_rank, plan_shrink
from punica.ops.triton_ops.plan import Batch, KernelPlan, operands_of, shrink_quant
from punica.ops.triton_ops.schedules import Problem, Schedule
from punica.ops.weights import Form, LoRAWeights

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
