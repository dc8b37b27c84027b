"""Promote this machine's fresh rows to recorded ones: `outputs/<hardware>/rows` -> `results/<hardware>`, figures too.

Recorded rows are committed and are what readers without the hardware see, so they must be repeatable: rows of
scale=smoke are refused, and so are rows measured from uncommitted code, unless `allow_dirty=true`, and rows whose
source hash is not that of the commit they name. With `commit=...`, rows of another commit are refused, too: a release
has one. Raw samples go along while `results` stays below `MOST_BYTES`.

Fresh rows replace recorded ones of the same points. Recorded points that the fresh set lacks (of another `runtime=`,
`timer=` or `system=`) stay until their rows are deleted by hand, and the command says how many. The `.json` beside
the rows describes the newest set alone.

    python -m experiments.commands.record figures=[fig08]
"""

import shutil
import sys
from collections import Counter
from pathlib import Path

from omegaconf import DictConfig

from experiments.commands.batch import batch_main, each
from experiments.commands.commits import Commits, is_uncommitted, refuse_other_sources
from experiments.harness.command import finish
from experiments.harness.experiment import Experiment
from experiments.harness.samples import read_samples, samples_file, write_samples
from experiments.harness.settings import folders
from experiments.measure.records import Row, RowFile, RowsError, read_rows

MOST_BYTES = 48_000_000
"""Size of all recorded rows and samples, above which samples are left out."""


def record(cfg: DictConfig) -> int:
    """Promote each chosen figure that has fresh rows; 0 when none was refused."""
    places = folders(cfg)

    def one(experiment: Experiment) -> list[Path]:
        from experiments.plots.draw import draw

        source, target = places.fresh_rows / f"{experiment.name}.csv", places.recorded_rows / f"{experiment.name}.csv"
        if not source.exists():
            return []
        rows = read_rows(source)
        refuse(source, rows, cfg.allow_dirty)
        refuse_other_commits(source, rows, cfg.commit)
        refuse_other_sources(rows, experiment.name, commits)
        promote(target, rows)
        promote_samples(source, target, places.recorded_rows.parent)
        if source.with_suffix(".json").exists():
            shutil.copyfile(source.with_suffix(".json"), target.with_suffix(".json"))
        return [target, *draw(experiment, target, places.recorded_figures, places.paper)]

    with Commits() as commits:
        recorded, failures = each(cfg, one)
    if not any(recorded.values()) and not failures:
        raise RowsError(f"no fresh rows in {places.fresh_rows}: run make reproduce first")
    finish(command="record", recorded=[str(path) for files in recorded.values() for path in files], refused=failures)
    return 1 if failures else 0


def promote(target: Path, rows: list[Row]) -> None:
    """Put `rows` in the place of those of the same points in `target`, and say which other points stay there."""
    recorded = RowFile(target)
    recorded.replace(rows)
    fresh = {row.point for row in rows}
    if stay := {row.point: row.panel for row in recorded.rows if row.point not in fresh}:
        panels = ", ".join(dict.fromkeys(stay.values()))
        print(f"{target.stem}: {len(stay)} recorded points without fresh rows stay ({panels})", file=sys.stderr)


def promote_samples(source: Path, target: Path, results: Path) -> None:
    """Put the samples behind the rows in `source` in the place of those of `target`, which others of its rows keep;
    say so where ``results`` would grow too large, or where all samples are of other rows.
    """
    file, fresh, rows = samples_file(target), read_samples(samples_file(source)), read_rows(target)
    known = read_samples(file)
    if not [*known, *fresh]:
        return
    write_samples(file, rows, [*known, *fresh])
    if not read_samples(file):
        print(f"{target.stem}: no samples; those in {samples_file(source)} are of other rows", file=sys.stderr)
    elif (size := sum(path.stat().st_size for path in results.rglob("*") if path.is_file())) > MOST_BYTES:
        write_samples(file, rows, known)
        left_out = f"{size / 1e6:.1f} MB of rows and samples are more than {MOST_BYTES / 1e6:.0f}"
        print(f"{target.stem}: samples stay in {samples_file(source)}: {left_out}", file=sys.stderr)
    if not read_samples(file):
        file.unlink()


def refuse(source: Path, rows: list[Row], allow_dirty: bool) -> None:
    """Raise `RowsError` when `rows` must not be recorded."""
    if any(row.scale == "smoke" for row in rows):
        raise RowsError(f"{source} holds rows of scale=smoke, whose numbers mean nothing: measure with scale=laptop")
    dirty = sorted({row.commit for row in rows if is_uncommitted(row.commit)})
    if dirty and not allow_dirty:
        raise RowsError(
            f"{source} holds rows measured from uncommitted code ({', '.join(dirty)}): commit and measure again with "
            "force=true, or record them as they are with allow_dirty=true"
        )


def refuse_other_commits(source: Path, rows: list[Row], commit: str) -> None:
    """Raise `RowsError` for rows that are not of `commit`, whole or shortened; empty: all are taken."""
    if set(commit) - set("0123456789abcdef"):
        raise RowsError(f"commit={commit} is none: give its first 12 digits, in quotes as commit=\\'4028c06\\'")
    short = commit[:12]  # rows have so many digits
    others = Counter(row.commit for row in rows if not row.commit.startswith(short))
    if others:
        listed = ", ".join(f"{number} of {name}" for name, number in others.items())
        raise RowsError(f"{source} holds rows of other commits than {commit} ({listed}): measure them at that one")


if __name__ == "__main__":
    batch_main("record", __doc__ or "", record, "figures", "allow_dirty", "commit")
