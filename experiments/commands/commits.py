"""Sources of recorded commits: a row is of the commit it names if that commit's tree has the row's source hash.

    python -m experiments.commands.commits      # after a change of the rule of `harness.source`

gives every recorded row, and its samples, the hash of its own commit's tree by today's rule. Rows that name no commit,
or one without their script, get an empty hash, which counts as older.
"""
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from experiments.harness.samples import read_samples, samples_file, write_samples
from experiments.harness.source import DATA, PACKAGES, fingerprint
from experiments.measure.commit import ROOT
from experiments.measure.records import Row, RowsError, read_rows, write_rows
from experiments.report.ages import script_of
from experiments.report.machines import recorded_folders, rows_files


class Commits:
    """Source hashes of scripts at commits of the repository at ``repository``; trees are unpacked once each."""

    def __init__(self, repository: Path = ROOT) -> None:
        self._repository, self._folder = repository, TemporaryDirectory(prefix="punica-commits-")

    def __enter__(self) -> "Commits":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.cleanup()

    def source_hash(self, commit: str, script: str) -> str:
        """Hash of ``script`` (a name in `experiments`) at ``commit``; empty where git has no such commit or script."""
        root = Path(self._folder.name) / commit
        if not root.exists():
            self._unpack(commit, root)
        path = root / "experiments" / f"{script}.py"
        return fingerprint(path, root) if path.exists() else ""

    def _unpack(self, commit: str, root: Path) -> None:
        """Unpack the packages and data of ``commit`` into ``root``, which stays empty where git has no such commit."""
        root.mkdir()
        there = self._git("ls-tree", "--name-only", commit, *PACKAGES, *DATA).decode().split()
        if there:
            with tarfile.open(fileobj=io.BytesIO(self._git("archive", "--format=tar", commit, *there))) as archive:
                archive.extractall(root, filter="data")

    def _git(self, *words: str) -> bytes:
        """Return what git prints; nothing where it fails."""
        done = subprocess.run(["git", *words], capture_output=True, cwd=self._repository, check=False)
        return done.stdout if done.returncode == 0 else b""


def refuse_other_sources(rows: Iterable[Row], script: str, commits: Commits) -> None:
    """Raise `RowsError` for rows of ``script`` whose source hash is not that of the commit they name.

    Rows of uncommitted code name none, and are not checked.
    """
    sources = Counter((row.commit, row.source_hash, row.figure) for row in rows if not is_uncommitted(row.commit))
    wrong = []
    for (commit, source, figure), number in sources.items():
        if (theirs := commits.source_hash(commit, script)) != source:
            gives = f"gives {theirs}" if theirs else "is not in this repository with that script"
            wrong.append(f"{number} rows of figure {figure} with source {source or 'unknown'}: commit {commit} {gives}")
    if wrong:
        raise RowsError(f"{script}: {'; '.join(wrong)}. Measure them again (force=true) from a clean checkout")


def is_uncommitted(commit: str) -> bool:
    """Check whether rows with ``commit`` are of code that no commit has."""
    return commit.endswith("-dirty") or commit in ("", "unknown")


def rehash(folder: Path, commits: Commits) -> Iterator[tuple[str, Counter[str]]]:
    """Give the rows in ``folder`` and their samples the hash of their commit; yield file and rows by new hash."""
    for path in rows_files(folder):
        script = script_of(path)
        rows, lines = read_rows(path), read_samples(samples_file(path))
        new = {
            (row.commit, row.source_hash): "" if script is None or is_uncommitted(row.commit)
            else commits.source_hash(row.commit, script.stem)
            for row in rows
        }  # fmt: skip
        of_line = {(row.config_hash, row.source_hash, row.repeat): new[row.commit, row.source_hash] for row in rows}
        for line in lines:
            line["source_hash"] = of_line[line["config_hash"], line["source_hash"], line["repeat"]]
        rows = [replace(row, source_hash=new[row.commit, row.source_hash]) for row in rows]
        write_rows(path, rows)
        if lines:
            write_samples(samples_file(path), rows, lines)
        yield path.name, Counter(row.source_hash for row in rows)


def main() -> None:
    """Rehash all recorded rows, and print what they have now."""
    with Commits() as commits:
        for folder in recorded_folders(ROOT / "results"):
            for name, found in rehash(folder, commits):
                print(f"{folder.name}/{name}: {dict(found)}")


if __name__ == "__main__":
    main()
