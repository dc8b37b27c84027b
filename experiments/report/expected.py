"""Expected ranges: what another run on recorded hardware should give, and the rows and claims that are outside.

A range reaches twice as far as the farthest recorded repeat of the same figure, metric and clock. It is never less than
a tenth, or a factor of 1.5 for times of a CPU. A line is one metric of one system and model in one figure, by the
median of its ratios. Ratios, times and throughputs are on a scale of factors, a growth in percent as a ratio less 1;
shares, correlations and differences are linear.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.claims import Verdict
from experiments.claims.rows import SIMULATED
from experiments.facts.paper import paper_file
from experiments.harness.counted import POINT, counted, merged
from experiments.measure.records import DIFFERENCES, RowsError, ensure_writable

FLOOR, CPU_FLOOR = 0.10, 0.50
"""Least width of a range, as a part of the recorded value: two sessions differ by more than repeats of one. A CPU may
share its host: of two runs on one machine, 45 minutes apart, 280 of 420 lines were within a tenth, 402 within half."""
TIMES = 2.0
"""Width of a range over the distance of its farthest repeat."""
SPEED_LIMIT = 1.25
"""Largest ratio, either way, of the median calibration to that of the nearest recorded repeat. Of two days on one
virtual CPU a copy took 1.57 times as long, and 233 of 545 lines were more than a tenth off."""
CALIBRATIONS = {"calib_gemm_us": "a product", "calib_copy_us": "a copy"}
TINY = 1e-9
"""Relative and absolute room at the ends of a range, for numbers written with fewer digits."""
FOLDER, SCALES = "expected", "claim_quantities.csv"
REMEDY = "write it again: make report ARGS=source=recorded"
LINE = ["figure", "system", "model", "metric", "unit", "timer"]
POOL = ["figure", "metric", "timer"]
QUANTITY = ["claim", "quantity"]
COLUMNS = {
    "claims": [*QUANTITY, "value", "low", "high", "verdict"],
    "measurements": [*LINE, "points", "repeats", "low", "high"],
}
_NUMBERS = dict.fromkeys(("value", "low", "high", "points", "repeats"), float)


def _floor(hardware: str) -> float:
    return CPU_FLOOR if hardware == "cpu" else FLOOR


def comparable(rows: pd.DataFrame) -> pd.DataFrame:
    """Choose among the rows that have a range, as `counted` does for points that are compared one by one. None have
    simulations, smoke rows, spreads and counts, zeros, and differences of two times, which may be close to zero.
    """
    fine = rows["statistic"].isin(["median", "value"]) & rows["kind"].eq("measured") & rows["scale"].ne("smoke")
    return counted(rows[fine & rows["value"].gt(0) & ~rows["metric"].isin(DIFFERENCES)], clock=None)


def ranges(rows: pd.DataFrame) -> pd.DataFrame:
    """The ranges of one machine's ``rows``, a line per `LINE`: ends of the ratio, most ``repeats`` of a point."""
    rows = comparable(rows)
    if rows.empty:
        return pd.DataFrame(columns=COLUMNS["measurements"])
    rows = rows[rows["counts"]]
    of_point = rows.groupby("point")
    rows = rows.assign(centre=of_point["value"].transform("median"), repeats=of_point["repeat"].transform("nunique"))
    lines = rows.groupby(LINE).agg(points=("point", "nunique"), repeats=("repeats", "max")).reset_index()
    parts = rows[rows["repeats"] > 1]
    ratio = (parts["value"] / parts["centre"]).transform(np.log)
    of_repeat = ratio.groupby([parts[name] for name in (*LINE, "repeat")]).median().abs().rename("farthest")
    lines = lines.merge(of_repeat.groupby(level=POOL).max().reset_index(), on=POOL, how="left")
    width = np.maximum(np.log1p(_floor(rows["hardware"].iloc[0])), TIMES * lines["farthest"].fillna(0.0))
    return lines.assign(low=np.exp(-width), high=np.exp(width))[COLUMNS["measurements"]]


ZERO = {"linear": -math.inf, "ratio": 0.0, "growth": -100.0}
"""Kind of a scale -> the value that has no logarithm."""


@dataclass(frozen=True)
class Scale:
    """Scale of one quantity, ``ratio``, ``growth`` or ``linear``; no value is below ``least`` or above ``most``."""

    kind: str = "ratio"
    least: float = -math.inf
    most: float = math.inf

    def around(self, value: float, ends: Sequence[float], floor: float) -> tuple[float, float]:
        """The range around ``value`` with repeats at ``ends``, no less than ``floor``, cut to what can be."""
        zero = ZERO[self.kind]
        for one in (value, *ends):
            if not (self.least <= one <= self.most and one > zero):
                raise ValueError(f"{one:g} is not possible on the scale {self.kind} from {self.least} to {self.most}")
        if self.kind == "linear":
            floor = floor if self.most == math.inf else FLOOR
            width = max([floor * abs(value), *(TIMES * abs(end - value) for end in ends)])
            low, high = value - width, value + width
        else:
            far = [TIMES * abs(math.log((end - zero) / (value - zero))) for end in ends]
            factor = math.exp(max([math.log1p(floor), *far]))
            low, high = zero + (value - zero) / factor, zero + (value - zero) * factor
        return max(self.least, low), min(self.most, high)


@lru_cache(maxsize=8)
def read_scales(folder: Path) -> dict[tuple[str, str], Scale]:
    """Claim and quantity -> scale, where it is no plain ratio; ValueError names file and line of an unknown one."""
    path, found = paper_file(folder, SCALES), {}
    with path.open(newline="", encoding="utf-8") as stream:
        for number, line in enumerate(csv.DictReader(stream), start=2):
            if line["scale"] not in ZERO:
                raise ValueError(f"{path}, line {number}: scale {line['scale']!r} is none of {', '.join(ZERO)}")
            ends = float(line["least"] or "-inf"), float(line["most"] or "inf")
            found[line["claim"], line["quantity"]] = Scale(line["scale"], *ends)
    return found


def claim_ranges(verdicts: Sequence[Verdict], paper: Path) -> pd.DataFrame:
    """A line per quantity of the ``verdicts``; ValueError names claim and quantity of an excluded value."""
    scales, lines = read_scales(paper), []
    for verdict in verdicts:
        floor = FLOOR if verdict.kind == SIMULATED else _floor(verdict.hardware)
        for name, value in verdict.quantities.items():
            scale = scales.get((verdict.id, name), Scale())
            try:
                low, high = scale.around(value, verdict.interval.get(name, ()), floor)
            except ValueError as error:
                raise ValueError(f"{verdict.id}, {name}: {error}; write its scale into {paper / SCALES}") from None
            lines.append((verdict.id, name, value, low, high, verdict.verdict))
    return pd.DataFrame(lines, columns=COLUMNS["claims"])


class Held(NamedTuple):
    """Lines of ranges: ``compared`` (with ``here``, ``is_outside``), ``absent`` here; ``unknown``: without a range."""

    compared: pd.DataFrame
    absent: pd.DataFrame
    unknown: pd.DataFrame

    @property
    def outside(self) -> pd.DataFrame:
        return self.compared[self.compared["is_outside"]]


def hold_rows(ranges: pd.DataFrame, recorded: pd.DataFrame, here: pd.DataFrame) -> Held:
    """Hold the rows ``here`` against ``ranges``, made of the rows ``recorded``; ``here`` of a line is its ratio."""
    key = [*POINT, "unit", "timer"]
    theirs, ours = (merged(comparable(rows))[[*key, "value"]] for rows in (recorded, here))
    both = theirs.merge(ours, on=key, suffixes=("_recorded", "_here"))
    ratios = both.assign(here=both["value_here"] / both["value_recorded"]).groupby(LINE)["here"]
    return _beside(ranges, ratios.agg(here="median", common="size").reset_index(), ours[LINE].drop_duplicates(), LINE)


def hold_claims(ranges: pd.DataFrame, verdicts: Sequence[Verdict]) -> Held:
    """Hold the quantities of ``verdicts`` against ``ranges``; column ``verdict_here`` has our verdict."""
    found = [(one.id, *each, one.verdict) for one in verdicts for each in one.quantities.items()]
    ours = pd.DataFrame(found, columns=[*QUANTITY, "here", "verdict_here"])
    return _beside(ranges, ours, ours[QUANTITY], QUANTITY)


def _beside(ranges: pd.DataFrame, ours: pd.DataFrame, known: pd.DataFrame, key: list[str]) -> Held:
    lines = ranges.merge(ours, on=key, how="left")
    has, room = lines["here"].notna(), TINY * np.maximum(1.0, lines[["low", "high"]].abs().max(axis=1))
    lines["is_outside"] = has & ~lines["here"].between(lines["low"] - room, lines["high"] + room)
    sides = known.merge(ranges[key], on=key, how="left", indicator=True)["_merge"]
    return Held(lines[has], lines[~has], known[sides.eq("left_only").to_numpy()])


def other_speed(recorded: pd.DataFrame, here: pd.DataFrame) -> str:
    """Describe the calibrations of ``here`` that differ from those of the same figures in ``recorded``, held against
    the medians of its repeats; empty where none does.
    """
    recorded, here = recorded[recorded["figure"].isin(here["figure"])], here[here["figure"].isin(recorded["figure"])]
    off = []
    for name, what in CALIBRATIONS.items():
        known, ours = recorded.groupby("repeat", dropna=False)[name].median(), here[name].median()
        ratio = ours / min(max(ours, known.min()), known.max())
        if abs(math.log(ratio)) > math.log(SPEED_LIMIT):
            off.append(f"{what} takes {ratio:.2f} of the recorded time")
    return ", ".join(off)


def other_speeds(recorded: pd.DataFrame, here: pd.DataFrame) -> dict[str, str]:
    """Map those figures to `other_speed` that were measured at another speed than recorded."""
    parts = {str(figure): other_speed(recorded, rows) for figure, rows in here.groupby("figure", sort=False)}
    return {figure: said for figure, said in parts.items() if said}


def write_expected(folder: Path, rows: pd.DataFrame, verdicts: Sequence[Verdict], paper: Path) -> list[Path]:
    """Write the ranges of the ``rows`` in ``folder`` and of the ``verdicts`` on them; ``paper``: ``paper_results``."""
    ensure_writable(folder / FOLDER)
    tables = {"claims": claim_ranges(verdicts, paper), "measurements": ranges(rows)}
    paths = {name: folder / FOLDER / f"{name}.csv" for name in tables}
    for name, table in tables.items():
        table.to_csv(paths[name], index=False, lineterminator="\n", float_format="%.6g")
    return [*paths.values()]


def read_expected(folder: Path) -> list[pd.DataFrame]:
    """Read the ranges of claims and of measurements of ``folder``; `RowsError` names a file that cannot be used."""
    tables = []
    for table, columns in COLUMNS.items():
        path, kinds = folder / FOLDER / f"{table}.csv", {name: _NUMBERS.get(name, str) for name in columns}
        try:
            read = pd.read_csv(path, dtype=str, keep_default_na=False, usecols=columns)
            tables.append(read[columns].astype(kinds))
        except (OSError, ValueError) as error:
            raise RowsError(f"{path}: no table of ranges ({error}); {REMEDY}") from None
    return tables
