"""Bounds of the claims, read from ``paper_results/claim_bounds.csv``. One may count only on the paper's class of
hardware (column ``where``); elsewhere the relation it belongs to cannot hold.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from experiments.facts.paper import paper_file
from experiments.facts.systems import MODELS

FILE = "claim_bounds.csv"
TESTS = ("relation", "shape")
WHERE = {"any": "", "data centre": " (on a data-centre GPU with the paper's models)", "A100": " (on an A100)"}
"""Class of hardware on which a bound counts -> words of the report."""
_DATA_CENTRE = {
    "v100", "a100", "a800", "a30", "a40", "l40", "l40s", "h20", "h100", "h200", "h800", "gh200", "b100", "b200", "b300",
}  # fmt: skip
_PAPER_MODELS = {name for names in MODELS.values() for name in names}

Interval = tuple[float, float]


class Outcome(IntEnum):
    """Outcome of one test, or of one bound; the worst first."""

    FAILS = 0
    NOISE = 1  # a bound is inside the interval of its quantity
    MISSING = 2  # a quantity that it needs was not measured
    ELSEWHERE = 3  # it counts only on another class of hardware
    HOLDS = 4


@dataclass(frozen=True)
class Bound:
    """``low <= quantity <= high`` of one claim; an infinite end is no bound, a ``strict`` end is excluded."""

    claim: str
    test: Literal["relation", "shape"]
    quantity: str
    when: Literal["always", "measured"]
    reading: str
    low: float = -math.inf
    high: float = math.inf
    strict: Literal["", "low", "high"] = ""
    where: Literal["any", "data centre", "A100"] = "any"

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}; swap them")

    def holds(self, value: float) -> bool:
        """Check whether ``value`` is inside, both ends included but for a strict one."""
        above = value > self.low if self.strict == "low" else value >= self.low
        below = value < self.high if self.strict == "high" else value <= self.high
        return above and below

    def outcome(self, value: float, interval: Interval | None = None) -> Outcome:
        """Return HOLDS or FAILS for all of ``interval`` (``value`` alone without one), else NOISE."""
        low, high = interval or (value, value)
        if self.holds(low) and self.holds(high):
            return Outcome.HOLDS
        beside = high < self.low or low > self.high
        return Outcome.FAILS if beside or not (interval and low < high) else Outcome.NOISE

    def counts(self, hardware: str, models: Sequence[str]) -> bool:
        """Check whether it counts for ``models`` (none: an operator) on the machine ``hardware``, e.g. ``h200``."""
        kinds = set(hardware.lower().split("-"))
        here = {"any": True, "data centre": bool(kinds & _DATA_CENTRE), "A100": "a100" in kinds}[self.where]
        return here and (self.where == "any" or set(models) <= _PAPER_MODELS)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.quantity} = {self.low:.7g}"
        above, below = (" <" if self.strict == end else " <=" for end in ("low", "high"))
        low = f"{self.low:.7g}{above} " if math.isfinite(self.low) else ""
        high = f"{below} {self.high:.7g}" if math.isfinite(self.high) else ""
        alone = f"{self.quantity}{above.replace('<', '>')} {self.low:.7g}"
        return alone if low and not high else f"{low}{self.quantity}{high}"


_BOUND = TypeAdapter(Bound)
Tests = Mapping[str, Sequence[Bound]]
"""``relation`` and ``shape`` -> the bounds of that test."""


def read_bounds(folder: str | Path) -> dict[str, Tests]:
    """Read the tests of each claim. ValueError names file, line and column of a bad bound."""
    path = paper_file(folder, FILE)
    bounds: dict[str, dict[str, list[Bound]]] = defaultdict(lambda: {test: [] for test in TESTS})
    with path.open(newline="", encoding="utf-8") as stream:
        for number, line in enumerate(csv.DictReader(stream), start=2):
            try:
                bound = _BOUND.validate_python({name: text for name, text in line.items() if text})
            except ValidationError as error:
                wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                raise ValueError(f"{path}, line {number}: {wrong}") from None
            bounds[bound.claim][bound.test].append(bound)
    return dict(bounds)


def outcome_of(
    bounds: Sequence[Bound], quantities: Mapping[str, float], intervals: Mapping[str, Interval] | None = None,
    hardware: str = "", models: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """The worst outcome of one test's bounds, MISSING without one; values not in ``intervals`` are exact."""
    found = []
    for bound in bounds:
        value = quantities.get(bound.quantity, math.nan)
        if not bound.counts(hardware, models):
            found.append(Outcome.ELSEWHERE)
        elif not math.isnan(value):
            found.append(bound.outcome(value, (intervals or {}).get(bound.quantity)))
        elif bound.when == "always":
            found.append(Outcome.MISSING)
    return min(found, default=Outcome.MISSING)


def missed_bounds(bounds: Sequence[Bound], quantities: Mapping[str, float]) -> str:
    """Describe the bounds that do not hold, e.g. ``peak is 10, not peak >= 16``."""
    known = [(bound, quantities[bound.quantity]) for bound in bounds if bound.quantity in quantities]
    return ", ".join(f"{one.quantity} is {value:.4g}, not {one}" for one, value in known if not one.holds(value))


def described(bounds: Sequence[Bound]) -> str:
    """Describe all bounds of one test in a line, e.g. ``1.3 <= ratio <= 3, batching_gain >= 10``."""
    said = [str(b) + WHERE[b.where] + (" (where measured)" if b.when == "measured" else "") for b in bounds]
    return ", ".join(said)
