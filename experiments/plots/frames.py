"""Rows as pandas frames, in the form that plots want."""

from pathlib import Path

import pandas as pd

from experiments.facts.paper import FIGURE_FILES, read_figure
from experiments.facts.systems import MODELS, STAND_INS, SYSTEMS
from experiments.harness.counted import counted, gives_way, merged
from experiments.measure.records import COLUMNS, TIMERS
from experiments.workload.popularity import WORKLOADS

SIZES = ["", *(ours for ours, _ in MODELS.values())]
"""Models by size; operators alone first."""


def distinct(rows: pd.DataFrame, column: str) -> list[str]:
    """The different texts of a column, sorted, without the empty one."""
    return sorted(set(rows[column].drop_duplicates().dropna().astype(str)) - {""})


def frame_of_clocks(rows: pd.DataFrame) -> pd.DataFrame:
    """`measured_frame` of every clock whose `rows`, all repeats of a file, count, the host's first."""
    rows = rows[~gives_way(rows)]
    clock = rows["timer"].fillna("")
    parts = [rows[clock == one] for one in reversed(TIMERS)]
    parts = [measured_frame(counted(part)) for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else measured_frame(counted(rows))


def measured_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """`counted` rows in the order of `in_order`, repeats made one."""
    return in_order(merged(rows))


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by model, panel, system, popularity and rank, models by size, names as registered, others last."""
    rows = rows.sort_values("rank", kind="stable")
    orders = {"workload": WORKLOADS.names(), "system": SYSTEMS.names(), "panel": (), "model": SIZES}
    for column, known in orders.items():
        places = {name: place for place, name in enumerate(dict.fromkeys([*known, *rows[column].unique()]))}
        rows = rows.iloc[rows[column].map(places).to_numpy().argsort(kind="stable")]
    return rows.reset_index(drop=True)


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


FEWEST_FOR_BAND = 5
"""Fewest samples per repeat whose p10 and p90 are drawn."""


def interval(frame: pd.DataFrame, x: str) -> pd.DataFrame:
    """`x`, `p10` and `p90`, one row per x with `FEWEST_FOR_BAND` samples in each repeat that counts."""
    spread = frame[frame["statistic"].isin(["p10", "p90", "count"])]
    wide = spread.pivot_table(index=x, columns="statistic", values="value")
    if not {"p10", "p90", "count"} <= set(wide.columns):
        return pd.DataFrame(columns=[x, "p10", "p90"])
    counts = _samples(spread).groupby(spread[x]).min()
    return wide[counts.reindex(wide.index) >= FEWEST_FOR_BAND][["p10", "p90"]].dropna().reset_index()


def _samples(rows: pd.DataFrame) -> pd.Series:
    """Numbers of samples per point, in the repeat that has the fewest."""
    return rows.loc[rows["statistic"] == "count", "lowest" if "lowest" in rows else "value"]


def disturbed_at(frame: pd.DataFrame, x: str) -> set[float]:
    """Values of column `x` at which other work disturbed what is in `frame`."""
    return set(frame.loc[frame["disturbed"].eq(True), x].astype(float)) if "disturbed" in frame else set()


NOTE = "clock"
"""Attribute of a frame: what its caption says of a clock that is not drawn."""
CLOCKS = {"host_clock": "host clock", "cuda_graph": "inside CUDA graphs"}


def measured(rows: pd.DataFrame, spans: str = "") -> str:
    """Describe the measurement in a caption's sentence; `spans` are what shows p10 and p90, where there is any."""
    models = [f"{model}{beside(model)}" for model in (distinct(rows, "model") if "model" in rows else [])]
    clocks = " and ".join(CLOCKS.get(timer, timer) for timer in reversed(distinct(rows, "timer")))
    parts = [", ".join(distinct(rows, "device")), *models, clocks, how_often(rows)]
    parts += [f"{spans}: p10 to p90"] if spans and (_samples(rows) >= FEWEST_FOR_BAND).any() else []
    crossed = "disturbed" in rows and rows["disturbed"].eq(True).any()
    said = f"Measured: {'; '.join(filter(None, parts))}{'; crosses: disturbed by other work' if crossed else ''}."
    return f"{said} {note.capitalize()}." if (note := rows.attrs.get(NOTE)) else said


def how_often(rows: pd.DataFrame) -> str:
    """Word the number of repeats per point, from fewest to most, and commits if several; empty: nothing was timed.

    >>> how_often(pd.DataFrame({"statistic": "median", "repeats": [3, 1], "timer": "host_clock"}))
    'median of 1 to 3 repeats'
    """
    drawn = centre(rows)
    drawn = drawn[drawn["timer"].fillna("") != ""]
    if drawn.empty:
        return ""
    repeats = drawn["repeats"] if "repeats" in drawn else pd.Series(1, index=drawn.index)
    ends = sorted({int(repeats.min()), int(repeats.max())})
    known = drawn.reindex(columns=["date", "commit"], fill_value="").drop_duplicates().sort_values("date")
    days = {commit[:8]: str(date)[:10] for date, commit in known.to_numpy()}
    each = f" each, at commits {' and '.join(f'{one} ({day})' for one, day in days.items())}" if len(days) > 1 else ""
    return ("one run" if ends == [1] else f"median of {' to '.join(map(str, ends))} repeats") + each


def role_of(model: str) -> str:
    """The paper's model whose part `model` plays (7B), an empty string where it plays none."""
    return next((role for role, names in MODELS.items() if model in names), STAND_INS.get(model, ""))


def beside(model: str) -> str:
    """Name the paper's model that a smaller one is drawn beside; empty for a model of the paper's size."""
    return f" beside the paper's {STAND_INS[model]}" if model in STAND_INS else ""
