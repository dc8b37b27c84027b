"""Machines: the rows of a folder with the verdicts on them, under each clock that timed the operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from experiments.claims import Verdict, judge
from experiments.claims.rows import Rows
from experiments.harness.clocks import unsteady
from experiments.harness.counted import counted, frame_of, merged
from experiments.measure.records import COLUMNS, read_rows
from experiments.plots.frames import distinct
from experiments.reliability.rows import FILE as TRIALS
from experiments.report.ages import older

NAME = "claims"
AUTO = "auto"
"""All rows, of several clocks the one that decides the claim."""
OTHER_TIMER = "cuda_graph"
"""The clock of CUDA graphs, as our engine runs its steps; the paper timed operators from the host."""
HERE = "this machine"
OPERATOR_TABLES = "operator tables"
NO_SCRIPT = (TRIALS,)
"""Rows files that are of no script of `experiments/`, on purpose: trials have one each, and are counted apart."""


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        name: of its folder in ``results``; `HERE` for fresh rows.
        folder, figures: where its rows are, and its figures.
        rows: with a column ``older``, see `read_folder`.
        clocks: timer -> verdicts, see `verdicts_by_clock`.
        paper: folder of the paper's numbers, ``paper_results``.
    """

    name: str
    folder: Path
    figures: Path
    rows: pd.DataFrame
    clocks: Mapping[str, Sequence[Verdict]]
    paper: Path

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """Verdicts on all rows, each under the clock that decides it."""
        return self.clocks[AUTO]

    @cached_property
    def chosen(self) -> Rows:
        """Rows that count, one number per point."""
        return Rows(self.rows)

    def points(self, figure: str) -> pd.DataFrame:
        """Return the rows of ``figure`` that count, one per point and statistic."""
        return merged(counted(self.rows[self.rows["figure"].eq(figure)]))


def machine_of(folder: Path, figures: Path, paper: Path, name: str = HERE) -> Machine:
    """Read and judge the rows in ``folder``; ``paper`` is ``paper_results``."""
    rows = read_folder(folder)
    return Machine(name, folder, figures, rows, verdicts_by_clock(rows, paper), paper)


def recorded_machines(results: Path, figures: Path, paper: Path) -> list[Machine]:
    """Read and judge every folder of rows in ``results``, by name; ``figures`` has a folder of figures for each."""
    return [machine_of(folder, figures / folder.name, paper, folder.name) for folder in recorded_folders(results)]


def columns(machines: Sequence[Machine]) -> dict[str, Sequence[Verdict]]:
    """Map a heading to the verdicts below it: a column per machine, and one for its graphs where it has two clocks."""
    return {
        machine.name + (f", {timer}" if timer != AUTO else ""): verdicts
        for machine in machines
        for timer, verdicts in machine.clocks.items()
    }


def recorded_folders(results: Path) -> list[Path]:
    """Return the folders in ``results`` that have rows, by name."""
    return sorted(path for path in results.glob("*") if path.is_dir() and rows_files(path))


def rows_files(folder: Path) -> list[Path]:
    """Return the files of figures' rows in ``folder``, by name: no verdict tables, none of `NO_SCRIPT`."""
    files = sorted(folder.glob("*.csv"))
    return [path for path in files if not path.stem.startswith(NAME) and path.name not in NO_SCRIPT]


def read_folder(folder: Path) -> pd.DataFrame:
    """Read all rows of all figures in ``folder``, with a column ``older`` (`ages`).

    RowsError names file, line and remedy when a file is damaged.
    """
    read = {path: frame_of(read_rows(path)) for path in rows_files(folder)}
    frames = [rows.assign(older=older(rows, path)) for path, rows in read.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*COLUMNS, "older"])


def of_timer(frame: pd.DataFrame, timer: str) -> pd.DataFrame:
    """The rows of ``timer`` alone in figures that have such, the others whole; all rows for ``auto``."""
    if timer == AUTO:
        return frame
    timed = set(frame.loc[frame["timer"] == timer, "figure"])
    return frame[~frame["figure"].isin(timed) | frame["timer"].fillna("").isin([timer, ""])]


def verdicts_by_clock(frame: pd.DataFrame, paper: Path) -> dict[str, list[Verdict]]:
    """Timer -> verdicts: of all rows, and where two clocks of operators count of the graph's alone as well."""
    found = {AUTO: judge(frame, paper)}
    operators = frame[frame["figure"] == "8"]
    if len(distinct(operators[~unsteady(operators)], "timer")) > 1:
        found[OTHER_TIMER] = judge(of_timer(frame, OTHER_TIMER), paper, OTHER_TIMER)
    return found


def file_name(timer: str) -> str:
    """``claims``, or ``claims_<timer>`` for the verdicts of one timer."""
    return NAME if timer == AUTO else f"{NAME}_{timer}"
