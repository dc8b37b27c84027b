"""The LoRA operator under chosen schedules, and parallel compilation of its kernels."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import cast

import torch

from experiments.benches.operator_lines import Operator
from experiments.benches.operator_sets import Call, OperatorSets
from experiments.benches.operators import MAX_LORAS
from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops.launch import Launch
from punica.ops.triton_ops.lora_linear import LinearMode, plan_linear
from punica.ops.triton_ops.plan import KernelPlan
from punica.ops.triton_ops.schedules import Gpu, Problem, Schedule, choose_expand, choose_shrink
from punica.ops.weights import Stack
from punica.processes import end_with_parent

Job = tuple[Operator, Schedule, Schedule, bool]  # operator, shrink, expand, pdl


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


class _MetaSets:
    """Shapes and strides of `OperatorSets` without memory, for a worker that only compiles."""

    def __init__(self, op: Operator) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        slots = max(MAX_LORAS, len(op.sizes))
        self.operator = op
        self.x, self.y = empty(1, op.tokens, op.k), empty(1, op.tokens, sum(op.widths))
        self.stacked_a = [tuple(empty(slots, op.rank, op.k) for _ in op.widths)]
        self.stacked_b = [tuple(empty(slots, op.rank, n).mT for n in op.widths)]
        self.stacked_ranks = empty(len(op.widths), slots, dtype=torch.int32)


def _compile(job: Job) -> str:
    op, shrink, expand, pdl = job
    Launch.compile_only = True
    try:
        pair_plan(_MetaSets(op), shrink, expand, pdl=pdl)(0)  # type: ignore[arg-type]
    except Exception as error:  # a candidate that does not fit the GPU is simply not a candidate
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(jobs: list[Job], workers: int) -> None:
    """Compile the kernels of `jobs` in worker processes, so that this one finds them in Triton's cache; those that fail
    are printed here, and skipped when they are timed.
    """
    code: dict[tuple[object, ...], Job] = {}
    for job in jobs:
        op = job[0]
        code[op.k, op.widths, op.rank, bool(op.ranks), op.tokens == 1, *job[1:]] = job
    if workers == 0 or not code:
        return
    found = list(code.values())  # other numbers of rows run the same code
    context, number = get_context("spawn"), min(workers, len(found))
    with ProcessPoolExecutor(number, mp_context=context, initializer=end_with_parent) as pool:
        for message in filter(None, pool.map(_compile, found, chunksize=4)):
            print("not compiled:", message[:200])
