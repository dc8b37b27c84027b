"""Explanation of a claim that does not hold here: its cost on this machine, and on the paper's A100.

`explained` asks four things of one formula: here it gives every measured quantity within `WITHIN`, on an A100 every one
of the paper's, it misses the bounds that are missed here, and it meets them on an A100. A formula that gives the same
on both machines explains no difference between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.claims.bounds import Bound
from experiments.claims.costs.formula import COSTS, FORMULAS
from experiments.claims.costs.machine import Machine
from experiments.claims.finding import CLAIMS
from experiments.claims.rows import NotMeasured, NotTestable, NoVerdict, Rows
from experiments.facts.models import SECONDS
from experiments.facts.paper import a100, paper_rows
from punica.measure.roofline import sgmv_flop

WITHIN = 0.25
"""Largest relative difference of a prediction from what was measured."""
GIVEN = ("steps", "total_tokens", "bytes", "bandwidth")
"""Metrics that a claim reads beside times, and that no cost predicts: counts, and the link's own speed."""
Quantities = Mapping[str, float]

PRICED = {figure for figure, *_ in FORMULAS}


@dataclass(frozen=True)
class Explanation:
    """A sentence about the formula's numbers, and whether they explain the difference."""

    text: str
    holds: bool


def predicted(id: str, rows: Rows, machine: Machine) -> Quantities:
    """Return the quantities of claim ``id`` on ``rows`` with every time priced for ``machine``.

    NotTestable where it needs what the machine has not.
    """
    unknown: list[NotMeasured] = []
    refused: list[NotTestable] = []

    def price(row: Any) -> float | None:
        if row.metric in GIVEN:
            return float(row.value)
        if (function := FORMULAS.get((row.figure, row.system, row.metric))) is None:
            return None
        try:
            return in_unit(row, sum(function(machine, row).values()))
        except NotTestable as reason:
            refused.append(reason)
            return None
        except NotMeasured as reason:  # any number: what is not testable shows without the calibration
            unknown.append(reason)
            return 1.0

    try:
        quantities = CLAIMS[id](rows.priced(PRICED, COSTS[id], price)).quantities
    except NotMeasured as missing:
        raise (refused or unknown or [missing])[0] from None
    if unknown:
        raise unknown[0]
    return quantities


def in_unit(row: Any, seconds: float) -> float:
    """Return ``seconds`` of ``row`` in its unit."""
    if row.unit == "FLOP/s":
        return sgmv_flop(int(row.batch_size), int(row.rank), 4096) / seconds
    return 1 / seconds if row.unit == "token/s" else seconds / SECONDS[row.unit]


@cache
def paper_machine(folder: Path) -> tuple[Rows, Machine]:
    """Return the paper's rows and its A100."""
    rows = Rows(paper_rows(folder))
    return rows, Machine(rows, rows, launches=True, stated=a100(folder))


@cache
def on_an_a100(id: str, folder: Path) -> tuple[Quantities, Quantities]:
    """Return the paper's quantities of claim ``id``, and those that the formula gives for an A100."""
    rows, machine = paper_machine(folder)
    return CLAIMS[id](rows).quantities, predicted(id, rows, machine)


def explain(
    id: str, measured: Quantities, here: Quantities, bounds: Mapping[str, Sequence[Bound]], folder: Path
) -> Explanation:
    """Compare prediction and measurement here and on an A100; ``bounds``: those that count here, by test."""
    try:
        paper, there = on_an_a100(id, folder)
    except NoVerdict as reason:
        return Explanation(f"no cost for an A100 ({reason})", False)
    missed = [bound for bound in bounds["shape"] if bound.quantity in measured and not _holds(bound, measured)]
    names = dict.fromkeys(bound.quantity for bound in (*missed, *bounds["shape"], *bounds["relation"]))
    near = {name: (_near(here, measured, name), _near(there, paper, name)) for name in names if name in measured}
    against = [
        *(f"here {name} is not within {WITHIN:.0%}" for name, (own, _) in near.items() if not own),
        *(f"on an A100 {name} is not within {WITHIN:.0%}" for name, (_, other) in near.items() if not other),
        *(f"the cost here meets {bound}" for bound in missed if _holds(bound, here)),
        *(f"the cost of an A100 misses {bound}" for bound in missed if not _holds(bound, there)),
    ]
    decisive = dict.fromkeys(bound.quantity for bound in missed)
    said = "; ".join(_said(name, measured, here, there, paper) for name in decisive or near)
    outcome = f"not explained, as {', '.join(against)}" if against else "explained"
    return Explanation(f"{said}: {outcome}", not against)


def _near(found: Quantities, wanted: Quantities, name: str) -> bool:
    if name not in wanted:  # what the paper does not give
        return True
    return name in found and abs(found[name] - wanted[name]) <= WITHIN * abs(wanted[name])


def _holds(bound: Bound, quantities: Quantities) -> bool:
    return bound.quantity in quantities and bound.holds(quantities[bound.quantity])


def _said(name: str, measured: Quantities, here: Quantities, there: Quantities, paper: Quantities) -> str:
    value = [f"{found[name]:.3g}" if name in found else "none" for found in (measured, here, there, paper)]
    return f"{name} {value[0]} here, {value[1]} predicted; {value[2]} predicted for an A100, {value[3]} in the paper"
