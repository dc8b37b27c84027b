"""Rows as pandas frames, and one row of several repeats."""

from collections.abc import Iterable
from dataclasses import asdict

import pandas as pd

from punica.measure.records import COLUMNS, Row


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Build a frame of `rows` with the columns of `Row`, also without any."""
    return pd.DataFrame([asdict(row) for row in rows], columns=list(COLUMNS))


def one_of_repeats(frame: pd.DataFrame) -> pd.DataFrame:
    """Merge rows that differ by `repeat` alone; column `repeats` counts them.

    As the claims do: the median of the undisturbed ones, or of all where none was quiet, and then the point stays
    marked. Of p10 the least is kept and of p90 the largest. `lowest`, `highest`: least and largest value that counts.
    """
    frame = frame.assign(repeats=1, lowest=frame["value"], highest=frame["value"])
    whole, parts = frame[frame["repeat"].isna()], frame[frame["repeat"].notna()]
    if parts.empty:
        return frame
    key = ["panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "timer", "scale", "metric"]
    key += ["statistic", "kind", "t_s", "gpu"]
    parts = parts.assign(disturbed=parts["disturbed"].eq(True))
    loud = parts.groupby(key, dropna=False, sort=False)["disturbed"].transform("all")
    counted = parts[loud | ~parts["disturbed"]]
    counted = counted.assign(repeats=counted.groupby(key, dropna=False, sort=False)["value"].transform("size"))
    made = [counted[counted["statistic"] == name] for name in dict.fromkeys(counted["statistic"])]
    made = [part.assign(**_over_repeats(part, key)).drop_duplicates(key) for part in made]
    return pd.concat([part for part in (whole, *made) if not part.empty], ignore_index=True)


def _over_repeats(rows: pd.DataFrame, key: list[str]) -> dict[str, pd.Series]:
    """Merge the values of repeats of `rows`, all of one statistic, and their least and largest."""
    of = {"p10": "min", "p90": "max"}.get(rows["statistic"].iloc[0], "median")
    values = rows.groupby(key, dropna=False, sort=False)["value"]
    return {name: values.transform(how) for name, how in (("value", of), ("lowest", "min"), ("highest", "max"))}
