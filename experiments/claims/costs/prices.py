"""Claims on predicted times: the same function as on measured rows, with a cost in place of every time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.claims.costs.formula import COSTS, FORMULAS, Terms
from experiments.claims.costs.machine import Machine
from experiments.claims.finding import CLAIMS
from experiments.claims.rows import NotMeasured, NotTestable, Rows
from experiments.facts.models import SECONDS
from punica.measure.roofline import sgmv_flop

GIVEN = ("steps", "total_tokens", "bytes", "bandwidth")
"""Metrics that a claim reads beside times, and that no cost predicts: counts, and the link's own speed."""
PRICED = {figure for figure, *_ in FORMULAS}
Quantities = Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """A row with its measured value; the predicted one and its terms in seconds, none of a count."""

    row: Any
    value: float
    terms: Terms


@dataclass(frozen=True)
class Prediction:
    """A claim's predicted quantities, the rows that its systems were measured in, and their points in order."""

    id: str
    quantities: Quantities
    measured: Rows
    points: tuple[Point, ...]


def predicted(id: str, rows: Rows, machine: Machine) -> Prediction:
    """Predict claim ``id`` on ``rows`` with every time priced for ``machine``.

    NotTestable where it needs what the machine has not.
    """
    unknown: list[NotMeasured] = []
    refused: list[NotTestable] = []
    points: list[Point] = []

    def price(row: Any) -> float | None:
        try:
            point = _priced(row, machine)
        except NotTestable as reason:
            refused.append(reason)
            return None
        except NotMeasured as reason:  # any number: what is not testable shows without the calibration
            unknown.append(reason)
            return 1.0
        if point is None:
            return None
        points.append(point)
        return point.value

    rows.asked.clear()
    try:
        CLAIMS[id](rows)  # asks for its figures
        priced = rows.priced(PRICED & rows.asked, COSTS[id], price)
        quantities = CLAIMS[id](priced).quantities
    except NotMeasured as missing:
        raise (refused or unknown or [missing])[0] from None
    if unknown:
        raise unknown[0]
    measured = priced.valued(np.array([point.row.value for point in points], dtype=float))
    return Prediction(id, quantities, measured, tuple(points))


def _priced(row: Any, machine: Machine) -> Point | None:
    """Price a row; None where no formula does."""
    if row.metric in GIVEN:
        return Point(row, float(row.value), {})
    if (function := FORMULAS.get((row.figure, row.system, row.metric))) is None:
        return None
    terms = function(machine, row)
    return Point(row, in_unit(row, sum(terms.values())), terms)


def in_unit(row: Any, seconds: float) -> float:
    """Return ``seconds`` of ``row`` in its unit."""
    if row.unit == "FLOP/s":
        return sgmv_flop(int(row.batch_size), int(row.rank), 4096) / seconds
    return 1 / seconds if row.unit == "token/s" else seconds / SECONDS[row.unit]
