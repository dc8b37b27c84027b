"""Stability of verdicts: how often other choices of the repeats that count give the same one.

A verdict rests on the median of a few repeats. `stability` judges every measured claim again with each repeat left out
in turn, and with repeats drawn by seed (`Rows.resamples`), by its value alone, as no interval belongs to one choice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.claims.bounds import Bound, outcome_of, read_bounds
from experiments.claims.evidence import Evidence
from experiments.claims.finding import CLAIMS, SIMULATED, Finding
from experiments.claims.judge import decide
from experiments.claims.rows import NotMeasured, Rows

SEEDS = 12


@dataclass(frozen=True)
class Stability:
    """Verdicts of one claim over ``of`` resamples: ``same`` of them give ``verdict``, that of all repeats that count;
    ``others`` counts the rest by verdict.
    """

    verdict: str
    same: int
    of: int
    others: Mapping[str, int]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {times}" for name, times in self.others.items())
        return f"{self.verdict} in {self.same} of {self.of} resamples" + (f" ({others})" if others else "")


def stability(rows: pd.DataFrame, folder: str | Path, seeds: int = SEEDS) -> dict[str, Stability]:
    """Map the claims in ``folder`` (``paper_results``) to the stability of their verdicts on ``rows`` of one hardware.

    Absent are claims without a verdict, simulated ones, and those whose quantities no resample changes: they rest on
    points that were measured once.
    """
    evidence, bounds = Evidence(rows, folder), read_bounds(folder)
    found: dict[str, Stability] = {}
    for clock in sorted({evidence.clock(id) for id in CLAIMS}):
        mine = {id: bounds[id] for id in CLAIMS if id in bounds and evidence.clock(id) == clock}
        found |= _under_one_clock(evidence.rows(clock), mine, evidence.hardware, seeds)
    return {id: found[id] for id in bounds if id in found}


def _under_one_clock(
    rows: Rows, bounds: Mapping[str, Mapping[str, list[Bound]]], hardware: str, seeds: int
) -> dict[str, Stability]:
    usual = {id: found for id in bounds if (found := _finding(id, rows)) and found.kind != SIMULATED}
    verdicts = {id: _verdict(bounds[id], found, hardware) for id, found in usual.items()}
    tallies: dict[str, Counter[str]] = {id: Counter() for id in usual}
    moved = set()
    for resample in rows.resamples(seeds):
        for id, before in usual.items():
            if found := _finding(id, resample):
                tallies[id][_verdict(bounds[id], found, hardware)] += 1
                moved |= {id} if found.quantities != before.quantities else set()
    return {id: _summed(verdicts[id], tallies[id]) for id in usual if id in moved}


def _finding(id: str, rows: Rows) -> Finding | None:
    try:
        return CLAIMS[id](rows)
    except NotMeasured:
        return None


def _verdict(bounds: Mapping[str, list[Bound]], finding: Finding, hardware: str) -> str:
    relation, shape = (
        outcome_of(bounds[test], finding.quantities, None, hardware, finding.models) for test in ("relation", "shape")
    )
    return decide(relation, shape)


def _summed(verdict: str, tally: Counter[str]) -> Stability:
    others = {name: times for name, times in tally.most_common() if name != verdict}
    return Stability(verdict, tally[verdict], tally.total(), others)
