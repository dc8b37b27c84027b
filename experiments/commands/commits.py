"""Sources of recorded commits: a row is of the commit it names if that commit's code has the row's source hash."""

import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from experiments.harness.source import PACKAGES, fingerprint
from punica.measure.commit import ROOT
from punica.measure.records import Row, RowsError


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
        """Unpack the packages of ``commit`` into ``root``, which stays empty where git has no such commit."""
        root.mkdir()
        command = ["git", "archive", "--format=tar", commit, *PACKAGES]
        done = subprocess.run(command, capture_output=True, cwd=self._repository, check=False)
        if done.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(root, filter="data")


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
