"""The rows that claims are computed from: which of many rows count, and how to pick a curve out of them.

A folder of rows can hold several scales, timers and statistics of one point. A claim sees one number per point:

* central statistics only (median, single value, count), and never rows of ``scale=smoke``;
* per figure the largest scale present (paper before gpu before laptop);
* per figure and metric one timer, as in the figures: the first of `punica.measure.records.TIMERS` that is there;
* of a point with repeats that are spread in time, the median of those that nothing disturbed (of all where none was
  quiet). `Rows.repeats` gives the same repeats one by one, so an interval comes from those that its value does.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from punica.measure.records import TIMERS

CENTRAL = ("median", "value", "count")
SCALES = ("paper", "gpu", "laptop")
MODELS = {"7B": ("llama2-7b", "7B"), "13B": ("llama2-13b", "13B"), "70B": ("llama2-70b", "70B")}
"""The paper's model -> ours of that size, and its name in the paper's own rows."""
STAND_INS = {"llama-small": "7B"}
"""Smaller model -> the paper's model whose part it plays where no model of that size was measured: on a CPU."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Unit of time -> seconds."""

_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are all different and fill [0, 1] evenly
_POINT = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric", "t_s", "gpu"]


class NoVerdict(Exception):
    """A claim cannot be judged from these rows; the message says why."""


class NotMeasured(NoVerdict):
    """The rows do not hold what a claim needs, but this hardware could give it; the message says what is missing."""


class NotTestable(NoVerdict):
    """This hardware cannot give what a claim needs; the message is the reason."""


class Rows:
    """Rows to judge, as a pandas frame with the columns of `punica.measure.records`."""

    def __init__(self, frame: pd.DataFrame) -> None:
        smoke = set(frame.loc[frame["scale"] == "smoke", "figure"])
        older = frame.get("older")
        chosen = _that_count(_one_row_per_repeat(frame))
        self._parts = chosen[chosen["repeat"].notna()]
        self._fill(_one_number_per_point(chosen), smoke)
        self._older = [] if older is None else list(dict.fromkeys(chosen.loc[chosen["older"], "figure"]))

    def _fill(self, frame: pd.DataFrame, smoke: set[str]) -> None:
        self._frame, self._smoke = frame, smoke
        self._figures = {str(name): part for name, part in frame.groupby("figure")}
        self.asked: set[str] = set()
        """Figures that were asked for so far."""

    def figure(self, *names: str) -> pd.DataFrame:
        """All rows of the figures whose name is, or begins with, one of ``names``; NotMeasured when there are none."""
        found = [figure for figure in self._figures if _one_of(figure, names)]
        if not found:
            smoke = any(_one_of(figure, names) for figure in self._smoke)
            hint = " (only at scale=smoke, whose numbers mean nothing)" if smoke else ""
            raise NotMeasured(f"no rows of figure {' or '.join(names)} yet{hint}")
        self.asked |= set(found)
        mine = [self._figures[figure] for figure in found]
        return mine[0] if len(mine) == 1 else pd.concat(mine)

    def older(self, names: Sequence[str]) -> list[str]:
        """Which of the figures ``names`` have rows here that were measured by other code than is here now."""
        return [figure for figure in self._older if _one_of(figure, names)]

    @property
    def models(self) -> set[str]:
        """Every model that has rows."""
        return set(self._frame["model"]) - {""}

    def repeats(self, figures: set[str]) -> Iterator["Rows"]:
        """The rows of ``figures`` as each repeat that counts had them; a point without that repeat keeps its number."""
        parts = self._parts[self._parts["figure"].isin(figures)]
        frame = self._frame[self._frame["figure"].isin(figures)]
        for _, one in parts.groupby("repeat"):
            values = frame[_POINT].merge(one[[*_POINT, "value"]], on=_POINT, how="left")["value"].to_numpy()
            yield self._with(frame, np.where(np.isnan(values), frame["value"].to_numpy(dtype=float), values))

    def stirred(self, figures: set[str], by: float, **where: Any) -> "Rows | None":
        """The rows of ``figures``, each one whose columns equal ``where`` times a factor of its own between ``1 - by``
        and ``1 + by``, so that ratios of them change too; None when there is no such row.
        """
        frame = self._frame[self._frame["figure"].isin(figures)]
        chosen = np.logical_and.reduce([frame[name].to_numpy() == value for name, value in where.items()])
        spread = 2 * (np.arange(1, len(frame) + 1) * _GOLDEN % 1) - 1
        values = frame["value"].to_numpy(dtype=float)
        return self._with(frame, np.where(chosen, (1 + by * spread) * values, values)) if chosen.any() else None

    def _with(self, frame: pd.DataFrame, values: np.ndarray) -> "Rows":
        rows = object.__new__(Rows)
        rows._fill(frame.assign(value=values), self._smoke)
        return rows


def _one_of(figure: str, names: Sequence[str]) -> bool:
    return any(figure == name or (not name.isdigit() and figure.startswith(name)) for name in names)


def _one_row_per_repeat(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame[frame["statistic"].isin(CENTRAL) & (frame["scale"] != "smoke")]
    text = ["figure", "panel", "system", "workload", "model", "metric", "timer", "scale"]
    frame = frame.assign(**{name: frame[name].fillna("").astype(str) for name in text})
    frame = frame.assign(disturbed=frame["disturbed"].eq(True))
    frame = frame.assign(**{name: pd.to_numeric(frame[name]) for name in ("repeat", "value", "t_s", "gpu")})
    # "count" rows of a sampled metric say how often it was measured; the median beside them is the number
    frame = frame[~((frame["statistic"] == "count") & (frame["unit"] == "samples"))]
    frame = _preferred(frame, "scale", SCALES, ["figure"])
    frame = _preferred(frame, "timer", TIMERS, ["figure", "metric"])
    return frame.sort_values("date", kind="stable").drop_duplicates([*_POINT, "repeat"], keep="last")


def _that_count(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` without the disturbed repeats of points that have quiet ones."""
    parts = frame["repeat"].notna()
    quiet = frame[parts & ~frame["disturbed"]]
    return frame[~(parts & frame["disturbed"] & _among(frame, quiet))]


def _one_number_per_point(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that are an aggregate already, and one with the median for each point that has repeats alone. The column
    ``once`` says which points have fewer than two repeats.
    """
    times = frame.groupby(_POINT, dropna=False)["repeat"].transform("nunique")
    frame = frame.assign(once=times < 2)
    whole, parts = frame[frame["repeat"].isna()], frame[frame["repeat"].notna()]
    if parts.empty:
        return whole
    first = parts.drop_duplicates(_POINT)
    medians = parts.groupby(_POINT, dropna=False, sort=False)["value"].median()
    first = first.assign(value=medians.to_numpy())  # groups come in the order of their first rows
    return pd.concat([part for part in (whole, first[~_among(first, whole)]) if not part.empty])


def _among(rows: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """For each of ``rows`` whether its point is among those of ``others``."""
    points = others[_POINT].drop_duplicates().assign(there=True)
    return rows[_POINT].merge(points, on=_POINT, how="left")["there"].notna().to_numpy()


def _preferred(frame: pd.DataFrame, column: str, order: Sequence[str], within: list[str]) -> pd.DataFrame:
    """Per group ``within``, only the rows whose ``column`` has the best value that the group offers."""
    place = frame[column].map(lambda value: order.index(value) if value in order else len(order))
    return frame[place == place.groupby([frame[name] for name in within]).transform("min")]


def model_for(frame: pd.DataFrame, role: str) -> str:
    """The model in ``frame`` that plays the paper's ``role`` ("7B", "13B", "70B"); NotMeasured when none does."""
    players = _players(role)
    for name in players:
        if name in set(frame["model"]):
            return name
    raise NotMeasured(f"no rows of the {role} model ({', '.join(players)})")


def models_in(frame: pd.DataFrame, roles: Sequence[str]) -> dict[str, str]:
    """The ``roles`` that ``frame`` covers -> the model that plays each; NotMeasured when it covers none."""
    present = set(frame["model"])
    found = {role: model_for(frame, role) for role in roles if present & set(_players(role))}
    if not found:
        raise NotMeasured(f"no rows of a {' or '.join(roles)} model")
    return found


def _players(role: str) -> list[str]:
    """Models that play the paper's ``role``, first choice first."""
    return [*MODELS[role], *(name for name, played in STAND_INS.items() if played == role)]


def pick(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Rows whose columns equal ``where``; NotMeasured when there are none."""
    for name, value in where.items():
        frame = frame[frame[name].to_numpy() == value]
    if frame.empty:
        raise NotMeasured("no rows with " + ", ".join(f"{name}={value}" for name, value in where.items()))
    return frame


def curve(frame: pd.DataFrame, metric: str, over: str = "batch_size", **where: Any) -> pd.Series:
    """Values of ``metric`` where the columns equal ``where``, indexed by ``over`` ascending; NotMeasured when empty."""
    chosen = pick(frame, metric=metric, **where).dropna(subset=[over])
    values = chosen.set_index(over)["value"].sort_index()
    if values.index.has_duplicates:
        panels = ", ".join(sorted(set(chosen["panel"]))) or "one panel"
        raise NotMeasured(f"{metric} has several values per {over} ({panels}); the claim is about one curve")
    return values


def at(values: pd.Series, index: float, what: str = "batch size") -> float:
    """The value at ``index``; NotMeasured, naming what there is, when it was not measured."""
    if index not in values.index:
        measured = ", ".join(f"{point:g}" for point in values.index)
        raise NotMeasured(f"{what} {index:g} was not measured (measured: {measured})")
    return float(values.loc[index])


def ratio(values: pd.Series, upper: float, lower: float) -> float:
    """Value at ``upper`` over value at ``lower``."""
    return at(values, upper) / at(values, lower)


def smallest_step(values: Sequence[float]) -> float:
    """Smallest ratio of a value to the one before it: at least 1 when the sequence never falls."""
    if len(values) < 2:
        raise NotMeasured("an order needs at least two values")
    return min(after / before for before, after in itertools.pairwise(values))


def numbers(values: Sequence[float] | pd.Series, digits: int = 3) -> str:
    """Comma-separated values with ``digits`` significant digits, for a claim's text."""
    return ", ".join(f"{value:.{digits}g}" for value in values)
