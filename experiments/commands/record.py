"""Promote this machine's fresh rows to recorded ones: `outputs/<hardware>/rows` -> `results/<hardware>`, figures too.

Recorded rows are committed and are what readers without the hardware see, so they must be repeatable: rows of
scale=smoke are refused, and so are rows measured from uncommitted code, unless `allow_dirty=true`.

Fresh rows replace recorded ones of the same points. Recorded points that the fresh set lacks (of another `runtime=`,
`timer=` or `system=`) stay until their rows are deleted by hand, and the command says how many. The `.json` beside
the rows describes the newest set alone.

    python -m experiments.commands.record figures=[fig08]
"""

import shutil
import sys
from pathlib import Path

from omegaconf import DictConfig

from experiments.commands.batch import batch_main, each
from experiments.harness.command import finish
from experiments.harness.experiment import Experiment
from experiments.harness.settings import folders
from punica.measure.records import Row, RowFile, RowsError, read_rows


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
        promote(target, rows)
        if source.with_suffix(".json").exists():
            shutil.copyfile(source.with_suffix(".json"), target.with_suffix(".json"))
        return [target, *draw(experiment, target, places.recorded_figures, places.paper)]

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


def refuse(source: Path, rows: list[Row], allow_dirty: bool) -> None:
    """Raise `RowsError` when `rows` must not be recorded."""
    if any(row.scale == "smoke" for row in rows):
        raise RowsError(f"{source} holds rows of scale=smoke, whose numbers mean nothing: measure with scale=laptop")
    dirty = sorted({row.commit for row in rows if row.commit.endswith("-dirty") or row.commit in ("", "unknown")})
    if dirty and not allow_dirty:
        raise RowsError(
            f"{source} holds rows measured from uncommitted code ({', '.join(dirty)}): commit and measure again with "
            "force=true, or record them as they are with allow_dirty=true"
        )


if __name__ == "__main__":
    batch_main("record", __doc__ or "", record, "figures", "allow_dirty")
