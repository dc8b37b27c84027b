"""The rows that claims are computed from: which of many rows count, and how to pick a curve out of them.

A folder of rows can hold several scales, timers and statistics of one point. A claim sees one number per point:

* central statistics only (median, single value, count), and never rows of ``scale=smoke``;
* per figure the largest scale present (paper before laptop);
* per figure and metric one timer, as in the figures: the first of `punica.measure.records.TIMERS` that is there.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from punica.measure.records import TIMERS

CENTRAL = ("median", "value", "count")
SCALES = ("paper", "laptop")
MODELS = {"7B": ("llama2-7b", "7B"), "13B": ("llama2-13b", "13B"), "70B": ("llama2-70b", "70B")}
"""The paper's model -> ours of that size, and its name in the paper's own rows."""
STAND_INS = {"llama-small": "7B"}
"""Smaller model -> the paper's model whose part it plays where no model of that size was measured: on a CPU."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Unit of time -> seconds."""

_POINT = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric"]


class NotTestable(Exception):
    """The rows do not hold what a claim needs; the message says what is missing."""


class Rows:
    """Rows to judge, as a pandas frame with the columns of `punica.measure.records`."""

    def __init__(self, frame: pd.DataFrame) -> None:
        chosen = _one_number_per_point(frame)
        self._figures = {str(name): part for name, part in chosen.groupby("figure")}
        self._smoke = set(frame.loc[frame["scale"] == "smoke", "figure"])
        self._older = list(dict.fromkeys(chosen.loc[chosen["older"], "figure"])) if "older" in chosen else []

    def figure(self, *names: str) -> pd.DataFrame:
        """All rows of the figures whose name is, or begins with, one of ``names``; NotTestable when there are none."""
        mine = [part for figure, part in self._figures.items() if _one_of(figure, names)]
        if not mine:
            smoke = any(_one_of(figure, names) for figure in self._smoke)
            hint = " (only at scale=smoke, whose numbers mean nothing)" if smoke else ""
            raise NotTestable(f"no rows of figure {' or '.join(names)} yet{hint}")
        return mine[0] if len(mine) == 1 else pd.concat(mine)

    def older(self, names: Sequence[str]) -> list[str]:
        """Which of the figures ``names`` have rows here that were measured by other code than is here now."""
        return [figure for figure in self._older if _one_of(figure, names)]


def _one_of(figure: str, names: Sequence[str]) -> bool:
    return any(figure == name or (not name.isdigit() and figure.startswith(name)) for name in names)


def _one_number_per_point(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame[frame["statistic"].isin(CENTRAL) & (frame["scale"] != "smoke")]
    text = ["figure", "panel", "system", "workload", "model", "metric", "timer", "scale"]
    frame = frame.assign(**{name: frame[name].fillna("").astype(str) for name in text})
    # "count" rows of a sampled metric say how often it was measured; the median beside them is the number
    frame = frame[~((frame["statistic"] == "count") & (frame["unit"] == "samples"))]
    frame = _preferred(frame, "scale", SCALES, ["figure"])
    frame = _preferred(frame, "timer", TIMERS, ["figure", "metric"])
    return frame.sort_values("date", kind="stable").drop_duplicates(_POINT, keep="last")


def _preferred(frame: pd.DataFrame, column: str, order: Sequence[str], within: list[str]) -> pd.DataFrame:
    """Per group ``within``, only the rows whose ``column`` has the best value that the group offers."""
    place = frame[column].map(lambda value: order.index(value) if value in order else len(order))
    return frame[place == place.groupby([frame[name] for name in within]).transform("min")]


def model_for(frame: pd.DataFrame, role: str) -> str:
    """The model in ``frame`` that plays the paper's ``role`` ("7B", "13B", "70B"); NotTestable when none does."""
    players = _players(role)
    for name in players:
        if name in set(frame["model"]):
            return name
    raise NotTestable(f"no rows of the {role} model ({', '.join(players)})")


def models_in(frame: pd.DataFrame, roles: Sequence[str]) -> dict[str, str]:
    """The ``roles`` that ``frame`` covers -> the model that plays each; NotTestable when it covers none."""
    present = set(frame["model"])
    found = {role: model_for(frame, role) for role in roles if present & set(_players(role))}
    if not found:
        raise NotTestable(f"no rows of a {' or '.join(roles)} model")
    return found


def _players(role: str) -> list[str]:
    """Models that play the paper's ``role``, first choice first."""
    return [*MODELS[role], *(name for name, played in STAND_INS.items() if played == role)]


def pick(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Rows whose columns equal ``where``; NotTestable when there are none."""
    for name, value in where.items():
        frame = frame[frame[name].to_numpy() == value]
    if frame.empty:
        raise NotTestable("no rows with " + ", ".join(f"{name}={value}" for name, value in where.items()))
    return frame


def curve(frame: pd.DataFrame, metric: str, over: str = "batch_size", **where: Any) -> pd.Series:
    """Values of ``metric`` where the columns equal ``where``, indexed by ``over`` ascending; NotTestable when empty."""
    chosen = pick(frame, metric=metric, **where).dropna(subset=[over])
    values = chosen.set_index(over)["value"].sort_index()
    if values.index.has_duplicates:
        panels = ", ".join(sorted(set(chosen["panel"]))) or "one panel"
        raise NotTestable(f"{metric} has several values per {over} ({panels}); the claim is about one curve")
    return values


def at(values: pd.Series, index: float, what: str = "batch size") -> float:
    """The value at ``index``; NotTestable, naming what there is, when it was not measured."""
    if index not in values.index:
        measured = ", ".join(f"{point:g}" for point in values.index)
        raise NotTestable(f"{what} {index:g} was not measured (measured: {measured})")
    return float(values.loc[index])


def ratio(values: pd.Series, upper: float, lower: float) -> float:
    """Value at ``upper`` over value at ``lower``."""
    return at(values, upper) / at(values, lower)


def smallest_step(values: Sequence[float]) -> float:
    """Smallest ratio of a value to the one before it: at least 1 when the sequence never falls."""
    if len(values) < 2:
        raise NotTestable("an order needs at least two values")
    return min(after / before for before, after in itertools.pairwise(values))


def numbers(values: Sequence[float] | pd.Series, digits: int = 3) -> str:
    """Comma-separated values with ``digits`` significant digits, for a claim's text."""
    return ", ".join(f"{value:.{digits}g}" for value in values)
