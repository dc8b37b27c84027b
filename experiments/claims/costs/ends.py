"""Ends of a quantity: the measured points that decide it, with what each was predicted to consist of.

They are found by changing points a little, so that a sentence names no cause that the rows do not show.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.claims.costs.formula import Terms
from experiments.claims.costs.prices import Point, Prediction
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
_TOLD = {"model": "{}", "system": "{}", "workload": "{}", "seq_len": "len {:g}", "rank": "rank {:g}",
         "batch_size": "batch {:g}", "metric": "{}"}  # fmt: skip
"""Columns that tell points apart -> words."""


def ends_of(prediction: Prediction, quantity: str) -> list[Point]:
    """Return the points that ``quantity`` of the measured rows depends on, those that it depends on most first."""
    values = np.array([point.row.value for point in prediction.points], dtype=float)
    spread = 1 + STEP * (0.5 + np.arange(1, len(values) + 1) * 0.618 % 1)  # all different: no two cancel in a ratio

    def asked(places: Sequence[int]) -> float | None:
        changed = values.copy()
        changed[places] *= spread[places]
        try:
            return CLAIMS[prediction.id](prediction.measured.valued(changed)).quantities.get(quantity)
        except NoVerdict:
            return None

    usual = asked([])
    if usual is None:
        return []
    found = _among(list(range(len(values))), lambda places: _differ(asked(places), usual))
    weight = {place: abs((asked([place]) or usual) - usual) / (spread[place] - 1) for place in found}
    ordered = sorted(found, key=lambda place: -weight[place])
    return [prediction.points[place] for place in ordered if prediction.points[place].terms]


def _differ(value: float | None, usual: float) -> bool:
    return value is not None and not math.isclose(value, usual, rel_tol=1e-9, abs_tol=1e-12)


def _among(places: list[int], changes: Callable[[list[int]], bool]) -> list[int]:
    """Return those of ``places`` that change the quantity, by halves."""
    if not places or not changes(places):
        return []
    if len(places) == 1:
        return places
    half = len(places) // 2
    return _among(places[:half], changes) + _among(places[half:], changes)


def told(ends: Sequence[Point], measured: str) -> str:
    """Tell what was ``measured`` and predicted of each end, with the prediction's terms."""
    parts = [
        f"{label} {end.row.value:.3g} {end.row.unit}{measured}, {end.value:.3g} predicted = {_consists(end)}"
        for label, end in zip(_labels(ends), ends[:MOST], strict=False)
    ]
    more = [f"{len(ends) - MOST} points more"] if len(ends) > MOST else []
    return "; ".join([*parts, *more])


def misses(ends: Sequence[Point]) -> str:
    """Tell how far each end's prediction is off."""
    named = zip(_labels(ends), ends[:MOST], strict=False)
    return ", ".join(f"{label} {off(end.value, end.row.value)}" for label, end in named)


def off(predicted: float, measured: float) -> str:
    """Tell how far a prediction is from what was measured."""
    if predicted * measured <= 0:
        return f"{predicted:.3g} for {measured:.3g}"
    ratio = predicted / measured
    if not 0.5 <= ratio <= 2:
        return f"x{ratio:.2g}"
    return f"{100 * (ratio - 1):+.0f} %"


def _labels(ends: Sequence[Point]) -> list[str]:
    """Tell ends apart, by the columns in which they differ; one alone by all that it has."""
    columns = {name: [_cell(end.row, name) for end in ends] for name in _TOLD}
    varied = [name for name, cells in columns.items() if len(set(cells)) > 1]
    chosen = varied or [name for name in ("system", "workload", "batch_size") if columns[name][0]]
    labels = zip(*(columns[name] for name in chosen), strict=True)
    return [" ".join(filter(None, cells)) for cells in labels]


def _cell(row: Any, name: str) -> str:
    value = getattr(row, name)
    if value == "" or value != value:
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
    said = [f"{name} {seconds / unit:.3g}" for name, seconds in sorted(large.items(), key=lambda one: -one[1])]
    rest = total - sum(large.values())
    return " + ".join([*said, f"rest {rest / unit:.2g}"] if rest > 1e-9 * total else said)
