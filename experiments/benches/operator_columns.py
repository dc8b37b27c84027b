"""Columns of the operator tables: calls on the sets of one operator, checked before they are timed.

==========================  ==============================================================================
punica                      the flat operator, both kernels early, B row after row as in adapter files
wrapper                     what a layer calls (`operators.begun`): defaults, 64 slots, true ranks, B by ranks.
wrapper, normal launch      as ``wrapper`` with ``LoRAConfig(pdl=False)``.
normal shrink               as a layer has it run, expand early only.
no overlap                  the flat operator with plain launches.
rank table                  the flat operator, the ranks read from a table.
batch invariant             the flat operator with ``batch_invariant=True``.
wrapper, batch invariant    the wrapper with ``LoRAConfig(batch_invariant=True)``.
==========================  ==============================================================================

``torch_loop`` and ``torch_gbmm`` are two baselines of the anchors: one addmm pair per adapter; gather and two bmm.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from experiments.benches.operator_sets import Call, OperatorSets
from experiments.benches.operators import begun
from experiments.harness.experiment import check_error
from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.lora_linear import LinearMode, plan_linear
from punica.ops.triton_ops.plan import KernelPlan
from punica.ops.triton_ops.schedules import Gpu, Problem, choose_expand, choose_shrink
from punica.ops.weights import LoRAWeights, Stack
from punica.vllm.ops import lora_linear
from punica.wrapper import PunicaWrapperBase, PunicaWrapperGPU

TOLERANCE = 1e-3
"""Largest relative error of one call in half precision; four times that after the many additions of a graph."""
TORCH = "torch"
"""Beginning of the names of columns with four times that tolerance: half precision between two products."""
EAGER_CALLS = 300


def _flat(sets: OperatorSets, pdl: bool = True, ranked: bool = False, batch_invariant: bool = False) -> Call:
    *tensors, count = sets.meta_args
    ranks = sets.stacked_ranks[:, : len(sets.operator.sizes)].contiguous() if ranked else sets.lora_ranks
    options = {"num_active_loras": count, "lora_ranks": ranks, "pdl": pdl, "batch_invariant": batch_invariant}
    return lambda i: lora_linear(sets.y[i], sets.x[i], sets.a[i], sets.b[i], *tensors, 1.0, **options)


def _begun(sets: OperatorSets, **switches: bool) -> PunicaWrapperBase:
    slots = sets.stacked_ranks.shape[1]
    return begun(PunicaWrapperGPU, sets.slots.tolist(), slots, sets.operator.rank, sets.x.device, **switches)


def _of_a_layer(sets: OperatorSets, **switches: bool) -> Call:
    wrapper = _begun(sets, **switches)
    stacks = zip(sets.stacked_a, sets.stacked_b, strict=True)
    weights = [LoRAWeights.of(a, b, sets.stacked_ranks) for a, b in stacks]
    return lambda i: wrapper.add_linear(sets.y[i], sets.x[i], weights[i])


def _normal_shrink(sets: OperatorSets) -> Call:
    """The plan of a layer, without dispatch."""
    op, device, ranks = sets.operator, sets.x.device, sets.stacked_ranks
    groups, step = RowGroups.of_runs(range(len(op.sizes)), op.sizes), LoRABatch(op.tokens, ranks.shape[1], device)
    step.fill(groups)
    problem, gpu = Problem(groups.tiles.shape, op.tokens, op.k, op.widths, op.rank), Gpu.of(device)
    shrink = choose_shrink(problem, gpu)
    schedules = shrink, choose_expand(problem, shrink.split_k, gpu)
    forms = Stack.of_a(sets.stacked_a[0], ranks).form, Stack.of_b(sets.stacked_b[0], ranks).form
    plan = plan_linear(sets.y[0], sets.x[0], forms, step, schedules, LinearMode(pdl=supports_pdl(device), early=False))
    shrink_plan = cast(KernelPlan, plan.shrink)  # without a base product
    partials = torch.empty(plan.partials, dtype=torch.float32, device=device)

    def call(i: int) -> None:
        shrink_plan.run(sets.x[i], sets.stacked_a[i], partials, step, ranks, True, 1.0)
        plan.expand.run(partials, sets.stacked_b[i], sets.y[i], step, ranks, True)

    return call


def _torch_loop(sets: OperatorSets) -> Call:
    def loop(i: int) -> None:
        start = 0
        for slot, size in enumerate(sets.operator.sizes):
            rows = slice(start, start + size)
            sets.y[i][rows].addmm_(sets.x[i][rows] @ sets.a[i][0][slot].T, sets.b[i][0][slot].T)
            start += size

    return loop


def _torch_gbmm(sets: OperatorSets) -> Call:
    slots = sets.slots.to(sets.x.device)

    def gather_bmm(i: int) -> None:
        a, b = sets.a[i][0][slots], sets.b[i][0][slots]
        sets.y[i].add_(torch.bmm(torch.bmm(sets.x[i][:, None], a.transpose(1, 2)), b.transpose(1, 2))[:, 0])

    return gather_bmm


COLUMNS: dict[str, Callable[[OperatorSets], Call]] = {
    "punica": _flat,
    "wrapper": _of_a_layer,
    "wrapper, normal launch": partial(_of_a_layer, pdl=False),
    "normal shrink": _normal_shrink,
    "no overlap": partial(_flat, pdl=False),
    "rank table": partial(_flat, ranked=True),
    "batch invariant": partial(_flat, batch_invariant=True),
    "wrapper, batch invariant": partial(_of_a_layer, batch_invariant=True),
    "torch_loop": _torch_loop,
    "torch_gbmm": _torch_gbmm,
}
"""Column -> its call on set i."""


def checked_us(sets: OperatorSets, name: str, call: Call, calls: int, replays: int) -> float:
    """Median microseconds of `call` in a graph, right after one call and after a whole replay; else `CheckFailed`."""
    tolerance = _checked_call(sets, name, call)
    us, error = sets.time_graph(call, calls=calls, replays=replays)
    check_error(f"{name}, after a graph replay", error, max(tolerance, 4 * TOLERANCE))
    return us


def eager_us(sets: OperatorSets, name: str, call: Call) -> float:
    """Host-bound microseconds per call of back-to-back eager calls; `CheckFailed` where one is wrong."""
    _checked_call(sets, name, call)
    for i in range(20):
        call(i % sets.count)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for i in range(EAGER_CALLS):
        call(i % sets.count)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / EAGER_CALLS


def _checked_call(sets: OperatorSets, name: str, call: Call) -> float:
    tolerance = (4 if name.startswith(TORCH) else 1) * TOLERANCE
    check_error(name, sets.relative_error(call), tolerance)
    return tolerance
