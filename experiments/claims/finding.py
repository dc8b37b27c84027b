"""What a claim function returns, and the table of all of them.

Every claim of ``paper_results/claims.csv`` has one function, registered under its id with `@claim("C09")`. It computes
*our* value from rows and knows no bound: the bounds are data (``paper_results/claim_bounds.csv``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from experiments.claims.rows import Rows


@dataclass(frozen=True)
class Finding:
    """Our side of one claim.

    ``quantities`` are the numbers that the bounds speak about; one that could not be measured is absent. ``text`` says
    the same for people, with the model, batch sizes and lengths that were really used. ``kind`` is ``simulated`` for
    arithmetic and replays that need no measurement.
    """

    quantities: Mapping[str, float]
    text: str
    kind: str = "measured"


ClaimFunction = Callable[[Rows], Finding]
CLAIMS: dict[str, ClaimFunction] = {}


def claim(id: str) -> Callable[[ClaimFunction], ClaimFunction]:
    """Decorator: this function computes our value of claim ``id``."""

    def store(function: ClaimFunction) -> ClaimFunction:
        if id in CLAIMS:
            raise ValueError(f"claim {id} already has a function, {CLAIMS[id].__name__}; one per claim")
        CLAIMS[id] = function
        return function

    return store
