"""Deterministic operators and atomic ones, for `ext_determinism`: their calls, and the differences of their bits.

=========================  ==========================================================================================
deterministic              the library's operator: split-K partials added in ascending order, early launch (PDL)
deterministic, no PDL      the same with plain launches
batch invariant            `batch_invariant=True`: one kernel form and one split, whatever else is in the batch
atomics                    zero-fill, shrink by atomic adds, expand (`atomics`), configured as ours;
                           expand starts early, shrink cannot, because the zero-fill comes before it. Where ours does
                           not split K, this does not either, and its bits repeat
atomics, finer split       the same with K split four times as often, what atomics are for: no partials to add up
=========================  ==========================================================================================

All are Triton kernels: they run on a GPU, and at toy sizes in Triton's interpreter. Importing this module registers
them in `experiments.benches.operators.OPERATORS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from experiments.benches.operator_shapes import Operator
from experiments.benches.operators import OPERATORS, Prepared, Problem, adding
from punica.measure.timing import Call
from punica.ops.weights import LoRAWeights

SMALLEST_BLOCK = 128  # of K, in elements
Linear = Callable[[Problem], Call]


@dataclass(frozen=True)
class Bits:
    """Difference between the outputs of two calls that should give the same bits."""

    share: float  # of the outputs
    absolute: float  # largest difference
    ulp: int  # largest difference in units in the last place of the output's dtype


def _library(problem: Problem, pdl: bool = True, batch_invariant: bool = False) -> Call:
    from punica.ops.triton_ops import Options, TritonOps

    weights = LoRAWeights.of((problem.a,), (problem.stored_b,))
    return partial(TritonOps(Options(batch_invariant, pdl)).linear, problem.y, problem.x, weights, problem.step())


def _atomics(problem: Problem, finer: int = 1) -> Call:
    from experiments.benches.atomics import prepare_lora_atomics
    from experiments.benches.operator_pairs import estimated
    from punica.ops.triton_ops.launch import supports_pdl

    _, h2, rank = problem.b.shape
    shrink, expand = estimated(Operator(problem.x.shape[1], (h2,), rank, problem.sizes))
    if finer > 1:
        block_k = max(SMALLEST_BLOCK, shrink.block_k // finer)
        shrink = shrink._replace(split_k=finer * shrink.split_k, block_k=block_k)
    operands = problem.y, problem.x, (problem.a,), (problem.stored_b,)
    overlap = supports_pdl(problem.x.device)
    call = prepare_lora_atomics(*operands, problem.meta_args(), shrink, expand, overlap=overlap)
    return lambda: call(*operands)


VARIANTS: dict[str, Linear] = {
    "deterministic": _library,
    "deterministic, no PDL": partial(_library, pdl=False),
    "batch invariant": partial(_library, batch_invariant=True),
    "atomics": _atomics,
    "atomics, finer split": partial(_atomics, finer=4),
}


def _prepare(linear: Linear, problem: Problem) -> Prepared:
    return adding(problem, linear(problem))


for _name, _linear in VARIANTS.items():
    OPERATORS.register(_name)(partial(_prepare, _linear))


def between_runs(problem: Problem, name: str, runs: int) -> Bits:
    """The first of `runs` runs on the same inputs against all others: any difference is a lack of determinism."""
    call = VARIANTS[name](problem)
    first = _added(problem, call)
    found = [differences(_added(problem, call), first) for _ in range(runs - 1)]
    changed = torch.stack([different for different, _, _ in found]).any(0)
    return Bits(_share(changed), max(a for _, a, _ in found), max(u for _, _, u in found))


def from_row_alone(problem: Problem, name: str) -> Bits:
    """Every row of the batch against the same row as a batch of one: any difference depends on the row's neighbours."""
    whole = _added(problem, VARIANTS[name](problem))
    rows = []
    for row in range(problem.x.shape[0]):
        this = slice(row, row + 1)
        alone = replace(
            problem, x=problem.x[this], y=torch.zeros_like(problem.y[this]), slots=problem.slots[this], sizes=(1,)
        )
        rows.append(_added(alone, VARIANTS[name](alone)))
    changed, absolute, ulp = differences(whole, torch.cat(rows))
    return Bits(_share(changed), absolute, ulp)


def _added(problem: Problem, call: Call) -> torch.Tensor:
    """Return the result of one call on y = 0."""
    problem.y.zero_()
    call()
    return problem.y.clone()


def _share(changed: torch.Tensor) -> float:
    return float(changed.double().mean())


def differences(result: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, float, int]:
    """Return a mask of changed outputs, the largest absolute difference, and the largest in ulp."""
    mine, theirs = _ordered(result), _ordered(other)
    return result != other, float((result.double() - other.double()).abs().max()), int((mine - theirs).abs().max())


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Floats as integers in the same order, neighbours one apart: a difference counts units in the last place."""
    kind = torch.int32 if values.element_size() == 4 else torch.int16
    bits = values.contiguous().view(kind).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)
