"""Rows as claims read them, and curves out of them.

A claim sees one number per point: of central statistics (median, single value, count), without rows of ``scale=smoke``,
that which `experiments.harness.counted` chooses by the claim's clock (``paper_results/claim_clocks.csv``).
`Rows.repeats` yields undisturbed repeats alone, `Rows.resamples` other choices of the repeats that count.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import pandas as pd

from experiments.facts.models import MODELS, STAND_INS
from experiments.harness.counted import POINT, counted, merged

CENTRAL = ("median", "value", "count")
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are all different and fill [0, 1] evenly
_READ = {
    *POINT, "value", "unit", "repeat", "statistic", "timer", "scale", "hardware", "disturbed", "kind", "cost_model",
    "date", "older", "calib_launch_us",
}  # fmt: skip
"""Columns that decide which rows count, and those that claims read."""
_CELL = [name for name in POINT if name not in ("system", "metric")]
"""Columns that points share which are timed side by side, and so slowed alike."""


class NotMeasured(Exception):
    """Rows are missing that a claim needs; the message names them."""


class Rows:
    """Rows to judge: a frame with the columns of `punica.measure.records`, one number per point.

    ``clock``: the timer to prefer; empty for the order of `TIMERS`.
    """

    def __init__(self, frame: pd.DataFrame, clock: str = "") -> None:
        frame = frame[[name for name in frame if name in _READ]]
        smoke, samples = frame["scale"] == "smoke", (frame["statistic"] == "count") & (frame["unit"] == "samples")
        # "count" rows of a sampled metric say how often it was measured; the median beside them is the number
        measured = counted(frame[frame["statistic"].isin(CENTRAL) & ~smoke & ~samples], clock)
        measured = measured.sort_values("date", kind="stable")  # by place, `stirred` chooses factors
        chosen, one = measured[measured["counts"]], merged(measured)
        self._smoke = set(frame.loc[smoke, "figure"])
        self._older = list(dict.fromkeys(chosen.loc[chosen["older"], "figure"])) if "older" in chosen else []
        self._parts = chosen[chosen["repeat"].notna() & ~chosen["disturbed"]]
        self._measured = measured[measured["repeat"].notna()]
        self._fill(one.assign(once=one["repeats"] < 2)[[*frame, "point", "once"]])

    def _fill(self, frame: pd.DataFrame) -> None:
        """Keep ``frame``: values apart from the other columns, which rows with other values share."""
        texts = [name for name, kind in frame.dtypes.items() if isinstance(kind, pd.StringDtype)]
        frame = frame.astype(dict.fromkeys(texts, object))  # pandas selects objects in one block, texts one by one
        self._values = frame["value"].to_numpy(dtype=float)
        self._frame = frame.drop(columns="value").copy()  # the copy has columns of a kind in one block, quick to select
        indices = sorted(frame.groupby("figure").indices.items())
        self._places = {str(name): np.asarray(places) for name, places in indices}
        self._figures = {name: self._frame.take(places) for name, places in self._places.items()}
        self.asked: set[str] = set()
        """Figures asked for so far."""

    def valued(self, values: np.ndarray) -> "Rows":
        """Return the same rows with other values."""
        rows = copy(self)
        rows._values, rows.asked = values, set()
        return rows

    def figure(self, *names: str) -> pd.DataFrame:
        """Return all rows of the figures whose name is, or begins with, one of ``names``; NotMeasured without any."""
        found = [figure for figure in self._figures if _one_of(figure, names)]
        if not found:
            smoke = any(_one_of(figure, names) for figure in self._smoke)
            hint = " (only at scale=smoke, whose numbers mean nothing)" if smoke else ""
            raise NotMeasured(f"no rows of figure {' or '.join(names)} yet{hint}")
        self.asked |= set(found)
        mine = [self._figures[figure].assign(value=self._values[self._places[figure]]) for figure in found]
        return mine[0] if len(mine) == 1 else pd.concat(mine)

    def scale(self, figure: str) -> str:
        """Return the scale of the rows of ``figure``; empty without rows."""
        return str(self._figures[figure]["scale"].iloc[0]) if figure in self._figures else ""

    def older(self, names: Sequence[str]) -> list[str]:
        """Return those of the figures ``names`` with rows of other code than today's."""
        return [figure for figure in self._older if _one_of(figure, names)]

    def repeats(self, figures: set[str]) -> Iterator["Rows"]:
        """Yield the rows by undisturbed repeat of ``figures``; a point without that repeat keeps its number."""
        for _, one in self._placed(self._parts[self._parts["figure"].isin(figures)]).groupby("repeat"):
            values = self._values.copy()
            values[one["place"]] = one["value"]
            yield self.valued(values)

    def _placed(self, parts: pd.DataFrame) -> pd.DataFrame:
        """Return repeats with the places of their points in the frame (``place``)."""
        place = pd.Series(np.arange(len(self._frame)), self._frame["point"])
        return parts.assign(place=place.loc[parts["point"]].to_numpy())

    def resamples(self, seeds: int) -> Iterator["Rows"]:
        """Yield the rows under other choices of the repeats that count: without each repeat in turn, then drawn with
        replacement, ``seeds`` times.

        Repeats of points that were timed side by side are drawn alike, so that what slowed both cancels in a ratio.
        A point with a single undisturbed repeat is drawn from all: nothing else tells its spread.
        """
        parts = self._drawable()
        for repeat in sorted(parts["repeat"].unique()):
            left = parts[parts["repeat"] != repeat]
            yield self.valued(self._medians(left["place"].to_numpy(), left["value"].to_numpy()))
        cells = parts.groupby(_CELL, dropna=False).ngroup().to_numpy()
        places, values = parts["place"].to_numpy(), parts["value"].to_numpy(dtype=float)
        grouped = parts.groupby("place")["value"]
        slots, times = grouped.cumcount().to_numpy(), grouped.transform("size").to_numpy()
        for seed in range(seeds if len(parts) else 0):
            luck = np.random.default_rng(seed).random((cells.max() + 1, times.max()))[cells, slots]
            drawn = np.arange(len(parts)) - slots + (luck * times).astype(int)
            yield self.valued(self._medians(places, values[drawn]))

    def _drawable(self) -> pd.DataFrame:
        """Return the repeats that a resample may draw, by point (``place`` in the frame) and in order."""
        quiet = self._measured[~self._measured["disturbed"]]
        often = quiet[quiet.duplicated("point", keep=False)]
        alone = self._measured[~self._measured["point"].isin(often["point"])]
        return self._placed(pd.concat([often, alone])).sort_values(["place", "repeat"], ignore_index=True)

    def _medians(self, places: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the numbers of all points, those at ``places`` from ``values``."""
        found = self._values.copy()
        medians = pd.Series(values).groupby(places).median()
        found[medians.index.to_numpy()] = medians.to_numpy()
        return found

    def stirred(self, figures: set[str], by: float, **where: Any) -> "Rows | None":
        """Return the rows, those of ``figures`` whose columns equal ``where`` times different factors within ``1 - by``
        and ``1 + by``, so that ratios change too; None without such a row.
        """
        places = np.flatnonzero(self._frame["figure"].isin(figures))
        chosen = np.logical_and.reduce([self._frame[name].to_numpy()[places] == value for name, value in where.items()])
        if not chosen.any():
            return None
        spread = 2 * (np.arange(1, len(places) + 1) * _GOLDEN % 1) - 1
        values = self._values.copy()
        values[places[chosen]] *= 1 + by * spread[chosen]
        return self.valued(values)

    def timers(self, figure: str) -> list[str]:
        """Return the clocks that timed the chosen rows of ``figure``."""
        return sorted(set(self._figures[figure]["timer"]) - {""}) if figure in self._figures else []


def _one_of(figure: str, names: Sequence[str]) -> bool:
    return any(figure == name or (not name.isdigit() and figure.startswith(name)) for name in names)


def model_for(frame: pd.DataFrame, role: str) -> str:
    """Return the model in ``frame`` that plays ``role`` ("7B", "13B", "70B"); NotMeasured without one."""
    players = _players(role)
    present = set(frame["model"].to_numpy())
    for name in players:
        if name in present:
            return name
    raise NotMeasured(f"no rows of the {role} model ({', '.join(players)})")


def models_in(frame: pd.DataFrame, roles: Sequence[str]) -> dict[str, str]:
    """Map the ``roles`` that ``frame`` covers to their models; NotMeasured when it covers none."""
    present = set(frame["model"])
    found = {role: model_for(frame, role) for role in roles if present & set(_players(role))}
    if not found:
        raise NotMeasured(f"no rows of a {' or '.join(roles)} model")
    return found


def _players(role: str) -> list[str]:
    """Return models that play the paper's ``role``, first choice first."""
    return [*MODELS[role], *(name for name, played in STAND_INS.items() if played == role)]


def pick(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Return rows whose columns equal ``where``; NotMeasured without any."""
    return frame.take(_places(frame, where))


def _places(frame: pd.DataFrame, where: dict[str, Any]) -> np.ndarray:
    """Return the positions of rows whose columns equal ``where``; NotMeasured without any."""
    places = np.arange(len(frame))
    for name, value in where.items():
        places = places[frame[name].to_numpy()[places] == value]
    if not len(places):
        raise NotMeasured("no rows with " + ", ".join(f"{name}={value}" for name, value in where.items()))
    return places


def curve(frame: pd.DataFrame, metric: str, over: str = "batch_size", **where: Any) -> pd.Series:
    """Return ``metric`` where columns equal ``where``, indexed by ``over`` ascending; NotMeasured when empty."""
    places = _places(frame, {"metric": metric, **where})  # copies of all columns would take most of a report's time
    keys = frame[over].to_numpy()[places]
    known = ~pd.isna(keys)
    order = np.argsort(keys[known], kind="stable")
    keys, values = keys[known][order], frame["value"].to_numpy()[places[known][order]]
    if (keys[1:] == keys[:-1]).any():
        panels = ", ".join(sorted(set(frame["panel"].to_numpy()[places]))) or "one panel"
        raise NotMeasured(f"{metric} has several values per {over} ({panels}); the claim is about one curve")
    return pd.Series(values, pd.Index(keys, name=over), name="value")


def at(values: pd.Series, index: float, what: str = "batch size") -> float:
    """Return the value at ``index``; NotMeasured, naming what there is, when it was not measured."""
    if index not in values.index:
        measured = ", ".join(f"{point:g}" for point in values.index)
        raise NotMeasured(f"{what} {index:g} was not measured (measured: {measured})")
    return float(values.loc[index])


def ratio(values: pd.Series, upper: float, lower: float) -> float:
    """Divide the value at ``upper`` by the value at ``lower``."""
    return at(values, upper) / at(values, lower)


def correlation(x: Any, y: Any) -> float:
    """Return Pearson's correlation; NaN where one of the two is constant, as some predictions are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.corrcoef(x, y)[0, 1])


def smallest_step(values: Sequence[float]) -> float:
    """Return the smallest ratio of a value to the one before it: at least 1 when the sequence never falls."""
    if len(values) < 2:
        raise NotMeasured("an order needs at least two values")
    return min(after / before for before, after in itertools.pairwise(values))


NO_BOUND = "-"
MET = {None: NO_BOUND, True: "yes", False: "**no**"}
"""Cells of a table by whether a bound is met; None: there is no bound, or no number."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Build the lines of a table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "| --- " * len(head) + "|", *map(line, rows)]


def numbers(values: Sequence[float] | pd.Series, digits: int = 3) -> str:
    """Format comma-separated values with ``digits`` significant digits."""
    return ", ".join(f"{value:.{digits}g}" for value in values)
