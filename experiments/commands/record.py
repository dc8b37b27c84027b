"""Promote this machine's fresh rows to recorded ones: `outputs/<hardware>/rows` -> `results/<hardware>`, figures too.

What readers without the hardware see must be repeatable: refused are rows of scale=smoke, rows of uncommitted code,
unless `allow_dirty=true`, and rows whose source hash is not that of the commit they name.

Fresh rows replace recorded ones of the same points. Recorded points that the fresh set lacks (of another `runtime=`,
`timer=` or `system=`) stay until their rows are deleted by hand, and the command says how many. The `.json` beside
the rows describes the newest set alone.

    python -m experiments.commands.record figures=[fig08]
"""

import io
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from experiments.commands.batch import batch_main, each
from experiments.harness.command import finish
from experiments.harness.experiment import Experiment
from experiments.harness.settings import folders
from experiments.harness.source import DATA, PACKAGES, fingerprint
from experiments.measure.commit import ROOT, is_uncommitted
from experiments.measure.records import Row, RowFile, RowsError, read_rows

SourceHash = Callable[[str, str], str]
"""Commit and script (a name in `experiments`) -> the hash; empty where git has no such commit or script."""


def record(cfg: DictConfig) -> int:
    """Promote each chosen figure that has fresh rows; 0 when none was refused."""
    places = folders(cfg)

    def one(experiment: Experiment) -> list[Path]:
        from experiments.plots.draw import draw

        source, target = places.fresh_rows / f"{experiment.name}.csv", places.recorded_rows / f"{experiment.name}.csv"
        if not source.exists():
            return []
        rows = read_rows(source)
        refuse(rows, cfg.allow_dirty)
        refuse_other_sources(rows, experiment.name, source_hash)
        promote(target, rows)
        if source.with_suffix(".json").exists():
            shutil.copyfile(source.with_suffix(".json"), target.with_suffix(".json"))
        return [target, *draw(experiment, target, places.recorded_figures, places.paper)]

    with source_hashes() as source_hash:
        recorded, failures = each(cfg, one)
    if not any(recorded.values()) and not failures:
        raise RowsError(f"no fresh rows in {places.fresh_rows}: run make reproduce first")
    finish(command="record", recorded=[str(path) for files in recorded.values() for path in files], refused=failures)
    return 1 if failures else 0


def promote(target: Path, rows: Sequence[Row]) -> None:
    """Put `rows` in the place of the same points in `target`; say which others stay."""
    recorded = RowFile(target)
    recorded.replace(rows)
    fresh = {row.point for row in rows}
    if stay := {row.point: row.panel for row in recorded.rows if row.point not in fresh}:
        panels = ", ".join(dict.fromkeys(stay.values()))
        print(f"{target.stem}: {len(stay)} recorded points without fresh rows stay ({panels})", file=sys.stderr)


@contextmanager
def source_hashes(repository: Path = ROOT) -> Iterator[SourceHash]:
    """Give the source hashes of scripts at commits of the repository at ``repository``, whose trees are unpacked."""

    def git(*words: str) -> bytes:
        done = subprocess.run(["git", *words], capture_output=True, cwd=repository, check=False)
        return done.stdout if done.returncode == 0 else b""

    with TemporaryDirectory(prefix="punica-commits-") as folder:

        @cache
        def tree(commit: str) -> Path:
            root = Path(folder) / commit
            if there := git("ls-tree", "--name-only", commit, *PACKAGES, *DATA).decode().split():
                with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit, *there))) as archive:
                    archive.extractall(root, filter="data")
            return root

        @cache
        def source_hash(commit: str, script: str) -> str:
            path = tree(commit) / "experiments" / f"{script}.py"
            return fingerprint(path, tree(commit)) if path.exists() else ""

        yield source_hash


def refuse(rows: Sequence[Row], allow_dirty: bool) -> None:
    """Raise `RowsError` for rows that cannot be repeated."""
    if any(row.scale == "smoke" for row in rows):
        raise RowsError("rows of scale=smoke have numbers that mean nothing: measure with scale=laptop")
    dirty = sorted({row.commit for row in rows if is_uncommitted(row.commit)})
    if dirty and not allow_dirty:
        advice = "commit and measure again with force=true, or record them with allow_dirty=true"
        raise RowsError(f"rows of uncommitted code ({', '.join(dirty)}): {advice}")


def refuse_other_sources(rows: Sequence[Row], script: str, source_hash: SourceHash) -> None:
    """Raise `RowsError` for rows of ``script`` whose source hash is not that of the commit they name, if any."""
    sources = Counter((row.commit, row.source_hash) for row in rows if not is_uncommitted(row.commit))
    wrong = []
    for (commit, source), number in sources.items():
        if (theirs := source_hash(commit, script)) != source:
            gives = f"gives {theirs}" if theirs else "is not in this repository with that script"
            wrong.append(f"{number} rows with source {source or 'unknown'}: commit {commit} {gives}")
    if wrong:
        raise RowsError(f"{script}: {'; '.join(wrong)}. Measure them again (force=true) from a clean checkout")


if __name__ == "__main__":
    batch_main("record", __doc__ or "", record, "figures", "allow_dirty")
