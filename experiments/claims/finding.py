"""Findings: our value of each claim, and how sure it is.

Every claim of ``paper_results/claims.csv`` has one function, registered under its id with `@claim("C09")`, which
computes *our* value from rows and knows no bound: bounds are data (``paper_results/claim_bounds.csv``).

An interval is the span of a claim's function over the repeats that are spread in time; without repeats it is unknown.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from experiments.claims.bounds import Interval
from experiments.claims.rows import NotMeasured, Rows

SIMULATED, MEASURED = "simulated", "measured"


@dataclass(frozen=True)
class Finding:
    """Our side of one claim.

    ``quantities``: numbers that bounds apply to; one that could not be measured is absent. ``text``: the same for
    people, with the models, batch sizes and lengths used. ``kind``: ``simulated`` for arithmetic, replays and
    simulations, which name their ``cost_model``. ``models``: those that were measured, none for an operator.
    """

    quantities: Mapping[str, float]
    text: str
    kind: str = MEASURED
    models: tuple[str, ...] = ()
    cost_model: str = ""


ClaimFunction = Callable[[Rows], Finding]
CLAIMS: dict[str, ClaimFunction] = {}


def claim(id: str, **chosen: Any) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Register a function, called with ``chosen`` (a model, a workload), as our value of claim ``id``.

    A function that answers several claims is decorated once for each.
    """

    def store(function: Callable[..., Finding]) -> Callable[..., Finding]:
        if id in CLAIMS:
            raise ValueError(f"claim {id} already has a function, {CLAIMS[id].__name__}; one per claim")  # type: ignore[attr-defined]
        CLAIMS[id] = update_wrapper(partial(function, **chosen), function)
        return function

    return store


SHIFT = 0.1
"""Relative change of rows, to see whether a quantity depends on them."""


def intervals(function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str]) -> dict[str, Interval]:
    """Return the intervals of the quantities of ``finding``, by asking ``function`` for each repeat of ``figures``."""
    repeats = [found for one in rows.repeats(figures) if (found := _ask(function, one))]
    known = {}
    for name, value in finding.quantities.items():
        span = [value, *(found.get(name, value) for found in repeats)]
        known[name] = (min(span), max(span))
    return {name: ends for name, ends in known.items() if not math.isclose(*ends, rel_tol=1e-9)}


def rests_on(function: ClaimFunction, rows: Rows, finding: Finding, figures: set[str], what: str) -> bool:
    """Check whether any quantity changes when the points of ``figures`` that are ``what`` (a column: ``disturbed``,
    ``once``) are up to a tenth off.
    """
    return any(_changes(function, finding, rows.stirred(figures, by, **{what: True})) for by in (SHIFT, -SHIFT))


def _changes(function: ClaimFunction, finding: Finding, changed: Rows | None) -> bool:
    return changed is not None and _ask(function, changed) != dict(finding.quantities)


def _ask(function: ClaimFunction, rows: Rows) -> dict[str, float] | None:
    try:
        return dict(function(rows).quantities)
    except NotMeasured:
        return None
