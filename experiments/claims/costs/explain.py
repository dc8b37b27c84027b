"""Explanation of a claim that does not hold here: its cost on this machine, and on the paper's A100.

`explained` asks four things of one formula. Here, and on an A100 for the paper, it gives every quantity and its ends
within `WITHIN`. It misses the bounds that are missed here, and meets them on an A100. A quotient whose two ends are off
alike is no explanation. A formula that gives the same
on both machines explains no difference between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from experiments.claims.bounds import Bound
from experiments.claims.costs.ends import ends_of, misses, off, told
from experiments.claims.costs.machine import Machine
from experiments.claims.costs.prices import Point, Prediction, Quantities, predicted
from experiments.claims.finding import CLAIMS
from experiments.claims.rows import NoVerdict, Rows
from experiments.facts.paper import a100, paper_rows

WITHIN = 0.25
"""Largest relative difference of a prediction from what was measured."""
Bounds = Mapping[str, Sequence[Bound]]


@dataclass(frozen=True)
class Explanation:
    """A sentence about the formula's numbers, and whether they explain the difference."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Side:
    """One machine: quantities as measured, and their prediction."""

    measured: Quantities
    cost: Prediction

    def near(self, name: str) -> bool:
        """Check whether a quantity is predicted within `WITHIN`, or not measured here."""
        if name not in self.measured:
            return True
        found, wanted = self.cost.quantities.get(name), self.measured[name]
        return found is not None and _is_near(found, wanted) and all(
            _is_near(end.value, end.row.value) for end in self.ends.get(name, [])
        )

    def miss(self, name: str) -> str:
        """Tell how far the prediction of a quantity is off, and by which of its ends."""
        if (found := self.cost.quantities.get(name)) is None:
            return f"{name} has no prediction"
        return f"{name} is predicted {off(found, self.measured[name])}{self.by(name)}"

    def by(self, name: str) -> str:
        """Tell how far the predictions of a quantity's ends are off."""
        ends = self.ends.get(name, [])
        return f" ({misses(ends)})" if ends else ""

    @cached_property
    def ends(self) -> Mapping[str, list[Point]]:
        """Points that decide each quantity."""
        return ends_of(self.cost)


def _is_near(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= WITHIN * abs(wanted)


@cache
def paper_machine(folder: Path) -> tuple[Rows, Machine]:
    """Return the paper's rows and its A100."""
    rows = Rows(paper_rows(folder))
    return rows, Machine(rows, rows, launches=True, stated=a100(folder))


@cache
def on_an_a100(id: str, folder: Path) -> Side:
    """Return the paper's quantities of claim ``id``, and their prediction for an A100."""
    rows, machine = paper_machine(folder)
    return Side(CLAIMS[id](rows).quantities, predicted(id, rows, machine))


def explain(measured: Quantities, cost: Prediction, bounds: Bounds, folder: Path) -> Explanation:
    """Compare prediction and measurement here and on an A100; ``bounds``: those that count here, by test."""
    here = Side(measured, cost)
    try:
        there = on_an_a100(cost.id, folder)
    except NoVerdict as reason:
        return Explanation(f"no cost for an A100 ({reason})", False)
    missed = [bound for bound in bounds["shape"] if bound.quantity in measured and not _holds(bound, measured)]
    met = [bound for bound in missed if _holds(bound, cost.quantities)]
    wide = [bound for bound in missed if not _holds(bound, there.cost.quantities)]
    decisive = list(dict.fromkeys(bound.quantity for bound in missed))
    every = dict.fromkeys([*decisive, *(one.quantity for one in (*bounds["shape"], *bounds["relation"]))])
    names = [name for name in every if name in measured]
    wrong, wrong_there = ([name for name in names if not side.near(name)] for side in (here, there))
    against = [
        *(f"here {here.miss(name)}" for name in wrong),
        *(f"on an A100 {there.miss(name)}" for name in wrong_there),
        *(f"the cost here meets {bound}{here.by(bound.quantity)}" for bound in met),
        *(f"the cost of an A100 misses {bound}{there.by(bound.quantity)}" for bound in wide),
    ]
    asked = decisive or names
    said = ["; ".join(_numbers(name, here, there) for name in asked)]
    said.append(f"Here {told(_ends(here, asked), '')}")
    if wrong_there or wide:
        said.append(f"On an A100 {told(_ends(there, asked), ' in the paper')}")
    outcome = f"not explained, as {', '.join(against)}" if against else "explained"
    return Explanation(f"{'. '.join(said)}: {outcome}", not against)


def _ends(side: Side, names: Iterable[str]) -> list[Point]:
    """Return the ends of several quantities, each point once."""
    found = {id(end): end for name in names for end in side.ends.get(name, [])}
    return list(found.values())


def _holds(bound: Bound, quantities: Quantities) -> bool:
    return bound.quantity in quantities and bound.holds(quantities[bound.quantity])


def _numbers(name: str, here: Side, there: Side) -> str:
    every = (here.measured, here.cost.quantities, there.cost.quantities, there.measured)
    value = [f"{found[name]:.3g}" if name in found else "none" for found in every]
    return f"{name} {value[0]} here, {value[1]} predicted; {value[2]} predicted for an A100, {value[3]} in the paper"
