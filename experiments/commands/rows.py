"""Check of folders of recorded rows, before a pull request: `python -m experiments.commands.rows results/rtx4090`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.commands.record import SourceHash, refuse, refuse_other_sources, source_hashes
from experiments.measure.records import RowsError, read_rows, refuse_impossible
from experiments.report.machines import rows_files

STAMPS = ("device", "python", "torch", "date", "config_hash", "source_hash", "commit")
NOTE = re.compile(r"[^<>|`]{1,300}")  # of FROM.md, which tables and pages of HTML repeat
OWN_CLOCK = ("ext_operator_tables", "ext_expert_tables", "fig13_cluster")  # scripts without calibrations


def faults(folder: Path, source_hash: SourceHash | None = None) -> Iterator[str]:
    """Yield what is wrong with the rows in ``folder``; today's rule hashes their sources: not for old rows."""
    if not rows_files(folder):
        yield f"{folder}: no rows; `make record` copies them there"
    for note in folder.glob("FROM.md"):
        if not NOTE.fullmatch(note.read_text(encoding="utf-8", errors="replace")):
            yield f"{note}: write who measured on what, in 1 to 300 characters other than < > | `"
    for path in rows_files(folder):
        try:
            refuse(rows := read_rows(path), allow_dirty=False)
            refuse_impossible(rows)
            for commit in {row.commit for row in rows}:
                if not re.fullmatch("[0-9a-f]*", commit):  # of Git's revisions, paths and options none
                    raise RowsError(f"commit {commit!r:.80} is no hash; leave the rows as they were measured")
            if source_hash is not None:
                refuse_other_sources(rows, path.stem, source_hash)
        except RowsError as error:
            yield f"{path}: {error}"
            continue
        for line, row in enumerate(rows, start=2):
            timed = row.kind == "measured" and row.statistic == "median" and path.stem not in OWN_CLOCK
            wanted = (*STAMPS, "calib_gemm_us", "calib_copy_us") if timed else STAMPS
            wrong = [f"{name} is not given" for name in wanted if not getattr(row, name)]
            wrong += [f"hardware {row.hardware} is not {folder.name}"] * (row.hardware != folder.name)
            if wrong:
                yield f"{path}, line {line}: {', '.join(wrong)}"
                break


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        raise SystemExit("name the folders to check: python -m experiments.commands.rows results/GPU")
    with source_hashes() as hashes:
        raise SystemExit("\n".join(one for folder in sys.argv[1:] for one in faults(Path(folder), hashes)) or None)
