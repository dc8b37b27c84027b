"""Extension: the price of determinism. Needs a GPU: on a CPU there is one operator, and it is deterministic.

Claims: SGMV without atomic adds gives the same bits in every run and is not slower than split-K with atomic adds, which
needs a zero-fill; keeping a row's bits whatever else is in its batch costs more. Timed: y += x A^T B^T at h1 = 4096, h2
= 11008, rank 16, interleaved, after a check against the reference:

    deterministic            the library's operator: split-K partials added in ascending order, early launch (PDL).
    deterministic, no PDL    the same with plain launches.
    batch invariant          `batch_invariant=True`: one kernel form and one split, whatever else is in the batch.
    atomics                  zero-fill, shrink by atomic adds (`benches.atomics`), expand, configured as ours
    atomics, finer split     the same with K split four times as often, what atomics are for

Beside it the share of outputs whose bits differ in any of `figure.runs` runs, and between a row in its batch and alone;
the largest differences, also in units in the last place. Cost: minutes on a GPU, where kernels are compiled first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, points_of_gpu
from experiments.harness import Config, Point, Reading, main, sampled

if TYPE_CHECKING:
    import torch

    from experiments.benches.operators import Problem
    from experiments.measure.timing import Call


class DeterminismConf(OperatorConf):
    """`runs`: how often one call is repeated to compare its bits."""

    runs: int = Field(ge=2)


class Determinism(OperatorExperiment):
    """Latency and bits of each variant per popularity (the panels) and batch."""

    name, figure, order, conf = "ext_determinism", "ext determinism", 220, DeterminismConf
    drawn_by = "extensions.draw_determinism"

    def points(self, cfg: Config) -> list[Point]:
        return points_of_gpu(self, cfg, super().points(cfg))

    def settings(self, cfg: Config) -> dict[str, Any]:
        return {**super().settings(cfg), "runs": cast(DeterminismConf, cfg.figure).runs}

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        from experiments.benches.atomics import VARIANTS
        from experiments.benches.operators import adding, checked

        return checked(point.system, [adding(one, VARIANTS[point.system](one)) for one in self.problems(cfg, point)])

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        batch = self.problems(cfg, point)[0]
        runs = between_runs(batch, point.system, cast(DeterminismConf, cfg.figure).runs)
        alone = from_row_alone(batch, point.system)
        return [*sampled("latency", samples, "us"), *_bits("between_runs", *runs), *_bits("from_row_alone", *alone)]


def _bits(where: str, changed: torch.Tensor, absolute: float, ulp: int) -> Iterator[Reading]:
    yield Reading(f"outputs_differing_{where}", float(changed.double().mean()), "share")
    yield Reading(f"max_difference_{where}", absolute, "1")
    yield Reading(f"max_ulp_{where}", ulp, "ulp")


def between_runs(problem: Problem, name: str, runs: int) -> tuple[torch.Tensor, float, int]:
    """The first of `runs` runs on the same inputs against all others: any difference is a lack of determinism."""
    import torch

    from experiments.benches.atomics import VARIANTS

    call = VARIANTS[name](problem)
    first = _added(problem, call)
    changed, absolute, ulp = zip(*[differences(_added(problem, call), first) for _ in range(runs - 1)], strict=True)
    return torch.stack(changed).any(0), max(absolute), max(ulp)


def from_row_alone(problem: Problem, name: str) -> tuple[torch.Tensor, float, int]:
    """Every row of the batch against the same row as a batch of one: any difference depends on the row's neighbours."""
    import torch

    from experiments.benches.atomics import VARIANTS

    whole = _added(problem, VARIANTS[name](problem))
    rows = []
    for row in range(problem.x.shape[0]):
        this = slice(row, row + 1)
        y = torch.zeros_like(problem.y[this])
        alone = replace(problem, x=problem.x[this], y=y, slots=problem.slots[this], sizes=(1,))
        rows.append(_added(alone, VARIANTS[name](alone)))
    return differences(whole, torch.cat(rows))


def _added(problem: Problem, call: Call) -> torch.Tensor:
    """Return the result of one call on y = 0."""
    problem.y.zero_()
    call()
    return problem.y.clone()


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
