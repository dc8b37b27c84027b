"""Findings: a ratio of rows, point by point, or a number of rows, over all points that both sides were measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from experiments.claims.rows import NotMeasured, Rows
from experiments.claims.table import DISTURBED, ONCE

_POINT = ["panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric"]
Where = Mapping[str, object]
"""Column -> its value; of a text a pattern as in file names (``Distinct*``)."""


@dataclass(frozen=True)
class Sought:
    """A number to look for in the rows of ``figure``: ``above`` over ``below``, and ``above`` itself without that.

    ``where`` holds for both sides, which are compared at points that are equal in all other columns.
    """

    what: str
    figure: str
    above: Where
    below: Where | None = None
    where: Where = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A number found: the middle of ``points`` (geometric mean of a ratio, else median), its ends, and its unit.

    ``marks`` has a dagger for disturbed points and a double dagger for points with a single undisturbed run.
    """

    what: str
    middle: float
    least: float
    most: float
    points: int
    unit: str = ""
    marks: str = ""


def find(sought: Sequence[Sought], rows: Rows) -> list[Found]:
    """Return what ``rows`` have of ``sought``, in its order."""
    return [found for one in sought if (found := _found(one, rows))]


def found_in(what: str, values: np.ndarray, unit: str = "", marks: str = "") -> Found:
    """Sum up ``values``."""
    middle = float(np.median(values)) if unit else float(np.exp(np.mean(np.log(values))))
    return Found(what, middle, float(values.min()), float(values.max()), len(values), unit, marks)


def _found(sought: Sought, rows: Rows) -> Found | None:
    try:
        frame = matching(rows.figure(sought.figure), sought.where)
    except NotMeasured:
        return None
    above = matching(frame, sought.above)
    if sought.below is None:
        sides, values, unit = above, above["value"].to_numpy(dtype=float), "".join(above["unit"].iloc[:1])
    else:
        keys = [name for name in _POINT if name not in {*sought.above, *sought.below}]
        sides = above.merge(matching(frame, sought.below), on=keys, suffixes=("", "_below"))
        values, unit = (sides["value"] / sides["value_below"]).to_numpy(dtype=float), ""
    return found_in(sought.what, values, unit, _marks(sides)) if len(values) else None


def matching(frame: pd.DataFrame, where: Where) -> pd.DataFrame:
    """Return the rows of ``frame`` whose columns match ``where``."""
    for name, wanted in where.items():
        column = frame[name].to_numpy()
        if isinstance(wanted, str):
            same = np.isin(column, [one for one in set(column) if fnmatchcase(one, wanted)])
        else:
            same = column == wanted
        frame = frame[same]
    return frame


def _marks(sides: pd.DataFrame) -> str:
    """Return the marks of the points of ``sides``."""
    flags = {mark: [name for name in (column, f"{column}_below") if name in sides] for mark, column in _FLAGS.items()}
    return "".join(mark for mark, names in flags.items() if sides[names].eq(True).to_numpy().any())


_FLAGS = {DISTURBED: "disturbed", ONCE: "once"}
