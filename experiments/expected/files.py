"""Files of expected ranges: `claims.csv` and `measurements.csv` in `results/<hardware>/expected/`."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.claims import Verdict
from experiments.expected import claims, ranges
from punica.measure.records import RowsError, ensure_writable

FOLDER = "expected"
REMEDY = "write it again: make report ARGS=source=recorded"
_TABLES = {"claims": claims.COLUMNS, "measurements": ranges.COLUMNS}


def write_expected(folder: Path, rows: pd.DataFrame, verdicts: Sequence[Verdict], paper: Path) -> list[Path]:
    """Write the ranges of the ``rows`` in ``folder`` (``results/<hardware>``) and of the ``verdicts`` on them;
    ``paper`` is ``paper_results``.
    """
    ensure_writable(folder / FOLDER)
    tables = {"claims": claims.claim_ranges(verdicts, paper), "measurements": ranges.ranges(rows)}
    paths = [folder / FOLDER / f"{name}.csv" for name in tables]
    for path, table in zip(paths, tables.values(), strict=True):
        table.to_csv(path, index=False, lineterminator="\n", float_format="%.6g")
    return paths


def read_expected(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the ranges of claims and of measurements of ``folder``; `RowsError` names a file that cannot be used."""
    return _read(folder / FOLDER / "claims.csv"), _read(folder / FOLDER / "measurements.csv")


def _read(path: Path) -> pd.DataFrame:
    numbers = {"value", "low", "high", "points", "repeats"}
    columns = _TABLES[path.stem]
    try:
        table = pd.read_csv(path, dtype={name: str for name in columns if name not in numbers}, keep_default_na=False)
        table = table.astype({name: float for name in columns if name in numbers})
    except (OSError, ValueError, KeyError) as error:
        raise RowsError(f"{path}: no table of ranges ({error}); {REMEDY}") from None
    if list(table.columns) != columns:
        raise RowsError(f"{path}: the header is {', '.join(table.columns)}, not {', '.join(columns)}; {REMEDY}")
    return table
