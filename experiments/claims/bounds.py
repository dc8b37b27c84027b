"""Bounds of the claims, read from ``paper_results/claim_bounds.csv``.

A bound may count only on the paper's class of hardware (column ``where``): a ratio of systems on a data-centre GPU with
the paper's models, an absolute time on an A100 with them. Elsewhere the relation it belongs to cannot hold.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from experiments.facts.models import MODELS
from experiments.facts.paper import paper_file

FILE = "claim_bounds.csv"
TESTS = ("relation", "shape")
WHEN = ("always", "measured")
WHERE = {"any": "", "data centre": " (on a data-centre GPU with the paper's models)", "A100": " (on an A100)"}
"""Class of hardware on which a bound counts -> words of the report."""
ENDS = ("", "low", "high")

_DATA_CENTRE = {
    "v100", "a100", "a800", "a30", "a40", "l40", "l40s", "h20", "h100", "h200", "h800", "gh200", "b100", "b200", "b300",
}  # fmt: skip
_PAPER_MODELS = {name for names in MODELS.values() for name in names}

Interval = tuple[float, float]


class Outcome(Enum):
    """Outcome of one test, or of one bound."""

    HOLDS = "holds"
    FAILS = "fails"
    NOISE = "within noise"  # a bound is inside the interval of its quantity
    ELSEWHERE = "counts elsewhere"  # only on another class of hardware
    MISSING = "missing"  # a quantity that it needs was not measured


@dataclass(frozen=True)
class Bound:
    """``low <= quantity <= high`` of one claim; an infinite end is no bound, a ``strict`` end is excluded."""

    claim: str
    test: str
    quantity: str
    low: float
    high: float
    when: str
    reading: str
    strict: str = ""
    where: str = "any"

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

    def distance(self, value: float) -> float:
        """Return the relative distance of ``value`` from the nearer finite end; infinite of an exact bound."""
        ends = [end for end in (self.low, self.high) if math.isfinite(end) and end and self.low != self.high]
        return min((abs(value / end - 1) for end in ends), default=math.inf)

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


def read_bounds(folder: str | Path) -> dict[str, dict[str, list[Bound]]]:
    """Read claim id -> test (``relation``, ``shape``) -> bounds. ValueError names file and line of a bad one."""
    path = paper_file(folder, FILE)
    allowed = {"test": TESTS, "when": WHEN, "strict": ENDS, "where": tuple(WHERE)}
    bounds: dict[str, dict[str, list[Bound]]] = defaultdict(lambda: {test: [] for test in TESTS})
    with path.open(newline="", encoding="utf-8") as stream:
        for number, line in enumerate(csv.DictReader(stream), start=2):
            where = f"{path}, line {number}"
            for name, choices in allowed.items():
                if line[name] not in choices:
                    said = ", ".join(entry or "empty" for entry in choices)
                    raise ValueError(f"{where}: {name} is {line[name]!r}; it must be one of {said}")
            try:
                low, high = float(line.pop("low") or "-inf"), float(line.pop("high") or "inf")
            except ValueError as wrong:
                raise ValueError(f"{where}: low and high must be numbers or empty: {wrong}") from None
            if low > high:
                raise ValueError(f"{where}: low={low} is above high={high}; swap them")
            bounds[line["claim"]][line["test"]].append(Bound(low=low, high=high, **line))
    return dict(bounds)


def outcome_of(
    bounds: Sequence[Bound], quantities: Mapping[str, float], intervals: Mapping[str, Interval] | None = None,
    hardware: str = "", models: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Return the worst outcome of one test's bounds on a machine: a failure first, then noise.

    Values without an entry in ``intervals`` are taken as exact. A test without an applicable bound is MISSING.
    """
    found, applied = set(), False
    for bound in bounds:
        value = quantities.get(bound.quantity, math.nan)
        if not bound.counts(hardware, models):
            found.add(Outcome.ELSEWHERE)
        elif math.isnan(value):
            found |= {Outcome.MISSING} if bound.when == "always" else set()
        else:
            applied = True
            found.add(bound.outcome(value, (intervals or {}).get(bound.quantity)))
    for worst in (Outcome.FAILS, Outcome.NOISE, Outcome.MISSING, Outcome.ELSEWHERE):
        if worst in found:
            return worst
    return Outcome.HOLDS if applied else Outcome.MISSING


def missed_bounds(bounds: Sequence[Bound], quantities: Mapping[str, float]) -> str:
    """Describe the bounds that do not hold, e.g. ``peak is 10, not peak >= 16``."""
    known = [(bound, quantities[bound.quantity]) for bound in bounds if bound.quantity in quantities]
    return ", ".join(f"{one.quantity} is {value:.4g}, not {one}" for one, value in known if not one.holds(value))


def described(bounds: Sequence[Bound]) -> str:
    """Describe all bounds of one test in a line, e.g. ``1.3 <= ratio <= 3, batching_gain >= 10``."""
    said = [str(b) + WHERE[b.where] + (" (where measured)" if b.when == "measured" else "") for b in bounds]
    return ", ".join(said)
