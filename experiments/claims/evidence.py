"""How sure a claim's quantities are: their intervals, and whether they rest on points that other work disturbed.

A quantity is a function of many rows, so its interval is found by asking the claim's function again: once for each
repeat that is spread in time, and once for either end of each row that carries an interval of its own. What repeats
span, and how far each such row alone moves the quantity, add in quadrature. Rows with neither have no interval, and
none is invented: the quantity's is then unknown.
"""

import math
from collections.abc import Iterator, Mapping

from experiments.claims.bounds import Interval
from experiments.claims.finding import ClaimFunction, Finding
from experiments.claims.rows import NoVerdict, Rows

PROBE, SHIFT = 0.001, 0.1
"""By how much rows are changed to see whether a quantity depends on them at all, and on disturbed ones."""


def intervals(function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str]) -> dict[str, Interval]:
    """Quantity of ``finding``, which ``function`` computed from ``rows`` of ``figures``, -> interval, where known."""
    repeats = [found for one in rows.repeats(figures) if (found := _ask(function, one))]
    ends = list(_moved_by_ends(function, rows, finding, figures))
    known = {}
    for name, value in finding.quantities.items():
        spans = [[found.get(name, value) for found in repeats]] if len(repeats) > 1 else []
        spans += [[low.get(name, value), high.get(name, value)] for low, high in ends]
        if spans:
            below = math.hypot(*(max(0.0, value - min(span)) for span in spans))
            above = math.hypot(*(max(0.0, max(span) - value) for span in spans))
            known[name] = (value - below, value + above)
    return {name: ends for name, ends in known.items() if not math.isclose(*ends, rel_tol=1e-9)}


def _moved_by_ends(
    function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str]
) -> Iterator[tuple[Mapping[str, float], Mapping[str, float]]]:
    """Quantities with each row at either end of its interval, for metrics on which any quantity depends."""
    depends: dict[str, bool] = {}
    for metric, low, high in rows.ends(figures):
        if metric not in depends:
            depends[metric] = _changes(function, finding, rows.stirred(figures, PROBE, metric=metric))
        if depends[metric]:
            yield _ask(function, low) or finding.quantities, _ask(function, high) or finding.quantities


def rests_on_disturbed(function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str]) -> bool:
    """Whether any quantity would be another if the disturbed points of ``figures`` were up to a tenth off."""
    return any(_changes(function, finding, rows.stirred(figures, by, disturbed=True)) for by in (SHIFT, -SHIFT))


def _changes(function: ClaimFunction, finding: Finding, changed: Rows | None) -> bool:
    return changed is not None and _ask(function, changed) != dict(finding.quantities)


def _ask(function: ClaimFunction, rows: Rows) -> dict[str, float] | None:
    try:
        return dict(function(rows).quantities)
    except NoVerdict:
        return None
