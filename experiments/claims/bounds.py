"""The bounds of the claims, read from ``paper_results/claim_bounds.csv``: the tests are data, not code."""

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.claims.paper import paper_file

FILE = "claim_bounds.csv"
TESTS = ("relation", "shape")
WHEN = ("always", "measured")


@dataclass(frozen=True)
class Bound:
    """``low <= quantity <= high`` for one quantity of one claim; an infinite end is no bound."""

    claim: str
    test: str
    quantity: str
    low: float
    high: float
    when: str
    reading: str

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies inside, both ends included."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.quantity} = {self.low:.7g}"
        low = f"{self.low:.7g} <= " if math.isfinite(self.low) else ""
        high = f" <= {self.high:.7g}" if math.isfinite(self.high) else ""
        return f"{self.quantity} >= {self.low:.7g}" if low and not high else f"{low}{self.quantity}{high}"


def read_bounds(folder: str | Path) -> dict[str, dict[str, list[Bound]]]:
    """Claim id -> test (``relation``, ``shape``) -> bounds. ValueError names file, line and remedy for a bad line."""
    path = paper_file(folder, FILE)
    bounds: dict[str, dict[str, list[Bound]]] = defaultdict(lambda: {test: [] for test in TESTS})
    with path.open(newline="", encoding="utf-8") as stream:
        for number, line in enumerate(csv.DictReader(stream), start=2):
            bound = _bound(line, f"{path}, line {number}")
            bounds[bound.claim][bound.test].append(bound)
    return dict(bounds)


def _bound(line: Mapping[str, str], where: str) -> Bound:
    for name, allowed in (("test", TESTS), ("when", WHEN)):
        if line[name] not in allowed:
            raise ValueError(f"{where}: {name} is {line[name]!r}; it must be one of {', '.join(allowed)}")
    try:
        low = float(line["low"] or "-inf")
        high = float(line["high"] or "inf")
    except ValueError:
        raise ValueError(f"{where}: low={line['low']!r}, high={line['high']!r} must be numbers or empty") from None
    if low > high:
        raise ValueError(f"{where}: low={low} is above high={high}; swap them")
    return Bound(line["claim"], line["test"], line["quantity"], low, high, line["when"], line["reading"])


def holds_all(bounds: Sequence[Bound], quantities: Mapping[str, float]) -> bool | None:
    """True when every bound holds, False when one fails, None when none fails but a needed quantity is absent.

    A test without bounds is None: there is nothing that could hold.
    """
    known = [bound for bound in bounds if _known(quantities, bound.quantity)]
    if not all(bound.holds(quantities[bound.quantity]) for bound in known):
        return False
    needed = {bound.quantity for bound in bounds if bound.when == "always"}
    return True if known and needed <= {bound.quantity for bound in known} else None


def _known(quantities: Mapping[str, float], name: str) -> bool:
    return name in quantities and not math.isnan(quantities[name])


def described(bounds: Sequence[Bound]) -> str:
    """All bounds of one test in a line, e.g. ``1.3 <= ratio <= 3, batching_gain >= 10``."""
    return ", ".join(str(bound) + (" (where measured)" if bound.when == "measured" else "") for bound in bounds)
