"""The LoRA operator under chosen schedules."""

from typing import cast

import torch

from experiments.benches.operator_lines import Operator
from experiments.benches.operator_sets import Call, OperatorSets
from experiments.benches.operators import MAX_LORAS
from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops.lora_linear import LinearMode, plan_linear
from punica.ops.triton_ops.plan import KernelPlan
from punica.ops.triton_ops.schedules import Gpu, Problem, Schedule, choose_expand, choose_shrink
from punica.ops.weights import Stack


def problem_of(op: Operator) -> Problem:
    """`op` in a layer, as its schedules are chosen for it."""
    shape = RowGroups.of_runs(range(len(op.sizes)), op.sizes).tiles.shape
    return Problem(shape, op.tokens, op.k, op.widths, op.rank)


def estimated(op: Operator) -> tuple[Schedule, Schedule]:
    """The schedules with the least estimated time for the shrink and the expand of `op` in a layer."""
    problem, gpu = problem_of(op), Gpu.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    shrink = choose_shrink(problem, gpu)
    return shrink, choose_expand(problem, shrink.split_k, gpu)


def step_of(op: Operator, device: torch.device) -> LoRABatch:
    """The step of `op`, as a wrapper with a server's slots holds it."""
    step = LoRABatch(op.tokens, max(MAX_LORAS, len(op.sizes)), device)
    step.fill(RowGroups.of_runs(range(len(op.sizes)), op.sizes))
    return step


def pair_plan(
    sets: OperatorSets, shrink: Schedule, expand: Schedule, *, pdl: bool, pdl_shrink: bool | None = None
) -> Call:
    """Build ``call(i)``: the operator on set i with these schedules, as in a layer, without dispatch."""
    step, ranks = step_of(sets.operator, sets.x.device), sets.stacked_ranks
    forms = Stack.of_a(sets.stacked_a[0], ranks).form, Stack.of_b(sets.stacked_b[0], ranks).form
    mode = LinearMode(pdl=pdl, early=pdl_shrink)
    plan = plan_linear(sets.y[0], sets.x[0], forms, step, (shrink, expand), mode)
    shrink_plan = cast(KernelPlan, plan.shrink)  # without a base product
    partials = torch.empty(plan.partials, dtype=torch.float32, device=sets.x.device)

    def call(i: int) -> None:
        shrink_plan.run(sets.x[i], sets.stacked_a[i], partials, step, ranks, True, 1.0)
        plan.expand.run(partials, sets.stacked_b[i], sets.y[i], step, ranks, True)

    return call
