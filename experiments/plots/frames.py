"""Rows as pandas frames, in the form that plots want."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from experiments.claims.paper import FIGURE_FILES, read_figure
from punica.measure.records import COLUMNS, TIMERS, Row, read_rows


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """`rows` as a frame with the columns of `Row`, also when there are none."""
    return pd.DataFrame([asdict(row) for row in rows], columns=list(COLUMNS))


def distinct(rows: pd.DataFrame, column: str) -> list[str]:
    """The different texts of a column, sorted, without the empty one."""
    return sorted(set(rows[column].dropna().astype(str)) - {""})


def measured_frame(path: Path) -> pd.DataFrame:
    """All measured rows of `path`; of several timers only the first of `TIMERS` that is there."""
    frame = frame_of(read_rows(path))
    for timer in TIMERS:
        if (frame["timer"] == timer).any():
            return frame[frame["timer"].isin([timer, ""])].reset_index(drop=True)
    return frame


def paper_frame(folder: Path, figure: str) -> pd.DataFrame:
    """The paper's rows of `figure` in the folder `paper_results`; none where the paper has no such figure."""
    return read_figure(folder, figure) if figure in FIGURE_FILES else pd.DataFrame(columns=list(COLUMNS))


def series(frame: pd.DataFrame, x: str, y: str = "value") -> tuple[list[float], list[float]]:
    """`x` and `y` columns in order of `x`."""
    ordered = frame.sort_values(x)
    return ordered[x].astype(float).tolist(), ordered[y].astype(float).tolist()


def centre(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows to draw as a line: medians, and single values."""
    return frame[frame["statistic"].isin(["median", "value"])]


def interval(frame: pd.DataFrame, x: str) -> pd.DataFrame:
    """`x`, `p10` and `p90`, one row per x."""
    wide = frame[frame["statistic"].isin(["p10", "p90"])].pivot_table(index=x, columns="statistic", values="value")
    return wide.reset_index() if {"p10", "p90"} <= set(wide.columns) else pd.DataFrame(columns=[x, "p10", "p90"])


def described(rows: pd.DataFrame) -> str:
    """What was measured on, for titles: `AMD EPYC, 2 cores` or the GPU, with the timer and the scale."""
    devices, timers, scales = (", ".join(distinct(rows, name)) for name in ("device", "timer", "scale"))
    return f"{devices}; {timers}; scale={scales}"
