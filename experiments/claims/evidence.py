"""How sure a claim's quantities are: their intervals, and whether they rest on points that other work disturbed, or
that were measured once.

A quantity is a function of many rows, so its interval is found by asking the claim's function again, once for each
repeat that is spread in time: it is the span of these answers. Rows without repeats have no interval, and none is
invented: the quantity's is then unknown.
"""

import math

from experiments.claims.bounds import Interval
from experiments.claims.finding import ClaimFunction, Finding
from experiments.claims.rows import NoVerdict, Rows

SHIFT = 0.1
"""By how much rows are changed to see whether a quantity depends on them."""


def intervals(function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str]) -> dict[str, Interval]:
    """Quantity of ``finding``, which ``function`` computed from ``rows`` of ``figures``, -> interval, where known."""
    repeats = [found for one in rows.repeats(figures) if (found := _ask(function, one))]
    known = {}
    for name, value in finding.quantities.items():
        span = [value, *(found.get(name, value) for found in repeats)]
        known[name] = (min(span), max(span))
    return {name: ends for name, ends in known.items() if not math.isclose(*ends, rel_tol=1e-9)}


def rests_on(function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str], what: str) -> bool:
    """Whether any quantity would be another if the points of ``figures`` that are ``what`` (a column: ``disturbed``,
    ``once``) were up to a tenth off.
    """
    return any(_changes(function, finding, rows.stirred(figures, by, **{what: True})) for by in (SHIFT, -SHIFT))


def _changes(function: ClaimFunction, finding: Finding, changed: Rows | None) -> bool:
    return changed is not None and _ask(function, changed) != dict(finding.quantities)


def _ask(function: ClaimFunction, rows: Rows) -> dict[str, float] | None:
    try:
        return dict(function(rows).quantities)
    except NoVerdict:
        return None
