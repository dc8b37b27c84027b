"""Findings of `findings.yaml`: a ratio of rows, or rows, over all points of both sides, repeat by repeat."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from experiments.claims.judge import DISTURBED, ONCE
from experiments.claims.rows import NotMeasured, Rows

_POINT = ["panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric"]
_FLAGS = {DISTURBED: "disturbed", ONCE: "once"}
_BRACES = re.compile(r"\{([^{}]*)\}")
Where = Mapping[str, str]


@dataclass(frozen=True)
class Sought:
    """A number to look for in ``figure``: ``above`` over ``below`` (or alone), where both sides have ``where``."""

    what: str
    figure: str
    above: Where
    below: Where
    where: Where


@dataclass(frozen=True)
class Found:
    """The middle of ``points`` (geometric mean of a ratio, else median), its ends, unit, and ``marks``."""

    what: str
    middle: float
    least: float
    most: float
    points: int
    unit: str = ""
    marks: str = ""


@cache
def sought() -> dict[str, list[Sought]]:
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    found: dict[str, list[Sought]] = {}
    for key, entries in content.items():
        figure = entries.pop("figure")
        for what, rule in entries.items():
            found.setdefault(key.partition(",")[0], []).extend(_parsed(figure, *pair) for pair in _expanded(what, rule))
    return found


def _expanded(what: str, rule: str) -> Iterator[tuple[str, str]]:
    """Yield a pair for each alternative; braces with equally many go together."""
    if not (braces := _BRACES.search(what)):
        yield what, rule
        return
    count = braces[1].count("|") + 1
    for place in range(count):

        def chosen(match: re.Match[str], place: int = place) -> str:
            parts = match[1].split("|")
            return parts[place] if len(parts) == count else match[0]

        yield from _expanded(_BRACES.sub(chosen, what), _BRACES.sub(chosen, rule))


def _parsed(figure: str, what: str, rule: str) -> Sought:
    sides, _, both = rule.partition(" @ ")
    above, _, below = sides.partition(" / ")
    read = [dict(one.split("=", 1) for one in part.split("; ") if one) for part in (above, below, both)]
    return Sought(what, figure, *read)


def find(wanted: list[Sought], rows: Rows) -> list[Found]:
    return [found for one in wanted if (found := _found(one, rows))]


def _found(one: Sought, rows: Rows) -> Found | None:
    try:
        frame = matching(rows.figure(one.figure).reset_index(names="place"), one.where)
    except NotMeasured:
        return None
    sides = matching(frame, one.above)
    values, unit = sides["value"].to_numpy(dtype=float), "".join(sides["unit"].iloc[:1])
    if one.below:
        keys = [name for name in _POINT if name not in {*one.above, *one.below}]
        sides = sides.merge(matching(frame, one.below), on=keys, suffixes=("", "_below"))
        places = zip(sides["place"], sides["place_below"], strict=True)
        values, unit = np.array([rows.ratio(*pair) for pair in places]), ""
    if not len(values):
        return None
    flagged = {mark: sides.filter(regex=f"^{name}(_below)?$").eq(True) for mark, name in _FLAGS.items()}
    marks = "".join(mark for mark, cells in flagged.items() if cells.to_numpy().any())
    middle = float(np.median(values)) if unit else float(np.exp(np.mean(np.log(values))))
    return Found(one.what, middle, float(values.min()), float(values.max()), len(values), unit, marks)


def matching(frame: pd.DataFrame, where: Where) -> pd.DataFrame:
    """Return the rows of ``frame`` whose columns match ``where``, texts as patterns."""
    for name, wanted in where.items():
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column):
            frame = frame[column == float(wanted)]
        else:
            frame = frame[column.isin([one for one in column.unique() if fnmatchcase(str(one), wanted)])]
    return frame
