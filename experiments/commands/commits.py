"""Sources of recorded commits: a row is of the commit it names if that commit's tree has the row's source hash.

    python -m experiments.commands.commits      # after a change of the rule of `harness.source`

gives every recorded row, and its samples, the hash of its own commit's tree by today's rule. Rows that name no commit,
or one without their script, get an empty hash, which counts as older.
"""

import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.harness.samples import read_samples, samples_file, write_samples
from experiments.harness.source import DATA, PACKAGES, fingerprint
from experiments.measure.commit import ROOT
from experiments.measure.records import read_rows, write_rows
from experiments.report.ages import script_of
from experiments.report.machines import recorded_folders, rows_files

SourceHash = Callable[[str, str], str]
"""Commit and script (a name in `experiments`) -> the hash; empty where git has no such commit or script."""


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

        def source_hash(commit: str, script: str) -> str:
            path = tree(commit) / "experiments" / f"{script}.py"
            return fingerprint(path, tree(commit)) if path.exists() else ""

        yield source_hash


def is_uncommitted(commit: str) -> bool:
    """Check whether rows with ``commit`` are of code that no commit has."""
    return commit.endswith("-dirty") or commit in ("", "unknown")


def rehash(folder: Path, source_hash: SourceHash) -> Iterator[tuple[str, Counter[str]]]:
    """Give the rows in ``folder`` and their samples the hash of their commit; yield file and rows by new hash."""
    for path in rows_files(folder):
        script, old, samples = script_of(path), read_rows(path), read_samples(samples_file(path))
        known = {row.commit for row in old if script and not is_uncommitted(row.commit)}
        hashes = {commit: source_hash(commit, script.stem) for commit in known} if script else {}
        rows = [replace(row, source_hash=hashes.get(row.commit, "")) for row in old]
        names = {(row.config_hash, row.source_hash, row.repeat): hashes.get(row.commit, "") for row in old}
        for line in samples:
            line["source_hash"] = names[line["config_hash"], line["source_hash"], line["repeat"]]
        write_rows(path, rows)
        if samples:
            write_samples(samples_file(path), rows, samples)
        yield path.name, Counter(row.source_hash for row in rows)


if __name__ == "__main__":
    with source_hashes() as at:
        for of_machine in recorded_folders(ROOT / "results"):
            for name, found in rehash(of_machine, at):
                print(f"{of_machine.name}/{name}: {dict(found)}")
