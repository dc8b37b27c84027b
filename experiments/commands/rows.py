"""Check of folders of recorded rows, before a pull request: `python -m experiments.commands.rows results/rtx4090`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.commands.record import SourceHash, refuse, refuse_other_sources, source_hashes
from experiments.measure.records import RowsError, read_rows, refuse_impossible
from experiments.report.machines import rows_files

STAMPS = ("device", "python", "torch", "date", "config_hash", "source_hash", "commit")
OWN_CLOCK = ("ext_operator_tables", "ext_expert_tables", "fig13_cluster")  # scripts without calibrations


def faults(folder: Path, source_hash: SourceHash | None = None) -> Iterator[str]:
    """Yield what is wrong with the rows in ``folder``; today's rule hashes their sources: not for old rows."""
    if not rows_files(folder):
        yield f"{folder}: no rows; `make record` copies them there"
    for path in rows_files(folder):
        try:
            refuse(rows := read_rows(path), allow_dirty=False)
            refuse_impossible(rows)
            if source_hash is not None:
                refuse_other_sources(rows, path.stem, source_hash)
        except RowsError as error:
            yield f"{path}: {error}"
            continue
        for line, row in enumerate(rows, start=2):
            timed = row.kind == "measured" and row.statistic == "median" and path.stem not in OWN_CLOCK
            wanted = (*STAMPS, "calib_gemm_us", "calib_copy_us") if timed else STAMPS
            missing = [name for name in wanted if not getattr(row, name)]
            if missing or row.hardware != folder.name:
                yield f"{path}, line {line}: hardware {row.hardware}; not given: {', '.join(missing) or 'nothing'}"
                break


if __name__ == "__main__":
    with source_hashes() as hashes:
        raise SystemExit("\n".join(one for folder in sys.argv[1:] for one in faults(Path(folder), hashes)) or None)
