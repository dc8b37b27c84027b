"""Machines: the rows of a folder with the verdicts on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from experiments.claims import Verdict, judge
from experiments.claims.rows import Rows
from experiments.harness.counted import counted, frame_of, merged
from experiments.measure.records import COLUMNS, read_rows
from experiments.report.ages import older

HERE = "this machine"
VERDICTS = "claims.csv"
"""Table of the verdicts beside the rows."""
TRIALS = "reliability.csv"
NO_SCRIPT = (VERDICTS, TRIALS)
"""Files beside the rows that are of no script of `experiments/`: verdicts, and trials, of `tests/reliability`."""
OPERATOR_TABLES = "operator tables"


@dataclass(frozen=True)
class Machine:
    """One machine: ``name`` (`HERE` for fresh rows), ``folder`` of rows and ``figures``, ``rows`` with ``older``,
    ``verdicts`` by the clock that decides each, ``paper``: ``paper_results``.
    """

    name: str
    folder: Path
    figures: Path
    rows: pd.DataFrame
    verdicts: Sequence[Verdict]
    paper: Path

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
    return Machine(name, folder, figures, rows, judge(rows, paper), paper)


def recorded_machines(results: Path, figures: Path, paper: Path) -> list[Machine]:
    """Read and judge every folder of rows in ``results``, by name; ``figures`` has a folder of figures for each."""
    return [machine_of(folder, figures / folder.name, paper, folder.name) for folder in recorded_folders(results)]


def recorded_folders(results: Path) -> list[Path]:
    return sorted(path for path in results.glob("*") if path.is_dir() and rows_files(path))


def rows_files(folder: Path) -> list[Path]:
    """Return the files of figures' rows in ``folder``, by name: all tables but `NO_SCRIPT`."""
    return [path for path in sorted(folder.glob("*.csv")) if path.name not in NO_SCRIPT]


def read_folder(folder: Path) -> pd.DataFrame:
    """All rows of all figures in ``folder``, with a column ``older``; RowsError when a file is damaged."""
    read = {path: frame_of(read_rows(path)) for path in rows_files(folder)}
    frames = [rows.assign(older=older(rows, path)) for path, rows in read.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*COLUMNS, "older"])


def older_share(rows: pd.DataFrame) -> str:
    """Return the number of rows that were measured by other code than is here now, and their share."""
    older = int(rows["older"].astype(bool).sum())
    return f"{older:,} of {len(rows):,} ({100 * older / len(rows):.1f} %)"


def said(value: float, digits: int = 3) -> str:
    """Write ``value`` with so many significant digits, whole numbers of more digits in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
