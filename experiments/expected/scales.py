"""Scales of the quantities behind the claims: how far two values are apart, and which values are possible.

A ratio, a time or a throughput is positive, and its distances are factors: 2 is as far from 1 as 0.5. A growth in
percent is a ratio less 1. Shares, correlations and differences are linear. ``paper_results/claim_quantities.csv`` names
every quantity that is not a plain ratio.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.expected.ranges import FLOOR, TIMES
from experiments.facts.paper import paper_file

FILE = "claim_quantities.csv"
LINEAR = "linear"
ZEROS = {"ratio": 0.0, "growth": -100.0}
"""Logarithmic scales -> the value at which they have no logarithm."""


@dataclass(frozen=True)
class Scale:
    """Scale of one quantity: ``kind`` is `LINEAR` or one of `ZEROS`; no value is below ``least`` or above ``most``."""

    kind: str = "ratio"
    least: float = -math.inf
    most: float = math.inf

    def is_possible(self, value: float) -> bool:
        """Check whether the quantity can have ``value``."""
        return self.least <= value <= self.most and value > ZEROS.get(self.kind, -math.inf)

    def around(self, value: float, ends: Sequence[float], floor: float) -> tuple[float, float]:
        """Return the range around ``value`` whose repeats reach to ``ends``, cut to what is possible.

        It reaches at least ``floor``, as a part of the value; of shares and correlations, which have a most, `FLOOR`.

        ValueError names a value or an end that is not possible.
        """
        for one in (value, *ends):
            if not self.is_possible(one):
                raise ValueError(f"{one:g} is not possible on the scale {self}")
        if self.kind == LINEAR:
            floor = floor if self.most == math.inf else FLOOR
            width = max(floor * abs(value), TIMES * max((abs(end - value) for end in ends), default=0.0))
            low, high = value - width, value + width
        else:
            zero = ZEROS[self.kind]
            farthest = max((abs(math.log((end - zero) / (value - zero))) for end in ends), default=0.0)
            factor = math.exp(max(math.log1p(floor), TIMES * farthest))
            low, high = zero + (value - zero) / factor, zero + (value - zero) * factor
        return max(self.least, low), min(self.most, high)

    def __str__(self) -> str:
        return f"{self.kind} from {self.least:g} to {self.most:g}"


@lru_cache(maxsize=8)
def read_scales(folder: Path) -> dict[tuple[str, str], Scale]:
    """Map claim and quantity to the scale, for those that are no plain ratio; ``folder`` is ``paper_results``.

    ValueError names file and line of a scale that is not known.
    """
    path, found = paper_file(folder, FILE), {}
    with path.open(newline="", encoding="utf-8") as stream:
        for number, line in enumerate(csv.DictReader(stream), start=2):
            if line["scale"] not in (LINEAR, *ZEROS):
                known = ", ".join((LINEAR, *ZEROS))
                raise ValueError(f"{path}, line {number}: scale is {line['scale']!r}; it must be one of {known}")
            ends = float(line["least"] or "-inf"), float(line["most"] or "inf")
            found[line["claim"], line["quantity"]] = Scale(line["scale"], *ends)
    return found
