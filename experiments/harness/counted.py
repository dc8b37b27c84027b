"""Rows that count: the one selection that claims, figures, tables, ranges, comparisons and cost models read:

* per figure the largest scale present (`SCALES`; others where these have none);
* per figure and metric one clock: the caller's, else the first of `measure.records.TIMERS`; the host's beside a GPU
  only where launches are steady: the 90 % quantile of calibrations at most `STEADY` times the 10 % one;
* of each repeat the newest row; of repeats the undisturbed ones, all where none was quiet.

A point's number is the median over the repeats that count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import numpy as np
import pandas as pd

from experiments.measure.records import COLUMNS, TIMERS, Row

HOST = TIMERS[-1]
STEADY = 1.10
"""Claims call curves flat within 10 % (C08, C14, C15, C24): a clock that wanders by more decides them by chance. On an
H200, 72 % of Figure 8's points differed by more between undisturbed repeats timed by the host, 4 % in graphs."""
NOT_STEADY = "host clock: not steady here"
SCALES = ("paper", "gpu", "laptop")
POINT = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric", "t_s", "gpu"]
"""Columns of a point, apart from its statistic; its scale is none of them, nor is its clock where one is chosen."""
_TEXTS = ["figure", "panel", "system", "workload", "model", "metric", "unit", "timer", "scale"]
_NUMBERS = ["batch_size", "seq_len", "rank", "t_s", "gpu", "repeat", "value"]


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Build a frame of `rows` with the columns of `Row`, also without any."""
    return pd.DataFrame([asdict(row) for row in rows], columns=list(COLUMNS))


def counted(rows: pd.DataFrame, clock: str | None = "") -> pd.DataFrame:
    """Choose scale, clock and the newest of each repeat, with columns ``point`` and ``counts``. ``clock``: the one to
    prefer; None: each clock is a point of its own, with its largest scale.
    """
    rows = rows.reset_index(drop=True)
    rows = rows.assign(
        **{name: rows[name].astype(object).fillna("").astype(str) for name in _TEXTS},
        **{name: pd.to_numeric(rows[name]) for name in _NUMBERS},
        disturbed=rows["disturbed"].eq(True),
    )
    if clock is not None:
        rows = _preferred(rows, "scale", SCALES, ["figure"])
        rows = rows[~gives_way(rows)]
        rows = _preferred(rows, "timer", [clock, *TIMERS] if clock else TIMERS, ["figure", "metric"])
    key = [*POINT, "statistic", *(["timer"] if clock is None else [])]
    rows = rows.assign(point=rows.groupby(key, dropna=False, sort=False).ngroup())
    if clock is None:
        rows = _preferred(rows, "scale", SCALES, ["point"])
    rows = rows.sort_values("date", kind="stable").drop_duplicates(["point", "repeat"], keep="last").sort_index()
    whole, quiet = rows["repeat"].isna(), ~rows["disturbed"]
    better = [rows["point"].isin(rows.loc[one, "point"]) for one in (whole, quiet)]
    return rows.assign(counts=whole | (~better[0] & (quiet | ~better[1])))


def merged(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per point of `counted` rows: medians, but least p10 and largest p90; `lowest` and `highest`."""
    rows = rows[rows["counts"]]
    values, first = rows.groupby("point", sort=False)["value"], rows.drop_duplicates("point")
    low, middle, high, times = (getattr(values, name)().to_numpy() for name in ("min", "median", "max", "size"))
    ends = [first["statistic"].eq(name).to_numpy() for name in ("p10", "p90")]
    value = np.select(ends, [low, high], middle)
    return first.assign(value=value, repeats=times, lowest=low, highest=high).reset_index(drop=True)


def _preferred(rows: pd.DataFrame, column: str, order: Sequence[str], within: list[str]) -> pd.DataFrame:
    """Keep, per group ``within``, the rows whose ``column`` has the first value of ``order`` in the group."""
    place = rows[column].map({name: place for place, name in enumerate(dict.fromkeys(order))}).fillna(len(order))
    return rows[place == place.groupby([rows[name] for name in within]).transform("min")]


def unsteady(rows: pd.DataFrame) -> pd.Series:
    """Mark rows of the host's clock beside a GPU whose figure has no steady launches at that scale."""
    host = rows[rows["timer"].eq(HOST) & rows["kind"].ne("simulated") & rows["hardware"].ne("cpu")]
    launches = pd.to_numeric(host["calib_launch_us"])
    groups = launches.groupby([host[name] for name in ("hardware", "figure", "scale")], dropna=False)
    spread = groups.transform(lambda us: us.quantile(0.9) / us.quantile(0.1) if us.notna().all() else float("inf"))
    return (spread > STEADY).reindex(rows.index, fill_value=False)


def gives_way(rows: pd.DataFrame) -> pd.Series:
    """Mark `unsteady` rows whose metric another clock has timed in the same figure; simulations have none."""
    noisy = unsteady(rows)
    alone = noisy | rows["kind"].eq("simulated")
    return noisy & ~alone.groupby([rows["figure"], rows["metric"]]).transform("all")


def clock_note(rows: pd.DataFrame) -> str:
    """Return the sentence for a figure of ``rows`` some of which give way; else an empty one."""
    return NOT_STEADY if gives_way(rows).any() else ""
