"""Ends of a quantity: the measured points that decide it, with what each was predicted to consist of.

They are found by changing points a little, so that a sentence names no cause that the rows do not show.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.claims.costs.formula import Terms
from experiments.claims.costs.prices import Point, Prediction, Quantities
from experiments.claims.finding import CLAIMS
from experiments.claims.rows import NoVerdict
from experiments.facts.models import SECONDS
from experiments.facts.systems import name_of

STEP = 1e-3
"""Relative change of a point, to see whether a quantity depends on it."""
MOST = 4
"""Points of one quantity that a sentence names."""
SMALL = 0.02
"""Share of a prediction below which terms are told as one."""
_TOLD = {"batch_size": "batch {:g}", "workload": "{}", "system": "{}", "rank": "rank {:g}", "seq_len": "len {:g}",
         "metric": "{}", "model": "{}"}  # fmt: skip
"""Columns that tell points apart, those to use first -> words."""
_SHARED = ("system", "workload", "seq_len", "batch_size")
"""Columns that are told once where all points agree."""


def ends_of(prediction: Prediction) -> dict[str, list[Point]]:
    """Return the points that each quantity of the measured rows depends on, those that it depends on most first."""
    values = np.array([point.row.value for point in prediction.points], dtype=float)
    spread = 1 + STEP * (0.5 + np.arange(1, len(values) + 1) * 0.618 % 1)  # all different: no two cancel in a ratio

    def asked(places: Sequence[int]) -> Quantities:
        changed = values.copy()
        changed[places] *= spread[places]
        try:
            return CLAIMS[prediction.id](prediction.measured.valued(changed)).quantities
        except NoVerdict:
            return {}

    usual = asked([])
    changed = _alone(list(range(len(values))), usual, asked)
    ends: dict[str, list[Point]] = {}
    for name, value in usual.items():
        weight = {place: abs(found.get(name, value) - value) / (spread[place] - 1) for place, found in changed.items()}
        least = 1e-6 * max(weight.values(), default=0.0)
        ordered = sorted(weight, key=lambda place: -weight[place])
        points = [prediction.points[place] for place in ordered if weight[place] > least]
        ends[name] = [point for point in points if point.terms]
    return ends


def _alone(
    places: list[int], usual: Quantities, asked: Callable[[list[int]], Quantities]
) -> dict[int, Quantities]:  # fmt: skip
    """Return those of ``places`` that change a quantity, each with the quantities that it alone gives, by halves."""
    found = asked(places) if places else usual
    if all(math.isclose(found.get(name, value), value, rel_tol=1e-9, abs_tol=1e-12) for name, value in usual.items()):
        return {}
    if len(places) == 1:
        return {places[0]: found}
    half = len(places) // 2
    return _alone(places[:half], usual, asked) | _alone(places[half:], usual, asked)


def told(ends: Sequence[Point], measured: str) -> str:
    """Tell what was ``measured`` and predicted of each end, with the prediction's terms."""
    shared = [cell for name in _SHARED if len(cells := {_cell(end.row, name) for end in ends}) == 1 for cell in cells]
    parts = [
        f"{label} {number(end.row.value)} {end.row.unit}{measured}, {number(end.value)} predicted = {_consists(end)}"
        for label, end in zip(_labels(ends), ends[:MOST], strict=False)
    ]
    more = [f"{len(ends) - MOST} points more"] if len(ends) > MOST else []
    return f"({', '.join(filter(None, shared))}) " + "; ".join([*parts, *more])


def misses(ends: Sequence[Point]) -> str:
    """Tell how far each end's prediction is off."""
    named = zip(_labels(ends), ends[:MOST], strict=False)
    return ", ".join(f"{label} {off(end.value, end.row.value)}".strip() for label, end in named)


def off(predicted: float, measured: float) -> str:
    """Tell how far a prediction is from what was measured."""
    if predicted * measured <= 0:
        return f"{predicted:.3g} for {measured:.3g}"
    ratio = predicted / measured
    if not 0.5 <= ratio <= 2:
        return f"{ratio:.2g}-fold"
    percent = round(100 * (ratio - 1))
    return f"{percent:+d} %" if percent else "0 %"


def number(value: float) -> str:
    """Write a number with three digits, thousands in full."""
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def _labels(ends: Sequence[Point]) -> list[str]:
    """Tell ends apart, by as few columns as it takes."""
    labels: list[tuple[str, ...]] = [()] * len(ends)
    for name in _TOLD:
        longer = [(*label, _cell(end.row, name)) for label, end in zip(labels, ends, strict=True)]
        if len(set(longer)) > len(set(labels)):
            labels = longer
    return [" ".join(filter(None, cells)) for cells in labels]


def _cell(row: Any, name: str) -> str:
    value = getattr(row, name)
    if value in ("", "none") or value != value:
        return ""
    if name == "system":
        return name_of(value)
    return _TOLD[name].format(value.replace("_", " ") if name == "metric" else value)


def _consists(end: Point) -> str:
    """Write a prediction as the sum of its terms, in the row's unit of time; of a rate as the time that it inverts."""
    timed = end.row.unit in SECONDS
    unit = end.row.unit if timed else ("us" if end.row.unit == "FLOP/s" else "ms")
    said = _sum(end.terms, SECONDS[unit])
    return said if timed else f"1 / ({said} {unit})"


def _sum(terms: Terms, unit: float) -> str:
    total = sum(terms.values())
    large = {name: seconds for name, seconds in terms.items() if seconds >= SMALL * total}
    said = [f"{name} {number(seconds / unit)}" for name, seconds in sorted(large.items(), key=lambda one: -one[1])]
    rest = total - sum(large.values())
    return " + ".join([*said, f"rest {number(rest / unit)}"] if rest > 1e-9 * total else said)
