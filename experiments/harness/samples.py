"""Raw samples behind the rows of a figure: `rows/samples/<figure>.jsonl.gz`, a line of JSON per point, repeat and
metric; of several lines of one name the last counts.
"""

import gzip
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.measure.records import Row, RowFile, RowsError, ensure_writable

NAMES = (
    "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "timer", "repeat", "metric", "gpu",
    "config_hash", "source_hash",
)  # fmt: skip
"""Columns of a line, those of the rows that it belongs to."""


def samples_file(rows_file: Path) -> Path:
    """Return the file of the samples behind the rows in ``rows_file``."""
    return rows_file.parent / "samples" / f"{rows_file.stem}.jsonl.gz"


def add_samples(rows: RowFile, found: Iterable[tuple[Row, Sequence[float]]]) -> None:
    """Append samples, in the unit of the metric, of newly written ``rows`` that count them."""
    lines = []
    for row, samples in found:
        named = {name: getattr(row, name) for name in NAMES}
        lines.append(json.dumps({**named, "samples": [float(f"{value:.6g}") for value in samples]}) + "\n")
    if lines:
        with rows.locked():
            path = samples_file(rows.path)
            ensure_writable(path.parent)
            with path.open("ab", buffering=0) as stream:
                stream.write(gzip.compress("".join(lines).encode(), mtime=0))


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``path`` that count, as dictionaries; none without the file. `RowsError` when damaged."""
    if not path.exists():
        return []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            lines = [json.loads(line) for line in stream]
            return list({tuple(line[name] for name in NAMES): line for line in lines}.values())
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise RowsError(f"{path} is damaged ({error}): delete it, the rows stay") from None


def write_samples(path: Path, rows: Sequence[Row], lines: Iterable[dict[str, Any]]) -> None:
    """Write those of ``lines`` that are behind ``rows`` to ``path``, in one step."""
    theirs = {tuple(getattr(row, name) for name in NAMES) for row in rows}
    kept = [line for line in lines if tuple(line[name] for name in NAMES) in theirs]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    ensure_writable(path.parent)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.replace(temporary, path)


def tidy_samples(rows: RowFile) -> None:
    """Drop the samples whose rows are gone, and compress the rest as one. A damaged file is deleted, with a message."""
    with rows.locked():
        path = samples_file(rows.path)
        if not path.exists():
            return
        try:
            write_samples(path, rows.rows, read_samples(path))
        except RowsError as error:  # of a run that was killed while it wrote
            print(f"{error}; deleted now", file=sys.stderr)
            path.unlink()
