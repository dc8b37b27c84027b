"""Trials of reliability as a table: what was tried, injected, survived and lost, and the command of each row."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reliability.rows import COUNTS, command_of, rows_file
from experiments.report.tables import said
from punica.measure.records import Row, read_rows

HEAD = ("trial", *COUNTS, "measured", "commit, date", "command")
NO_TRIALS = "No trials are recorded on this machine: `make reliability`, then `make reliability ARGS=record=true`."


def trials_table(folder: Path) -> tuple[Sequence[str], list[list[str]]] | None:
    """Return head and a line for each trial, size and seed in a folder of rows; None without such rows.

    RowsError names file, line and remedy where they are damaged.
    """
    file = rows_file(folder)
    if not file.exists():
        return None
    runs: dict[tuple[object, ...], list[Row]] = {}
    for row in read_rows(file):
        runs.setdefault((*row.point, row.repeat), []).append(row)
    return HEAD, [_line(rows) for rows in runs.values()]


def _line(rows: Sequence[Row]) -> list[str]:
    first, values = rows[0], {row.metric: row for row in rows}
    counts = [f"{values[name].value:,.0f}" for name in COUNTS]
    measured = [f"{name.replace('_', ' ')} {_with_unit(row)}" for name, row in values.items() if name not in COUNTS]
    commit = f"{first.commit}, {first.date[:10]}"
    return [f"{first.panel}: {first.system}", *counts, "; ".join(measured) or "-", commit, f"`{command_of(first)}`"]


def _with_unit(row: Row) -> str:
    return said(row.value) if row.unit == "count" else f"{said(row.value)} {row.unit}"
