"""Columns of the operator tables (`docs/operators.md`): calls on sets of one operator, checked before they are timed.
One graph rotates through *sets* (x, y, A, B) of more bytes than any cache has, so that weights come from HBM.
``torch_loop`` and ``torch_gbmm`` are two baselines of the anchors: one addmm pair per adapter; gather and two bmm.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from experiments.benches.operator_lines import LOOP, Operator
from experiments.benches.operators import MAX_LORAS, begun, kernel_meta_args
from experiments.harness.experiment import check_error
from experiments.measure.timing import CapturedRun, captured_rounds, seconds_between_events
from punica.metadata import LoRABatch, RowGroups
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.lora_linear import LinearMode, plan_linear
from punica.ops.triton_ops.plan import KernelPlan
from punica.ops.triton_ops.schedules import Gpu, Problem, choose_expand, choose_shrink
from punica.ops.weights import LoRAWeights, Stack
from punica.vllm.ops import lora_linear
from punica.wrapper import PunicaWrapperGPU

TOLERANCE = 1e-3
"""Largest relative error of one call in half precision; four times that after the many additions of a graph."""
TORCH = "torch"
"""Beginning of the names of columns with four times that tolerance: half precision between two products."""
EAGER_CALLS = 300
ROTATING_BYTES = 256 << 20  # bytes of all sets together; the L2 cache of an H200 holds 60 MB
Call = Callable[[int], object]  # a call on one of the sets


class OperatorSets:
    """Rotating inputs of one operator, set i in ``x[i]``, ``y[i]``, ``a[i]``, ``b[i]``; ``stacked_*``: a layer's
    stacks, the adapters of set i in the first slots, B rank after rank, and true ranks, 0 in the rest.
    """

    def __init__(
        self, operator: Operator, device: torch.device | str = "cuda", rotating_bytes: int = ROTATING_BYTES
    ) -> None:
        self.operator = operator
        adapters, tokens, slices = len(operator.sizes), operator.tokens, len(operator.widths)
        slots = max(MAX_LORAS, adapters)
        generator = torch.Generator(device).manual_seed(0)
        per_set = 2 * (tokens * (operator.k + sum(operator.widths)))
        per_set += 2 * adapters * operator.rank * (operator.k * slices + sum(operator.widths))
        self.count = max(2, -(-rotating_bytes // per_set))

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            out = torch.empty(shape, device=device, dtype=torch.float16)
            return out.normal_(generator=generator).mul_(scale)

        self.x = normal(self.count, tokens, operator.k)
        self.y = torch.zeros(self.count, tokens, sum(operator.widths), device=device, dtype=torch.float16)
        total = self.count * adapters + slots - adapters
        a = [normal(total, operator.rank, operator.k, scale=operator.k**-0.5) for _ in operator.widths]
        b = [normal(total, n, operator.rank, scale=operator.rank**-0.5) for n in operator.widths]
        stored = [weight.mT.contiguous().mT for weight in b]
        self.a, self.b = self.windows(a, adapters), self.windows(b, adapters)
        self.stacked_a, self.stacked_b = (self.windows(bank, slots) for bank in (a, stored))
        self.slots = torch.repeat_interleave(torch.arange(adapters), torch.tensor(operator.sizes))
        self.meta_args = kernel_meta_args(self.slots, slots, self.x.device)
        self._references: dict[int, torch.Tensor] = {}
        true = torch.tensor(operator.ranks or [operator.rank] * adapters, dtype=torch.int32, device=device)
        self.lora_ranks = true.repeat(slices, 1) if operator.ranks else None
        self.stacked_ranks = torch.zeros(slices, slots, dtype=torch.int32, device=device)
        self.stacked_ranks[:, :adapters] = true

    def windows(self, bank: Sequence[torch.Tensor], length: int) -> list[tuple[torch.Tensor, ...]]:
        """Return ``length`` slots of `bank` (one tensor per slice) for each set, the set's adapters first."""
        adapters = len(self.operator.sizes)
        starts = range(0, self.count * adapters, adapters)
        return [tuple(weight[start : start + length] for weight in bank) for start in starts]

    def reference(self, i: int) -> torch.Tensor:
        """Return the float32 reference of one call on set i; computed once."""
        if i not in self._references:
            ranks = self.operator.ranks or [self.operator.rank] * len(self.operator.sizes)
            parts = zip(ranks, self.x[i].float().split(self.operator.sizes), strict=True)
            self._references[i] = torch.cat([self._delta(i, slot, *part) for slot, part in enumerate(parts)])
        return self._references[i]

    def _delta(self, i: int, slot: int, rank: int, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.a[i], self.b[i], strict=True)
        return torch.cat([x @ a[slot, :rank].float().T @ b[slot, :, :rank].float().T for a, b in pairs], 1)

    def error(self, i: int, calls: int = 1) -> float:
        """``|added - reference| / |reference|`` after `calls` calls on set i; infinite where that is not a number."""
        expected = self.reference(i) * calls
        error = float((self.y[i].float() - expected).norm() / expected.norm())
        return error if error == error else float("inf")

    def relative_error(self, call: Call) -> float:
        """``|added - reference| / |reference|``, the worse of the first and the last set, from y = 0."""
        errors = []
        for i in (0, self.count - 1):
            self.y[i].zero_()
            call(i)
            errors.append(self.error(i))
            self.y[i].zero_()
        return max(errors)


def captured(call: Call, sets: int, calls: int) -> tuple[CapturedRun, int]:
    """Capture `calls` calls or one for each of `sets`, every set in turn; return the graph and its number of calls."""
    return captured_rounds([partial(call, i) for i in range(sets)], calls)


def median_us(run: CapturedRun, calls: int, replays: int) -> float:
    return statistics.median(seconds_between_events(run) * 1e6 / calls for _ in range(replays))


def _flat(sets: OperatorSets, pdl: bool = True, ranked: bool = False, batch_invariant: bool = False) -> Call:
    *tensors, count = sets.meta_args
    ranks = sets.stacked_ranks[:, : len(sets.operator.sizes)].contiguous() if ranked else sets.lora_ranks
    options = {"num_active_loras": count, "lora_ranks": ranks, "pdl": pdl, "batch_invariant": batch_invariant}
    return lambda i: lora_linear(sets.y[i], sets.x[i], sets.a[i], sets.b[i], *tensors, 1.0, **options)


def _of_a_layer(sets: OperatorSets, **switches: bool) -> Call:
    slots = sets.stacked_ranks.shape[1]
    wrapper = begun(PunicaWrapperGPU, sets.slots.tolist(), slots, sets.operator.rank, sets.x.device, **switches)
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
        parts = [y.split(sets.operator.widths, 1) for y in sets.y[i].split(sets.operator.sizes)]
        for slot, (x, outputs) in enumerate(zip(sets.x[i].split(sets.operator.sizes), parts, strict=True)):
            for y, a, b in zip(outputs, sets.a[i], sets.b[i], strict=True):
                y.addmm_(x @ a[slot].T, b[slot].T)

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
    LOOP: _torch_loop,
    "torch_gbmm": _torch_gbmm,
}
"""Column -> its call on set i."""


def checked_us(sets: OperatorSets, name: str, call: Call, calls: int, replays: int) -> float:
    """Median microseconds of `call` in a graph, right after one call and after a whole replay; else `CheckFailed`."""
    tolerance = _checked_call(sets, name, call)
    run, total = captured(call, sets.count, calls)
    sets.y.zero_()
    run()
    error = max(sets.error(i, total // sets.count) for i in (0, sets.count - 1))
    check_error(f"{name}, after a graph replay", error, max(tolerance, 4 * TOLERANCE))
    return median_us(run, total, replays)


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
