"""Rows and verdicts of this machine beside the expected ranges."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.claims import Verdict
from experiments.expected.claims import values_of
from experiments.expected.ranges import LINE, comparable
from experiments.harness.counted import POINT, merged

TINY = 1e-9
"""Relative and absolute room at the ends of a range, for numbers written with fewer digits."""


@dataclass(frozen=True)
class Held:
    """Lines of ranges with our value.

    Attributes:
        compared: columns of the ranges and ``here``, ``is_outside``; of measurements ``common``, the points of both.
        absent: ranges without a value here.
        unknown: our lines without a range.
    """

    compared: pd.DataFrame
    absent: pd.DataFrame
    unknown: pd.DataFrame

    @property
    def outside(self) -> pd.DataFrame:
        """Lines outside their range."""
        return self.compared[self.compared["is_outside"]]


def hold_rows(ranges: pd.DataFrame, recorded: pd.DataFrame, here: pd.DataFrame) -> Held:
    """Hold the rows ``here`` against ``ranges``, made of the rows ``recorded``; ``here`` of a line is its ratio."""
    key = [*POINT, "unit", "timer"]
    theirs, ours = (merged(comparable(rows))[[*key, "value"]] for rows in (recorded, here))
    both = theirs.merge(ours, on=key, suffixes=("_recorded", "_here"))
    both["here"] = both["value_here"] / both["value_recorded"]
    ratios = both.groupby(LINE)["here"].agg(here="median", common="size").reset_index()
    return _beside(ranges, ratios, ours[LINE].drop_duplicates(), LINE)


def hold_claims(ranges: pd.DataFrame, verdicts: Sequence[Verdict]) -> Held:
    """Hold the quantities of ``verdicts`` against ``ranges``; column ``verdict_here`` has our verdict."""
    key = ["claim", "quantity"]
    lines = [(one.id, name, value, one.verdict) for one in verdicts for name, value in values_of(one).items()]
    ours = pd.DataFrame(lines, columns=[*key, "here", "verdict_here"])
    return _beside(ranges, ours, ours[key], key)


def _beside(ranges: pd.DataFrame, ours: pd.DataFrame, known: pd.DataFrame, key: list[str]) -> Held:
    lines = ranges.merge(ours, on=key, how="left")
    has = lines["here"].notna()
    room = TINY * np.maximum(1.0, lines[["low", "high"]].abs().max(axis=1))
    lines["is_outside"] = has & ~lines["here"].between(lines["low"] - room, lines["high"] + room)
    without = known.merge(ranges[key].assign(there=True), on=key, how="left")["there"].isna().to_numpy()
    return Held(lines[has], lines[~has], known[without])
