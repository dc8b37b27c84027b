"""Extension: the price of determinism. Needs a GPU: on a CPU there is one operator, and it is deterministic.

Not in the paper. Claims: SGMV without atomic adds gives the same bits in every run and is not slower than split-K with
atomic adds, which needs a zero-fill; a form that also keeps a row's bits whatever else is in its batch
(`batch_invariant`) costs more, and this says how much. Expected shape: `deterministic` lowest everywhere,
`batch invariant` at or above it, bits that change between runs only for atomics that split K. Bits may depend on the
batch for `deterministic` too, which chooses its kernel by shape.

Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, rank 16, interleaved, every variant after a check against the reference:

    deterministic            the library's operator: split-K partials added in ascending order, early launch (PDL)
    deterministic, no PDL    the same with plain launches
    batch invariant          `batch_invariant=True`: one kernel form and one split, whatever else is in the batch
    atomics                  zero-fill, shrink by atomic adds, expand (`benches.atomics`), configured as ours; expand
                             starts early, shrink cannot, behind the zero-fill. Its bits repeat where ours splits no K
    atomics, finer split     the same with K split four times as often, what atomics are for: no partials to add up

Measured beside it per variant, popularity and batch: the share of outputs whose
bits differ in any of `figure.runs` runs of one call, and between a row in its batch and alone. Differences are the
largest, absolute and in units in the last place.

Cost at scale=laptop: minutes on a GPU, where kernels are compiled on first use; 4 GB. Nothing on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import Field
from tqdm import tqdm

from experiments.benches.operator_conf import OperatorConf
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness import Config, Point, Reading, main, sampled

if TYPE_CHECKING:
    import torch

    from experiments.benches.operators import Problem
    from experiments.measure.timing import Call

SMALLEST_BLOCK = 128  # of K, in elements


class DeterminismConf(OperatorConf):
    """`runs`: how often one call is repeated to compare its bits."""

    runs: int = Field(ge=2)


class Determinism(OperatorExperiment):
    """Latency and bits of each variant per popularity (the panels) and batch."""

    name, figure, order, conf = "ext_determinism", "ext determinism", 220, DeterminismConf
    drawn_by = "extensions.draw_determinism"

    def points(self, cfg: Config) -> list[Point]:
        if cfg.hardware.device == "cpu":
            text = "nothing to measure on a CPU, whose one operator is deterministic; it needs a GPU"
            tqdm.write(f"{self.name}: {text}", file=sys.stderr)
            return []
        return super().points(cfg)

    def settings(self, cfg: Config) -> dict[str, Any]:
        return {**super().settings(cfg), "runs": cast(DeterminismConf, cfg.figure).runs}

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        from experiments.benches.operators import adding, checked, problems

        batches = problems(cfg, point.workload, cast(int, point.batch_size), cast(int, point.rank))
        return checked(point.system, [adding(batch, VARIANTS[point.system](batch)) for batch in batches])

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        from experiments.benches.operators import problems

        batch = problems(cfg, point.workload, cast(int, point.batch_size), cast(int, point.rank))[0]
        runs = between_runs(batch, point.system, cast(DeterminismConf, cfg.figure).runs)
        found = sampled("latency", samples, "us")
        for where, bits in (("between_runs", runs), ("from_row_alone", from_row_alone(batch, point.system))):
            found.append(Reading(f"outputs_differing_{where}", bits.share, "share"))
            found.append(Reading(f"max_difference_{where}", bits.absolute, "1"))
            found.append(Reading(f"max_ulp_{where}", bits.ulp, "ulp"))
        return found


class Bits(NamedTuple):
    """Difference between the outputs of two calls that should give the same bits."""

    share: float  # of the outputs
    absolute: float  # largest difference
    ulp: int  # largest difference in units in the last place of the output's dtype


def _library(problem: Problem, pdl: bool = True, batch_invariant: bool = False) -> Call:
    from punica.ops.triton_ops import Options, TritonOps
    from punica.ops.weights import LoRAWeights

    weights = LoRAWeights.of((problem.a,), (problem.stored_b,))
    return partial(TritonOps(Options(batch_invariant, pdl)).linear, problem.y, problem.x, weights, problem.step())


def _atomics(problem: Problem, finer: int = 1) -> Call:
    from experiments.benches.atomics import prepare_lora_atomics
    from experiments.benches.operator_pairs import estimated
    from experiments.benches.operator_shapes import Operator
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


VARIANTS: dict[str, Callable[[Problem], Call]] = {
    "deterministic": _library,
    "deterministic, no PDL": partial(_library, pdl=False),
    "batch invariant": partial(_library, batch_invariant=True),
    "atomics": _atomics,
    "atomics, finer split": partial(_atomics, finer=4),
}
"""System -> its call: Triton kernels, which run on a GPU, and at toy sizes in Triton's interpreter."""


def between_runs(problem: Problem, name: str, runs: int) -> Bits:
    """The first of `runs` runs on the same inputs against all others: any difference is a lack of determinism."""
    import torch

    call = VARIANTS[name](problem)
    first = _added(problem, call)
    found = [differences(_added(problem, call), first) for _ in range(runs - 1)]
    changed = torch.stack([different for different, _, _ in found]).any(0)
    return Bits(_share(changed), max(a for _, a, _ in found), max(u for _, _, u in found))


def from_row_alone(problem: Problem, name: str) -> Bits:
    """Every row of the batch against the same row as a batch of one: any difference depends on the row's neighbours."""
    import torch

    whole = _added(problem, VARIANTS[name](problem))
    rows = []
    for row in range(problem.x.shape[0]):
        this = slice(row, row + 1)
        y = torch.zeros_like(problem.y[this])
        alone = replace(problem, x=problem.x[this], y=y, slots=problem.slots[this], sizes=(1,))
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
    import torch

    kind = torch.int32 if values.element_size() == 4 else torch.int16
    bits = values.contiguous().view(kind).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


EXPERIMENT = Determinism()

if __name__ == "__main__":
    main(EXPERIMENT)
