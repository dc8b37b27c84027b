"""Rows as claims read them, and curves out of them: one number per point, chosen by `harness.counted` with the claim's
clock; the same with one repeat alone, or some points changed, for intervals and marks. And our value of each claim: one
function per claim, which computes from rows and knows no bound.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial, update_wrapper
from typing import Any

import numpy as np
import pandas as pd

from experiments.facts.systems import MODELS, STAND_INS
from experiments.harness.counted import POINT, counted, merged

CENTRAL = ("median", "value", "count")
SHIFT = 0.1
"""Relative change of points, to see whether a quantity depends on them."""
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are all different and fill [0, 1] evenly
_READ = {
    *POINT, "value", "unit", "repeat", "statistic", "timer", "scale", "hardware", "disturbed", "kind", "cost_model",
    "date", "older", "calib_launch_us",
}  # fmt: skip
"""Columns that decide which rows count, and those that claims read."""


class NotMeasured(Exception):
    """Rows are missing that a claim needs; the message names them."""


class Rows:
    """Rows to judge, one number per point; ``clock``: the timer to prefer. The index of `figure` is a point's place."""

    def __init__(self, frame: pd.DataFrame, clock: str = "") -> None:
        frame = frame[[name for name in frame if name in _READ]]
        smoke, samples = frame["scale"] == "smoke", (frame["statistic"] == "count") & (frame["unit"] == "samples")
        # "count" rows of a sampled metric say how often it was measured; the median beside them is the number
        measured = counted(frame[frame["statistic"].isin(CENTRAL) & ~smoke & ~samples], clock)
        measured = measured.sort_values("date", kind="stable")  # by place, `stirred` chooses factors
        chosen, one = measured[measured["counts"]], merged(measured)
        runs = chosen.groupby("point")["date"].nunique()  # a date is that of a run; its repeats are minutes apart
        self._smoke = set(frame.loc[smoke, "figure"])
        self._older = list(dict.fromkeys(chosen.loc[chosen["older"], "figure"])) if "older" in chosen else []
        self._values = one["value"].to_numpy(dtype=float)
        known = chosen[chosen["repeat"].notna()]
        wide = known.pivot(index="point", columns="repeat", values="value").reindex(one["point"])
        quiet = known[~known["disturbed"]].pivot(index="point", columns="repeat", values="value")
        self._quiet = quiet.reindex(index=one["point"], columns=wide.columns).to_numpy(dtype=float)
        self._repeats = self._paired = wide.to_numpy(dtype=float)
        self._frame = one.assign(once=one["point"].map(runs) < 2).drop(columns=["value", "point", "counts"])
        self._figures = {str(name): part for name, part in self._frame.groupby("figure")}

    def figure(self, *names: str) -> pd.DataFrame:
        """Return all rows of the figures whose name is, or begins with, one of ``names``; NotMeasured without any."""
        found = named(self._figures, names)
        if not found:
            hint = " (only at scale=smoke, whose numbers mean nothing)" if named(self._smoke, names) else ""
            raise NotMeasured(f"no rows of figure {' or '.join(names)} yet{hint}")
        frame = self._figures[found[0]] if len(found) == 1 else pd.concat([self._figures[name] for name in found])
        return frame.assign(value=self._values[frame.index])

    def together(self, places: Sequence[int]) -> np.ndarray:
        """Return the numbers at ``places``, a line each, by the repeats that all have, else those that count."""
        for table in (self._paired, self._repeats):
            numbers = table[list(places)]
            numbers = numbers[:, ~np.isnan(numbers).any(axis=0)]
            if numbers.size:
                return numbers
        return self._values[list(places), None]

    def ratio(self, upper: int, lower: int) -> float:
        above, below = self.together([upper, lower])
        return float(np.median(above / below))

    def scale(self, figure: str) -> str:
        return str(self._figures[figure]["scale"].iloc[0]) if figure in self._figures else ""

    def timers(self, names: Sequence[str]) -> list[str]:
        """Return the clocks that timed the chosen rows of the figures ``names``."""
        return sorted({timer for one in named(self._figures, names) for timer in self._figures[one]["timer"]} - {""})

    def older(self, names: Sequence[str]) -> list[str]:
        """Return those of the figures ``names`` with rows of other code than today's."""
        return named(self._older, names)

    @cached_property
    def alone(self) -> list["Rows"]:
        """The rows by undisturbed repeat; a point without that repeat keeps its number."""
        return [self._with(one, one[:, None]) for one in self._quiet.T] if self._quiet.shape[1] > 1 else []

    def stirred(self, what: str) -> list["Rows"]:
        """The rows, those with ``what`` times different factors around 1, and their mirror image; none without one."""
        chosen = self._frame[what].to_numpy(dtype=bool)
        spread = SHIFT * (2 * (np.arange(1, len(chosen) + 1) * _GOLDEN % 1) - 1) * chosen
        factors = [1 + spread, 1 - spread] if chosen.any() else []
        return [self._with(self._values * factor, self._repeats * factor[:, None]) for factor in factors]

    def _with(self, values: np.ndarray, paired: np.ndarray) -> "Rows":
        rows = copy(self)
        rows._values, rows._paired = np.where(np.isnan(values), self._values, values), paired
        return rows


def named(figures: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the figures that are, or whose title begins with, one of ``names``."""
    begins = tuple(itertools.filterfalse(str.isdigit, names))
    return [figure for figure in figures if figure in names or figure.startswith(begins)]


PLAYERS = {
    role: [*names, *(name for name, played in STAND_INS.items() if played == role)] for role, names in MODELS.items()
}
"""The paper's role -> models that play it, first choice first."""


def model_for(frame: pd.DataFrame, role: str) -> str:
    """Return the model in ``frame`` that plays ``role`` ("7B", "13B", "70B"); NotMeasured without one."""
    present = set(frame["model"].to_numpy())
    for name in PLAYERS[role]:
        if name in present:
            return name
    raise NotMeasured(f"no rows of the {role} model ({', '.join(PLAYERS[role])})")


def pick(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Return rows whose columns equal ``where``; NotMeasured without any."""
    places = np.arange(len(frame))
    for name, value in where.items():
        places = places[frame[name].to_numpy()[places] == value]
    if not len(places):
        raise NotMeasured("no rows with " + ", ".join(f"{name}={value}" for name, value in where.items()))
    return frame.take(places)


def curve(frame: pd.DataFrame, metric: str, over: str = "batch_size", **where: Any) -> pd.Series:
    """Return ``metric`` where columns equal ``where``, indexed by ``over`` ascending; NotMeasured when empty."""
    found = pick(frame, metric=metric, **where).dropna(subset=over)
    if found[over].duplicated().any():
        panels = ", ".join(sorted(set(found["panel"]))) or "one panel"
        raise NotMeasured(f"{metric} has several values per {over} ({panels}); the claim is about one curve")
    return found.set_index(over)["value"].sort_index()


def at(values: pd.Series, index: float, what: str = "batch size") -> float:
    """Return the value at ``index``; NotMeasured, naming what there is, when it was not measured."""
    if index not in values.index:
        measured = ", ".join(f"{point:g}" for point in values.index)
        raise NotMeasured(f"{what} {index:g} was not measured (measured: {measured})")
    return float(values.loc[index])


def ratio(values: pd.Series, upper: float, lower: float) -> float:
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

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "| --- " * len(head) + "|", *map(line, rows)]


def numbers(values: Sequence[float] | pd.Series, digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}g}" for value in values)


SIMULATED, MEASURED = "simulated", "measured"


@dataclass(frozen=True)
class Finding:
    """Our side of one claim: ``quantities`` that bounds apply to (absent where not measured), ``text`` beside them,
    ``kind`` (``simulated`` with its ``cost_model``), ``models`` measured.
    """

    quantities: Mapping[str, float]
    text: str
    kind: str = MEASURED
    models: tuple[str, ...] = ()
    cost_model: str = ""


ClaimFunction = Callable[[Rows], Finding]
CLAIMS: dict[str, ClaimFunction] = {}


def claim(id: str, /, **chosen: Any) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Register a function, called with ``chosen``, as our value of claim ``id``; once for each claim it answers."""

    def store(function: Callable[..., Finding]) -> Callable[..., Finding]:
        if id in CLAIMS:
            raise ValueError(f"claim {id} already has a function; one per claim")
        CLAIMS[id] = update_wrapper(partial(function, **chosen), function)
        return function

    return store


def quantities(function: ClaimFunction, rows: Rows) -> dict[str, float]:
    """Return the quantities that ``function`` finds in ``rows``; none where a row is missing."""
    try:
        return dict(function(rows).quantities)
    except NotMeasured:
        return {}


def spans(value: Mapping[str, float], repeats: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the spans of the quantities of ``value`` over those of undisturbed repeats, where these differ."""
    known = {}
    for name, middle in value.items():
        span = [middle, *(one[name] for one in repeats if name in one)]
        if max(span) - min(span) > 1e-9 * max(abs(max(span)), abs(min(span))):
            known[name] = min(span), max(span)
    return known
