"""Ranges of measurements: how far the ratio of a new run to the recorded one may be from 1.

A line is one metric of one system and model in one figure. Its ratio is the median over all points that both runs have,
so one slow point does not decide it. The farthest repeat is taken over all lines of the same figure, metric and clock:
most points have few repeats, and some a single one.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from experiments.harness.counted import counted
from punica.measure.records import DIFFERENCES

FLOOR, CPU_FLOOR = 0.10, 0.50
"""Least width of a range, as a part of the recorded value: two sessions differ by more than repeats of one. A CPU may
share its host: of two runs on one machine, 45 minutes apart, 280 of 420 lines were within a tenth, 402 within half."""
TIMES = 2.0
"""Width of a range over the distance of its farthest repeat."""
LINE = ["figure", "system", "model", "metric", "unit", "timer"]
POOL = ["figure", "metric", "timer"]
COLUMNS = [*LINE, "points", "repeats", "low", "high"]
SINGLE = ("median", "value")
_REASONS: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "of scale=smoke, whose shapes are others": lambda rows: rows["scale"].eq("smoke"),
    "simulated or from a datasheet": lambda rows: rows["kind"].ne("measured"),
    "differences of two times, which may be close to zero": lambda rows: rows["metric"].isin(DIFFERENCES),
    "of zero or less, which have no ratio": lambda rows: ~rows["value"].gt(0),
}
"""Why a row has no range, and which rows that holds for."""


def floor_of(hardware: str) -> float:
    """Return the least width of ranges of measurements on ``hardware``, e.g. ``cpu``."""
    return CPU_FLOOR if hardware == "cpu" else FLOOR


def left_out(rows: pd.DataFrame) -> dict[str, int]:
    """Count the rows without a range by reason. Spreads and counts, which belong to a median, are not listed."""
    rows, found = rows[rows["statistic"].isin(SINGLE)], {}
    for reason, is_so in _REASONS.items():
        holds = is_so(rows)
        found[reason] = int(holds.sum())
        rows = rows[~holds]
    return {reason: count for reason, count in found.items() if count}


def comparable(rows: pd.DataFrame) -> pd.DataFrame:
    """Choose among the rows that have a range, as `counted` does for points that are compared one by one."""
    rows = rows[rows["statistic"].isin(SINGLE)]
    for is_so in _REASONS.values():
        rows = rows[~is_so(rows)]
    return counted(rows, clock=None)


def ranges(rows: pd.DataFrame) -> pd.DataFrame:
    """Build the ranges of ``rows``, those of one machine: a line per `LINE` with the columns `COLUMNS`.

    ``low``, ``high``: ends of the ratio. ``repeats``: the most that a point has; 0 where rows do not say.
    """
    rows = comparable(rows)
    if rows.empty:
        return pd.DataFrame(columns=COLUMNS)
    rows = rows[rows["counts"]]
    of_point = rows.groupby("point")
    rows = rows.assign(centre=of_point["value"].transform("median"), repeats=of_point["repeat"].transform("nunique"))
    lines = rows.groupby(LINE).agg(points=("point", "nunique"), repeats=("repeats", "max")).reset_index()
    lines = lines.merge(_farthest(rows[rows["repeats"] > 1]), on=POOL, how="left")
    floor = np.log1p(floor_of(rows["hardware"].iloc[0]))
    width = np.maximum(floor, TIMES * lines["farthest"].fillna(0.0))
    return lines.assign(low=np.exp(-width), high=np.exp(width))[COLUMNS]


def _farthest(parts: pd.DataFrame) -> pd.DataFrame:
    """Return the largest distance (log of the ratio) of a repeat from the median of all, per `POOL`."""
    ratio = (parts["value"] / parts["centre"]).transform(np.log)
    of_repeat = ratio.groupby([parts[name] for name in (*LINE, "repeat")]).median().abs().rename("farthest")
    return of_repeat.groupby(level=POOL).max().reset_index()
